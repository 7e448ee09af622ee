"""Hooks of mkdocs: pages that are made of other files (README, CONTRIBUTING, CHANGELOG, each kernel), and links that leave the site."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import m3attn

ROOT = Path(__file__).resolve().parents[2]
REPOSITORY_PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
KERNEL_FOLDERS = ("triton_kernels", "dsl_kernels")
LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for page, source in REPOSITORY_PAGES.items():
        files.append(File.generated(config, page, content=_rehome((ROOT / source).read_text())))
    for module, path in kernel_files():
        files.append(File.generated(config, kernel_address(path), content=kernel_page(module, path)))
    return files


def on_config(config: Any) -> Any:
    listed = {page for section in config.nav for pages in section.values() for page in pages}
    others = [path.name for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in listed]  # a kernel's own page
    config.nav.insert(3, {"Kernels": [*others, *(kernel_address(path) for _, path in kernel_files())]})
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    markdown = markdown.replace("<!-- notebooks -->", notebooks())
    markdown = markdown.replace("<!-- other public names -->", other_names(markdown))
    return markdown if page.file.src_uri in REPOSITORY_PAGES else _rehome(markdown, folder=Path("docs"))


def other_names(markdown: str) -> str:
    """Directives for public names that a page does not list."""
    listed = {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)$", markdown, re.MULTILINE)}
    others = [getattr(m3attn, name) for name in m3attn.__all__ if name not in listed and name != "__version__"]
    return "\n".join(["## Others\n" if others else "", *(f"::: {other.__module__}.{other.__qualname__}" for other in others)])


def notebooks() -> str:
    """Title and first paragraph of each notebook, from its first cell."""
    parts = []
    for path in sorted((ROOT / "notebooks").glob("*.py")):
        cell = path.read_text().split("# %% [markdown]\n", 1)[1].split("\n\n# %%", 1)[0]
        title, paragraph = "\n".join(line[2:] for line in cell.splitlines()).split("\n\n", 2)[:2]
        parts += [f"#{title}", f"`notebooks/{path.name}`", paragraph]
    return "\n\n".join(parts)


def _rehome(markdown: str, folder: Path = Path()) -> str:
    """Links of a file in `folder` of the repository, as links of the site; what is no page of it becomes plain text.

    Raises:
        ValueError: a link to a file that is not in the repository.
    """

    def replace(found: re.Match[str]) -> str:
        image, label, target, anchor = found[1], found[2], found[3], found[4] or ""
        path = (ROOT / folder / target).resolve()
        homes = {ROOT / source: page for page, source in REPOSITORY_PAGES.items()}
        if path in homes:
            return f"[{label}]({homes[path]}{anchor})"
        if path.is_relative_to(ROOT / "docs"):
            return f"{image}[{label}]({path.relative_to(ROOT / 'docs')}{anchor})"
        if path.is_relative_to(ROOT / "notebooks"):
            return f"[{label}](notebooks.md)"
        if folder == Path("docs") and target.startswith("kernels/"):
            return found[0]
        if not path.exists():
            raise ValueError(f"link to {target}, which is not in the repository")
        return label

    return LINK.sub(replace, markdown)


def kernel_files() -> list[tuple[str, Path]]:
    """(module, file) of every file that holds kernels, or a class that fills in another file's kernel."""
    trees = {path: ast.parse(path.read_text()) for folder in KERNEL_FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}
    bases = {node.name for tree in trees.values() for node in classes(tree) if kernels(node)}
    return [
        (".".join(("m3attn", *path.relative_to(ROOT).with_suffix("").parts)), path)
        for path, tree in trees.items()
        if kernels(tree) or heirs(tree, bases)
    ]


def kernel_address(path: Path) -> str:
    """A kernel file's page; of two files with one name the CuTe one says so."""
    is_twin = path.parent.name != KERNEL_FOLDERS[0] and (ROOT / KERNEL_FOLDERS[0] / path.name).exists()
    return f"kernels/{'cute_' * is_twin}{path.stem}.md"


def classes(tree: ast.AST) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def heirs(tree: ast.AST, bases: set[str]) -> list[ast.ClassDef]:
    """Classes that inherit a kernel which is written in parts."""
    return [node for node in classes(tree) if any(ast.unparse(base) in bases for base in node.bases)]


def kernels(tree: ast.AST) -> list[ast.FunctionDef]:
    """The functions that the host launches: `<what>_kernel` in Triton, methods under `cute.kernel` in CuTe."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            decorators = [ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in node.decorator_list]
            if ("jit" in decorators and node.name.endswith("_kernel")) or "kernel" in decorators:
                found.append(node)
    return found


def kernel_page(module: str, path: Path) -> str:
    """What a kernel file is, who runs it, its kernels, and its text."""
    text = path.read_text()
    tree = ast.parse(text)
    title = Path(kernel_address(path)).stem
    lines = ["---", "hide: [toc]", "---", f"# {title}", "", ast.get_docstring(tree) or "", "", f"`{path.relative_to(ROOT)}`", ""]
    users = [i for i in m3attn.implementations() if module in i.sources]
    if users:
        lines += ["| stage | implementation | runs on |", "| --- | --- | --- |"]
        lines += [f"| `{i.stage}` | `{i.key}` | {', '.join(i.archs)} |" for i in users] + [""]
    lines += ["| kernel | lines | |", "| --- | ---: | --- |"]
    for node in kernels(tree) or [node for node in classes(tree) if node.bases]:
        size = (node.end_lineno or node.lineno) - node.lineno + 1
        about = (ast.get_docstring(node) or "").partition("\n")[0].replace("|", "\\|")
        lines.append(f"| `{node.name}` | {size} | {about} |")
    return "\n".join([*lines, "", "````python", text.rstrip(), "````", ""])
