"""What several CuTe DSL kernels share."""
