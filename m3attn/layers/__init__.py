"""M3's attention layers as torch modules, on the public stage functions.

config = m3attn.M3Config.from_hf(folder)
layers = [(M3SparseAttention if sparse else M3DenseAttention)(config, cos_sin=table) for sparse in config.sparse_layers]
layers[i].load_hf(state, f"model.layers.{i}.self_attn.")
pool = m3attn.PagedKVPool(config, num_tokens=100_000)
caches = [pool.layer(i) for i in pool.layers]
plan = m3attn.StepPlan.for_layers(layers, caches, 8192, decode=PlanCapacity(32, 32, 1), prefill=PlanCapacity(4, 2048, 2048))
plan.update(q_lens, seq_lens, page_table)
x = x + layers[i](x, plan, caches[i])
"""
