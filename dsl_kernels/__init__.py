"""CuTe DSL implementations of m3attn's stages; import this package as `m3attn.dsl_kernels`."""

if __name__ == "dsl_kernels":
    raise ImportError("this folder is part of m3attn: import m3attn.dsl_kernels")
