"""One attempt runs from its request, with a real store and real child processes; only what is computed is made up."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_work import CHECKPOINT_EVERY
from tests.support.orchestrated import events, pace
from tests.support.real_runs import wait_for
from vantage.attempts import run_attempt as attempts
from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.jobs import request_for, steps_of
from vantage.attempts.launchers.launcher import StageFailed
from vantage.attempts.launchers.local_process import LocalProcess, attempt_folder
from vantage.attempts.run_attempt import run_attempt
from vantage.attempts.segments import read_segments
from vantage.runs.resolving import load_resolved
from vantage.runs.workspace import Workspace
from vantage.schemas.recipe.guards import Guard
from vantage.schemas.recipe.inputs import Model
from vantage.schemas.recipe.pass_limits import FoundLimits
from vantage.schemas.recipe.stage import Resources
from vantage.schemas.recipe.work import ImportModel
from vantage.schemas.records.artifacts import Artifact, PolicyCheckpoint
from vantage.schemas.records.attempt import AttemptBegun, AttemptOutcome, AttemptRequest, Failure, Share
from vantage.schemas.records.firings import Firing, Watched
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.steps import dependencies
from vantage.storage.store import Store
from vantage.tasks.training.scratch import RESUMED_FROM, read_found, write_committed, write_found
from vantage.tasks.training.watched import write_watched

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
    """Return what ``sft`` reads."""
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
    program = "import json, runpy, sys, tests.support.bare_preload\nsys.argv[0] = 'vantage.attempts'\n"
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


@pytest.mark.slow
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


@pytest.mark.slow
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


class Launched:
    """A launcher without a process: it remembers what it is given, acts, and leaves what a process would leave."""

    def __init__(self, act: Callable[[StageJob], object] = lambda job: None, **result: Any) -> None:
        self.act = act
        self.result = StageResult(**{"metrics": {}, "tokenizer_digest": "d" * 64, **result})
        self.jobs: list[StageJob] = []
        self.options: dict[str, Any] = {}

    def launch(self, job: StageJob, **options: Any) -> StageResult:
        self.jobs.append(job)
        self.options = options
        self.act(job)
        (job.output / "weights.txt").write_text("w")
        attempt_folder(job).mkdir(exist_ok=True)
        (attempt_folder(job) / "result.json").write_text(self.result.model_dump_json())
        return self.result


def asked_for(
    workspace: Workspace, recipe_file: Path, step: str, *overrides: str, **changes: Any
) -> AttemptRequest:
    """Return a request for a step whose inputs nobody looks at."""
    recipe, _ = load_resolved(str(recipe_file), list(overrides))
    policy = PolicyCheckpoint(
        uri="objects/a", digest="a" * 64, stage_key="0" * 64, parents={}, tokenizer_digest="a" * 64
    )
    asked = request_for(
        steps_of(recipe)[step],
        dict.fromkeys(dependencies(recipe)[step], policy),
        run_id="r",
        storage=str(workspace.store),
        log=workspace.root / f"{step}.log",
    )
    return asked.model_copy(update=changes)


FIRINGS = (Firing(guard=Guard(metric="loss", above=2.0), step=3, values=(2.5, 2.6, 2.7)),)


def test_a_computation_gets_what_its_request_has(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    rows = b'{"prompt": "1+1?", "response": "2"}\n'
    recipe_file.with_name("rows.jsonl").write_bytes(rows)
    asked = asked_for(
        workspace,
        recipe_file,
        "data.demonstrations",
        f"data.demonstrations.source={recipe_file.with_name('rows.jsonl')}",
        share=Share(cpus=3, gpus=("1",)),
        resources=Resources(hang_seconds=7.0),
        date=date(2031, 2, 1),
        max_dropped={"data": 0.25},
        function="tests.support.fake_work.run_stage",
    )
    kept: list[tuple[str, ...]] = []
    monkeypatch.setattr(Store, "keep_copy", lambda self, key, names: kept.append(names) or nullcontext())
    stop, launcher = threading.Event(), Launched()
    outcome = run_attempt(asked, storage=workspace.storage, launcher=launcher, stop=stop)
    assert outcome.status == "made"
    assert launcher.options.pop("on_poll") is not None
    assert launcher.options == {
        "log": asked.log,
        "share": asked.share,
        "stop": stop,
        "function": asked.function,
        "hang_seconds": 7.0,
    }
    [job] = launcher.jobs
    assert (job.date, job.max_dropped, job.source_sha256) == (
        asked.date,
        asked.max_dropped,
        hashlib.sha256(rows).hexdigest(),
    )
    assert (job.threads, job.seed, job.generation) == (3, asked.seed, asked.generation)
    [names] = kept
    assert {*names} >= {"segments.json", "progress.json", "checkpoints", "journal.jsonl"}
    assert names[: len(RESUMED_FROM)] == RESUMED_FROM, "in their order"


def test_what_a_stage_left_is_in_the_outcome_of_who_reuses_it_until_it_is_reported(
    workspace: Workspace, recipe_file: Path
) -> None:
    """Firings are in the artifact. Samples are in the stage's scratch folder, which is removed once the ledger has
    them.
    """
    samples = ({"prompt": "1+1?"},)
    asked = asked_for(workspace, recipe_file, "sft")
    launcher = Launched(firings=FIRINGS, samples=samples)
    made = run_attempt(asked, storage=workspace.storage, launcher=launcher)
    reused = run_attempt(asked, storage=workspace.storage, launcher=launcher)
    assert (made.status, reused.status, len(launcher.jobs)) == ("made", "reused", 1)
    assert made.firings == reused.firings == FIRINGS
    assert made.samples == reused.samples == samples
    assert reused.unreported
    another = asked.model_copy(update={"run_id": "0002-another"})
    taken = run_attempt(another, storage=workspace.storage, launcher=launcher)
    assert (taken.status, taken.unreported) == ("reused", False), "the run that made it reports it"
    workspace.storage.discard_scratch(asked.stage_key)
    later = run_attempt(asked, storage=workspace.storage, launcher=launcher)
    assert (later.status, later.firings, later.samples, later.unreported) == ("reused", FIRINGS, (), False)


def test_why_rows_were_dropped_is_in_the_outcome_of_who_reuses_the_dataset(
    workspace: Workspace, recipe_file: Path
) -> None:
    def report(job: StageJob) -> None:
        (job.output / "report.json").write_text(json.dumps({"dropped": {"empty": 3}}))

    asked = asked_for(workspace, recipe_file, "data.demonstrations")
    for status in ("made", "reused"):
        outcome = run_attempt(asked, storage=workspace.storage, launcher=Launched(report))
        assert (outcome.status, outcome.dropped) == (status, {"empty": 3})


def test_a_failed_stage_has_its_firings_and_what_the_machine_did_meanwhile(
    workspace: Workspace, recipe_file: Path
) -> None:
    def fail(job: StageJob) -> None:
        write_committed(job.scratch, step=4, journal_offset=0)
        write_watched(job.scratch, Watched(firings=FIRINGS))
        failure = Failure(exit_code=78, cause="guard", message="loss is above 2", remedy="look at it")
        raise StageFailed(failure, log=workspace.root / "log")

    asked = asked_for(workspace, recipe_file, "sft")
    outcome = run_attempt(asked, storage=workspace.storage, launcher=Launched(fail))
    assert (outcome.status, outcome.committed_step, outcome.firings) == ("failed", 4, FIRINGS)
    assert outcome.usage is not None and outcome.facts


def test_of_a_stage_of_several_nodes_this_machine_is_not_measured(
    workspace: Workspace, recipe_file: Path
) -> None:
    asked = asked_for(workspace, recipe_file, "sft", "stages.sft.resources.nodes=2")
    outcome = run_attempt(asked, storage=workspace.storage, launcher=Launched())
    assert (outcome.status, outcome.energy, outcome.usage, outcome.facts) == ("made", None, None, {})


def test_the_ranks_of_an_attempt_are_recorded_and_a_change_is_named_from_the_first_checkpoint_on(
    workspace: Workspace, recipe_file: Path
) -> None:
    asked = asked_for(workspace, recipe_file, "sft", "stages.sft.resources.distributed.ranks=3")
    asked = asked.model_copy(update={"made_with": {"world_size": "2"}})
    ranks: list[int] = []

    def look(job: StageJob) -> None:
        ranks.extend(each.ranks for each in read_segments(job.scratch))
        raise OSError("look no further")

    first = run_attempt(asked, storage=workspace.storage, launcher=Launched(look))
    assert (ranks, first.provenance["world_size"]) == ([3], "3")
    assert "resumed_across" not in first.provenance, "nothing is gone on from"
    write_committed(workspace.storage.scratch_folder(asked.stage_key), step=4, journal_offset=0)
    second = run_attempt(asked, storage=workspace.storage, launcher=Launched())
    assert "world_size: 2 → 3" in second.provenance["resumed_across"]
    assert second.provenance["not_bitwise"] == "begun on 2 processes, continued on 3"


@pytest.mark.parametrize(("named", "expected"), [([], 512), (["stages.sft.microbatch_tokens=4096"], None)])
def test_a_limit_in_the_recipe_replaces_one_that_an_attempt_found(
    workspace: Workspace, recipe_file: Path, named: list[str], expected: int | None
) -> None:
    asked = asked_for(workspace, recipe_file, "sft", *named)
    write_found(workspace.storage.scratch_folder(asked.stage_key), FoundLimits(tokens=512), device="cpu")
    seen: list[int | None] = []

    def look(job: StageJob) -> None:
        found = read_found(job.scratch)
        seen.append(None if found is None else found.tokens)

    assert run_attempt(asked, storage=workspace.storage, launcher=Launched(look)).status == "made"
    assert seen == [expected]


def test_a_copied_model_names_the_artifact_that_it_copies(workspace: Workspace, recipe_file: Path) -> None:
    work = ImportModel(model=Model(source=f"run:r1/sft#{'c' * 64}"))
    asked = asked_for(workspace, recipe_file, "model", work=work)
    outcome = run_attempt(asked, storage=workspace.storage, launcher=Launched())
    assert outcome.artifact is not None
    assert outcome.artifact.parents == {"source": "c" * 64}


def test_a_traceback_in_the_log_shows_no_secret(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REGISTRY_PASSWORD", "hunter22-canary")

    def leak(job: StageJob) -> None:
        raise RuntimeError("cannot log in with hunter22-canary")

    asked = asked_for(workspace, recipe_file, "sft")
    outcome = run_attempt(asked, storage=workspace.storage, launcher=Launched(leak))
    assert outcome.failure is not None
    shown = asked.log.read_text() + outcome.failure.message
    assert "RuntimeError: cannot log in with" in shown
    assert "hunter22-canary" not in shown


def test_who_waits_for_a_key_says_so_once_and_can_be_stopped(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "_PATIENCE_SECONDS", 0.05)
    asked = asked_for(workspace, recipe_file, "sft")
    seen, stop, outcomes = Seen(), threading.Event(), []

    def wait() -> None:
        outcomes.append(run_attempt(asked, observer=seen, stop=stop, launcher=Launched()))

    waiting = threading.Thread(target=wait)
    with workspace.storage.exclusive(asked.stage_key, holder="run other"):
        waiting.start()
        wait_for(lambda: bool(seen.waited))
        time.sleep(0.5)  # long enough for a second report of the wait
        stop.set()
        waiting.join(20.0)
        is_waiting = waiting.is_alive()
    waiting.join()
    assert not is_waiting
    assert [outcome.status for outcome in outcomes] == ["stopped"]
    [holder] = seen.waited
    assert holder.startswith("run other (process ")
