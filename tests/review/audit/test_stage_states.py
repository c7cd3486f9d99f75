"""The status of each stage in run.json is the one that the outbox gives, also of a run that was resumed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.review.audit.conftest import SHORT_RECIPE, STAGES, run_once, write_recipe
from tests.review.audit.tampering import Case, edit_json, found
from tests.support.orchestrated import attempt_all, orchestrated
from vantage.flows.recording import Recording
from vantage.ledger.replay import Replay
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.run_states import status_checks
from vantage.runs.record import RunRecord
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace

FIRST, MADE, LAST = "model", "sft", "evaluation"
"""Steps in the order of the run; the resumed runs are interrupted before ``MADE`` and before ``LAST``."""


class Killed(BaseException):
    """The process ends in this moment."""


def _killed_before_it_reports(workspace: Workspace, recipe: Path) -> None:
    """Run until ``MADE`` is in the store and in run.json, and is not in the outbox."""

    def report(self: Recording, request: Any, *others: Any) -> None:
        if request.step == MADE:
            raise Killed
        original(self, request, *others)

    original = Recording._report
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Recording, "_report", report)
        with (
            pytest.raises(Killed),
            orchestrated(workspace, recipe, stage_function=STAGES, in_process=True) as run,
        ):
            attempt_all(run)


def _once(workspace: Workspace, recipe: Path) -> None:
    run_once(workspace, recipe)


def _resumed_once(workspace: Workspace, recipe: Path) -> None:
    run_once(workspace, recipe, until=LAST)
    run_once(workspace, recipe)


def _resumed_twice(workspace: Workspace, recipe: Path) -> None:
    run_once(workspace, recipe, until=MADE)
    run_once(workspace, recipe, until=LAST)
    run_once(workspace, recipe)


def _recorded_late(workspace: Workspace, recipe: Path) -> None:
    _killed_before_it_reports(workspace, recipe)
    run_once(workspace, recipe)


def _failed(workspace: Workspace, recipe: Path) -> None:
    workspace.root.mkdir()
    (workspace.root / "refuse.txt").write_text(LAST)
    run_once(workspace, recipe)


def _failed_and_resumed(workspace: Workspace, recipe: Path) -> None:
    _failed(workspace, recipe)
    run_once(workspace, recipe, until=MADE)


def _under_way(workspace: Workspace, recipe: Path) -> None:
    run_once(workspace, recipe, until=LAST)


RUNS: dict[str, Callable[[Workspace, Path], None]] = {
    "once": _once,
    "resumed once": _resumed_once,
    "resumed twice": _resumed_twice,
    "recorded late": _recorded_late,
    "failed": _failed,
    "failed and resumed": _failed_and_resumed,
    "under way": _under_way,
}
Runs = dict[str, tuple[Evidence, RunRecord, Replay]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Yield one run of each kind, each in a workspace of its own."""
    made: Runs = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # the outbox is all that is read
        for name, make in RUNS.items():
            folder = tmp_path_factory.mktemp("states")
            workspace = Workspace(folder / "workspace")
            make(workspace, write_recipe(folder, SHORT_RECIPE.partition("publish:")[0]))
            [record] = read_runs(workspace)
            evidence = Evidence(workspace)
            replay = evidence.replay(record.run_id)
            assert isinstance(replay, Replay)
            made[name] = evidence, record, replay
        yield made


def statuses(runs: Runs, run: str, changes: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the checks of a run after changes to its record: by step, or under ``run``, the fields that change."""
    evidence, record, replay = runs[run]
    of_run = changes.get("run", {})
    stages = {step: each.model_copy(update=changes.get(step, {})) for step, each in record.stages.items()}
    changed = record.model_copy(update={"stages": stages, **of_run})
    return [(check.outcome, check.detail) for check in status_checks(evidence, changed, replay)]


@pytest.mark.parametrize("run", RUNS)
def test_what_nobody_has_changed_agrees(runs: Runs, run: str) -> None:
    expected = {
        "once": ["completed", "completed", "completed"],
        "resumed once": ["reused", "reused", "completed"],
        "resumed twice": ["reused", "reused", "completed"],
        "recorded late": ["reused", "reused", "completed"],
        "failed": ["completed", "completed", "failed"],
        "failed and resumed": ["reused", "waiting", "waiting"],
        "under way": ["completed", "completed", "waiting"],
    }
    _, record, replay = runs[run]
    assert [record.stages[step].status for step in (FIRST, MADE, LAST)] == expected[run]
    said = [each for each in statuses(runs, run, {}) if "its process was killed as it ended" not in each[1]]
    assert said == [], "a run that is under way has no end yet"
    openings = {"resumed once": 2, "resumed twice": 3, "recorded late": 2, "failed and resumed": 2}
    assert replay.entry.openings == openings.get(run, 1)


FOUND = {"status": "reused", "seconds": 0.0}
MADE_IT = {"status": "completed", "seconds": 2.5}
WAS_MADE = "was made, run.json that it was found in the store"
WAS_FOUND = "was found in the store, run.json that it was made"
CHANGES: dict[str, tuple[str, dict[str, dict[str, Any]], str, str]] = {
    "made is found": ("once", {MADE: FOUND}, "wrong", f"that {MADE} {WAS_MADE}"),
    "made is found, resumed once": ("resumed once", {LAST: FOUND}, "wrong", f"that {LAST} {WAS_MADE}"),
    "made is found, resumed twice": ("resumed twice", {LAST: FOUND}, "wrong", f"that {LAST} {WAS_MADE}"),
    "made is found, failed": ("failed", {MADE: FOUND}, "wrong", f"that {MADE} {WAS_MADE}"),
    "made is found, with its time": ("resumed once", {LAST: FOUND | {"seconds": 3.0}}, "wrong", "and that it took 3.0 s"),
    "found is made, resumed once": ("resumed once", {MADE: MADE_IT}, "wrong", f"that {MADE} {WAS_FOUND}"),
    "found is made, resumed twice": ("resumed twice", {FIRST: MADE_IT}, "wrong", f"that {FIRST} {WAS_FOUND}"),
    "failed is completed": ("failed", {LAST: MADE_IT, "run": {"status": "completed"}}, "wrong", f"that {LAST} is failed, run.json that it is completed"),
    "failed is found": ("failed", {LAST: FOUND}, "wrong", f"that {LAST} is failed, run.json that it is reused"),
    "not begun is completed": ("under way", {LAST: MADE_IT}, "wrong", f"that {LAST} is completed, the outbox nothing of it"),
    "not reached again is found": ("failed and resumed", {MADE: FOUND}, "wrong", f"that {MADE} is reused, the outbox nothing of it"),
    "failed is blocked": ("failed", {LAST: {"status": "blocked"}}, "wrong", "run.json has the status failed, and by its stages"),
    "made is failed": ("resumed once", {LAST: {"status": "failed"}, "run": {"status": "failed"}}, "wrong", "the outbox has the status completed, run.json failed"),
    "made is failed beside one that is": ("failed", {MADE: {"status": "failed"}}, "unchecked", f"run.json has {MADE} as failed, the outbox as completed"),
    "found is blocked": ("resumed twice", {MADE: {"status": "blocked"}}, "unchecked", f"run.json has {MADE} as blocked, the outbox as reused"),
    "made is resumable": ("once", {MADE: {"status": "resumable"}}, "unchecked", f"run.json has {MADE} as resumable, the outbox as completed"),
}  # fmt: skip
"""Change → the run, the changed fields, the worst outcome, and what is said."""


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_status_is_found(runs: Runs, change: str) -> None:
    run, fields, outcome, said = CHANGES[change]
    found_so = [detail for each, detail in statuses(runs, run, fields) if each == outcome]
    assert any(said in each for each in found_so), statuses(runs, run, fields)


def test_a_stage_that_was_recorded_late_may_have_either_status(runs: Runs) -> None:
    """A process was killed before the outbox had the stage's end, and the next process has recorded that it was made."""
    assert statuses(runs, "recorded late", {MADE: MADE_IT}) == []
    replay = runs["recorded late"][2]
    finished = replay.finished(MADE)
    assert finished is not None and finished.usage is None
    late = replay.finished(LAST)
    assert late is not None and late.usage is not None


@pytest.mark.slow
def test_a_whole_audit_finds_it(short_case: Case) -> None:
    case = short_case
    run_once(case.workspace, case.original / "fake.yaml", "seed=18", until=LAST)
    run_once(case.workspace, case.original / "fake.yaml", "seed=18")
    resumed = read_runs(case.workspace)[0]
    place = case.workspace.folder(resumed.run_id) / "run.json"
    assert found(case.audit(resumed.run_id)) == []
    edit_json(place, lambda run: run["stages"][LAST].update(FOUND))
    assert any(f"that {LAST} {WAS_MADE}" in each for each in found(case.audit(resumed.run_id)))
