"""Tests of CuTe DSL kernels: they compile and run without a GPU, in the interpreter, which takes the place of the DSL's runtime in its process."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "ptxsim" / "tests")]
