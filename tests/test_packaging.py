"""What users install: wheel, sdist, and the one name each kernel folder has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KERNEL_FOLDERS = ("triton_kernels", "dsl_kernels")

if not (ROOT / "Makefile").exists():
    pytest.skip("tests of the packaging need the checkout", allow_module_level=True)


def run(*command: str | Path, cwd: Path, **env: str) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(kind: str, source: Path, out: Path) -> Path:
    # The build tool's own egg-info and build folders stay out of the checkout, whose tests run in parallel.
    run(sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", out, source, cwd=out)
    [made] = [path for path in out.iterdir() if path.name.endswith(".whl" if kind == "wheel" else ".tar.gz")]
    return made


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that git knows or would add, links kept."""
    copy = tmp_path_factory.mktemp("checkout")
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT)
    for name in filter(None, listed.split("\0")):
        if os.path.lexists(ROOT / name):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", checkout, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    [name] = [name for name in names(wheel) if name.endswith(".dist-info/METADATA")]
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(name).decode())


def test_wheel_holds_every_module_under_one_name(wheel: Path) -> None:
    inside = names(wheel)
    assert {name.split("/")[0] for name in inside if ".dist-info/" not in name} == {"m3attn"}
    for package in (ROOT / "m3attn", *(ROOT / folder for folder in KERNEL_FOLDERS)):
        prefix = "m3attn" if package.name == "m3attn" else f"m3attn/{package.name}"
        for path in package.rglob("*.py"):
            assert f"{prefix}/{path.relative_to(package)}" in inside
    assert "m3attn/py.typed" in inside


def test_sdist_builds_the_same_wheel(checkout: Path, wheel: Path, tmp_path: Path) -> None:
    sdist = build("sdist", checkout, tmp_path)
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert not [member.name for member in members if member.issym() or member.islnk()]
    [unpacked] = (tmp_path / "unpacked").iterdir()
    (tmp_path / "rebuilt").mkdir()
    assert names(build("wheel", unpacked, tmp_path / "rebuilt")) == names(wheel)


def test_every_module_of_the_installed_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=tmp_path)
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    [site] = (path for path in venv.rglob("site-packages") if path.is_dir())
    # The dependencies as they are here; a path file inside that folder, such as the one of an editable install, is not followed.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    program = """
import importlib, importlib.util, pkgutil, sys
for name in ("matplotlib", "numpy", "pytest", "tqdm", "transformers"):  # what no dependency brings
    sys.modules[name] = None
import m3attn
assert m3attn.__file__.startswith(sys.prefix), m3attn.__file__
needs = {
    "m3attn.triton_kernels.": "triton",
    "m3attn.bench.stream": "triton",
    "m3attn.dsl_kernels.": "cutlass",
    "m3attn.testing.matrix": "pytest",
    "m3attn.integrations.transformers.": "transformers",
}
absent = tuple(prefix for prefix, package in needs.items() if importlib.util.find_spec(package) is None)
for module in pkgutil.walk_packages(m3attn.__path__, "m3attn.", onerror=lambda name: sys.exit(f"cannot import {name}")):
    if not module.name.endswith("__main__") and not module.name.startswith(absent):
        importlib.import_module(module.name)
        print(module.name)
"""
    environment = {"PYTHONPATH": "", "PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    imported = run(python, "-c", program, cwd=tmp_path, **environment).split()
    assert {f"m3attn.{folder}" for folder in KERNEL_FOLDERS} <= set(imported)
    command = venv / ("Scripts/m3attn.exe" if os.name == "nt" else "bin/m3attn")
    assert "demo" in run(command, "--help", cwd=tmp_path, **environment)


@pytest.mark.parametrize("folder", KERNEL_FOLDERS)
def test_top_level_name_raises_and_names_the_right_one(folder: str) -> None:
    done = subprocess.run([sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert re.search(rf"ImportError: .*import m3attn\.{folder}", done.stderr), done.stderr


@pytest.mark.parametrize("folder", KERNEL_FOLDERS)
def test_kernel_folders_are_relative_links(folder: str) -> None:
    entry = run("git", "ls-files", "--stage", f"m3attn/{folder}", cwd=ROOT)
    assert entry.startswith("120000 "), entry
    assert (ROOT / "m3attn" / folder).readlink() == Path("..") / folder


def test_dependencies(metadata: Message) -> None:
    requires = {re.match(r"[\w.-]+", line)[0]: line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}  # type: ignore[index]
    assert set(requires) == {"torch", "triton", "einops"}
    assert ">=2.11" in requires["torch"]
    assert ">=3.6" in requires["triton"] and re.search(r"platform_system == .Linux.", requires["triton"])
    [cute] = [line for line in metadata.get_all("Requires-Dist") if line.startswith("nvidia-cutlass-dsl")]
    assert "[cu13]>=4.8.0" in cute and "<" not in cute
    assert {"cute", "demo", "notebooks", "hf", "test"} <= set(metadata.get_all("Provides-Extra"))


def test_constraints_pin_what_the_project_asks_for() -> None:
    constraints = {
        re.split("[=<]=", line)[0].lower().replace("_", "-"): line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    for requirement in wanted:
        name = re.match(r"[\w.-]+", requirement)[0]  # type: ignore[index]
        assert name == "m3attn" or name.lower() in constraints, f"constraints.txt: {name} is not pinned"


def test_ruff_is_pinned_alike() -> None:
    [pinned] = re.findall(r"^ruff==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    [hook] = re.findall(r"ruff-pre-commit\n\s+rev: v(\S+)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    assert hook == pinned


def test_readme_changelog_and_version_agree(metadata: Message) -> None:
    from m3attn.version import __version__

    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()
