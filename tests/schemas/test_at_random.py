"""Recipes, sweeps and overrides made at random load, or are refused with problems. Nothing else is raised."""

from collections import Counter
from pathlib import Path

import pytest

from tests.schemas.at_random import try_one

pytestmark = pytest.mark.slow

BLOCK = 60
BLOCKS = 10
"""600 in all; benchmarks/hostile_inputs.py tries as many as one likes."""


@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_recipe_made_at_random_escapes(tmp_path: Path, block: int) -> None:
    ends = Counter(try_one(number, tmp_path) for number in range(block * BLOCK, (block + 1) * BLOCK))
    assert ends["refused"] > BLOCK // 3
    assert sum(ends.values()) == BLOCK


def test_some_of_them_load(tmp_path: Path) -> None:
    assert Counter(try_one(number, tmp_path) for number in range(3, 600, 5))["loaded"] > 5
