"""The stand-in for libcute_dsl_runtime.so: built once with the C compiler, and named to the DSL through its environment variables.

Importing this module must come before importing cutlass, which reads those variables."""

import atexit
import ctypes
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(__file__).with_name("runtime_stub.c")

LaunchCallback = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint64, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint32), ctypes.POINTER(ctypes.c_void_p))
LoadCallback = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint64)


def build() -> str:
    """Path of the library, compiled unless a library of this source stands in the temporary folder already."""
    digest = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    folder = pathlib.Path(tempfile.gettempdir(), f"ptxsim-{os.getuid()}-{digest}")
    library = folder / "libcute_dsl_runtime.so"
    if not library.exists():
        folder.mkdir(exist_ok=True)
        partial = folder / f"{library.name}.{os.getpid()}"
        subprocess.run([os.environ.get("CC", "gcc"), "-O1", "-shared", "-fPIC", "-w", "-o", partial, SOURCE], check=True)
        partial.replace(library)  # two processes may build at once
    return str(library)


def set_environment(library: str) -> None:
    """Make the DSL use `library`, and keep the PTX, the cubin and the IR of each kernel."""
    dump = tempfile.mkdtemp(prefix="ptxsim-dump-")
    atexit.register(shutil.rmtree, dump, True)
    os.environ.update(CUTE_DSL_LIBS=library, CUTE_DSL_KEEP="ptx,cubin,ir", CUTE_DSL_DUMP_DIR=dump)
    os.environ.setdefault("CUTE_DSL_DISABLE_FILE_CACHING", "1")
    os.environ.setdefault("CUTE_DSL_NO_CACHE", "1")
    os.environ.setdefault("QUACK_CACHE_ENABLED", "0")  # its disk cache holds objects without their PTX


if "cutlass" in sys.modules:
    raise ImportError("import ptxsim before cutlass")
_path = build()
set_environment(_path)
library = ctypes.CDLL(_path)
