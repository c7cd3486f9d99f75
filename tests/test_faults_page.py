"""Each fault of ``docs/faults.md`` has its tests in ``docs/faults_tests.yaml``, and each of these tests exists."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
SECTIONS = ("Durability", "Services", "Training", "Data and input", "Security")

TestsOfPage = dict[str, dict[str, list[str]]]
"""Section → fault, or claim → the tests of it."""


def read_tests(name: str) -> TestsOfPage:
    """Return the tests that a file of ``docs/`` lists; assert that no key occurs twice, which would hide tests."""
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    found: TestsOfPage = yaml.safe_load(text)
    assert sum(map(len, found.values())) == len(re.findall(r"^  \S.*:$", text, re.MULTILINE))
    return found


TESTS = read_tests("faults_tests.yaml")


@cache
def collected(file: Path) -> frozenset[str]:
    """Yield ``::name`` and ``::Class::name`` of every test of a file."""

    def tests(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
                yield f"{prefix}::{node.name}"
            elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                yield from tests(node.body, f"{prefix}::{node.name}")

    return frozenset(tests(ast.parse(file.read_text(encoding="utf-8")).body, ""))


def missing_tests(listed: TestsOfPage) -> list[str]:
    """Return the listed tests that do not exist."""
    found = []
    for each in sorted({test for claims in listed.values() for tests in claims.values() for test in tests}):
        path, separator, name = each.partition("::")
        if not (ROOT / path).is_file() or separator + name not in collected(ROOT / path):
            found.append(each)
    return found


def tables(page: str) -> dict[str, list[list[str]]]:
    """Return section → the rows of its table as cells, without the heading."""
    found: dict[str, list[list[str]]] = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, _, text = section.partition("\n")
        lines = [line for line in text.splitlines() if line.startswith("|")]
        found[title.strip()] = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]
    return found


def test_every_listed_test_exists() -> None:
    assert missing_tests(TESTS) == []


def test_a_test_that_does_not_exist_is_found() -> None:
    here = "tests/test_faults_page.py"
    listed = [
        f"{here}::test_a_test_that_does_not_exist_is_found",
        f"{here}::collected",
        f"{here}::test_gone",
        here,
        "tests/test_gone.py::test_a",
        "tests/attempts/launchers/test_local_process.py::TestHang::test_is_not_what_goes_on_reporting",
    ]
    assert missing_tests({"Durability": {"a": listed}}) == sorted([*listed[1:4], listed[4]])


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_and_the_list_of_tests_have_the_same_faults(section: str) -> None:
    rows = tables(PAGE)[section]
    assert [row[0] for row in rows] == list(TESTS[section])
    assert all(len(row) == 2 and all(row) for row in rows)
    assert all(TESTS[section].values())


def test_no_section_is_left_out() -> None:
    assert tuple(TESTS) == SECTIONS
    assert list(tables(PAGE)) == ["What you see and what to do", *SECTIONS, "Not done, or not tested"]


def test_what_is_missing_belongs_to_a_fault_of_the_page() -> None:
    faults = [fault for section in SECTIONS for fault in TESTS[section]]
    rows = tables(PAGE)["Not done, or not tested"]
    assert all(len(row) == 2 and all(row) for row in rows)
    assert [fault for fault in faults if fault in {row[0] for row in rows}] == [row[0] for row in rows]


def test_the_page_names_no_test() -> None:
    assert "tests/" not in PAGE
