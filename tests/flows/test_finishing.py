"""A running stage may be asked to finish early; the command reports when it will."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vantage.flows import finishing
from vantage.flows.finishing import MAX_REASON, finish_stage
from vantage.runs.workspace import RunError


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, str, str]]:
    """Return the requests that were made. A process executes run 0001 alone."""
    found: list[tuple[Path, str, str]] = []
    monkeypatch.setattr(finishing, "Training", SimpleNamespace)
    monkeypatch.setattr(finishing, "pool_of", lambda recipe, step: None)
    monkeypatch.setattr(finishing, "is_active", lambda workspace, run_id: run_id == "0001")
    monkeypatch.setattr(
        finishing, "ask_to_finish", lambda folder, *, run_id, reason: found.append((folder, run_id, reason))
    )
    return found


def finish(of_stage: str, of_run: str, *, run_id: str = "0001", reason: str = "good enough") -> str:
    storage = SimpleNamespace(has_scratch=lambda key: True, scratch_folder=lambda key: Path("scratch", key))
    record: Any = SimpleNamespace(
        run_id=run_id,
        status=of_run,
        recipe=SimpleNamespace(stages={"policy": SimpleNamespace(kind="policy_optimization")}),
        stages={"policy": SimpleNamespace(status=of_stage)},
        used_keys={"policy": "key"},
    )
    workspace: Any = SimpleNamespace(storage=storage)
    return finish_stage(workspace, record, "policy", reason=reason)


@pytest.mark.parametrize(
    ("of_stage", "of_run", "run_id", "when"),
    [
        ("running", "running", "0001", "after its next step"),
        ("running", "running", "0002", "after one more step, when the run is resumed"),
        ("resumable", "resumable", "0002", "after one more step, when the run is resumed"),
        ("resumable", "running", "0001", "after one more step, when the run is resumed"),
    ],
)
def test_a_stage_ends_after_a_step_that_it_still_makes(
    of_stage: str, of_run: str, run_id: str, when: str, asked: list[Any]
) -> None:
    said = finish(of_stage, of_run, run_id=run_id)
    assert said.startswith(f"policy of run {run_id} is asked to finish: it ends {when}, and")
    assert asked == [(Path("scratch/key"), run_id, "good enough")]


@pytest.mark.parametrize(
    ("of_stage", "of_run"), [("completed", "running"), ("failed", "failed"), ("waiting", "running")]
)
def test_what_does_not_compute_is_not_asked(of_stage: str, of_run: str, asked: list[Any]) -> None:
    with pytest.raises(RunError, match=f"policy of run 0001 is {of_stage}, so there is nothing to finish"):
        finish(of_stage, of_run)
    assert not asked


def test_a_reason_has_its_limit(asked: list[Any]) -> None:
    finish("running", "running", reason="x" * MAX_REASON)
    with pytest.raises(RunError, match=f"has {MAX_REASON + 1} characters"):
        finish("running", "running", reason="x" * (MAX_REASON + 1))
    assert len(asked) == 1
