"""No stage, formula or check compares a preset's name; only schemas/recipe/presets.py and the class that reads it do."""

import ast
from collections.abc import Iterator
from typing import get_args

import pytest

from tests.support.every import every
from tests.support.packages import PACKAGES, ROOT
from vantage.schemas.recipe.presets import PresetName

PAGES = [ROOT / "schemas" / "recipe" / page for page in ("presets.py", "algorithm.py")]
NAMES = frozenset(get_args(PresetName))
TABLES = frozenset({"PRESETS", "PresetName"})


def preset_names(source: str) -> Iterator[str]:
    """Yield every place in a module that contains a preset's name as a string, or uses the table of presets."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(text)) if text in NAMES:
                yield f"line {node.lineno}: {text!r}"
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) if name in TABLES:
                yield f"line {node.lineno}: {name}"


def test_nothing_outside_the_page_names_a_preset() -> None:
    found = []
    for package in PACKAGES:
        modules = [file for file in (ROOT / package).rglob("*.py") if file not in PAGES]
        assert modules, package
        found += [
            f"{file.relative_to(ROOT)}, {place}"
            for file in modules
            for place in preset_names(file.read_text(encoding="utf-8"))
        ]
    assert found == []


@every(
    "source",
    [
        'if algorithm.preset == "vapo": pass',
        'if "dapo" == algorithm.preset: pass',
        'if algorithm.preset in ("grpo", "dr_grpo"): pass',
        'if algorithm.preset not in {"rloo"}: pass',
        'match preset:\n    case "remax": pass',
        'CRITICS = {"a2c": True}',
        "if algorithm.preset in PRESETS: pass",
        'PRESETS[preset]["lambda_policy"]',
        "from vantage.schemas.recipe.presets import PRESETS as TABLE",
        "vantage.schemas.recipe.algorithm.PRESETS.get(preset)",
    ],
)
def test_asking_for_one_would_be_seen(source: str) -> None:
    assert list(preset_names(source))


@pytest.mark.parametrize("source", ['"""As in vapo."""', "ppo = 3", 'if switches.advantage == "gae": pass'])
def test_other_words_are_not_taken_for_one(source: str) -> None:
    assert not list(preset_names(source))
