"""FlashInfer's kernels for MiniMax-M3 on Hopper behind the key `flashinfer`: to be named and compared, never taken by auto.

Written for release 0.7.4. Its kernels take less than m3attn's contract gives: lengths and page ids that must be right, ids that are clean,
scores in another layout, the same number of queries in every request of a decode step. The functions here stand between: they bound what
the device holds, make every row of a short step a request of its own, and clear the rows that see no key. For that they allocate, which other
implementations do not. The package builds kernels at first use, which takes seconds and needs a CUDA toolkit; under graph capture it raises.

`select_blocks` is not exact (`exact_ids` in its capabilities). FlashInfer's selection takes a score of zero for one of block 0 and leaves out scores
of -1e30 and below. It is therefore given other numbers in the same order, whose lowest bits number the block: blocks may be exchanged whose scores
lie closer than 1/512 of their size at 8,192 blocks, and half of that for each halving of the blocks.
"""
