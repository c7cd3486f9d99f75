"""``docs/faults.md`` promises nothing that no test holds: each test that it names exists, and each row says where it stands."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "faults.md"
SECTIONS = ("Durability", "Services", "Training", "Data and input", "Security")

TEST = re.compile(r"`(tests/[\w/]+\.py)((?:::\w+)+)`")
OPEN = re.compile(r"not yet|cannot be tested here: \S")


@cache
def collected(file: Path) -> frozenset[str]:
    """``::name`` and ``::Class::name`` of every test of a file."""

    def tests(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
                yield f"{prefix}::{node.name}"
            elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                yield from tests(node.body, f"{prefix}::{node.name}")

    return frozenset(tests(ast.parse(file.read_text(encoding="utf-8")).body, ""))


def sections() -> dict[str, list[list[str]]]:
    """Section → its table's rows, heads left out, as cells."""
    found: dict[str, list[list[str]]] = {}
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        lines = [line for line in text.splitlines() if line.startswith("|")]
        found[title.strip()] = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]
    return found


ROWS = [(section, row) for section in SECTIONS for row in sections()[section]]


@pytest.mark.parametrize(("path", "name"), sorted(set(TEST.findall(PAGE.read_text(encoding="utf-8")))))
def test_every_test_that_the_page_names_exists(path: str, name: str) -> None:
    assert (ROOT / path).is_file(), f"{path} is not there"
    assert name in collected(ROOT / path), f"{path} has no {name}"


@pytest.mark.parametrize(
    "row", [row for _, row in ROWS], ids=[f"{section}: {row[0]}" for section, row in ROWS]
)
def test_every_fault_is_held_by_a_test_or_said_to_be_open(row: list[str]) -> None:
    assert len(row) == 3, row
    fault, doing, test = row
    assert fault
    assert doing
    assert TEST.search(test) or OPEN.match(test), f"{fault}: name a test, or say 'not yet'"


def test_nothing_that_looks_like_a_test_is_misspelt() -> None:
    """A path in other quotes, or without its name, would pass unseen."""
    text = PAGE.read_text(encoding="utf-8")
    named = len(TEST.findall(text))
    assert named > 100
    assert text.count("tests/") == named + text.count("`tests/test_faults_page.py`")


def test_a_test_that_is_not_there_would_be_noticed() -> None:
    here = collected(Path(__file__))
    assert "::test_a_test_that_is_not_there_would_be_noticed" in here
    assert "::collected" not in here
    assert "::TestHang::test_is_not_what_goes_on_reporting" in collected(
        ROOT / "tests/attempts/launchers/test_local_process.py"
    )
