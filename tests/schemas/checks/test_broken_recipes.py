"""The loader reports of broken recipes what it reported when the file was written."""

import json
from typing import Any

import pytest

from tests.schemas.checks.broken_recipes import BASES, FILE, plain, problems_of, problems_of_case
from tests.support.every import every

pytestmark = pytest.mark.slow

CASES: list[dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
BLOCK = 50


@every("start", range(0, len(CASES), BLOCK))
def test_problems_keep_their_text_order_and_number(start: int) -> None:
    for number, case in enumerate(CASES[start : start + BLOCK], start):
        assert problems_of_case(case) == case["problems"], (
            f"case {number}: {case['base']} with {case['edits']}"
        )


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("in_one_line", [True, False])
def test_without_a_fault_there_is_no_problem(base: str, in_one_line: bool) -> None:
    assert problems_of(plain(base), in_one_line=in_one_line) == []
