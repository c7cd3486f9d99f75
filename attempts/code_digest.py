"""Compute digests of the code that a stage runs: of the syntax trees of a module and of all our modules that it imports.

Nothing here imports the code. The facts of a module are cached (``vantage.storage.machine_cache``) and reused while the
module's bytes are the same: parsing all modules takes a third of the time of ``vantage plan``.
"""

import ast
import gc
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

from vantage.attempts.identity.package import package_folder
from vantage.schemas.recipe.builtin_verifiers import BUILTIN
from vantage.schemas.recipe.terms import TERMS
from vantage.storage.machine_cache import keep_derived, read_derived

PREFIX = "vantage."
"""Prefix of our modules' names. Digests are taken without it, since it did not exist at the first digests."""

PACKAGES = ("schemas", "algorithms", "models", "storage", "ledger", "tasks")
"""Packages whose code determines a stage's numbers."""

_PREFIXED = re.compile(rf"\b{re.escape(PREFIX)}(?=(?:{'|'.join(PACKAGES)})\b)")

KINDS_MODULE = "vantage.schemas.kinds"
"""Module that is excluded: the rows of its table are in the stage key, or change no number. Otherwise a new kind, or a
new revision of one kind, would count as changed code of all other kinds."""

LOADED_BY_NAME = {
    "vantage.tasks.rewards.scoring": [kind.module for kind in TERMS],
    "vantage.tasks.rewards.builtin.judge": [row.module for row in BUILTIN],
    "vantage.tasks.rewards.sandbox": ["vantage.tasks.rewards.sandbox_inside"],
}
"""Module → modules that it imports by their names in a table, or starts as processes."""

# CPython 3.11 has one depth counter of syntax trees for all threads: if a garbage collection lets another thread parse
# at the same time, either fails with a SystemError (python/cpython#106905). Libraries parse too, without this lock.
_parser_lock = threading.Lock()
_PARSE_ATTEMPTS = 20
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Reading(NamedTuple):
    """Facts that were read from one module's source."""

    source: str
    """sha256 of the module's bytes."""
    tree: str
    """sha256 of the module's syntax tree without docstrings."""
    imports: tuple[str, ...]
    """Modules that the module may import."""


@cache  # an audit asks for the digest of every stage
def code_digest(module: str) -> str:
    """Return the sha256 over the syntax trees of a module and of all our modules that it imports, at any depth.

    Comments, layout and docstrings do not change it; a renamed variable does.

    Raises:
        ValueError: the module is not one of ours.
    """
    trees = module_digests(module)
    if not trees:
        raise ValueError(
            f"{module} is no module of {', '.join(PREFIX + package for package in PACKAGES)}: there is no code to digest"
        )
    listing = "\n".join(f"{name} {trees[name]}" for name in sorted(trees))
    return hashlib.sha256(listing.encode()).hexdigest()


def module_digests(module: str) -> dict[str, str]:
    """Return module, without the prefix → sha256 of its syntax tree, for a module and all of ours that it imports.

    All versions of Python give the same digests.
    """
    trees: dict[str, str] = {}
    waiting = [module]
    kept_before = _kept().copy()
    while waiting:
        name = waiting.pop()
        path = _source(name)
        short = name.removeprefix(PREFIX)
        if short not in trees and name != KINDS_MODULE and path is not None:
            reading = _read(path)
            trees[short] = reading.tree
            waiting += [*reading.imports, *LOADED_BY_NAME.get(name, ())]
    if _kept() != kept_before:
        _keep()
    return trees


@cache
def _read(path: Path) -> Reading:
    """Return the module's facts, from the cache if its bytes are the same."""
    source = path.read_bytes()
    sha256 = hashlib.sha256(source).hexdigest()
    kept = _kept().get(str(path))
    if kept is not None and kept.source == sha256:
        return kept
    reader = _TreeReader()
    with _no_collection():
        text = reader.dump(_parsed(source))
    reading = Reading(sha256, hashlib.sha256(text.encode()).hexdigest(), tuple(reader.imports))
    _kept()[str(path)] = reading
    return reading


@cache
def _kept() -> dict[str, Reading]:
    """Return path → facts that this process or earlier ones have read from the file."""
    kept = read_derived(_name())
    readings = {} if kept is None else json.loads(kept)
    return {path: Reading(source, tree, tuple(imports)) for path, (source, tree, imports) in readings.items()}


def _keep() -> None:
    """Write the facts of modules that still exist to the cache."""
    present = {path: reading for path, reading in _kept().copy().items() if Path(path).is_file()}
    keep_derived(_name(), json.dumps(present).encode())


def _name() -> str:
    """Return the cache file's name. It contains the digest of this module, since another version may read other facts."""
    return f"code-{hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]}.json"


@contextmanager
def _no_collection() -> Iterator[None]:
    """Switch off garbage collections, which make parsing three times as long for nothing: a tree has no cycles."""
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
    """Return the module's file, found without importing it; None if the module is not ours."""
    package, *rest = module.removeprefix(PREFIX).split(".")
    if not module.startswith(PREFIX) or package not in PACKAGES:
        return None
    folder = package_folder() / package
    path = folder.joinpath(*rest).with_suffix(".py") if rest else folder / "__init__.py"
    return path if path.is_file() else None


class _TreeReader:
    """Dumps a tree and collects its imports in one pass, since a pass takes as long as parsing."""

    def __init__(self) -> None:
        self.imports: list[str] = []
        """Every module that the tree may import; ``from a import b`` gives ``a`` and ``a.b``."""

    def dump(self, node: object) -> str:
        """Dump a tree as ``ast.dump`` does, without docstrings, and without empty fields, in which versions of Python differ."""
        if isinstance(node, list):
            return f"[{', '.join([self.dump(each) for each in node])}]"
        if not isinstance(node, ast.AST):
            return repr(_PREFIXED.sub("", node) if isinstance(node, str) else node)
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
    """Return whether a statement is a string alone, like a docstring."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
