"""A gate waits for a person: the right people may answer, and an answer holds for exactly what it was about."""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from tests.support.orchestrated import Witness, attempt_all, events, orchestrated
from vantage.attempts.exit_codes import ExitCode
from vantage.flows.execution import exit_code
from vantage.flows.pipeline import _allowed_meanwhile
from vantage.ledger.operations import MoveAlias, RecordApproval, from_json, to_json
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.target import audit
from vantage.runs.approving import answer
from vantage.runs.contradictions import contradictions
from vantage.runs.planning import plan
from vantage.runs.record import StageRecord
from vantage.runs.run import Run, hold_run, next_run, read_run, read_runs
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.records.approvals import Approval

FAKE = "tests.support.fake_models.run_stage"
RECIPE = """\
recipe: asking
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations"}
  preferences: {source: "builtin:arithmetic/preferences"}
stages:
  sft: {kind: sft, data: demonstrations, gate: {metric: test_nll, at_most: 0.1, on_fail: approve}}
  reward: {kind: reward_model, init: sft, data: preferences}
"""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    """Return a recipe whose first stage (0.5) does not pass its gate."""
    path = tmp_path / "asking.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, workspace: Workspace) -> None:
    """Let no MLflow answer: what is recorded waits in the outbox."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")


def go_through(workspace: Workspace, recipe: Path, *overrides: str) -> list[str]:
    """Go on with the newest unfinished run of the recipe, or a new one, to its end; return what was printed."""
    with orchestrated(workspace, recipe, *overrides, stage_function=FAKE, in_process=True) as orchestrator:
        attempt_all(orchestrator)
        orchestrator.end()
        orchestrator.ledger.close()
        assert isinstance(orchestrator.watcher, Witness)
        return orchestrator.watcher.lines


def statuses(workspace: Workspace) -> dict[str, str]:
    return {name: stage.status for name, stage in read_runs(workspace)[0].stages.items()}


def approve(workspace: Workspace, subject: str = "sft", **changes: object) -> Approval:
    [record] = read_runs(workspace)[:1]
    given = {"approved": True, "by": "ada", "reason": "the slice is small", **changes}
    return answer(workspace, record.run_id, subject, **given)[0]  # type: ignore[arg-type]


@pytest.mark.slow
def test_it_waits_is_approved_of_and_goes_on(
    workspace: Workspace, recipe_file: Path, ledger_database: str
) -> None:
    """A run waits at its gate, is approved of, and goes on."""
    go_through(workspace, recipe_file)
    [waits] = read_runs(workspace)
    assert (waits.status, exit_code(waits)) == ("waiting_approval", ExitCode.WAITING_APPROVAL)
    assert statuses(workspace)["sft"] == "waiting_approval"
    assert statuses(workspace)["reward"] == "blocked"
    assert waits.stages["reward"].reason == "reads sft, which is waiting approval"
    question = waits.open_questions["sft"]
    assert (question.digest, question.stage_key) == (
        waits.stages["sft"].digest,
        waits.stages["sft"].stage_key,
    )
    assert [str(verdict) for verdict in question.verdicts] == ["test_nll 0.500 <= 0.1: CLOSED"]
    computed = len(events(workspace))

    go_through(workspace, recipe_file)
    assert [each.run_id for each in read_runs(workspace)] == [waits.run_id], "the same command asks again"
    assert statuses(workspace)["sft"] == "waiting_approval"
    assert len(events(workspace)) == computed

    given = approve(workspace)
    assert (given.by, given.reason, given.approved) == ("ada", "the slice is small", True)
    assert given.question == question
    assert given.login is not None
    recipe, approvals = next_run(workspace, waits.recipe)
    planned = {step.name: step.action for step in plan(recipe, workspace.storage, [], approvals=approvals)}
    assert (planned["sft"], planned["reward"]) == ("reuse", "run")
    unapproved = {step.name: step for step in plan(recipe, workspace.storage, [])}
    assert unapproved["reward"].reasons == ("reads sft, which waits for a person's approval",)

    lines = go_through(workspace, recipe_file)
    [done] = read_runs(workspace)
    assert (done.run_id, done.status) == (waits.run_id, "completed")
    assert any("approved by ada" in line and "the slice is small" in line for line in lines)
    assert done.approvals == (given,)
    assert list(contradictions(workspace, done)) == []

    client = MlflowClient(ledger_database)
    [run] = client.search_runs(
        [each.experiment_id for each in client.search_experiments()],
        f"tags.`vantage.run_id` = '{done.run_id}' AND tags.`vantage.stage` = 'sft'",
    )
    assert run.data.tags["vantage.status"] == "completed"
    assert run.data.tags["vantage.verdict"] == "closed"
    assert run.data.tags["vantage.approval"] == str(given)
    recorded = Approval.model_validate_json(
        run.data.tags["vantage.approval.record"].replace(
            '"on_fail":"approve"', '"on_fail":"approve","evidence":{}'
        )
    )
    assert (recorded.by, recorded.time, recorded.question.digest) == ("ada", given.time, question.digest)
    assert "approved by ada" in run.data.tags["mlflow.note.content"]
    parent = client.get_run(run.data.tags["mlflow.parentRunId"])
    assert (parent.info.status, parent.data.tags["vantage.status"]) == ("FINISHED", "completed")


@pytest.mark.usefixtures("offline")
def test_a_rejected_gate_is_closed(workspace: Workspace, recipe_file: Path) -> None:
    go_through(workspace, recipe_file)
    approve(workspace, approved=False, reason="too low")
    go_through(workspace, recipe_file)
    [record] = read_runs(workspace)
    assert (record.status, statuses(workspace)["sft"]) == ("gate_closed", "gate_closed")
    assert exit_code(record) == ExitCode.GATE_CLOSED

    go_through(workspace, recipe_file)
    newest, _ = read_runs(workspace)
    assert newest.run_id != record.run_id
    assert newest.status == "waiting_approval", "an answer is one of its run; another run asks again"
    assert newest.stages["model"].status == "reused"


@pytest.mark.usefixtures("offline")
def test_another_threshold_or_another_artifact_asks_again(workspace: Workspace, recipe_file: Path) -> None:
    go_through(workspace, recipe_file)
    approve(workspace)
    [record] = read_runs(workspace)
    with hold_run(workspace, record.run_id) as run:
        tighter = run.record.recipe.model_dump()
        tighter["stages"]["sft"]["gate"][0]["at_most"] = 0.05
        run.update(recipe=type(run.record.recipe).model_validate(tighter))
    with orchestrated(workspace, recipe_file, stage_function=FAKE, in_process=True) as orchestrator:
        assert orchestrator.run.record.run_id == record.run_id
        assert attempt_all(orchestrator)["sft"].status == "waiting_approval"
        asked = orchestrator.run.record.open_questions["sft"]
        assert asked.verdicts[0].threshold == 0.05
        stage = orchestrator.run.record.stages["sft"]
        other = orchestrator.artifacts["sft"].model_copy(update={"digest": "0" * 64})
        state = orchestrator._recording._ask("sft", other, stage.verdicts)
        assert state == "waiting_approval"
        assert orchestrator.run.record.open_questions["sft"].digest == "0" * 64


@pytest.mark.usefixtures("offline")
def test_a_gate_that_stops_is_not_asked_about(workspace: Workspace, recipe_file: Path) -> None:
    gates = "[{metric: test_nll, at_most: 0.1, on_fail: approve}, {metric: test_nll, at_most: 0.2}]"
    go_through(workspace, recipe_file, f"stages.sft.gate={gates}")
    [record] = read_runs(workspace)
    assert (record.status, record.questions) == ("gate_closed", {})


@pytest.mark.parametrize(
    ("subject", "changes", "message"),
    [
        ("model", {}, r"model does not wait for approval \(it is completed\); what waits: sft\."),
        ("stf", {}, "stf is no stage of it and no publish:NAME; what waits: sft"),
        ("publish:m", {}, "publish:m does not wait for approval; what waits: sft"),
        ("sft", {"reason": "  "}, "--reason is empty"),
        ("sft", {"reason": "x" * 2001}, "--reason has 2,001 characters; give 2,000 or fewer"),
        ("sft", {"by": ""}, "--by is empty"),
    ],
)
def test_what_is_refused(waiting: Workspace, subject: str, changes: dict[str, object], message: str) -> None:
    """An answer to a question that does not wait, or without a reason, is refused and not recorded."""
    with pytest.raises(RunError, match=message):
        approve(waiting, subject, **changes)
    assert read_runs(waiting)[0].approvals == ()


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """Return the workspace of a run that waits for an answer. Tests may only read it."""
    folder = tmp_path_factory.mktemp("waiting")
    (folder / "asking.yaml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        workspace = Workspace(folder / "workspace")
        go_through(workspace, folder / "asking.yaml")
    return workspace


@pytest.mark.usefixtures("offline")
def test_of_several_at_once_one_is_recorded(workspace: Workspace, recipe_file: Path) -> None:
    go_through(workspace, recipe_file)
    outcomes: list[str] = []

    def decide(number: int) -> None:
        try:
            approve(workspace, approved=number % 2 == 0, by=f"person {number}")
            outcomes.append(f"person {number}")
        except RunError as error:
            outcomes.append("refused" if "an answer is never changed" in str(error) else str(error))

    threads = [threading.Thread(target=decide, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes)[-3:] == ["refused"] * 3
    [record] = read_runs(workspace)
    assert [each.by for each in record.approvals] == sorted(outcomes)[:1]
    with pytest.raises(RunError, match="sft of run .* is (approved|rejected) by person"):
        approve(workspace)


@pytest.mark.usefixtures("offline")
def test_an_answer_to_a_run_that_is_executed_is_taken_up_by_it(
    workspace: Workspace, recipe_file: Path
) -> None:
    with orchestrated(workspace, recipe_file, stage_function=FAKE, in_process=True) as orchestrator:
        attempt_all(orchestrator)
        record = orchestrator.run.record
        given, sent = answer(
            workspace, record.run_id, "sft", approved=True, by="ada", reason="the slice is small"
        )
        assert not sent
        assert orchestrator.run.record.approvals == ()
        # a write by the process that executes the run keeps the answer
        orchestrator.run.update(status="running")
        assert orchestrator.take_up_answers()
        assert not orchestrator.take_up_answers()
        assert orchestrator.blocked() == ["reward"]
        assert orchestrator.run.record.stages["sft"].status == "completed"
        assert attempt_all(orchestrator)["reward"].status == "completed"
        orchestrator.end()
        assert orchestrator.run.record.status == "completed"
    assert read_run(workspace, record.run_id).approvals == (given,)


@pytest.mark.usefixtures("offline")
def test_an_answer_that_comes_before_its_stage_is_recorded_as_waiting_is_taken_up(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may answer at once, and the thread of another step takes the answer up in that moment."""
    with orchestrated(workspace, recipe_file, stage_function=FAKE, in_process=True) as orchestrator:
        run = orchestrator.run
        set_stage = type(run).set_stage

        def late(self: Run, step: str, stage: StageRecord) -> None:
            if stage.status == "waiting_approval":
                answer(workspace, run.record.run_id, "sft", approved=True, by="ada", reason="fine")
                assert orchestrator.take_up_answers()
            set_stage(self, step, stage)

        with monkeypatch.context() as patched:
            patched.setattr(Run, "set_stage", late)
            attempt_all(orchestrator)
        assert run.record.stages["sft"].status == "waiting_approval"
        assert orchestrator.take_up_answers()
        assert run.record.stages["sft"].status == "completed"
        assert not orchestrator.take_up_answers()
        assert attempt_all(orchestrator)["reward"].status == "completed"
        orchestrator.end()
        assert run.record.status == "completed"
    with Evidence(workspace) as evidence:
        assert audit(evidence, "latest").outcome != "wrong"


@pytest.mark.usefixtures("offline")
def test_steps_that_take_up_one_answer_at_once_record_it_once_and_find_it_recorded(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step that waits for the stage does so in a thread, and must not be blocked by a stage that waits no longer."""
    with orchestrated(workspace, recipe_file, stage_function=FAKE, in_process=True) as orchestrator:
        attempt_all(orchestrator)
        run = orchestrator.run
        answer(workspace, run.record.run_id, "sft", approved=True, by="ada", reason="fine")
        recorded: list[Approval] = []
        found: list[str] = []
        answered = orchestrator._recording.answered

        def slow(given: Approval) -> bool:
            recorded.append(given)
            time.sleep(0.2)
            return answered(given)

        def take_up() -> None:
            orchestrator.take_up_answers()
            found.append(run.record.stages["sft"].status)

        monkeypatch.setattr(orchestrator._recording, "answered", slow)
        threads = [threading.Thread(target=take_up) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(recorded), found) == (1, ["completed", "completed"])


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("approved", [True, False])
def test_a_blocked_step_goes_on_whichever_step_has_taken_up_the_answer(
    workspace: Workspace, recipe_file: Path, *, approved: bool
) -> None:
    """A step that waits for others too takes it up when these are over; those that were blocked before it must not stay so."""
    with orchestrated(workspace, recipe_file, stage_function=FAKE, in_process=True) as orchestrator:
        attempt_all(orchestrator)
        assert asyncio.run(_allowed_meanwhile(orchestrator)) == []
        answer(
            workspace, orchestrator.run.record.run_id, "sft", approved=approved, by="ada", reason="as it is"
        )
        assert orchestrator.take_up_answers(), "by a step that reads sft and another stage"
        assert asyncio.run(_allowed_meanwhile(orchestrator)) == (["reward"] if approved else [])
        orchestrator.stop.set()
        assert asyncio.run(_allowed_meanwhile(orchestrator)) == []


@pytest.mark.usefixtures("offline")
def test_an_answer_whose_process_was_killed_before_it_was_copied_is_found(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_through(workspace, recipe_file)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("vantage.runs.approving._record", killed)
        with pytest.raises(KeyboardInterrupt):
            approve(workspace)
    run_id = read_runs(workspace)[0].run_id
    assert workspace.records.read(run_id).approvals == ()
    with pytest.raises(RunError, match="an answer is never changed"):
        approve(workspace)
    go_through(workspace, recipe_file)
    [record] = read_runs(workspace)
    assert record.status == "completed"
    told = [from_json(line) for _, line in _outbox(workspace, run_id)]
    assert [each.approval for each in told if isinstance(each, RecordApproval)] == list(record.approvals)


def _outbox(workspace: Workspace, run_id: str) -> list[tuple[int, dict[str, object]]]:
    from vantage.ledger.outbox import Outbox

    return list(Outbox(workspace.folder(run_id) / "ledger").read())


@pytest.mark.slow
def test_without_an_answering_mlflow_the_answer_waits_in_the_outbox(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_through(workspace, recipe_file)
    run_id = read_runs(workspace)[0].run_id
    with monkeypatch.context() as patched:
        patched.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
        _, sent = answer(workspace, run_id, "sft", approved=True, by=None, reason="the slice is small")
    assert not sent
    assert len(read_run(workspace, run_id).approvals) == 1
    go_through(workspace, recipe_file)
    assert read_run(workspace, run_id).status == "completed"


def test_a_hand_written_approval_in_run_json_holds_for_its_artifact_alone(waiting: Workspace) -> None:
    """An approval counts only for exactly the same question."""
    [record] = read_runs(waiting)
    question = record.questions["sft"]
    changed = question.model_copy(update={"digest": "1" * 64})
    assert changed.id != question.id
    given = Approval(question=changed, approved=True, by="eve", reason="because", time=0)
    with_it = record.model_copy(update={"approvals": (given,)})
    assert list(with_it.open_questions) == ["sft"]


def test_the_new_operations_survive_the_outbox(waiting: Workspace) -> None:
    question = read_runs(waiting)[0].questions["sft"]
    approval = Approval(question=question, approved=False, by="ada", reason="no", time=5)
    movement = MoveAlias(
        time=6, stage="reward", digest="1" * 64, registered_model="m", alias="champion", from_version="3",
        to_version="2", by="ada", login="root", reason="worse",
    )  # fmt: skip
    for operation in (RecordApproval(approval=approval), movement):
        assert from_json(to_json(operation)) == operation


def test_a_workspace_in_a_bucket(
    bucket: str, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr("vantage.storage.leases.LEASE_SECONDS", 2.0)

    def machine(number: int) -> Workspace:
        monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / f"machine-{number}"))
        return Workspace.at(bucket)

    go_through(machine(0), recipe_file)
    given = approve(machine(1))
    with pytest.raises(RunError, match="an answer is never changed"):
        approve(machine(2))
    go_through(machine(2), recipe_file)
    [record] = read_runs(machine(3))
    assert (record.status, record.approvals) == ("completed", (given,))


def test_its_commands(
    waiting: Workspace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The commands that a waiting run prints can be typed as they are."""
    import shutil

    from typer.testing import CliRunner

    from vantage.cli.main import app
    from vantage.runs.next_steps import after_questions

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    shutil.copytree(waiting.root, tmp_path / "workspace")
    place, run = str(tmp_path / "workspace"), CliRunner().invoke
    [record] = read_runs(Workspace(tmp_path / "workspace"))
    lines = after_questions(record, place)
    assert f"approve {record.run_id} sft --reason WHY --workspace {place}" in "\n".join(lines)
    assert run(app, ["approve", "latest", "sft", "--workspace", place]).exit_code == ExitCode.USAGE
    empty = run(app, ["approve", "latest", "sft", "--reason", "", "--workspace", place])
    assert empty.exit_code == ExitCode.BAD_INPUT
    done = run(app, ["reject", "latest", "sft", "--reason", "too low", "--by", "ada", "--workspace", place])
    assert done.exit_code == 0
    assert f"sft of run {record.run_id} is rejected by ada" in done.output
    assert f"resume {record.run_id} --workspace {place}" in done.output
    again = run(app, ["approve", "latest", "sft", "--reason", "yes", "--workspace", place])
    assert again.exit_code == ExitCode.BAD_INPUT
    shown = run(app, ["status", "latest", "--workspace", place])
    assert "sft rejected by ada" in shown.output


def test_an_answer_is_recorded_before_what_follows_from_it(
    workspace: Workspace, recipe_file: Path, offline: None
) -> None:
    """The signature is computed before the answer is stored, and stored after it, so that no signature exists without its answer."""
    go_through(workspace, recipe_file)
    [record] = read_runs(workspace)
    seen: list[tuple[str, int]] = []

    def prepare(given: Approval) -> Callable[[], None]:
        def complete() -> None:
            seen.append(("completed", len(read_run(workspace, record.run_id).approvals)))

        seen.append(("prepared", len(read_run(workspace, record.run_id).approvals)))
        return complete

    answer(workspace, record.run_id, "sft", approved=True, by="ada", reason="it is small", prepare=prepare)
    assert seen == [("prepared", 0), ("completed", 1)]
