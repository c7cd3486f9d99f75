"""One attempt from its request, with a real store and real child processes; only what is computed is made up."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_work import CHECKPOINT_EVERY
from tests.support.orchestrated import events, pace
from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.jobs import request_for, steps_of
from vantage.attempts.launchers.local_process import LocalProcess
from vantage.attempts.run_attempt import run_attempt
from vantage.runs.resolving import load_resolved
from vantage.runs.workspace import Workspace
from vantage.schemas.recipe.stage import Resources
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.attempt import AttemptBegun, AttemptOutcome, AttemptRequest
from vantage.schemas.steps import dependencies
from vantage.storage.store import Store

ROOT = Path(__file__).parents[2]


class Seen:
    """An observer that remembers."""

    def __init__(self) -> None:
        self.waited: list[str] = []
        self.damage: list[str] = []
        self.attempts: list[AttemptBegun] = []
        self.polls = 0

    def waits(self, holder: str) -> None:
        self.waited.append(holder)

    def damaged(self, problem: str) -> None:
        self.damage.append(problem)

    def begun(self, begun: AttemptBegun) -> None:
        self.attempts.append(begun)

    def polled(self) -> None:
        self.polls += 1


@pytest.fixture
def made(workspace: Workspace, recipe_file: Path) -> dict[str, Artifact]:
    """What ``sft`` reads."""
    artifacts: dict[str, Artifact] = {}
    for step in ("model", "data.demonstrations"):
        outcome = run_attempt(request(workspace, recipe_file, step, artifacts))
        assert outcome.artifact is not None
        artifacts[step] = outcome.artifact
    return artifacts


def request(
    workspace: Workspace, recipe_file: Path, step: str, artifacts: dict[str, Artifact], **options: Any
) -> AttemptRequest:
    recipe, _ = load_resolved(str(recipe_file), [])
    reads = dependencies(recipe)[step]
    return request_for(
        steps_of(recipe)[step],
        {role: artifacts[read] for role, read in reads.items()},
        run_id=options.pop("run_id", "r"),
        storage=str(workspace.store),
        log=workspace.root / f"{step}.log",
        function="tests.support.fake_work.run_stage",
        **options,
    )


def as_program(asked: AttemptRequest, folder: Path, *, then: str = "") -> subprocess.Popen[str]:
    """Make the attempt in a process of its own, from a file to a file."""
    (folder / "request.json").write_text(asked.model_dump_json())
    program = "import json, runpy, sys\nsys.argv[0] = 'vantage.attempts'\n"
    program += "try:\n    runpy.run_module('vantage.attempts', run_name='__main__')\n"
    program += "except SystemExit as end:\n    code = end.code\n"
    program += "servers = sorted({'prefect', 'mlflow', 'torch'} & {name.partition('.')[0] for name in sys.modules})\n"
    program += "print(json.dumps(servers))\nsys.exit(code)"
    return subprocess.Popen(
        [sys.executable, "-c", program, str(folder / "request.json"), str(folder / "outcome.json")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


def outcome_in(folder: Path) -> AttemptOutcome:
    return AttemptOutcome.model_validate_json((folder / "outcome.json").read_bytes())


def test_in_a_process_that_knows_neither_prefect_nor_mlflow_it_makes_the_same_artifact(
    workspace: Workspace, recipe_file: Path, made: dict[str, Artifact], tmp_path: Path
) -> None:
    other = Workspace(tmp_path / "other")
    here = run_attempt(request(workspace, recipe_file, "sft", made))
    elsewhere: dict[str, Artifact] = {}
    for step in ("model", "data.demonstrations", "sft"):
        process = as_program(request(other, recipe_file, step, elsewhere), tmp_path)
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == ExitCode.OK
        assert json.loads(printed.splitlines()[-1]) == []
        artifact = outcome_in(tmp_path).artifact
        assert artifact is not None
        elsewhere[step] = artifact
    assert here.artifact == elsewhere["sft"]
    assert (here.status, here.attempt, here.made_by, here.unreported) == ("made", 1, "r", False)
    assert Store(other.store).lookup(elsewhere["sft"].stage_key).ref is not None


def test_an_artifact_that_is_there_is_reused_and_one_that_is_damaged_made_again(
    workspace: Workspace, recipe_file: Path, made: dict[str, Artifact]
) -> None:
    asked = request(workspace, recipe_file, "sft", made, run_id="first")
    first = run_attempt(asked)
    again = run_attempt(request(workspace, recipe_file, "sft", made, run_id="second"))
    assert (again.status, again.artifact, again.made_by) == ("reused", first.artifact, "first")
    assert not again.unreported
    assert run_attempt(asked).unreported, "nobody has told the ledger of the first run's"

    assert first.artifact is not None
    (workspace.store / first.artifact.uri / "weights.txt").write_text("flipped")
    only = request(workspace, recipe_file, "sft", made, only_reuse=True)
    seen = Seen()
    assert run_attempt(only, observer=seen).status == "absent"
    assert "weights.txt" in seen.damage[0]
    third = run_attempt(asked)
    assert (third.status, third.attempt) == ("made", 2)
    assert third.artifact == first.artifact


def test_a_request_to_stop_before_it_begins_computes_nothing(
    workspace: Workspace, recipe_file: Path, made: dict[str, Artifact]
) -> None:
    stop = threading.Event()
    stop.set()
    before = events(workspace)
    assert run_attempt(request(workspace, recipe_file, "sft", made), stop=stop).status == "stopped"
    assert events(workspace) == before


def test_of_two_at_once_one_computes_and_the_other_waits_says_for_whom_and_adopts(
    workspace: Workspace, recipe_file: Path, made: dict[str, Artifact], tmp_path: Path
) -> None:
    pace(workspace, 0.2)
    process = as_program(request(workspace, recipe_file, "sft", made, run_id="elsewhere"), tmp_path)
    deadline = time.monotonic() + 60
    while "sft started" not in "".join(events(workspace)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    seen = Seen()
    here = run_attempt(request(workspace, recipe_file, "sft", made, run_id="here"), observer=seen)
    process.communicate(timeout=60)
    assert (outcome_in(tmp_path).status, here.status) == ("made", "reused")
    assert (here.artifact, here.made_by) == (outcome_in(tmp_path).artifact, "elsewhere")
    assert seen.waited[0].startswith("run elsewhere (process ")
    assert (seen.attempts, seen.polls) == ([], 0)


def test_asked_to_stop_by_a_signal_it_saves_and_another_goes_on(
    workspace: Workspace, recipe_file: Path, made: dict[str, Artifact], tmp_path: Path
) -> None:
    asked = request(workspace, recipe_file, "sft", made)
    whole = Workspace(tmp_path / "whole")
    parts = {step: run_attempt(request(whole, recipe_file, step, {})).artifact for step in made}
    expected = run_attempt(request(whole, recipe_file, "sft", parts)).artifact  # type: ignore[arg-type]

    pace(workspace, 0.3)
    process = as_program(asked, tmp_path)
    progress = workspace.store / "scratch" / asked.stage_key / "progress.json"
    deadline = time.monotonic() + 60
    while not progress.exists() or json.loads(progress.read_bytes())["step"] < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == ExitCode.RESUME
    stopped = outcome_in(tmp_path)
    assert stopped.failure is not None
    assert (stopped.status, stopped.failure.cause, stopped.attempt) == ("failed", "preempted", 1)
    assert stopped.committed_step >= 2

    pace(workspace, 0.0)
    seen = Seen()
    made_with = {**stopped.provenance, "torch": "1.0"}
    resumed = run_attempt(asked.model_copy(update={"made_with": made_with}), observer=seen)
    assert (resumed.status, resumed.attempt, resumed.artifact) == ("made", 2, expected)
    assert seen.attempts[0].provenance["resumed_across"].startswith("torch: 1.0 → ")


def test_a_failure_says_why_and_from_where_another_attempt_goes_on(
    workspace: Workspace, recipe_file: Path, made: dict[str, Artifact]
) -> None:
    (workspace.root / "memory.txt").write_text("sft 32")
    failed = run_attempt(request(workspace, recipe_file, "sft", made))
    assert failed.failure is not None
    assert (failed.status, failed.failure.cause, failed.failure.exit_code) == (
        "failed",
        "memory",
        ExitCode.OUT_OF_MEMORY,
    )
    assert failed.committed_step == CHECKPOINT_EVERY
    assert AttemptOutcome.model_validate_json(failed.model_dump_json()) == failed
    smaller = run_attempt(request(workspace, recipe_file, "sft", made, microbatch_tokens=320))
    assert smaller.status == "made"
    assert smaller.provenance["microbatch_tokens"] == "320 in place of any number: memory ran out"


def test_an_error_of_the_storage_is_an_outcome_too(
    workspace: Workspace, recipe_file: Path, made: dict[str, Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Store, "commit", full)
    asked = request(workspace, recipe_file, "sft", made)
    outcome = run_attempt(asked)
    assert outcome.failure is not None
    assert (outcome.status, outcome.failure.exit_code) == ("failed", ExitCode.STORAGE)
    assert "No space left" in asked.log.read_text()


@pytest.mark.parametrize(("asked_for", "expected"), [({}, 20.0), ({"grace_seconds": 0.25}, 0.25)])
def test_a_stage_has_the_grace_period_of_its_recipe(
    workspace: Workspace,
    recipe_file: Path,
    made: dict[str, Artifact],
    asked_for: dict[str, float],
    expected: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graces: list[float] = []

    def launch(self: LocalProcess, *_: object, **__: object) -> None:
        graces.append(self.grace)
        raise KeyboardInterrupt

    monkeypatch.setattr(LocalProcess, "launch", launch)
    asked = request(workspace, recipe_file, "sft", made)
    asked = asked.model_copy(update={"resources": Resources(**asked_for)})
    with pytest.raises(KeyboardInterrupt):
        run_attempt(asked)
    assert graces == [expected]
