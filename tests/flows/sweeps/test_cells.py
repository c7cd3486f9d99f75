"""The runs of a sweep begin after the shared steps, and each counts as done once its artifacts are stored; no server is needed."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from vantage.attempts.exit_codes import ExitCode
from vantage.flows.sweeps import runs
from vantage.flows.sweeps.cells import run_cells
from vantage.flows.sweeps.runs import SweepRuns, finished_run, row_of


def test_the_others_begin_when_the_last_shared_step_has_ended() -> None:
    events: list[str] = []

    async def run_one(cell: Any, machine: Any, ended: Any) -> None:
        events.append(f"{cell} begins")
        if cell == "first":
            for step in ("data", "sft", "policy"):
                ended(step)
                events.append(f"{step} has ended")
                for _ in range(5):
                    await asyncio.sleep(0)
        events.append(f"{cell} ends")

    cells: Any = ["first", "second", "third"]
    machine: Any = None
    asyncio.run(run_cells(cells, run_one, machine=machine, at_once=3, shared=lambda _: {"data", "sft"}))
    assert events[:3] == ["first begins", "data has ended", "sft has ended"]
    assert events.index("second begins") < events.index("policy has ended") < events.index("first ends")
    assert set(events[3:]) >= {"second begins", "third begins", "third ends"}


def test_a_first_run_that_breaks_off_holds_nothing_up() -> None:
    begun: list[str] = []

    async def run_one(cell: Any, machine: Any, ended: Any) -> None:
        begun.append(cell)

    cells: Any = ["first", "second"]
    asyncio.run(run_cells(cells, run_one, machine=None, at_once=1, shared=lambda _: {"sft"}))  # type: ignore[arg-type]
    assert begun == ["first", "second"]


@pytest.mark.parametrize(
    ("codes", "missing", "expected"),
    [
        ([0, 0], 0, ExitCode.OK),
        ([0, 78, 0], 0, ExitCode.GATE_CLOSED),
        ([78, 0, 70, 137], 0, ExitCode.INTERNAL),
        ([0, 0], 1, ExitCode.RESUME),
        ([0, 78], 1, ExitCode.RESUME),
        ([137, 78], 1, ExitCode.OUT_OF_MEMORY),
    ],
)
def test_a_failure_outweighs_a_closed_gate(codes: list[int], missing: int, expected: int) -> None:
    rows = {str(number): SimpleNamespace(exit_code=code) for number, code in enumerate(codes)}
    sweep: Any = SimpleNamespace(_rows=rows, _cells=range(len(codes) + missing))
    assert SweepRuns._exit_code(sweep) == expected


def finished(run_id: str, status: str, *, recipe: str = "ours", **made: str) -> Any:
    stages = {name: SimpleNamespace(digest=digest or None) for name, digest in made.items()}
    return SimpleNamespace(run_id=run_id, recipe_digest=recipe, status=status, stages=stages)


def test_a_run_is_done_whose_artifacts_are_all_in_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "recipe_digests", lambda recipe: {"ours"})
    cell: Any = SimpleNamespace(recipe=None)
    steps: Any = [SimpleNamespace(name="sft", digest="1"), SimpleNamespace(name="policy", digest="2")]
    whole = finished("0002", "gate_closed", sft="1", policy="2", late="")
    others = [
        finished("0004", "failed", sft="1", policy="2"),
        finished("0003", "completed", recipe="another", sft="1", policy="2"),
    ]
    assert finished_run(cell, steps, [*others, whole]) is whole
    assert finished_run(cell, steps, others) is None
    of_other_bits = finished("0005", "completed", sft="1", policy="3")
    assert finished_run(cell, steps, [of_other_bits, whole]) is None, "the newest decides"


def test_a_row_says_what_failed_once() -> None:
    def stage(status: str, **fields: Any) -> SimpleNamespace:
        known = {"reason": None, "verdicts": (), "metrics": {}, "seconds": 1.5, "exit_code": None}
        return SimpleNamespace(status=status, **known | fields)

    record: Any = SimpleNamespace(
        status="failed",
        run_id="0001",
        mlflow_run_id=None,
        stages={
            "sft": stage("failed", reason="out of memory", exit_code=137),
            "policy": stage("blocked", reason="sft has failed", metrics={"accuracy": 0.5}, seconds=0.0),
        },
    )
    measure = SimpleNamespace(name="accuracy", stage="policy", metric="accuracy")
    cell: Any = SimpleNamespace(arm="ours", seed=3)
    sweep: Any = SimpleNamespace(measure=[measure])
    row = row_of(cell, record, sweep)
    assert row.reason == "sft: out of memory"
    assert (row.values, row.seconds, row.exit_code) == ({"accuracy": 0.5}, 1.5, 137)
