"""What a test module of the interpreter needs, asked before it imports anything of it."""

import importlib.metadata
import os
import shutil

import pytest
import torch


def need(*packages: str) -> None:
    """Import ptxsim, which must come before cutlass; or skip the calling module with the reason why it cannot run here.

    packages: distributions that the module imports besides."""
    if torch.cuda.is_available():
        # It points the DSL of the whole process at a stand-in for its runtime, and the tests of kernels need the real one.
        pytest.skip("the interpreter stands in for a GPU, and there is one: CUDA_VISIBLE_DEVICES= hides it", allow_module_level=True)
    compiler = os.environ.get("CC", "gcc")
    if shutil.which(compiler) is None:
        pytest.skip(f"the interpreter's stand-in runtime is built with {compiler}, which is not there", allow_module_level=True)
    for package in packages:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{package} is not installed", allow_module_level=True)
    import ptxsim  # noqa: F401
