"""What an installed wheel has: every package of the tree."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOP = ("schemas", "algorithms", "models", "recipes", "storage", "ledger", "tasks", "flows")


def test_every_package_is_in_the_wheel() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    listed = settings["tool"]["setuptools"]["packages"]
    found = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for top in TOP
        for file in (ROOT / top).rglob("__init__.py")
    }
    assert sorted(listed) == sorted(found)
