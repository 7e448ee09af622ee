"""Triton implementations of m3attn's stages; import this package as `m3attn.triton_kernels`."""

if __name__ == "triton_kernels":
    raise ImportError("this folder is part of m3attn: import m3attn.triton_kernels (triton_kernels is the name of a package of Triton's own)")
