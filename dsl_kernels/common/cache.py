"""Compiled kernels, kept in memory by a small named key and on disk across processes."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

MAGIC = b"m3attn kernel 1"

Key = TypeVar("Key")
Compiled = TypeVar("Compiled")


class VariantNotReady(RuntimeError):
    """A variant was asked for under CUDA-graph capture before it was loaded and launched once."""


def cache_folder() -> pathlib.Path:
    """`M3ATTN_CACHE_DIR`, or m3attn in the user's cache folder."""
    named = os.environ.get("M3ATTN_CACHE_DIR")
    if named:
        return pathlib.Path(named).expanduser()
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "m3attn"


def describe(key: Any) -> str:
    """`Name(field=value, ...)`, equal in every process for equal keys.

    Raises:
        TypeError: key is no frozen dataclass, or a field's value is none of str, int, bool, None, and tuples of these."""
    if not dataclasses.is_dataclass(key) or isinstance(key, type) or not key.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(f"key: expected an instance of a frozen dataclass, got {type(key).__name__}")
    fields = {field.name: getattr(key, field.name) for field in dataclasses.fields(key)}
    for name, value in fields.items():
        if not _is_plain(value):
            raise TypeError(f"key.{name}: expected str, int, bool, None or a tuple of these, got {value!r}")
    return f"{type(key).__name__}({', '.join(f'{name}={value!r}' for name, value in fields.items())})"


def _is_plain(value: object) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple) else value is None or type(value) in (str, int, bool)


class KernelCache(Generic[Key, Compiled]):
    """The compiled variants of one kernel.

    On disk an entry is found by the variant, the architecture, the text of `sources` and `versions`, and is one file: what it is, a checksum, what
    `save` gave. A file that is cut short, altered, or refused by `load` counts as a miss and is replaced. Processes that want the same missing entry
    wait for the first to compile it; where files cannot be locked each compiles for itself, and the last rename stands. A folder that cannot be
    written is reported by one warning in a process, and compiled kernels then stay in memory.

    Args:
        name: the kernel's name, the start of its files' names.
        sources: files whose text decides what is compiled.
        versions: releases that decide it, by package; the compiler's above all.
        compile: (key, arch) -> what is launched.
        save, load: what is launched -> bytes, and back.
    """

    def __init__(
        self,
        name: str,
        *,
        sources: Iterable[str | os.PathLike[str]],
        versions: Mapping[str, str],
        compile: Callable[[Key, str], Compiled],
        save: Callable[[Compiled], bytes],
        load: Callable[[bytes], Compiled],
    ) -> None:
        self.name = name
        self._compile, self._save, self._load = compile, save, load
        self._toolkit = ", ".join(f"{package} {release}" for package, release in sorted(versions.items()))
        self._sources = hashlib.sha256(b"".join(hashlib.sha256(pathlib.Path(path).read_bytes()).digest() for path in sources)).hexdigest()
        self._ready: dict[tuple[Key, str], Compiled] = {}
        self._compiling = threading.Lock()

    def get(self, key: Key, arch: str) -> Compiled:
        """The variant `key`, a frozen dataclass, for `arch` ("sm_90a"): from memory, from disk, or compiled now.

        Raises:
            TypeError: the key is not what `describe` takes.
            What `compile` raises; the next call compiles again.
        """
        ready = self._ready.get((key, arch))
        if ready is not None:
            return ready
        with self._compiling:  # threads that want different variants wait for one another too: the compiler is not promised to be re-entrant
            if (key, arch) not in self._ready:
                self._ready[key, arch] = self._from_disk_or_compiled(key, arch)
            return self._ready[key, arch]

    def path(self, key: Key, arch: str) -> pathlib.Path:
        """The file of this variant, whether it exists or not."""
        digest = hashlib.sha256(self._identity(key, arch)).hexdigest()[:32]
        return cache_folder() / f"{self.name}-{arch}-{digest}.bin"

    def _identity(self, key: Key, arch: str) -> bytes:
        """One line that says all that decides the compiled bytes."""
        return f"{self.name} {describe(key)} {arch}; {self._toolkit}; sources {self._sources}".encode()

    def _from_disk_or_compiled(self, key: Key, arch: str) -> Compiled:
        path, identity = self.path(key, arch), self._identity(key, arch)
        found = self._read(path, identity)
        if found is not None:
            return found
        with _locked(path):
            found = self._read(path, identity)  # another process may have been compiling it
            if found is None:
                found = self._compile(key, arch)
                self._write(path, identity, found)
        return found

    def _read(self, path: pathlib.Path, identity: bytes) -> Compiled | None:
        try:
            magic, stored_identity, checksum, payload = path.read_bytes().split(b"\n", 3)
        except (OSError, ValueError):
            return None
        if (magic, stored_identity, checksum) != (MAGIC, identity, hashlib.sha256(payload).hexdigest().encode()):
            return None
        try:
            return self._load(payload)
        except Exception:  # whatever a loader says of bytes that it does not like, compiling again mends it
            return None

    def _write(self, path: pathlib.Path, identity: bytes, compiled: Compiled) -> None:
        payload = self._save(compiled)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(b"\n".join((MAGIC, identity, hashlib.sha256(payload).hexdigest().encode(), payload)))
                os.replace(partial, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(partial)
                raise
        except OSError as error:
            _warn_once(path.parent, error)


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """Hold the lock of this entry among processes; without one where the folder or the system has none."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            import fcntl  # POSIX only

            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(open(path.with_suffix(".lock"), "ab"))
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file is closed, also by a process that dies
        yield


_warned = False


def _warn_once(folder: pathlib.Path, error: OSError) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"{folder} cannot be written ({error.strerror or error}): compiled kernels stay in memory, and every process compiles its own. "
            "M3ATTN_CACHE_DIR names another folder",
            RuntimeWarning,
            stacklevel=2,
        )
