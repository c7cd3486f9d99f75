import ast
import sys
from pathlib import Path

import pytest

from vantage import algorithms

FILES = sorted(Path(algorithms.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_maths_imports_torch_and_the_standard_library_only(path):
    allowed = {"torch", "vantage", *sys.stdlib_module_names}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert {alias.name.split(".")[0] for alias in node.names} <= allowed
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module.split(".")[0] in allowed
