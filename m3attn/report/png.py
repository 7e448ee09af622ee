"""A picture of shares as a PNG of one colour whose opacity is the share, so that it is legible on any background."""

from __future__ import annotations

import base64
import struct
import zlib

COLOUR = (59, 130, 246)
SHADES = 256


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def encode(shares: bytes, rows: int, columns: int) -> bytes:
    """The PNG of `rows` x `columns` shares, a byte each; opacity 0 for 0, full for 255."""
    if len(shares) != rows * columns:
        raise ValueError(f"shares: expected {rows * columns} bytes, got {len(shares)}")
    header = struct.pack(">IIBBBBB", columns, rows, 8, 3, 0, 0, 0)  # eight bits, a palette
    lines = b"".join(b"\0" + shares[row * columns : (row + 1) * columns] for row in range(rows))
    chunks = [
        (b"IHDR", header),
        (b"PLTE", bytes(COLOUR) * SHADES),
        (b"tRNS", bytes(range(SHADES))),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def data_uri(shares: bytes, rows: int, columns: int) -> str:
    return "data:image/png;base64," + base64.b64encode(encode(shares, rows, columns)).decode()
