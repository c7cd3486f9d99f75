"""The exit code of a run, from what its record says."""

from types import SimpleNamespace
from typing import Any

import pytest

from vantage.attempts.exit_codes import ExitCode
from vantage.flows.execution import exit_code


def record(status: str, *codes: int | None, **left: tuple[str, ...]) -> Any:
    stages = {
        str(number): SimpleNamespace(status="failed" if code != 0 else "completed", exit_code=code)
        for number, code in enumerate(codes)
    }
    nothing: dict[str, tuple[str, ...]] = {"unpublished": (), "refused_aliases": (), "unsigned": ()}
    return SimpleNamespace(status=status, stages=stages, **nothing | left)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((0, 137, 65), ExitCode.OUT_OF_MEMORY),
        ((65, 0, 137), ExitCode.BAD_INPUT),
        ((None, 65), ExitCode.BAD_INPUT),
        ((None,), ExitCode.INTERNAL),
    ],
)
def test_the_first_stage_that_failed_decides(codes: tuple[int | None, ...], expected: int) -> None:
    assert exit_code(record("failed", *codes)) == expected


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        ({}, ExitCode.OK),
        ({"unsigned": ("sft",)}, ExitCode.BAD_INPUT),
        ({"refused_aliases": ("a",), "unsigned": ("sft",)}, ExitCode.GATE_CLOSED),
        ({"unpublished": ("m",), "refused_aliases": ("a",), "unsigned": ("sft",)}, ExitCode.STORAGE),
    ],
)
def test_what_a_complete_run_could_not_do_has_a_code(left: dict[str, Any], expected: int) -> None:
    """What is not published at all comes before an alias that was refused, and that before a missing signature."""
    assert exit_code(record("completed", 0, **left)) == expected


def test_only_a_complete_run_is_asked_what_it_published() -> None:
    assert exit_code(record("gate_closed", 0, unpublished=("m",))) == ExitCode.GATE_CLOSED
    assert exit_code(record("running", 0, unsigned=("sft",))) == ExitCode.RESUME
