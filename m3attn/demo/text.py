"""The text: its bytes are the tokens."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Protocol

SHIPPED = "attention.txt"


def load(path: Path | None) -> bytes:
    """The bytes of a file, or of the text that ships with the package.

    Raises:
        ValueError: a file that is missing, is no file, or is empty; the message says which.
    """
    if path is None:
        return (resources.files("m3attn") / "data" / SHIPPED).read_bytes()
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"--text: there is no file {path}") from None
    except OSError as error:
        raise ValueError(f"--text: cannot read {path}: {error.strerror}") from None
    if not content:
        raise ValueError(f"--text: {path} is empty; the demo needs at least one byte")
    return content


def counted(number: int, unit: str) -> str:
    """`1 byte`, `2 bytes`."""
    return f"{number} {unit}{'' if number == 1 else 's'}"


def readable(content: bytes) -> str:
    """One line: white space as single spaces, what is no text as dots."""
    shown = content.decode("utf-8", errors="replace").replace("\ufffd", ".")
    return " ".join("".join(c if c.isprintable() or c.isspace() else "." for c in shown).split())


def line_at(content: bytes, position: int) -> str:
    """The line that holds byte `position`, up to and including it: what the query has read of its line."""
    start = content.rfind(b"\n", 0, position) + 1
    return readable(content[start : position + 1])


def block_text(content: bytes, block: int, block_size: int) -> str:
    return readable(content[block * block_size : (block + 1) * block_size])


class Passages(Protocol):
    """A text as a query sees it: `unit` is what a position counts."""

    @property
    def unit(self) -> str: ...

    @property
    def block_size(self) -> int: ...

    def line(self, position: int) -> str:
        """What the query at `position` has read of its line."""
        ...

    def block(self, number: int) -> str: ...


@dataclass(frozen=True, slots=True)
class ByteText:
    """A text whose bytes are the tokens."""

    content: bytes
    block_size: int
    unit: str = "byte"

    def line(self, position: int) -> str:
        return line_at(self.content, position)

    def block(self, number: int) -> str:
        return block_text(self.content, number, self.block_size)


@dataclass(frozen=True, slots=True)
class TokenText:
    """A text with a tokenizer's tokens; `offsets` are the characters [begin, end) of each."""

    content: str
    offsets: tuple[tuple[int, int], ...]
    block_size: int
    unit: str = "token"

    def line(self, position: int) -> str:
        end = self.offsets[position][1]
        return readable(self.content[self.content.rfind("\n", 0, max(0, end - 1)) + 1 : end].encode())

    def block(self, number: int) -> str:
        spans = self.offsets[number * self.block_size : (number + 1) * self.block_size]
        return readable(self.content[spans[0][0] : spans[-1][1]].encode())
