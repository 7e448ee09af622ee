"""Which PTX belongs to a binary that the DSL's host code loads."""

import ctypes
import hashlib
import struct

from .translate.ptx import Module

_ptx_of_cubin: dict[str, str] = {}  # by the cubin's digest
_cubin_of_ptx: dict[str, bytes] = {}  # by the text's digest
_modules: dict[str, Module] = {}  # by the text's digest
_loaded: list[Module | None] = []  # library handle - 1


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def remember(text: str, cubin: bytes) -> None:
    """The DSL has compiled `text` to `cubin`."""
    _ptx_of_cubin[_digest(cubin)] = text
    _cubin_of_ptx[_digest(text.encode())] = cubin


def module_of(text: str) -> Module:
    """The parsed PTX, parsed once."""
    key = _digest(text.encode())
    if key not in _modules:
        _modules[key] = Module(text)
    return _modules[key]


def cubin_of(module: Module) -> bytes:
    """What the DSL compiled this module's text to."""
    return _cubin_of_ptx[_digest(module.text.encode())]


def load(pointer: int) -> int:
    """Handle of the library whose image starts at `pointer`. An image without known PTX gets one too: only launching from it is an error."""
    image = _image(pointer)
    text = _ptx_of_cubin.get(_digest(image)) if image else None
    if text is None and image:
        text = _held_by(image) or _named_in(image)
    _loaded.append(None if text is None else module_of(text))
    return len(_loaded)


def _held_by(image: bytes) -> str | None:
    """The text whose binary lies somewhere in the image, as in one that was padded or wrapped."""
    return next((text for text in reversed(list(_ptx_of_cubin.values())) if _cubin_of_ptx[_digest(text.encode())] in image), None)


def _named_in(image: bytes) -> str | None:
    """The newest text all of whose kernels' names are in the image."""
    for text in reversed(list(_ptx_of_cubin.values())):
        kernels = module_of(text).kernels
        if kernels and all(name.encode() in image for name in kernels):
            return text
    return None


def loaded(handle: int) -> Module | None:
    """The module behind a handle that `load` gave, or None when its PTX is not known."""
    return _loaded[handle - 1]


def _image(pointer: int) -> bytes | None:
    """The bytes of the ELF file or fat binary at `pointer`; its size follows from its own headers."""
    head = ctypes.string_at(pointer, 64)
    if head[:4] != b"\x7fELF":
        magic, _, header_size, size = struct.unpack_from("<IHHQ", head)
        return ctypes.string_at(pointer, header_size + size) if magic == 0xBA55ED50 else None
    segments, sections = struct.unpack_from("<QQ", head, 32)
    segment_size, num_segments, section_size, num_sections = struct.unpack_from("<HHHH", head, 54)
    end = max(sections + section_size * num_sections, segments + segment_size * num_segments)
    for index in range(num_sections):
        section = ctypes.string_at(pointer + sections + index * section_size, 64)
        (kind,) = struct.unpack_from("<I", section, 4)
        offset, size = struct.unpack_from("<QQ", section, 24)
        if kind != 8:  # SHT_NOBITS has no bytes in the file
            end = max(end, offset + size)
    return ctypes.string_at(pointer, end)
