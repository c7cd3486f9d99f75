"""A recipe with more iterations, or a gate, trains a stage further; the plan and every record describe it."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.extended_work import ASKED, KILLED, SAME, Killed
from tests.support.orchestrated import Witness, attempt_all, events, orchestrated
from vantage.cli.main import app
from vantage.flows.garbage_collection import collect
from vantage.ledger.model_card import parents_table
from vantage.ledger.replay import read_replay
from vantage.review.exports.bills import bill_of
from vantage.review.reports.gather import gather_report
from vantage.runs.next_steps import after_closed_gates
from vantage.runs.planning import PlannedStep, plan
from vantage.runs.record import RunRecord
from vantage.runs.resolving import load_resolved
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.records.extensions import state_key
from vantage.storage.refs import Ref

WORK = "tests.support.extended_work.run_stage"
KEPT = (
    "stages.policy.iterations=4",
    "stages.policy.validate_every=2",
    "stages.policy.checkpoint_every=3",
    "stages.policy.keep_state=true",
)
LONGER = (*KEPT, "stages.policy.iterations=6")

RECIPE = """\
recipe: fake
seed: 17
model: {source: "builtin:tiny"}
data:
  prompts: {source: "builtin:arithmetic/prompts"}
rewards:
  main: {terms: [{verifier: arithmetic}]}
stages:
  policy: {kind: policy_optimization, algorithm: grpo, init: model, reward: main, prompts: prompts}
  evaluation: {kind: evaluation, candidate: policy, baseline: model, judge: {verifier: arithmetic}, prompts: prompts}
"""
"""The smallest run with a stage that reads an extended one."""


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(RECIPE)
    return path


def gate(at_least: float, *, by: int = 2, at_most: int = 2) -> str:
    """Return the override that gives the policy stage a gate which extends it."""
    return (
        f"stages.policy.gate={{metric: test_score, at_least: {at_least}, on_fail: extend, "
        f"extend: {{by: {by}, at_most: {at_most}}}}}"
    )


def go_through(workspace: Workspace, recipe: Path, *overrides: str) -> tuple[RunRecord, list[str]]:
    """Run to the end."""
    with orchestrated(
        workspace, recipe, *overrides, in_process=True, stage_function=WORK, makes_report=False
    ) as orchestrator:
        attempt_all(orchestrator)
        orchestrator.end()
        assert isinstance(orchestrator.watcher, Witness)
    return read_runs(workspace)[0], orchestrator.watcher.lines


def planned_policy(workspace: Workspace, recipe: Path, overrides: Sequence[str]) -> PlannedStep:
    """Return the plan of the policy stage."""
    steps = plan(load_resolved(recipe, overrides)[0], workspace.storage, read_runs(workspace))
    return next(step for step in steps if step.name == "policy")


def ref_of(workspace: Workspace, record: RunRecord) -> Ref:
    """Return the ref of the policy that a run has made."""
    key = record.stages["policy"].stage_key
    assert key is not None
    ref = workspace.storage.find(key)
    assert ref is not None
    return ref


def test_more_iterations_go_on_from_the_state_of_the_shorter_stage(
    workspace: Workspace, recipe_file: Path, tmp_path: Path
) -> None:
    shorter, _ = go_through(workspace, recipe_file, *KEPT)
    planned = planned_policy(workspace, recipe_file, LONGER)
    assert (planned.action, planned.label) == ("run", "extend")
    assert planned.reasons == (f"extends {shorter.run_id}/policy: 4 → 6 iterations",)

    longer, _ = go_through(workspace, recipe_file, *LONGER)
    stage, ref = longer.stages["policy"], ref_of(workspace, longer)
    assert stage.status == "completed"
    assert [(each.run_id, each.length) for each in stage.shorter] == [(shorter.run_id, 4.0)]
    first = ref_of(workspace, shorter).artifact
    state = workspace.storage.find(state_key(first.stage_key))
    assert state is not None and state.artifact.metrics == {"steps": 4.0}
    assert ref.artifact.parents["previous"] == first.digest
    assert ref.artifact.parents["previous.state"] == state.artifact.digest
    assert ref.key_parts["configuration"]["iterations"] == 6
    assert (
        ref.provenance["extended"]
        == f"extends {shorter.run_id}/policy: 4 → 6 iterations ({first.digest[:12]})"
    )
    assert "extended_across" not in ref.provenance

    other = Workspace(tmp_path / "other")
    whole, _ = go_through(other, recipe_file, *LONGER)
    assert whole.stages["policy"].stage_key != stage.stage_key
    assert whole.stages["policy"].digest == stage.digest
    assert whole.stages["evaluation"].stage_key == longer.stages["evaluation"].stage_key

    again = planned_policy(workspace, recipe_file, LONGER)
    assert again.action == "reuse"
    assert again.reasons[:2] == (
        f"extends {shorter.run_id}/policy: 4 → 6 iterations",
        f"made by run {longer.run_id}",
    )
    third, _ = go_through(workspace, recipe_file, *LONGER)
    assert third.stages["policy"].status == "reused"
    assert third.stages["policy"].shorter == stage.shorter


@pytest.mark.slow
def test_a_stage_that_was_extended_is_extended_again(workspace: Workspace, recipe_file: Path) -> None:
    go_through(workspace, recipe_file, *KEPT)
    second, _ = go_through(workspace, recipe_file, *LONGER)
    third, _ = go_through(workspace, recipe_file, *KEPT, "stages.policy.iterations=8")
    stage = third.stages["policy"]
    assert [each.length for each in stage.shorter] == [4.0, 6.0]
    assert ref_of(workspace, third).artifact.parents["previous"] == second.stages["policy"].digest
    assert stage.metrics["test_score"] == 8.0


def test_a_gate_extends_its_stage_until_it_passes(workspace: Workspace, recipe_file: Path) -> None:
    record, lines = go_through(workspace, recipe_file, *KEPT, gate(7.5))
    stage = record.stages["policy"]
    assert (stage.status, stage.metrics["test_score"]) == ("completed", 8.0)
    assert [(each.length, [verdict.passed for verdict in each.verdicts]) for each in stage.shorter] == [
        (4.0, [False]),
        (6.0, [False]),
    ]
    assert [verdict.passed for verdict in stage.verdicts] == [True]
    assert record.stages["evaluation"].status == "completed"
    assert (
        f"  policy: gate test_score 4.000 >= 7.5: CLOSED; extends {record.run_id}/policy: 4 → 6 iterations"
        in lines
    )
    assert events(workspace).count("policy started 1") == 3

    between = planned_policy(
        workspace, recipe_file, LONGER
    )  # a recipe of six iterations finds the part in between
    assert (between.action, between.digest) == ("reuse", stage.shorter[1].digest)
    planned = planned_policy(workspace, recipe_file, (*KEPT, gate(7.5)))
    assert planned.action == "reuse"
    again, _ = go_through(workspace, recipe_file, *KEPT, gate(7.5))
    assert again.stages["policy"].status == "reused"
    assert again.stages["policy"].shorter == stage.shorter


def test_a_gate_that_stays_closed_stops_the_run_after_its_last_extension(
    workspace: Workspace, recipe_file: Path
) -> None:
    record, _ = go_through(workspace, recipe_file, *KEPT, gate(99.0, at_most=1))
    stage = record.stages["policy"]
    assert (stage.status, stage.metrics["test_score"]) == ("gate_closed", 6.0)
    assert record.stages["evaluation"].status == "blocked"
    assert events(workspace).count("policy started 1") == 2
    planned = planned_policy(workspace, recipe_file, (*KEPT, gate(99.0, at_most=1)))
    assert (planned.action, planned.stands) == ("reuse", "gate_closed")
    advice = after_closed_gates(record, workspace.address)
    assert (
        "  1. train it further: stages.policy.gate.extend.at_most. It goes on from its last iteration"
        in advice[1]
    )
    assert "--set stages.policy.gate.extend.at_most=2" in advice[2]
    [approving] = [line for line in advice if "on_fail=approve" in line]
    overrides = [word for word in approving.split() if word.startswith("stages.policy.gate.")]
    asked = planned_policy(workspace, recipe_file, (*KEPT, gate(99.0, at_most=1), *overrides))
    assert asked.stands == "waiting_approval"
    further = planned_policy(workspace, recipe_file, (*KEPT, gate(99.0, at_most=2)))
    assert (further.label, further.reasons[0]) == (
        "extend",
        f"extends {record.run_id}/policy: 6 → 8 iterations",
    )


@pytest.mark.slow
def test_code_that_has_changed_since_is_shown_and_recorded(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_through(workspace, recipe_file, *KEPT)
    for module in ("runs.planning", "attempts.run_attempt"):
        monkeypatch.setattr(
            f"vantage.{module}.provenance", lambda *_, **__: {"device": "another", "threads": "1"}
        )
    assert "device: cpu → another" in planned_policy(workspace, recipe_file, LONGER).drift
    longer, _ = go_through(workspace, recipe_file, *LONGER)
    assert "device: cpu → another" in longer.stages["policy"].provenance["extended_across"]


def test_a_stage_that_was_made_without_state_is_not_extended_and_says_why(
    workspace: Workspace, recipe_file: Path
) -> None:
    """``keep_state`` is not in the key, so the recipe that asks for it reuses what is there."""
    without = [each for each in KEPT if "keep_state" not in each]
    first, _ = go_through(workspace, recipe_file, *without)
    planned = planned_policy(workspace, recipe_file, LONGER)
    assert planned.label == "run"
    assert planned.reasons[-1] == (
        f"does not extend {first.run_id}/policy (4 iterations): its training state was not kept, or it stopped before its last "
        "step; keep_state: true keeps the state of a stage that trains anew"
    )
    record, lines = go_through(workspace, recipe_file, *KEPT, gate(7.5))
    assert record.stages["policy"].status == "gate_closed"
    [said] = [line for line in lines if "not extended" in line]
    assert said.startswith("  policy is not extended: its training state was not kept")


def test_a_schedule_that_has_ended_is_not_extended(workspace: Workspace, recipe_file: Path) -> None:
    linear = ("stages.policy.schedule=linear", *(each for each in KEPT if "keep_state" not in each))
    first, _ = go_through(workspace, recipe_file, *linear)
    planned = planned_policy(workspace, recipe_file, (*linear, "stages.policy.iterations=6"))
    assert planned.label == "run"
    assert planned.reasons[-1].startswith(
        f"does not extend {first.run_id}/policy (4 iterations): schedule=linear has reached its end"
    )


@pytest.mark.slow
def test_a_stage_that_a_guard_ended_is_not_extended(workspace: Workspace, recipe_file: Path) -> None:
    """The guard is in the key of the longer stage too, which would end at the same step."""
    guard = "stages.policy.guards={metric: score_mean, above: 0.5, over: 1, action: finish}"
    first, _ = go_through(workspace, recipe_file, *KEPT, guard)
    assert ref_of(workspace, first).artifact.ended_early is not None
    planned = planned_policy(workspace, recipe_file, (*LONGER, guard))
    assert planned.label == "run"
    assert planned.reasons[-1] == (
        f"does not extend {first.run_id}/policy (4 iterations): it finished at 2 of 4 by guard score_mean, and a longer one would "
        "have ended there too"
    )


@pytest.mark.slow
def test_a_stage_that_a_person_ended_is_not_extended(workspace: Workspace, recipe_file: Path) -> None:
    """Neither its gate, in the same run, nor a longer recipe extends it, since a longer stage would not have ended
    there by itself.
    """
    workspace.root.mkdir(parents=True)
    (workspace.root / ASKED).write_text("1")
    first, lines = go_through(workspace, recipe_file, *KEPT, gate(6))
    assert first.stages["policy"].status == "gate_closed"
    ended = "it finished at 3 of 4 by hand (enough), so no state of all its steps was kept"
    assert [line for line in lines if "not extended" in line] == [f"  policy is not extended: {ended}"]
    (workspace.root / ASKED).unlink()
    planned = planned_policy(workspace, recipe_file, LONGER)
    assert planned.label == "run"
    assert not any("finished at 3" in reason and "ended there too" in reason for reason in planned.reasons)
    second, _ = go_through(workspace, recipe_file, *LONGER)
    assert second.stages["policy"].metrics["test_score"] == 6.0


def test_a_whole_stage_that_is_under_way_goes_on(workspace: Workspace, recipe_file: Path) -> None:
    workspace.root.mkdir(parents=True)
    (workspace.root / KILLED).write_text("4")
    with (
        pytest.raises(Killed),
        orchestrated(workspace, recipe_file, *LONGER, in_process=True, stage_function=WORK) as orchestrator,
    ):
        attempt_all(orchestrator)
    go_through(workspace, recipe_file, *KEPT)
    planned = planned_policy(workspace, recipe_file, LONGER)
    assert (planned.label, planned.extends) == ("resume at 3", None)


def test_a_closed_gate_that_stops_the_run_overrules_one_that_extends(
    workspace: Workspace, recipe_file: Path
) -> None:
    both = gate(7.5).replace("gate={", "gate=[{") + ", {metric: test_score, at_most: 3}]"
    record, _ = go_through(workspace, recipe_file, *KEPT, both)
    assert record.stages["policy"].status == "gate_closed"
    assert record.stages["policy"].shorter == ()


@pytest.mark.slow
def test_the_longest_shorter_stage_is_gone_on_from(workspace: Workspace, recipe_file: Path) -> None:
    go_through(workspace, recipe_file, *LONGER)
    go_through(workspace, recipe_file, *KEPT)
    planned = planned_policy(workspace, recipe_file, (*KEPT, "stages.policy.iterations=8"))
    assert planned.reasons[0].endswith("/policy: 6 → 8 iterations")


def test_a_stage_that_differs_in_more_than_its_length_begins_anew(
    workspace: Workspace, recipe_file: Path
) -> None:
    go_through(workspace, recipe_file, *KEPT)
    planned = planned_policy(workspace, recipe_file, (*LONGER, "stages.policy.learning_rate=0.001"))
    assert planned.label == "run"
    assert not any("extend" in reason for reason in planned.reasons)


def test_a_damaged_state_is_refused_by_its_digest(workspace: Workspace, recipe_file: Path) -> None:
    first, _ = go_through(workspace, recipe_file, *KEPT)
    state = workspace.storage.find(state_key(ref_of(workspace, first).artifact.stage_key))
    assert state is not None
    file = workspace.storage.folder(state.artifact) / "curves.jsonl"
    file.chmod(0o644)
    file.write_bytes(file.read_bytes().replace(b"4.0", b"5.0"))
    planned = planned_policy(workspace, recipe_file, LONGER)
    assert planned.label == "run"
    assert "its training state is damaged" in planned.reasons[-1]
    assert "curves.jsonl: sha256 is" in planned.reasons[-1]
    record, _ = go_through(workspace, recipe_file, *LONGER)
    assert record.stages["policy"].shorter == ()
    assert record.stages["policy"].metrics["test_score"] == 6.0


@pytest.mark.parametrize(
    "step", [4, pytest.param(5, marks=pytest.mark.slow), pytest.param(7, marks=pytest.mark.slow)]
)
def test_a_run_that_is_killed_in_an_extension_goes_on_with_it(
    workspace: Workspace, recipe_file: Path, tmp_path: Path, step: int
) -> None:
    overrides = (*KEPT, gate(99.0))
    whole, _ = go_through(Workspace(tmp_path / "other"), recipe_file, *overrides)
    workspace.root.mkdir(parents=True, exist_ok=True)
    (workspace.root / KILLED).write_text(str(step))
    with (
        pytest.raises(Killed),
        orchestrated(
            workspace, recipe_file, *overrides, in_process=True, stage_function=WORK
        ) as orchestrator,
    ):
        attempt_all(orchestrator)
    collect(workspace)  # the first part is needed, although nothing that is made was made of it yet
    assert workspace.storage.find(whole.stages["policy"].shorter[0].stage_key) is not None
    record, _ = go_through(workspace, recipe_file, *overrides)
    assert len(read_runs(workspace)) == 1
    stage, expected = record.stages["policy"], whole.stages["policy"]
    assert (stage.digest, stage.stage_key) == (expected.digest, expected.stage_key)
    assert [each.stage_key for each in stage.shorter] == [each.stage_key for each in expected.shorter]
    assert [each.verdicts for each in stage.shorter] == [each.verdicts for each in expected.shorter]


@pytest.mark.slow
def test_every_record_names_what_an_extended_stage_goes_on_from(
    workspace: Workspace, recipe_file: Path
) -> None:
    """An earlier run made the first part, and a gate asked for the two others. Status, report, model card, bill of
    materials, diff and audit all name them."""
    first, _ = go_through(workspace, recipe_file, *KEPT)
    second, _ = go_through(workspace, recipe_file, *KEPT, gate(7.5))
    lines = (
        f"extends {first.run_id}/policy: 4 → 6 iterations; gate test_score 4.000 >= 7.5: CLOSED",
        f"extends {second.run_id}/policy: 6 → 8 iterations; gate test_score 6.000 >= 7.5: CLOSED",
    )
    assert tuple(second.stages["policy"].extensions) == lines

    shown = command("status", second.run_id, "--workspace", workspace.address)
    assert all(f"policy: {line}" in shown for line in lines)
    state = json.loads(command("status", second.run_id, "--json", "--workspace", workspace.address))
    assert [each["length"] for each in state["stages"]["policy"]["shorter"]] == [4.0, 6.0]
    remarks = [each.text for each in gather_report(workspace, second).remarks if each.step == "policy"]
    assert tuple(remarks[:2]) == lines

    data = workspace.records.read_outbox(second.run_id)
    assert data is not None
    entry = read_replay(data, run_id=second.run_id).entry
    parents = ref_of(workspace, second).artifact.parents
    table = parents_table(entry.stages["policy"], {})
    for role, kind in (("previous", "policy"), ("previous.state", "training state")):
        assert (
            f"| {role} | {kind} | the shorter stage that it goes on from | `{parents[role][:16]}` |" in table
        )

    bill = bill_of(workspace, second, "policy")
    assert bill is not None
    listed = {each["version"] for each in json.loads(bill)["components"] if "version" in each}
    assert {parents["previous"][:12], parents["previous.state"][:12]} <= listed
    differing = CliRunner().invoke(
        app, ["diff", first.run_id, second.run_id, "--workspace", workspace.address]
    )
    assert "inputs.previous: absent → " in differing.stdout
    audited = CliRunner().invoke(app, ["audit", second.run_id, "--workspace", workspace.address])
    assert audited.exit_code == 0
    assert "training state" in audited.stdout


def test_parts_that_keep_the_same_weights_are_told_apart_by_their_keys(
    workspace: Workspace, recipe_file: Path
) -> None:
    """No better weights were found, so three artifacts are one object, and they have three states."""
    workspace.root.mkdir(parents=True)
    (workspace.root / SAME).touch()
    record, _ = go_through(workspace, recipe_file, *KEPT, gate(7.5))
    stage = record.stages["policy"]
    assert {each.digest for each in stage.shorter} == {stage.digest}
    states = [workspace.storage.find(state_key(each.stage_key)) for each in stage.shorter]
    assert len({each.artifact.digest for each in states if each is not None}) == 2
    audited = CliRunner().invoke(app, ["audit", record.run_id, "--workspace", workspace.address])
    assert audited.exit_code == 0, audited.stdout


def command(*words: str) -> str:
    """Return what a command prints, in one line."""
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.stdout
    return " ".join(done.stdout.split())


def test_an_audit_finds_another_training_state_and_another_length(
    workspace: Workspace, recipe_file: Path
) -> None:
    go_through(workspace, recipe_file, *KEPT)
    record, _ = go_through(workspace, recipe_file, *KEPT, gate(7.5))
    path = workspace.folder(record.run_id) / "run.json"
    whole = path.read_text()
    edited = json.loads(whole)
    edited["stages"]["policy"]["shorter"][1]["length"] = 7.0
    path.write_text(json.dumps(edited))
    audited = CliRunner().invoke(app, ["audit", record.run_id, "--workspace", workspace.address])
    assert audited.exit_code == 1
    assert "its length is 7, and its stage key was made with another" in audited.stdout
    path.write_text(whole)

    shorter = record.stages["policy"].shorter[0]
    key = state_key(shorter.stage_key)
    ref_file = workspace.root / "store" / "refs" / f"{key}.json"
    ref = json.loads(ref_file.read_text())
    ref["key_parts"]["of"] = "0" * 64
    ref_file.write_text(json.dumps(ref))
    audited = CliRunner().invoke(app, ["audit", record.run_id, "--workspace", workspace.address])
    assert audited.exit_code == 1


@pytest.mark.slow
def test_a_state_stays_as_long_as_its_artifact(workspace: Workspace, recipe_file: Path) -> None:
    """A run that went on from an artifact keeps it and its state; when that run goes too, nothing of them is left."""
    first, _ = go_through(workspace, recipe_file, *KEPT)
    second, _ = go_through(workspace, recipe_file, *LONGER)
    artifact, longer = ref_of(workspace, first).artifact, ref_of(workspace, second).artifact
    states = [state_key(each.stage_key) for each in (artifact, longer)]
    digests = [ref.artifact.digest for key in states if (ref := workspace.storage.find(key)) is not None]
    assert len(digests) == 2
    collect(workspace, keep_last=1)
    assert all(workspace.storage.find(key) is not None for key in (*states, artifact.stage_key))
    assert all(map(workspace.storage.has_object, digests))
    assert planned_policy(workspace, recipe_file, LONGER).action == "reuse"

    go_through(workspace, recipe_file, "seed=18")
    collect(workspace, keep_last=1)
    assert not any(workspace.storage.find(key) is not None for key in (*states, artifact.stage_key))
    assert not any(map(workspace.storage.has_object, digests))


def test_a_run_that_was_asked_to_stop_extends_later(workspace: Workspace, recipe_file: Path) -> None:
    overrides = (*KEPT, gate(7.5))
    with orchestrated(
        workspace, recipe_file, *overrides, in_process=True, stage_function=WORK
    ) as orchestrator:
        attempt_all(orchestrator, until="policy")
        request = orchestrator.request("policy")
        assert request is not None
        orchestrator.attempt(request)
        orchestrator.request_stop()
        assert not orchestrator.extends("policy")
        assert orchestrator.run.record.stages["policy"].status == "resumable"
        orchestrator.end()
    [begun] = read_runs(workspace)
    assert begun.status == "resumable"
    planned = planned_policy(workspace, recipe_file, overrides)
    assert planned.reasons[0] == f"extends {begun.run_id}/policy: 4 → 6 iterations"
    record, _ = go_through(workspace, recipe_file, *overrides)
    assert (record.run_id, record.stages["policy"].status) == (begun.run_id, "completed")
