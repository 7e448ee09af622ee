"""Warps that arrive at an mbarrier by one lane, in sparse MLA and index scoring on Hopper; prefill's are in test_sparse_prefill.py."""

import itertools
import re

import pytest
from needed import need

need("nvidia-cutlass-dsl", "apache-tvm-ffi")

from simulator import artifacts

from m3attn.dsl_kernels.variants import VARIANTS

NAMES = [name for name in VARIANTS["sm_90"] if name.startswith(("sparse_mla", "index_score"))]

# Where bytes are expected, copies follow, and nothing was written before.
ARRIVAL = re.compile(r"(?:(?!mbarrier|cp\.async).)*mbarrier\.arrive\.shared", re.DOTALL)


@pytest.mark.parametrize("name", NAMES)
def test_all_lanes_are_done_before_one_says_so(name: str) -> None:
    """The interpreter's warps run in step and would not show it."""
    kernel, variant = VARIANTS["sm_90"][name]
    parts = re.split(r"elect\.sync[^;]*;", artifacts(kernel, variant, "sm_90").ptx)
    by_one = [before for before, after in itertools.pairwise(parts) if ARRIVAL.match(after)]
    assert by_one and all(before.rstrip().endswith("bar.warp.sync \t-1;") for before in by_one)
