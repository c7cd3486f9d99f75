"""The orchestrator works with a real store and a real outbox; only what the stages compute is made up.

Stages run in child processes only where a test needs these: a first full run, stages that hang or are stopped, and runs
beside one another.
"""

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_work import CHECKPOINT_EVERY, STEPS
from tests.support.orchestrated import attempt, attempt_all, events, orchestrated, pace
from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.launchers.local_process import LocalProcess
from vantage.flows.orchestrator import Orchestrator
from vantage.flows.recording import Recording
from vantage.ledger.run_ledger import Ledger
from vantage.runs.planning import plan
from vantage.runs.run import read_run
from vantage.runs.workspace import Workspace
from vantage.storage.store import Store

pytestmark = pytest.mark.usefixtures("unsent")


class Killed(BaseException):
    """Stands for kill -9: none of our code may catch it, and nothing happens after it."""


def told(workspace: Workspace, run_id: str, operation: str) -> list[dict[str, Any]]:
    """Return the operations of one kind in the ledger's outbox."""
    path = workspace.folder(run_id) / "ledger" / "outbox.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["operation"] == operation]


def kill_at(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, *, after: bool = False) -> None:
    """Kill the process at the first call of a method, or ``after`` the method has done its work."""
    original: Callable[..., Any] = getattr(owner, name)

    def deadly(*arguments: Any, **options: Any) -> Any:
        if after:
            original(*arguments, **options)
        monkeypatch.undo()
        raise Killed

    monkeypatch.setattr(owner, name, deadly)


def test_stages_are_made_once_and_reused_ever_after(workspace: Workspace, recipe_file: Path) -> None:
    with orchestrated(workspace, recipe_file) as orchestrator:
        first = attempt_all(orchestrator)
        orchestrator.run.update(status=orchestrator.run.outcome())
    assert {stage.status for stage in first.values()} == {"completed"}
    assert Counter(line.split()[1] for line in events(workspace)) == {"started": 9, "finished": 9}

    with orchestrated(workspace, recipe_file) as orchestrator:
        assert orchestrator.run.record.number == 2
        second = attempt_all(orchestrator)
    assert {stage.status for stage in second.values()} == {"reused"}
    assert len(events(workspace)) == 18
    assert {name: stage.digest for name, stage in second.items()} == {
        name: stage.digest for name, stage in first.items()
    }
    assert len(told(workspace, orchestrator.run.record.run_id, "record_reuse")) == 9
    assert second["evaluation"].samples == ({"prompt": "1+1?", "baseline": "3", "candidate": "2"},)


def test_a_switch_of_the_policy_changes_the_policy_and_what_reads_it(
    workspace: Workspace, recipe_file: Path
) -> None:
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        attempt_all(orchestrator)
    with orchestrated(
        workspace, recipe_file, "stages.policy.algorithm.clip_range_high=0.2", in_process=True
    ) as orchestrator:
        stages = attempt_all(orchestrator)
    assert {name for name, stage in stages.items() if stage.status == "completed"} == {"policy", "evaluation"}
    assert {name for name, stage in stages.items() if stage.status == "reused"} == set(stages) - {
        "policy",
        "evaluation",
    }


def test_the_next_run_closes_what_a_dead_one_left_running(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_at(monkeypatch, Store, "commit")
    with pytest.raises(Killed), orchestrated(workspace, recipe_file, in_process=True) as dead:
        attempt_all(dead)
    assert read_run(workspace, dead.run.record.run_id).stages["model"].status == "running"

    with orchestrated(workspace, recipe_file, "seed=5", in_process=True) as orchestrator:
        record = read_run(workspace, dead.run.record.run_id)
        [closed] = told(workspace, orchestrator.run.record.run_id, "close_run")
    assert (record.status, record.stages["model"].status) == ("resumable", "resumable")
    assert record.stages["model"].reason == "the run's process died"
    assert record.stages["sft"].status == "waiting"
    assert (closed["run_id"], closed["reason"]) == (dead.run.record.run_id, "the run's process died")

    with orchestrated(workspace, recipe_file, in_process=True) as again:
        assert again.run.record.run_id == dead.run.record.run_id, "the same command goes on with it"
        assert {stage.status for stage in attempt_all(again).values()} <= {"completed", "reused"}


def test_a_closed_gate_keeps_what_depends_on_it_from_starting(
    workspace: Workspace, recipe_file: Path
) -> None:
    with orchestrated(
        workspace, recipe_file, "stages.value.gate.at_least=0.9", in_process=True
    ) as orchestrator:
        stages = attempt_all(orchestrator)
    assert stages["value"].status == "gate_closed"
    assert str(stages["value"].verdicts[0]) == "explained_variance 0.400 >= 0.9: CLOSED"
    assert stages["value"].digest is not None, "what the stage made is kept"
    assert (stages["policy"].status, stages["policy"].reason) == (
        "blocked",
        "reads value, which is gate closed",
    )
    assert (stages["evaluation"].status, stages["evaluation"].reason) == (
        "blocked",
        "reads policy, which is blocked",
    )
    assert not any(line.startswith(("policy", "evaluation")) for line in events(workspace))
    assert orchestrator.run.outcome() == "gate_closed"


def test_a_policy_that_learned_nothing_is_said_to_and_passes_no_gate_on_a_difference(
    workspace: Workspace, recipe_file: Path
) -> None:
    """The evaluation's gate asks for accuracy_gain >= 0. A gain of 0.1 of a model over itself does not open it."""
    workspace.root.mkdir(parents=True, exist_ok=True)
    (workspace.root / "idle.txt").write_text("policy")
    nothing = "learned nothing: the best weights are those of sft"
    itself = "policy holds the weights of sft: a model is compared with itself"
    for status in ("completed", "reused"):
        with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
            stages = attempt_all(orchestrator)
            orchestrator.run.update(status=orchestrator.run.outcome())
        assert (stages["policy"].status, stages["policy"].remark) == (status, nothing)
        assert (stages["evaluation"].status, stages["evaluation"].remark) == ("gate_closed", itself)
        [verdict] = stages["evaluation"].verdicts
        assert (verdict.passed, verdict.reason) == (False, itself)
        assert stages["sft"].remark is stages["value"].remark is None
    steps = {step.name: step for step in plan(orchestrator.recipe, orchestrator.store, [])}
    assert nothing in steps["policy"].reasons
    assert any("CLOSED" in reason and itself in reason for reason in steps["evaluation"].reasons)


def test_the_verdict_is_recorded_before_the_stage_ends(workspace: Workspace, recipe_file: Path) -> None:
    with orchestrated(
        workspace, recipe_file, "stages.value.gate.at_least=0.9", in_process=True
    ) as orchestrator:
        attempt_all(orchestrator)
        run_id = orchestrator.run.record.run_id
    path = workspace.folder(run_id) / "ledger" / "outbox.jsonl"
    operations = [json.loads(line) for line in path.read_text().splitlines()]
    of_value = [line for line in operations if line.get("stage") == "value"]
    # On a busy machine metrics are recorded while the stage runs, too.
    edges = [line["operation"] for line in of_value if line["operation"] != "log_metrics"]
    assert edges == ["open_stage", "record_verdicts", "finish_stage"]
    assert (of_value[0]["operation"], of_value[-1]["operation"]) == ("open_stage", "finish_stage")
    steps = [row[3] for line in of_value if line["operation"] == "log_metrics" for row in line["rows"]]
    assert steps == list(range(1, STEPS + 1))
    assert told(workspace, run_id, "record_verdicts")[-1]["verdicts"][0]["evidence"] == {
        "explained_variance": 0.4
    }
    assert told(workspace, run_id, "finish_stage")[-1]["outcome"] == "gate_closed"


def test_a_moved_threshold_judges_again_and_makes_nothing_again(
    workspace: Workspace, recipe_file: Path
) -> None:
    with orchestrated(
        workspace, recipe_file, "stages.value.gate.at_least=0.9", in_process=True
    ) as orchestrator:
        attempt_all(orchestrator)
    with orchestrated(
        workspace, recipe_file, "stages.value.gate.at_least=0.35", in_process=True
    ) as orchestrator:
        stages = attempt_all(orchestrator)
    assert stages["value"].status == "reused"
    assert stages["value"].verdicts[0].passed
    assert stages["policy"].status == "completed"
    with orchestrated(
        workspace, recipe_file, "stages.value.gate.at_least=0.9", in_process=True
    ) as orchestrator:
        stages = attempt_all(orchestrator)
    assert stages["value"].status == "gate_closed"
    assert stages["policy"].status == "blocked"
    assert sum(line.startswith("value started") for line in events(workspace)) == 1


def test_a_gate_that_continues_only_records(workspace: Workspace, recipe_file: Path) -> None:
    with orchestrated(
        workspace,
        recipe_file,
        "stages.value.gate.at_least=0.9",
        "stages.value.gate.on_fail=continue",
        in_process=True,
    ) as orchestrator:
        stages = attempt_all(orchestrator)
    assert stages["value"].status == "completed"
    assert not stages["value"].verdicts[0].passed
    assert stages["evaluation"].status == "completed"


@pytest.mark.parametrize(
    "owner, method, after",
    [
        (Store, "commit", True),  # after the commit, before the run's own record is written
        (Recording, "_report", False),  # after the commit, before anything is recorded in the ledger
        (Ledger, "finish_stage", False),  # before the ledger records it
        (Ledger, "finish_stage", True),  # the ledger has recorded it, scratch is still there
    ],
)
def test_killed_after_the_commit_the_artifact_is_adopted_and_told_once(
    workspace: Workspace,
    recipe_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    after: bool,
) -> None:
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        attempt_all(orchestrator, until="sft")
        with monkeypatch.context() as patch:
            kill_at(patch, owner, method, after=after)
            with pytest.raises(Killed):
                attempt(orchestrator, "sft")
        interrupted = orchestrator.run.record.run_id
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        assert orchestrator.run.record.run_id == interrupted
        stages = attempt_all(orchestrator, until="reward")
        key = stages["sft"].stage_key
        assert not (workspace.store / "scratch" / str(key)).exists()
    assert stages["sft"].status == "reused"
    assert sum(line.startswith("sft started") for line in events(workspace)) == 1
    rows = [row for line in told(workspace, interrupted, "log_metrics") for row in line["rows"]]
    assert [row[3] for row in rows if row[0] == "loss"] == list(range(1, STEPS + 1))
    artifacts = {
        line["artifact"]["digest"]
        for line in told(workspace, interrupted, "finish_stage")
        if line["stage"] == "sft"
    }
    assert artifacts == {stages["sft"].digest}


def test_killed_between_commit_and_record_an_evaluation_keeps_what_it_would_have_shown(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        attempt_all(orchestrator, until="evaluation")
        with monkeypatch.context() as patch:
            kill_at(patch, Store, "commit", after=True)
            with pytest.raises(Killed):
                attempt(orchestrator, "evaluation")
    shown = ({"prompt": "1+1?", "baseline": "3", "candidate": "2"},)
    for _ in range(2):  # by the run that goes on, then by another that only reads what the first has kept
        with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
            evaluation = attempt_all(orchestrator)["evaluation"]
            orchestrator.run.update(status=orchestrator.run.outcome())
        assert (evaluation.status, evaluation.samples) == ("reused", shown)
    assert sum(line.startswith("evaluation started") for line in events(workspace)) == 1


def allow(workspace: Workspace, file: str, text: str) -> None:
    """Write what the fake stages read: how much memory there is, or who hangs."""
    workspace.root.mkdir(exist_ok=True)
    (workspace.root / file).write_text(text)


def test_out_of_memory_a_stage_goes_on_once_with_half_the_micro_batch(
    workspace: Workspace, recipe_file: Path
) -> None:
    with orchestrated(workspace, recipe_file) as whole:
        expected = attempt_all(whole, until="reward")["sft"].digest

    other = Workspace(workspace.root.with_name("other"))
    allow(other, "memory.txt", "sft 32")
    with orchestrated(other, recipe_file) as orchestrator:
        orchestrator.retries = True  # as the flow does, in whose place this test attempts the stage again
        attempt_all(orchestrator, until="sft")
        first = attempt(orchestrator, "sft")
        assert (first.status, first.exit_code) == ("resumable", ExitCode.OUT_OF_MEMORY)
        assert first.reason == (
            "CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 is full.; attempt 2 goes on from step "
            f"{CHECKPOINT_EVERY} with passes of at most 320 positions in place of 640 ({orchestrator.log_of('sft')})"
        )
        second = attempt(orchestrator, "sft")
    assert (second.status, second.attempt, second.digest) == ("completed", 2, expected)
    told_first, told_second = (
        line for line in told(other, orchestrator.run.record.run_id, "finish_stage") if line["stage"] == "sft"
    )
    assert (told_first["outcome"], told_first["reason"]) == ("resumable", first.reason)
    assert told_second["provenance"]["microbatch_tokens"] == "320 in place of any number: memory ran out"
    assert second.key_parts == whole.run.record.stages["sft"].key_parts, "the key knows nothing of it"


def test_limits_that_a_stage_found_are_told_and_remembered(workspace: Workspace, recipe_file: Path) -> None:
    allow(workspace, "found.txt", "sft 4096")
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        stage = attempt_all(orchestrator, until="reward")["sft"]
        run_id, artifact = orchestrator.run.record.run_id, orchestrator.artifacts["sft"]
        told_words = "found: passes of at most 4,096 positions"
        assert stage.provenance["microbatch_tokens"] == told_words
        assert stage.microbatch_tokens is None, "no attempt is given what the stage found by itself"
        ref = orchestrator.store.lookup(str(stage.stage_key)).ref
    assert ref is not None
    assert (ref.artifact, ref.provenance) == (artifact, stage.provenance)
    finished = [line for line in told(workspace, run_id, "finish_stage") if line["stage"] == "sft"]
    assert finished[-1]["provenance"]["microbatch_tokens"] == told_words


def test_limits_that_were_found_hold_until_the_recipe_gives_some(
    workspace: Workspace, recipe_file: Path
) -> None:
    """The run goes on twice, in two copies of the workspace: as it was, and with a limit in the recipe."""
    allow(workspace, "found.txt", "sft 4096")
    allow(workspace, "hang.txt", "sft 1")
    with orchestrated(workspace, recipe_file, "stages.sft.resources.hang_seconds=8") as orchestrator:
        attempt_all(orchestrator, until="sft")
        assert attempt(orchestrator, "sft").exit_code == ExitCode.HUNG
    (workspace.root / "found.txt").unlink()
    for given in (None, 500):
        copy = Workspace(workspace.root.with_name(f"given-{given}"))
        shutil.copytree(workspace.root, copy.root)
        own = [] if given is None else [f"stages.sft.microbatch_tokens={given}"]
        with orchestrated(copy, recipe_file, *own, in_process=True) as orchestrator:
            stage = attempt_all(orchestrator, until="reward")["sft"]
        assert stage.attempt == 2
        assert ("microbatch_tokens" in stage.provenance) == (given is None)


def test_out_of_memory_again_a_stage_fails_with_what_a_person_can_do(
    workspace: Workspace, recipe_file: Path
) -> None:
    allow(workspace, "memory.txt", "sft 16")
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        attempt_all(orchestrator, until="sft")
        assert attempt(orchestrator, "sft").status == "resumable"
        again = attempt(orchestrator, "sft")
        assert (again.status, again.exit_code) == ("failed", ExitCode.OUT_OF_MEMORY)
        assert "set stages.sft.microbatch_tokens below 320, which changes no result" in str(again.reason)
        assert str(orchestrator.log_of("sft")) in str(again.reason)
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:  # the same command
        assert orchestrator.next_attempt("sft") == 3
        attempt_all(orchestrator, until="sft")
        assert "at most 160 positions in place of 320" in str(attempt(orchestrator, "sft").reason), (
            "the old size is not tried again"
        )
        assert attempt(orchestrator, "sft").status == "completed"


def test_out_of_memory_in_a_pass_of_fewer_rows_than_a_minibatch_these_are_halved(
    workspace: Workspace, recipe_file: Path
) -> None:
    """Half of the 64 rows of a minibatch would change nothing where memory ran out in a pass of 12."""
    allow(workspace, "memory.txt", "sft 6")
    allow(workspace, "rows.txt", "sft 12")
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        attempt_all(orchestrator, until="sft")
        first = attempt(orchestrator, "sft")
        assert "with passes of at most 60 positions in place of 120" in str(first.reason)
        assert attempt(orchestrator, "sft").status == "completed"


def test_a_run_that_an_earlier_version_halved_by_rows_goes_on_with_these(
    workspace: Workspace, recipe_file: Path
) -> None:
    """The run.json of such a run has ``microbatch_size`` in place of ``microbatch_tokens``."""
    allow(workspace, "memory.txt", "sft 32")
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        attempt_all(orchestrator, until="sft")
        assert attempt(orchestrator, "sft").status == "resumable"
        file = orchestrator.run.folder / "run.json"
    record = json.loads(file.read_text())
    assert record["stages"]["sft"].pop("microbatch_tokens") == 320
    record["stages"]["sft"]["microbatch_size"] = 24
    file.write_text(json.dumps(record))
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        stage = attempt_all(orchestrator, until="reward")["sft"]
        run_id = orchestrator.run.record.run_id
    assert (stage.status, stage.attempt, stage.microbatch_size) == ("completed", 2, 24)
    finished = [line for line in told(workspace, run_id, "finish_stage") if line["stage"] == "sft"]
    assert finished[-1]["provenance"]["microbatch_size"] == "24 in place of any number: memory ran out"


def test_out_of_memory_before_any_pass_a_stage_is_tried_once_more_as_it_is(
    workspace: Workspace, recipe_file: Path
) -> None:
    """No pass of the stage took the memory, so halving its passes would change nothing."""
    allow(workspace, "memory.txt", "sft 16")
    allow(workspace, "silent.txt", "sft 1")
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        attempt_all(orchestrator, until="sft")
        first = attempt(orchestrator, "sft")
        assert (first.status, first.microbatch_tokens) == ("resumable", None)
        assert "positions" not in str(first.reason)
        again = attempt(orchestrator, "sft")
    assert again.status == "failed"
    assert "run fewer stages side by side" in str(again.reason)
    assert "microbatch" not in str(again.reason)


def test_a_single_sequence_that_does_not_fit_is_not_tried_again(
    workspace: Workspace, recipe_file: Path
) -> None:
    allow(workspace, "memory.txt", "sft 0")
    with orchestrated(
        workspace, recipe_file, "stages.sft.microbatch_size=1", in_process=True
    ) as orchestrator:
        stage = attempt_all(orchestrator, until="reward")["sft"]
    assert (stage.status, stage.attempt) == ("failed", 1)
    assert "one sequence or pair alone, a pass of 10 positions, does not fit" in str(stage.reason)


@pytest.mark.slow
def test_a_stage_that_hangs_is_killed_with_its_stacks_and_goes_on_once(
    workspace: Workspace, recipe_file: Path
) -> None:
    with orchestrated(workspace, recipe_file) as whole:
        expected = attempt_all(whole, until="reward")["sft"].digest

    other = Workspace(workspace.root.with_name("other"))
    allow(other, "hang.txt", "sft 1")
    with orchestrated(other, recipe_file, "stages.sft.resources.hang_seconds=8") as orchestrator:
        orchestrator.retries = True  # as the flow does
        attempt_all(orchestrator, until="sft")
        first = attempt(orchestrator, "sft")
        assert (first.status, first.exit_code) == ("resumable", ExitCode.HUNG)
        assert first.reason == (
            "no progress for 8 s: the stage hung and was killed, and the log has the stacks of its threads; "
            f"attempt 2 goes on from step {CHECKPOINT_EVERY} ({orchestrator.log_of('sft')})"
        )
        assert 'fake_work.py", line' in orchestrator.log_of("sft").read_text()
        assert " in hang\n" in orchestrator.log_of("sft").read_text()
        second = attempt(orchestrator, "sft")
    assert (second.status, second.attempt, second.digest) == ("completed", 2, expected)


def test_a_stage_that_hangs_twice_fails(workspace: Workspace, recipe_file: Path) -> None:
    allow(workspace, "hang.txt", "sft 9")
    with orchestrated(workspace, recipe_file, "stages.sft.resources.hang_seconds=1") as orchestrator:
        attempt_all(orchestrator, until="sft")
        assert attempt(orchestrator, "sft").status == "resumable"
        again = attempt(orchestrator, "sft")
    assert (again.status, again.exit_code, again.attempt) == ("failed", ExitCode.HUNG, 2)
    assert "raise its resources.hang_seconds" in str(again.reason)


def stop_in_the_middle(orchestrator: Orchestrator, step: str) -> None:
    """Ask the run to stop once the step has shown some progress, however long that takes."""
    while not any(name == step and done > 0 for name, done in orchestrator.watcher.seen):  # type: ignore[attr-defined]
        time.sleep(0.01)
    orchestrator.request_stop()


def test_a_stage_that_is_stopped_goes_on_from_its_checkpoint(workspace: Workspace, recipe_file: Path) -> None:
    with orchestrated(workspace, recipe_file) as whole:
        expected = attempt_all(whole, until="reward")["sft"].digest

    other = Workspace(workspace.root.with_name("other"))
    pace(other, 0.5)
    with orchestrated(other, recipe_file) as orchestrator:
        attempt_all(orchestrator, until="sft")
        threading.Thread(target=stop_in_the_middle, args=(orchestrator, "sft"), daemon=True).start()
        stage = attempt(orchestrator, "sft")
        assert (stage.status, stage.exit_code) == ("resumable", ExitCode.RESUME)
        assert "stopped after step" in str(stage.reason)
        assert orchestrator.obstacle("reward") == "the run was stopped"
        assert orchestrator.block("reward", "the run was stopped").status == "resumable"
    pace(other, 0.0)
    with orchestrated(other, recipe_file) as orchestrator:
        assert orchestrator.next_attempt("sft") == 2
        stage = attempt_all(orchestrator, until="reward")["sft"]
    assert (stage.status, stage.attempt, stage.digest) == ("completed", 2, expected)


@pytest.mark.slow
def test_metrics_reach_the_ledger_up_to_the_committed_checkpoint_only(
    workspace: Workspace, recipe_file: Path
) -> None:
    pace(workspace, 0.25)
    with orchestrated(workspace, recipe_file) as orchestrator:
        attempt_all(orchestrator, until="sft")
        running = threading.Thread(target=attempt, args=(orchestrator, "sft"))
        running.start()
        deadline = time.monotonic() + 60
        while not (rows := told(workspace, orchestrator.run.record.run_id, "log_metrics")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        steps = {row[3] for line in rows for row in line["rows"]}
        orchestrator.stop.set()
        running.join()
    assert steps
    assert max(steps) % 4 == 0, "checkpoints are at every fourth step"


def test_a_damaged_artifact_is_made_again_loudly(workspace: Workspace, recipe_file: Path) -> None:
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        stages = attempt_all(orchestrator, until="reward")
        (workspace.store / "objects" / str(stages["sft"].digest) / "weights.txt").write_text("flipped")
        orchestrator.run.update(status="completed")
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        again = attempt_all(orchestrator, until="reward")
        assert any("sft" in line and "damaged" in line for line in orchestrator.watcher.lines)  # type: ignore[attr-defined]
    assert (again["sft"].status, again["sft"].digest) == ("completed", stages["sft"].digest)
    assert again["model"].status == "reused"


def test_a_step_that_only_looks_its_artifact_up_computes_nothing(
    workspace: Workspace, recipe_file: Path
) -> None:
    """Such an attempt has no share of the machine; an artifact that was lost meanwhile is made by an attempt that has
    one.
    """
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        stages = attempt_all(orchestrator, until="reward")
        (workspace.store / "objects" / str(stages["sft"].digest) / "weights.txt").write_text("flipped")
        orchestrator.run.update(status="completed")
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        attempt_all(orchestrator, until="sft")
        computed = events(workspace)
        lost = attempt(orchestrator, "sft", only_reuse=True)
        assert (lost.status, events(workspace)) == ("resumable", computed)
        assert lost.reason == "its artifact was lost after the run was planned"
        again = attempt(orchestrator, "sft")
    assert (again.status, again.digest) == ("completed", stages["sft"].digest)


def test_a_failed_stage_names_its_cause_and_its_log(workspace: Workspace, recipe_file: Path) -> None:
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        orchestrator.stage_function = "tests.support.fake_work.refuse"
        stages = attempt_all(orchestrator)
    assert (stages["model"].status, stages["model"].exit_code) == ("failed", ExitCode.BAD_INPUT)
    assert "row 7 has no prompt" in str(stages["model"].reason)
    assert str(orchestrator.log_of("model")) in str(stages["model"].reason)
    assert stages["sft"].status == "blocked"
    assert orchestrator.run.outcome() == "failed"


def test_an_error_of_our_own_fails_its_stage_alone(workspace: Workspace, recipe_file: Path) -> None:
    source = recipe_file.with_name("rows.jsonl")
    source.write_text('{"prompt": "1+1?", "response": "2"}\n')
    with orchestrated(workspace, recipe_file, f"data.demonstrations.source={source}") as orchestrator:
        source.unlink()
        stages = attempt_all(orchestrator)
    assert stages["data.demonstrations"].status == "failed"
    assert "rows.jsonl" in str(stages["data.demonstrations"].reason)
    assert "Traceback" in orchestrator.log_of("data.demonstrations").read_text()
    assert stages["data.preferences"].status == "completed"


def test_two_runs_at_once_make_each_artifact_once(workspace: Workspace, recipe_file: Path) -> None:
    pace(workspace, 0.05)
    with orchestrated(workspace, recipe_file) as one, orchestrated(workspace, recipe_file) as other:
        assert one.run.record.run_id != other.run.record.run_id
        threads = [
            threading.Thread(target=attempt_all, args=(orchestrator,), kwargs={"until": "value"})
            for orchestrator in (one, other)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        made = Counter(line.split()[0] for line in events(workspace) if line.split()[1] == "started")
        assert made["sft"] == made["reward"] == made["model"] == 1
        statuses = sorted(orchestrator.run.record.stages["sft"].status for orchestrator in (one, other))
        assert statuses == ["completed", "reused"]
        assert one.run.record.stages["reward"].digest == other.run.record.stages["reward"].digest


def test_what_changed_since_the_attempt_that_is_resumed_is_recorded(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pace(workspace, 0.5)
    with orchestrated(workspace, recipe_file) as orchestrator:
        attempt_all(orchestrator, until="sft")
        threading.Thread(target=stop_in_the_middle, args=(orchestrator, "sft"), daemon=True).start()
        assert attempt(orchestrator, "sft").status == "resumable"
    pace(workspace, 0.0)
    monkeypatch.setattr("vantage.attempts.run_attempt.provenance", lambda kind, **_: {"torch": "9.0"})
    with orchestrated(workspace, recipe_file) as orchestrator:
        stage = attempt_all(orchestrator, until="reward")["sft"]
    assert stage.provenance["resumed_across"].startswith("torch: 2.")
    assert stage.provenance["resumed_across"].endswith("→ 9.0")


@pytest.mark.slow
def test_a_source_that_is_replaced_after_its_key_was_made_is_refused(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = recipe_file.with_name("mine.py")
    verifier.write_text("def verify(prompt, response, answer):\n    return True\n")
    overrides = (f"verifiers={{mine: {{source: {verifier}}}}}", "stages.evaluation.judge={verifier: mine}")
    launch = LocalProcess.launch

    def replaced_then_launched(*arguments: Any, **options: Any) -> Any:
        verifier.write_text("def verify(prompt, response, answer):\n    return False\n")
        return launch(*arguments, **options)

    with orchestrated(workspace, recipe_file, *overrides) as orchestrator:
        attempt_all(orchestrator, until="verifiers.mine")
        monkeypatch.setattr(LocalProcess, "launch", replaced_then_launched)
        record = attempt(orchestrator, "verifiers.mine")
        assert record.status == "failed"
        assert record.exit_code == ExitCode.BAD_INPUT
        assert "has changed since the run was planned" in str(record.reason)
        assert "run the same command again" in str(record.reason)
        assert attempt(orchestrator, "verifiers.mine").status == "completed"


def test_what_was_left_out_and_is_warned_of_is_in_the_record_and_again_when_it_is_reused(
    workspace: Workspace, recipe_file: Path
) -> None:
    too_long = {"prompts_too_long": 137, "prompts_too_long_share": 137 / 261}
    dropped = {"dropped_rows": 12, "repeated_rows": 2, "source_rows": 200}
    workspace.root.mkdir(parents=True, exist_ok=True)
    (workspace.root / "measured.json").write_text(
        json.dumps(
            {
                "sft": too_long,
                "prepare_data": dropped,
                "dropped": {"not JSON": 10, "repeats an earlier row": 2},
            }
        )
    )
    for status in ("completed", "reused"):
        with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
            attempt_all(orchestrator, until="reward")
            record = read_run(workspace, orchestrator.run.record.run_id)
            orchestrator.run.update(status="completed")
        assert record.stages["sft"].status == status
        prepared, trained = record.stages["data.demonstrations"], record.stages["sft"]
        assert prepared.left_out == "12 of 200 rows dropped (not JSON: 10, repeats an earlier row: 2)"
        assert prepared.warnings[0].startswith("5 % of the source's rows cannot be used")
        assert trained.left_out == "137 prompts too long (52 %)"
        assert [warning[:4] for warning in trained.warnings] == ["52 %"]
        assert record.stages["model"].left_out is None and record.stages["model"].warnings == ()
