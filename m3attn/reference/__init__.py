"""The specification: every stage in eager torch, in fp32 or fp64, written to be read.

One file a stage or pair of stages. Each holds a pure function on tensors and a `*_call` function that fills the outputs of a call of
`m3attn.calls`. Runs on any device, reads lengths back to the host, and is differentiable except through the selection of blocks.
"""
