import ast
import sys
from collections.abc import Iterator
from pathlib import Path

from vantage import algorithms

FILES = sorted(Path(algorithms.__file__).parent.glob("*.py"))


def imported(source: str) -> Iterator[str]:
    """Yield the first part of each imported name; a relative import is a dot."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            yield "." if node.level else str(node.module).split(".")[0]


def test_the_maths_imports_torch_and_the_standard_library_only() -> None:
    allowed = {"torch", "vantage", *sys.stdlib_module_names}
    found = [f"{path.name}: {name}" for path in FILES for name in imported(path.read_text())]
    assert len(found) > len(FILES)
    assert [each for each in found if each.split(": ")[1] not in allowed] == []
