"""``docs/security.md`` promises nothing that no test holds: each test that it names exists."""

import pytest

from tests.test_faults_page import ROOT, TEST, collected

PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("path", "name"), sorted(set(TEST.findall(PAGE))))
def test_every_test_that_the_page_names_exists(path: str, name: str) -> None:
    assert name in collected(ROOT / path), f"{path} has no {name}"


def test_every_row_of_the_trusted_names_one() -> None:
    table = PAGE.split("## What is trusted")[1].split("\n\n")[1]
    rows = [line for line in table.splitlines() if line.startswith("| **")]
    assert len(rows) == 9
    assert all(TEST.search(row) for row in rows)
