"""Environment variables that a call looks at: read anew each time, so that one set or unset later counts from then on."""

from __future__ import annotations

import os
from collections.abc import Callable


def reader(name: str) -> Callable[[], str | None]:
    """A function that gives the variable's value, or None where it is unset.

    `os.environ.get` encodes the name at every call, which costs more than a stage's choice of its implementation; this encodes it once.
    """
    stored = getattr(os.environ, "_data", None)
    if stored is None:
        return lambda: os.environ.get(name)
    key, decode = os.environ.encodekey(name), os.environ.decodevalue

    def read() -> str | None:
        value = stored.get(key)
        return None if value is None else decode(value)

    return read


impl = reader("M3ATTN_IMPL")
arch = reader("M3ATTN_ARCH")
disable_cute = reader("M3ATTN_DISABLE_CUTE")
disable_fp8_attn_gemm = reader("M3ATTN_DISABLE_FP8_ATTN_GEMM")
log_calls = reader("M3ATTN_LOG_CALLS")
check = reader("M3ATTN_CHECK")
