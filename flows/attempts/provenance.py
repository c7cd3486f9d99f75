"""The provenance of a stage's result: code, library versions, device. Differences are shown as drift; no key has it.

Nothing here imports the code: it is read as syntax trees, and versions come from the installed metadata.
"""

import ast
import gc
import hashlib
import importlib.util
import os
import platform
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from schemas.kinds import KINDS
from schemas.recipe.terms import TERMS

PACKAGES = ("schemas", "algorithms", "models", "storage", "ledger", "tasks")
"""Packages whose code determines a stage's numbers."""

KINDS_MODULE = "schemas.kinds"
"""Excluded from the code: its rows are in the stage key, or change no number. Otherwise a new kind, or a new revision
of one kind, would count as changed code of all others."""

LOADED_BY_NAME = {"tasks.rewards.scoring": [kind.module for kind in TERMS]}
"""Module → modules that it imports by the names in a table."""

NVIDIA = Path("/proc/driver/nvidia")
GRAPHS = "VANTAGE_CUDA_GRAPHS"
"""Environment variable; 0: the sampler captures none, so that what it draws is rounded otherwise."""

# CPython 3.11 has one depth counter of syntax trees for all threads: if a garbage collection lets another thread parse
# at the same time, either fails with a SystemError (python/cpython#106905). Libraries parse too, without this lock.
_parser_lock = threading.Lock()
_PARSE_ATTEMPTS = 20
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "pyarrow", "numpy")


def provenance(kind: str, *, threads: int, world_size: int) -> dict[str, str]:
    """Provenance of a kind of work on this machine: code, library versions, device, torch's threads, processes."""
    return {
        "code": code_digest(KINDS[kind].module),
        "python": platform.python_version(),
        **{name: _version(name) for name in LIBRARIES},
        "device": _device(),
        "threads": str(threads),
        "world_size": str(world_size),
    }


def drift(recorded: Mapping[str, object], present: Mapping[str, str]) -> list[str]:
    """``part: old → new`` for each difference; digests are shortened."""
    return [
        f"{part}: {_short(str(recorded.get(part, 'unknown')))} → {_short(value)}"
        for part, value in present.items()
        if recorded.get(part) != value
    ]


def code_digest(module: str) -> str:
    """sha256 over the syntax trees of a module and of all our modules that it imports, at any depth.

    Comments, layout and docstrings do not change it; a renamed variable does.
    """
    trees = module_digests(module)
    listing = "\n".join(f"{name} {trees[name]}" for name in sorted(trees))
    return hashlib.sha256(listing.encode()).hexdigest()


def module_digests(module: str) -> dict[str, str]:
    """Module → sha256 of its syntax tree, for a module and all of ours that it imports; the same in all Pythons."""
    trees: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _source(name)
        if name not in trees and name != KINDS_MODULE and path is not None:
            trees[name], imports = _read(path)
            waiting += [*imports, *LOADED_BY_NAME.get(name, ())]
    return trees


@cache
def _read(path: Path) -> tuple[str, tuple[str, ...]]:
    """sha256 of the module's syntax tree without docstrings, and its possible imports; cached."""
    reading = _Reading()
    with _no_collection():
        text = reading.dump(_parsed(path.read_bytes()))
    return hashlib.sha256(text.encode()).hexdigest(), tuple(reading.imports)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collections, which make parsing take three times as long: a tree has no cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _parsed(source: bytes) -> ast.Module:
    for _ in range(_PARSE_ATTEMPTS):
        with suppress(SystemError), _parser_lock:
            return ast.parse(source)
    return ast.parse(source)


@cache
def _source(module: str) -> Path | None:
    """The module's file, found without importing it; None if the module is not ours."""
    package, *rest = module.split(".")
    if package not in PACKAGES:
        return None
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    folder = Path(found.submodule_search_locations[0])
    path = folder.joinpath(*rest).with_suffix(".py") if rest else folder / "__init__.py"
    return path if path.is_file() else None


class _Reading:
    """Reads a tree once, since reading takes as long as parsing."""

    def __init__(self) -> None:
        self.imports: list[str] = []
        """Every module that the tree may import; ``from a import b`` gives ``a`` and ``a.b``."""

    def dump(self, node: object) -> str:
        """``ast.dump`` without docstrings, and without empty fields, in which versions of Python differ."""
        if isinstance(node, list):
            return f"[{', '.join([self.dump(each) for each in node])}]"
        if not isinstance(node, ast.AST):
            return repr(node)
        kind = type(node)
        self._note_import(node)
        filled = []
        for name in kind._fields:
            value = getattr(node, name, None)
            if name == "body" and kind in _WITH_DOCSTRING:
                value = [statement for statement in value or () if not _is_text(statement)] or [ast.Pass()]
            if value is not None and value != []:
                filled.append(f"{name}={self.dump(value)}")
        return f"{kind.__name__}({', '.join(filled)})"

    def _note_import(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            self.imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            self.imports += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]


def _is_text(statement: ast.stmt) -> bool:
    """Whether a statement is a docstring: a string alone."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _device() -> str:
    """The name of the first GPU from its driver, and whether it may replay what it computes (docs/decisions/0037), or ``cpu``;
    read from /proc, so that no library is loaded."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1"):
        return "cpu"
    for information in sorted(NVIDIA.glob("gpus/*/information")):
        if model := re.search(r"^Model:\s*(.+)$", information.read_text(), re.MULTILINE):
            return model[1].strip() + (" without CUDA graphs" if os.environ.get(GRAPHS) == "0" else "")
    return "cpu"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "absent"


def _short(value: str) -> str:
    return value[:12] if re.fullmatch(r"[0-9a-f]{64}", value) else value
