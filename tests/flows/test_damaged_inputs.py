"""When an artifact is damaged while the run is under way, its bytes are compared before anything parses them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.orchestrated import InProcess, attempt_all, attempt_rest, orchestrated
from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.launchers.launcher import StageFailed
from vantage.attempts.run_attempt import Observer, run_attempt
from vantage.flows.orchestrator import Orchestrator
from vantage.runs.record import StageRecord
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.records.attempt import AttemptOutcome, AttemptRequest, Failure
from vantage.schemas.records.job import StageJob, StageResult
from vantage.storage.sealed_folders import find_problems
from vantage.storage.storage import Storage

pytestmark = pytest.mark.usefixtures("unsent")

DAMAGE = {
    "a byte differs": lambda file: file.write_bytes(
        bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:]
    ),
    "a file is gone": lambda file: file.unlink(),
    "a file is cut": lambda file: file.write_bytes(file.read_bytes()[:-1]),
}


def first_file(orchestrator: Orchestrator, step: str) -> Path:
    folder = orchestrator.store.folder(orchestrator.artifacts[step])
    return next(path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "manifest.json")


def hurt_before(
    orchestrator: Orchestrator, step: str, hurt: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have something happen right before the step's first attempt."""
    attempt, happened = orchestrator.attempt, []

    def watched(request: AttemptRequest) -> StageRecord:
        if request.step == step and not happened:
            happened.append(hurt())
        return attempt(request)

    monkeypatch.setattr(orchestrator, "attempt", watched)


def here(request: AttemptRequest, *, storage: Storage, observer: Observer, **_: Any) -> AttemptOutcome:
    """Stand in for a worker that reaches the workspace's folder: make the attempt as it does, from intact inputs."""
    for artifact in request.inputs.values():
        assert find_problems(storage.folder(artifact), digest=artifact.digest) == []
    return run_attempt(request, storage=storage, observer=observer, launcher=InProcess())


@pytest.mark.parametrize("pool", [None, "gpu"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_it_is_set_aside_and_made_again_with_the_same_bits(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch, damage: str, pool: str | None
) -> None:
    monkeypatch.setattr("vantage.flows.pools.run_on_pool.run_on_pool", here)
    on_pool = () if pool is None else (f"stages.reward.resources.pool={pool}",)
    with orchestrated(workspace, recipe_file, *on_pool, in_process=True) as orchestrator:
        assert orchestrator.steps["reward"].pool == pool
        hurt_before(
            orchestrator, "reward", lambda: DAMAGE[damage](first_file(orchestrator, "sft")), monkeypatch
        )
        attempt_all(orchestrator, until="reward")
        before = orchestrator.artifacts["sft"].digest
        attempt_rest(orchestrator, "reward")
        orchestrator.run.update(status=orchestrator.run.outcome())
        watcher = orchestrator.watcher
    lines = getattr(watcher, "lines", None) or getattr(watcher, "_watcher").lines  # noqa: B009
    [record] = read_runs(workspace)
    assert record.status == "completed"
    assert record.stages["sft"].digest == before
    assert len([line for line in lines if "its input sft is damaged and made again" in line]) == 1
    assert record.stages["sft"].attempt == 2
    assert workspace.storage.lookup(record.stages["sft"].stage_key or "").damage == ()
    assert len(list((workspace.store / "quarantine").iterdir())) >= 1


def test_what_is_damaged_while_it_is_read_is_found_when_the_stage_has_failed(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage that cannot parse its damaged input fails with some other error. The next try reads intact files."""
    workspace.root.mkdir()
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        launch = InProcess.launch

        def launched(self: InProcess, job: StageJob, **of: Any) -> StageResult:
            if job.name == "reward" and job.attempt == 1:
                DAMAGE["a byte differs"](first_file(orchestrator, "sft"))
                explained = Failure(exit_code=65, cause="refused", message="no JSON", remedy="mend the data")
                raise StageFailed(explained, log=of["log"])
            return launch(self, job, **of)

        monkeypatch.setattr(InProcess, "launch", launched)
        attempt_all(orchestrator)
        orchestrator.run.update(status=orchestrator.run.outcome())
    [record] = read_runs(workspace)
    assert record.status == "completed"
    assert (record.stages["sft"].attempt, record.stages["reward"].attempt) == (2, 2)


def test_one_that_cannot_be_made_again_leaves_the_run_to_be_resumed(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.root.mkdir()
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:

        def hurt() -> None:
            DAMAGE["a file is gone"](first_file(orchestrator, "sft"))
            (workspace.root / "refuse.txt").write_text("sft")

        hurt_before(orchestrator, "reward", hurt, monkeypatch)
        attempt_all(orchestrator, until="reward")
        attempt_rest(orchestrator, "reward")
    reward = read_runs(workspace)[0].stages["reward"]
    assert (reward.status, reward.exit_code) == ("resumable", ExitCode.RESUME)
    assert "its input sft is damaged and could not be made again" in str(reward.reason)
