"""The examples of the page for contributors are those that tests/test_extending.py writes into a tree and uses."""

import re

import pytest

from tests import test_extending
from tests.docs.site.documented_commands import ROOT
from tests.support.extensions import SWITCH

PAGE = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")


def examples(heading: str, language: str = "python") -> list[str]:
    """Return the blocks of code under a heading, without indentation and line breaks."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return [plain(each) for each in re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)]


def plain(code: str) -> str:
    return " ".join(code.split())


def test_the_switch_of_the_page_is_the_one_that_is_tried() -> None:
    written = {file: plain(" ".join(text for _, text in pairs)) for file, pairs in SWITCH.inserted.items()}
    shown = examples("A switch of the algorithm")
    assert len(shown) == len(written) == 4
    for example, (file, text) in zip(shown, written.items(), strict=True):
        assert example in text, file
        assert f"`{file}`" in PAGE


@pytest.mark.parametrize("part", ["STAGE_CLASS", "STAGE_TASK", "STAGE_ROW"])
def test_the_kind_of_the_page_is_the_one_that_is_tried(part: str) -> None:
    [example] = [each for each in examples("A kind of stage") if each in plain(getattr(test_extending, part))]
    assert len(example) > 100


def test_the_recipe_of_the_kind_is_the_one_that_is_planned() -> None:
    assert examples("A kind of stage", "yaml") == [plain(test_extending.STAGE_RECIPE)]
