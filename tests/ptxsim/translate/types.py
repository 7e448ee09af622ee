"""How registers of each PTX type are stored and read.

A letter names a form of 32 lanes: p predicates; b, h, u, U unsigned integers of 1, 2, 4, 8 bytes and B, H, i, I signed ones; f fp32, d fp64, x pairs
of fp32 (64 values), Q 16 bytes. Floats of 16 bits are kept as bits."""

from collections.abc import Callable

import numpy as np

from ..formats import f4, f8, u2, u4, u8

# What a block returns besides the next block's number: it must wait, its lanes are done, or its lanes must meet first.
BLOCK, EXIT, CONV = -1, -2, -4


def _by_type(**types: str) -> dict[str, str]:
    """PTX type -> the letter whose list names it."""
    return {name: letter for letter, names in types.items() for name in names.split()}


# How a register is stored, before those that are mostly used as fp32 become f or x; how an instruction of this type reads its operands.
STORAGE = _by_type(p="pred", h="b8 u8 s8 b16 u16 s16 f16 bf16", u="b32 u32 s32 f16x2 bf16x2", f="f32", U="b64 u64 s64", d="f64", x="f32x2", Q="b128")
READ_AS = _by_type(
    p="pred", b="b8 u8", B="s8", h="b16 u16 f16 bf16", H="s16", u="b32 u32 f16x2 bf16x2", i="s32", f="f32", U="b64 u64", I="s64", d="f64", x="f32x2"
)
WIDTH = {"p": 0, "b": 1, "B": 1, "h": 2, "H": 2, "u": 4, "i": 4, "f": 4, "U": 8, "I": 8, "x": 8, "d": 8, "Q": 16}
NUMPY_NAME = {"b": "u1", "B": "i1", "h": "u2", "H": "i2", "u": "u4", "i": "i4", "f": "f4", "U": "u8", "I": "i8", "x": "f4", "d": "f8"}

ZERO: dict[str, Callable[[], np.ndarray]] = {
    "p": lambda: np.zeros(32, bool),
    "h": lambda: np.zeros(32, u2),
    "u": lambda: np.zeros(32, u4),
    "f": lambda: np.zeros(32, f4),
    "U": lambda: np.zeros(32, u8),
    "x": lambda: np.zeros(64, f4),
    "d": lambda: np.zeros(32, f8),
    "Q": lambda: np.zeros((32, 2), u8),
}
