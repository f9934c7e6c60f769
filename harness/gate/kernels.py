"""Which kernels a figure was made with."""

import hashlib
from importlib.util import find_spec
from pathlib import Path


def kernel_digest(folder: Path | None = None) -> str:
    """A digest over the sources of `paged_kernels`, other providers and references aside.

    A record with another digest is stale: it says nothing about the kernels of this tree.
    """
    root = folder or _package()
    digest = hashlib.sha256()
    for path in digested_files(root):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def digested_files(root: Path) -> list[Path]:
    """The source files below `root` that a kernel's speed depends on, sorted."""
    paths = sorted(root.rglob("*.py"))
    return [
        path
        for path in paths
        if not path.relative_to(root).as_posix().startswith(("reference", "providers/"))
    ]


def _package() -> Path:
    spec = find_spec("paged_kernels")  # finds without importing torch
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("package paged_kernels is not installed")
    return Path(next(iter(spec.submodule_search_locations)))
