"""The page of the study of value bias shows the numbers of its seeds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats

from docs.value_bias.study.report import PAIRS, PANELS, over_seeds, paired, summary

PAGE = Path(__file__).resolve().parents[2] / "docs" / "value_bias"


@pytest.fixture(scope="module")
def measured() -> list[dict[str, Any]]:
    return [row for path in sorted(PAGE.glob("seed-*.json")) for row in json.loads(path.read_text())]


def test_the_summary_is_that_of_the_seeds(measured: list[dict[str, Any]]) -> None:
    rows = [*measured, *paired(measured)]
    tables = {part: over_seeds(rows, part) for part in (*PANELS, *PAIRS.values())}
    assert summary(tables, num_seeds=5) == (PAGE / "summary.md").read_text()


@pytest.mark.parametrize(
    ("part", "critic", "quantity"),
    [
        ("position", "pretrained", "explained_variance"),
        ("position", "reward model", "advantage_first_half_minus_second"),
        ("iteration", "from_value_model", "test_score"),
    ],
)
def test_the_page_shows_the_mean_and_its_interval(
    measured: list[dict[str, Any]], part: str, critic: str, quantity: str
) -> None:
    """The interval is Student's t over the five seeds, computed from the rows alone."""
    numbers = [
        row["value"]
        for row in measured
        if (row["part"], row["critic"], row["quantity"], row["x"]) == (part, critic, quantity, None)
    ]
    assert len(numbers) == 5
    half = scipy.stats.t.ppf(0.975, 4) * scipy.stats.sem(numbers)
    shown = f"{np.mean(numbers):.3f} ± {half:.3f}".replace("-", "−")
    assert shown in " ".join((PAGE / "README.md").read_text().split())
