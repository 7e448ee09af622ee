"""What `record` keeps of a lone layer, of a model, and of a step split in parts; and the file of ids."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import m3attn
from m3attn import M3Config, M3DenseAttention, M3SparseAttention, PagedKVPool, PlanCapacity, StepPlan
from m3attn.analysis import load_ids, record, save_ids
from m3attn.layers.rope import rotary_table
from m3attn.reference import index

CONFIG = M3Config(
    hidden_size=48, num_q_heads=4, num_kv_heads=2, num_index_heads=2, block_size=16, topk=3, max_position=256, sparse_layers=(False, True, True)
)


class Model(nn.Module):
    """A dense layer and two sparse ones, the second of which may take the first's ids."""

    def __init__(self, **last: object) -> None:
        super().__init__()
        table = rotary_table(CONFIG.max_position, CONFIG.rotary_dim, CONFIG.rope_theta)
        options = {"page_size": 16, "dtype": torch.float32, "cos_sin": table}
        self.layers = nn.ModuleList(
            [M3DenseAttention(CONFIG, **options), M3SparseAttention(CONFIG, **options), M3SparseAttention(CONFIG, **options, **last)]
        )
        generator = torch.Generator().manual_seed(1)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
        self.pool = PagedKVPool(CONFIG, num_pages=16, page_size=16, dtype=torch.float32, device="cpu", zero_on_alloc=True)
        self.caches = [self.pool.layer(number) for number in range(3)]

    def forward(self, x: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        for layer, cache in zip(self.layers, self.caches, strict=True):
            x = x + layer(x, plan, cache)
        return x


def run(model: Model, steps, **capacities) -> None:
    """Run steps of (q_lens, seq_lens) of two requests."""
    plan = StepPlan.for_layers(list(model.layers), model.caches, 112, **capacities)
    generator = torch.Generator().manual_seed(2)
    for q_lens, seq_lens in steps:
        plan.update(q_lens, seq_lens, [[3, 1, 4, 15, 9, 2, 6], [5, 8, 7, 0, 10, 11, 12]])
        model(torch.randn(plan.tokens, CONFIG.hidden_size, generator=generator), plan)


def test_ids_and_scores_of_a_model_in_two_requests_and_steps():
    model = Model()
    with record(model, mass=True, error=True) as kept:
        run(model, [([30, 50], [30, 50]), ([1, 20], [31, 70])], prefill=PlanCapacity(2, 90, 60))
    assert list(kept.layers) == ["layers.1", "layers.2"] and [len(steps) for steps in kept.layers.values()] == [2, 2]
    first, second = kept.layers["layers.1"]
    assert first.ids.shape == (2, 80, 3) and second.ids.shape == (2, 21, 3)
    assert second.positions.tolist() == [30, *range(50, 70)] and second.requests.tolist() == [0] + [1] * 20
    assert first.mass.shape == first.error.shape == (80, 4)
    early = first.positions < 48  # K blocks hold everything these queries see
    torch.testing.assert_close(first.mass[early], torch.ones_like(first.mass[early]))
    assert first.error[early].max() < 1e-5 and first.mass[~early].max() < 1.0 and first.error[~early].min() > 0
    ids, scores = kept.ids("layers.2", request=1), kept.scores("layers.2", request=1)
    assert ids.shape == (2, 70, 3) and scores.shape[:2] == (2, 70)
    alone = m3attn.PagedBatch.from_lengths([70], [70], torch.zeros(1, 5, dtype=torch.int32), page_size=16, block_size=16)
    assert torch.equal(index.select_blocks(scores, alone, topk=3), ids)


def test_what_is_recorded_is_what_a_layer_does_without():
    model = Model()
    plain = Model()
    plan, other = (StepPlan.for_layers(list(m.layers), m.caches, 112, prefill=PlanCapacity(1, 60, 60)) for m in (model, plain))
    x = torch.randn(60, CONFIG.hidden_size)
    for each in (plan, other):
        each.update([60], [60], [[3, 1, 4, 15]])
    with record(model.layers[1]) as kept:
        got = model(x, plan)
    assert torch.equal(got, plain(x, other)) and list(kept.layers) == [""] and kept.layers[""][0].mass is None
    model(x, plan)
    assert len(kept.layers[""]) == 1, "a layer is left as it was found"
    assert "_attend" not in vars(model.layers[1])


def test_split_plans_keep_each_part_and_shared_ids_have_no_scores():
    model = Model(reuse_ids=True)
    with record(model, device="cpu") as kept:
        run(model, [([40, 30], [40, 30]), ([1, 40], [41, 70])], decode=PlanCapacity(2, 2, 1), prefill=PlanCapacity(2, 72, 60))
    steps = kept.layers["layers.1"]
    assert [s.positions.tolist() for s in steps if len(s.positions)] == [[*range(40), *range(30)], [40], [*range(30, 70)]]
    assert torch.equal(kept.ids("layers.1", 1), kept.ids("layers.2", 1)) and kept.ids("layers.1", 0).shape == (2, 41, 3)
    with pytest.raises(ValueError, match=r"scores: expected layer 'layers.2' to have recorded scores"):
        kept.scores("layers.2")


def test_a_position_that_ran_twice_counts_as_it_ran_last():
    model = Model()
    with record(model, scores=False) as kept:
        run(model, [([60, 0], [60, 0]), ([20, 0], [60, 0]), ([4, 0], [64, 0])], prefill=PlanCapacity(2, 60, 60))
    first, again, more = kept.layers["layers.1"]
    assert not torch.equal(first.ids[:, 40:], again.ids)
    assert torch.equal(kept.ids("layers.1"), torch.cat([first.ids[:, :40], again.ids, more.ids], dim=1))


def test_errors_name_the_model_layer_and_request():
    with pytest.raises(ValueError, match="model: expected an M3SparseAttention or a module that holds some, got Linear"), record(nn.Linear(1, 1)):
        pass
    model = Model()
    with record(model) as kept:
        with pytest.raises(ValueError, match=r"request: expected one that layer 'layers.1' has run, got 0"):
            kept.ids("layers.1")
        run(model, [([5, 0], [5, 0])], prefill=PlanCapacity(2, 8, 8))
    with pytest.raises(ValueError, match=r"layer: expected one of 'layers.1', 'layers.2', got 'layers.0'"):
        kept.ids("layers.0")
    with pytest.raises(ValueError, match=r"request: expected one that layer 'layers.1' has run, got 1"):
        kept.ids("layers.1", 1)


def test_ids_go_through_a_file(tmp_path):
    model = Model()
    with record(model, scores=False) as kept:
        run(model, [([30, 50], [30, 50]), ([1, 1], [31, 51])], prefill=PlanCapacity(2, 90, 60))
    kept.save(tmp_path / "ids.pt")
    steps = load_ids(tmp_path / "ids.pt")
    assert [(s.layer, s.q_lens, s.seq_lens, s.block_size) for s in steps] == [
        (f"layers.{n}", q_lens, seq_lens, 16) for n in (1, 2) for q_lens, seq_lens in (((30, 50), (30, 50)), ((1, 1), (31, 51)))
    ]
    assert torch.equal(steps[1].ids, kept.layers["layers.1"][1].ids)


def test_a_file_that_holds_no_ids_is_refused(tmp_path):
    path = tmp_path / "ids.pt"
    with pytest.raises(FileNotFoundError):
        load_ids(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"ids.pt: expected a file of recorded ids"):
        load_ids(path)
    torch.save({"weights": torch.zeros(3)}, path)
    with pytest.raises(ValueError, match="got another kind of file"):
        load_ids(path)
    model = Model()
    with record(model) as kept:
        run(model, [([9, 0], [9, 0])], prefill=PlanCapacity(2, 9, 9))
    (step,) = kept.steps("layers.1")
    save_ids(path, [replace(step, ids=step.ids[:, :4])])
    with pytest.raises(ValueError, match=r"expected int32 ids \[Hkv, 9, K\] in step 0, got \[2, 4, 3\]"):
        load_ids(path)
