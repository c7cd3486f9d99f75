"""The lines that a sweep prints cut off no number on a narrow terminal, and print nothing twice."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from tests.flows.sweeps.test_sweep import row, sweep_of
from vantage.flows.sweeps.report import Row, compare, show_table
from vantage.flows.sweeps.runs import CellView, _shown_status
from vantage.runs.console import Screen
from vantage.runs.record import StageRecord
from vantage.runs.watching import PAGE_AT

LONG = "critic_from_reward_model"
ROWS = [row("vapo", seed, 0.25 * seed) for seed in (1, 2, 3)] + [
    row(LONG, seed, 0.25 * seed + 0.125) for seed in (1, 2, 3)
]
"""The means are 0.5 and 0.625; each pair differs by 0.125."""


def shown(width: int) -> list[str]:
    printed = io.StringIO()
    sweep = sweep_of("vapo", LONG)
    console = Console(file=printed, width=width, force_terminal=True, no_color=True, legacy_windows=False)
    show_table(console, sweep, compare(sweep, ROWS))
    text = "".join(
        part.partition("m")[2] if at else part for at, part in enumerate(printed.getvalue().split("\x1b["))
    )
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize("width", [40, 60, 80, 160])
def test_no_name_and_no_number_is_cut_off(width: int) -> None:
    lines = shown(width)
    text = " ".join(" ".join(lines).split())
    assert "…" not in text
    for word in (LONG, "0.625", "+0.125", "[+0.125, +0.125]", "better", "baseline", "published: points"):
        assert word in text
    assert max(map(len, lines)) <= width


def test_a_wide_terminal_shows_a_line_for_each_arm_and_a_narrow_one_three() -> None:
    assert sum(LONG in line and "0.625" in line for line in shown(160)) == 1
    narrow = shown(80)
    assert f"  {LONG}" in narrow
    at = narrow.index(f"  {LONG}")
    assert narrow[at + 1].startswith("    n 3  mean 0.625  sd 0.25")
    assert narrow[at + 2].startswith("    difference +0.125  95 % interval [+0.125, +0.125]  verdict better")


def test_the_line_of_a_run_names_its_failed_stage_whose_reason_was_printed_before() -> None:
    stages = {
        "policy": StageRecord(status="failed", reason="13 iterations bring bad luck; use 12"),
        "evaluation": StageRecord(status="blocked", reason="reads policy, which is failed"),
    }
    failed = row("vapo", 1, None, "failed", "policy: 13 iterations bring bad luck; use 12")
    assert _shown_status(failed, stages) == "failed: policy"
    shared: Row = row("vapo", 2, None, "failed", "sft has failed in vapo · 1")
    assert _shown_status(shared, {}) == "failed: sft has failed in vapo · 1"


def test_the_page_of_each_run_is_not_printed_and_other_lines_are(tmp_path: Path) -> None:
    printed = io.StringIO()
    view = CellView("vapo · 1", Screen(Console(file=printed, width=200)), {})
    view.say(f"{PAGE_AT}http://127.0.0.1:4200/runs/flow-run/1", "dim")
    view.say("  Prefect's flow broke off: reason", "red")
    assert printed.getvalue() == "  vapo · 1: Prefect's flow broke off: reason\n"
