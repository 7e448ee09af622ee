"""Register storage classes and the numpy types behind them."""

import numpy as np

from ..formats import f4, f8, u2, u4, u8

# What a block returns besides the next block's number: it must wait, its lanes are done, or its lanes must meet first.
BLOCK, EXIT, CONV = -1, -2, -4

STO = {
    "pred": "p",
    "b8": "h",
    "u8": "h",
    "s8": "h",
    "b16": "h",
    "u16": "h",
    "s16": "h",
    "f16": "h",
    "bf16": "h",
    "b32": "u",
    "u32": "u",
    "s32": "u",
    "f32": "f",
    "f16x2": "u",
    "bf16x2": "u",
    "b64": "U",
    "u64": "U",
    "s64": "U",
    "f64": "d",
    "f32x2": "x",
    "b128": "Q",
}


WANT = {
    "pred": "p",
    "b8": "b",
    "u8": "b",
    "s8": "B",
    "b16": "h",
    "u16": "h",
    "s16": "H",
    "f16": "h",
    "bf16": "h",
    "b32": "u",
    "u32": "u",
    "s32": "i",
    "f32": "f",
    "f16x2": "u",
    "bf16x2": "u",
    "b64": "U",
    "u64": "U",
    "s64": "I",
    "f64": "d",
    "f32x2": "x",
}


WID = {"p": 0, "b": 1, "B": 1, "h": 2, "H": 2, "u": 4, "i": 4, "f": 4, "U": 8, "I": 8, "x": 8, "d": 8, "Q": 16}


NPT = {"b": "u1", "B": "i1", "h": "u2", "H": "i2", "u": "u4", "i": "i4", "f": "f4", "U": "u8", "I": "i8", "x": "f4", "d": "f8"}


ZERO = {
    "p": lambda: np.zeros(32, bool),
    "h": lambda: np.zeros(32, u2),
    "u": lambda: np.zeros(32, u4),
    "f": lambda: np.zeros(32, f4),
    "U": lambda: np.zeros(32, u8),
    "x": lambda: np.zeros(64, f4),
    "d": lambda: np.zeros(32, f8),
    "Q": lambda: np.zeros((32, 2), u8),
}
