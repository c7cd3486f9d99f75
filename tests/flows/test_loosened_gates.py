"""Another run loosens a gate that closed: run.json, the ledger, the card, the audit and the policy show it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.orchestrated import attempt_all, orchestrated
from vantage.cli.main import app
from vantage.ledger.model_card import card_sections
from vantage.ledger.replay import read_replay
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.run_claims import record_checks
from vantage.review.reports.first_screen import first_screen
from vantage.review.reports.gather import gather_report
from vantage.runs.record import RunRecord
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.signing.policy import FILE, check_publish_policy
from vantage.storage.refs import Ref

pytestmark = pytest.mark.usefixtures("unsent")

CLOSED = ("stages.value.gate.at_least=0.9",)
LOOSER = ("stages.value.gate.at_least=0.1",)
POLICY = "models: {'*': {aliases: {'*': {loosened_gates: refuse}}}}"


def go_through(workspace: Workspace, recipe: Path, *overrides: str) -> RunRecord:
    """Run to the end, with a critic that explains 0.4."""
    with orchestrated(workspace, recipe, *overrides, in_process=True) as orchestrator:
        attempt_all(orchestrator)
        orchestrator.run.update(status=orchestrator.run.outcome())
        orchestrator.ledger.close()
    return read_runs(workspace)[0]


@pytest.fixture
def loosened(workspace: Workspace, recipe_file: Path) -> RunRecord:
    """Return the second of two runs: its gate asks 0.1, after a gate of 0.9 had closed in the first."""
    first = go_through(workspace, recipe_file, *CLOSED)
    assert first.stages["value"].status == "gate_closed"
    assert first.stages["value"].loosened == ()
    return go_through(workspace, recipe_file, *LOOSER)


def test_run_json_and_the_outbox_have_it(loosened: RunRecord, workspace: Workspace) -> None:
    first = read_runs(workspace)[1]
    [gate] = loosened.stages["value"].loosened
    assert str(gate) == f"explained_variance passed at >= 0.1; closed at >= 0.9 in run {first.run_id}"
    data = workspace.records.read_outbox(loosened.run_id)
    assert data is not None
    entry = read_replay(data, run_id=loosened.run_id).entry
    assert entry.stages["value"].loosened == (gate,)
    assert [name for name, stage in entry.stages.items() if stage.loosened] == ["value"]
    limits = "\n".join(card_sections(entry, "policy", {})["Limits"])
    assert "value: the gate was loosened: " in limits, "what the policy was made of counts, too"


@pytest.mark.slow
def test_a_gate_that_is_left_out_is_loosened_too(workspace: Workspace, recipe_file: Path) -> None:
    go_through(workspace, recipe_file, *CLOSED)
    record = go_through(workspace, recipe_file, "stages.value.gate=[]")
    assert record.stages["value"].verdicts == ()
    [found] = record.stages["value"].loosened
    assert "explained_variance has no gate any longer; closed at >= 0.9" in str(found)


def test_the_report_and_the_status_begin_with_it(loosened: RunRecord, workspace: Workspace) -> None:
    text = f"explained_variance passed at >= 0.1; closed at >= 0.9 in run {read_runs(workspace)[1].run_id}"
    page = first_screen(gather_report(workspace, loosened))
    assert "The gate of value was loosened: " + text.replace(">", "&gt;") in page
    shown = CliRunner().invoke(app, ["status", loosened.run_id, "--workspace", workspace.address])
    assert f"loosened: value: {text}" in shown.stdout


def test_a_policy_refuses_what_was_loosened(loosened: RunRecord, workspace: Workspace) -> None:
    (workspace.root / FILE).write_text(POLICY)
    why = check_publish_policy(workspace, loosened, "policy", model="tiny", alias="champion")
    assert why is not None
    assert f"loosened_gates: value of run {loosened.run_id}: explained_variance passed at >= 0.1" in why
    assert "train a model that passes the earlier gate" in why
    hidden = loosened.model_copy(
        update={
            "stages": {
                name: each.model_copy(update={"loosened": ()}) for name, each in loosened.stages.items()
            }
        }
    )
    why = check_publish_policy(workspace, hidden, "policy", model="tiny", alias="champion")
    assert why is not None, "the other run's record shows it too"


def test_a_policy_lets_through_what_was_not(workspace: Workspace, recipe_file: Path) -> None:
    record = go_through(workspace, recipe_file, *LOOSER)
    go_through(workspace, recipe_file, *CLOSED)  # later: it closes what was published
    (workspace.root / FILE).write_text(POLICY)
    assert check_publish_policy(workspace, record, "policy", model="tiny", alias="champion") is None


def test_the_audit_notes_it_and_finds_one_that_was_invented(
    loosened: RunRecord, workspace: Workspace
) -> None:
    def notes(record: RunRecord) -> list[tuple[str, str]]:
        workspace.records.write(record)
        with Evidence(workspace) as evidence:
            ref = evidence.ref(record.stages["value"].stage_key or "")
            assert isinstance(ref, Ref)
            found = record_checks(evidence, record.run_id, "value", ref.artifact.digest, ref)
            return [(check.outcome, check.detail) for check in found if "loosened" in check.detail]

    [gate] = loosened.stages["value"].loosened
    assert notes(loosened) == [("note", f"loosened: {gate}")]
    invented = gate.model_copy(update={"metric": "residual_variance"})
    stage = loosened.stages["value"].model_copy(update={"loosened": (gate, invented)})
    found = notes(loosened.model_copy(update={"stages": loosened.stages | {"value": stage}}))
    assert [outcome for outcome, _ in found] == ["note", "wrong"]
    assert found[1][1].endswith(f"which run {gate.run_id} does not confirm")
    none = loosened.stages["value"].model_copy(update={"loosened": ()})
    assert notes(loosened.model_copy(update={"stages": loosened.stages | {"value": none}}))[0][0] == "note"
