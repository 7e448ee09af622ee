"""FlashInfer's kernels for MiniMax-M3 on Hopper behind the key `flashinfer`: to be named and compared, never taken by auto.

Written for release 0.7.4. Its kernels take less than m3attn's contract gives: lengths and page ids that must be right, ids that are clean,
scores in another layout, the same number of queries in every request of a decode step. The functions here stand between: they bound what
the device holds, make every row of a short step a request of its own, and clear the rows that see no key. For that they allocate, which other
implementations do not. The package builds kernels at first use, which takes seconds and needs a CUDA toolkit; under graph capture it raises.

`select_blocks` is not exact: FlashInfer ranks scores by their upper bits, so that blocks may be exchanged whose scores lie closer than about a
thousandth of their size (`exact_ids` in its capabilities).
"""
