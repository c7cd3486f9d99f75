"""Each claim of ``docs/security.md`` has its tests in ``docs/security_tests.yaml``, and each of these tests exists."""

import re

import pytest

from tests.test_faults_page import ROOT, missing_tests, read_tests, tables

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
TESTS = read_tests("security_tests.yaml")


def test_every_listed_test_exists() -> None:
    assert missing_tests(TESTS) == []
    assert all(tests for claims in TESTS.values() for tests in claims.values())


@pytest.mark.parametrize(("section", "rows"), [("What is trusted", 10), ("Servers", 5)])
def test_every_row_has_its_tests(section: str, rows: int) -> None:
    claims = [row[0] for row in tables(PAGE)[section]]
    assert len(claims) == rows
    assert claims == list(TESTS[section])[:rows]


@pytest.mark.parametrize("section", TESTS)
def test_every_claim_stands_in_its_section(section: str) -> None:
    [text] = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    text = " ".join(text.split())
    assert [claim for claim in TESTS[section] if claim not in text] == []


def test_the_page_names_no_test() -> None:
    assert "tests/" not in PAGE
