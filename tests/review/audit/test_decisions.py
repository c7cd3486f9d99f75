"""An audit checks decisions about a model: approvals, moved aliases, signatures and removals."""

from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from tests.review.audit import audited_work
from tests.review.audit.conftest import run_once
from tests.review.audit.tampering import Case, edit_json, edit_lines, found
from tests.support.orchestrated import Witness
from vantage.flows.publishing.moving_aliases import publish_again, roll_back
from vantage.ledger.operations import MoveAlias, Publish
from vantage.review.audit.decisions import deciding_runs
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.target import audit
from vantage.runs.approving import answer
from vantage.runs.record import RunRecord
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.records import verdicts
from vantage.schemas.records.audit import AuditReport
from vantage.schemas.records.job import StageJob, StageResult
from vantage.schemas.records.uncertainty import Uncertainty
from vantage.signing.keys import SigningKey, new_key
from vantage.signing.signing import sign_all
from vantage.storage.removed import Cause
from vantage.storage.storage import garbage_of

RECIPE = """\
recipe: asking
model: {source: "builtin:tiny"}
data: {demonstrations: {source: "builtin:arithmetic/demonstrations"}}
stages:
  sft: {kind: sft, data: demonstrations, gate: {metric: test_nll, at_most: 0.1, on_fail: approve}}
publish: [{stage: sft, registered_model: asking, alias: champion, approve: true}]
"""


class Place:
    """A workspace with its own MLflow, in which a gate and an alias wait for a person."""

    def __init__(self, folder: Path) -> None:
        self.workspace = Workspace(folder / "workspace")
        self.recipe = folder / "asking.yaml"
        self.recipe.write_text(RECIPE)

    @cached_property
    def client(self) -> MlflowClient:
        """A client of its database, to be used after a run: the run's ledger makes the database from a copy, where a
        client would take seconds for migrations."""
        return MlflowClient(tracking_uri=f"sqlite:///{self.workspace.root / 'mlflow.db'}")

    @property
    def record(self) -> RunRecord:
        return read_runs(self.workspace)[0]

    def run(self, *overrides: str) -> RunRecord:
        run_once(self.workspace, self.recipe, *overrides)
        return self.record

    def approve(self, subject: str) -> None:
        given = {"approved": True, "by": "ada", "reason": "the slice is small"}
        answer(self.workspace, self.record.run_id, subject, **given)  # type: ignore[arg-type]

    def publish_approved(self, *overrides: str) -> RunRecord:
        """Return a run whose gate and alias a person let pass."""
        self.run(*overrides)
        self.approve("sft")
        self.run(*overrides)
        self.approve("publish:asking")
        return self.run(*overrides)

    def audit(self, target: str = "latest") -> AuditReport:
        with Evidence(self.workspace) as evidence:
            return audit(evidence, target)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Place(tmp_path)


def is_clean(report: AuditReport) -> bool:
    assert (found(report), found(report, "unchecked")) == ([], [])
    return report.exit_code == 0


def test_a_published_model_is_audited_with_the_gates_that_were_loosened_for_it(place: Place) -> None:
    """A first run made the model, and its gate closed. A second run asked for less and published the model."""
    closed = place.run("publish=[]")
    loosened = place.run("publish.0.approve=false", "stages.sft.gate.at_most=5")
    assert loosened.status == "completed"
    report = place.audit("asking@champion")
    assert is_clean(report)
    [note] = [check for check in report.checks if "loosened" in check.detail]
    assert (note.subject, note.outcome) == ("gates", "note")
    assert note.detail == (
        f"loosened in sft of run {loosened.run_id}: test_nll passed at <= 5; closed at <= 0.1 in run {closed.run_id}"
    )
    assert not any(
        "loosened" in check.detail for check in place.audit("asking/1").checks if check.outcome == "wrong"
    )


def test_from_waiting_to_an_alias_that_people_let_move(place: Place) -> None:
    assert place.run().status == "waiting_approval"
    assert is_clean(place.audit())
    place.approve("sft")
    assert is_clean(place.audit()), "answered, and not resumed"
    place.run()
    assert is_clean(place.audit()), "the alias waits"
    place.approve("publish:asking")
    record = place.run()
    assert record.status == "completed"
    assert is_clean(place.audit())
    report = place.audit("asking@champion")
    assert is_clean(report)

    path = place.workspace.folder(record.run_id) / "run.json"
    whole = path.read_bytes()
    edit_json(path, lambda run: run.update(approvals=run["approvals"][1:]))
    for file in (place.workspace.folder(record.run_id) / "approvals").glob("*.json"):
        file.unlink()
    said = found(place.audit())
    assert any("by its verdicts and the answers to them it is waiting approval" in each for each in said), (
        said
    )
    assert any("the outbox has an answer about sft" in each for each in said), said
    path.write_bytes(whole)

    def forge(run: dict[str, object]) -> None:
        answers = run["approvals"]
        assert isinstance(answers, list)
        answers[0]["by"] = "grace"

    edit_json(path, forge)
    said = found(place.audit())
    assert any("run.json has an answer about sft (approved by grace" in each for each in said), said
    path.write_bytes(whole)

    outbox = place.workspace.folder(record.run_id) / "ledger" / "outbox.jsonl"
    edit_lines(outbox, lambda lines: [each for each in lines if each["operation"] != "record_approval"])
    said = found(place.audit("asking@champion"))
    assert any(
        "the gate of sft is closed" in each and "nobody has approved of it" in each for each in said
    ), said
    assert any("vantage.approval" in each and "nobody sent" in each for each in said), said


def test_what_an_earlier_version_judged_and_people_answered_stands(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdicts without a method are judged by the rules they were made by: the answer to them holds, and the audit agrees."""
    of_stage = audited_work.run_stage

    def estimated(job: StageJob) -> StageResult:
        known = Uncertainty(n=40, rows=40, standard_error=0.02)
        return of_stage(job).model_copy(
            update={"uncertainty": {"test_nll": known} if job.name == "sft" else {}}
        )

    monkeypatch.setattr(audited_work, "run_stage", estimated)
    with monkeypatch.context() as earlier:
        earlier.setattr(verdicts, "_is_of_earlier_method", lambda like, uncertainty: True)
        assert place.run().status == "waiting_approval"
    [told] = place.record.stages["sft"].verdicts
    assert (told.method, told.n is not None) == (None, True)
    assert is_clean(place.audit())
    place.approve("sft")
    place.run()
    place.approve("publish:asking")
    record = place.run()
    assert record.status == "completed"
    assert record.stages["sft"].verdicts == (told,)
    assert is_clean(place.audit())
    assert is_clean(place.audit("asking@champion"))

    path = place.workspace.folder(record.run_id) / "run.json"
    whole = path.read_bytes()
    for field, value in (("method", "wilson"), ("counts", {"rows": 3})):

        def claim(run: Any, field: str = field, value: object = value) -> None:
            run["stages"]["sft"]["verdicts"][0][field] = value

        edit_json(path, claim)
        assert any("gate" in each for each in found(place.audit())), field
        path.write_bytes(whole)

    def widen(run: Any) -> None:
        run["stages"]["sft"]["intervals"]["test_nll"] = [0.0, 99.0]

    edit_json(path, widen)
    assert any("intervals" in each for each in found(place.audit()))


@pytest.mark.slow
def test_an_alias_that_was_rolled_back_and_one_that_was_moved_by_hand(place: Place) -> None:
    place.publish_approved("seed=1")
    second = place.publish_approved("seed=2")
    roll_back(place.workspace, "asking", "champion", to=None, by="ada", reason="worse", watcher=Witness())
    report = place.audit("asking@champion")
    assert is_clean(report)
    [moved] = [check for _, check in report.every_check() if check.subject == "alias asking@champion"]
    assert "moved by ada (ledger of run 0001-" in moved.detail
    assert is_clean(place.audit()), "nothing is wrong with the run whose alias was moved back"
    publish_again(place.workspace, second.run_id, Witness(), model=None, alias="trial")
    place.approve("publish:asking@trial")
    publish_again(place.workspace, second.run_id, Witness(), model=None, alias="trial")
    assert is_clean(place.audit("asking@trial"))

    place.client.set_registered_model_alias("asking", "champion", "2")
    said = found(place.audit("asking@champion"))
    assert any("no run moved it there" in each for each in said), said


def test_required_signatures(case: Case, tmp_path: Path) -> None:
    """With a required key, an audit reports each artifact that is not signed with it."""
    key, other = new_key(tmp_path / "key.pem"), new_key(tmp_path / "other.pem")

    def audited(*keys: SigningKey, target: str = "fake@champion") -> AuditReport:
        with Evidence(case.workspace, required_keys=[each.public for each in keys]) as evidence:
            return audit(evidence, target)

    report = audited(key)
    unsigned = [where for where, check in report.every_check() if check.subject == "signature"]
    assert report.exit_code == 1
    assert len(unsigned) == len(report.artifacts)
    sign_all(case.workspace, case.record, list(case.record.stages), key)
    assert is_clean(audited(key))
    assert is_clean(audited()), "a signature that nobody asks for must hold all the same"
    said = found(audited(other))
    assert any(f"is not signed by key {other.public.short}, which is required" in each for each in said), said

    edit_json(case.ref("sft"), lambda ref: ref["provenance"].update(torch="2.0"))
    said = found(audited(key, target="fake"))
    assert any("signature: key" in each and "differs from what was signed" in each for each in said), said


@pytest.mark.parametrize("edited", [False, True])
def test_a_removed_artifact_is_told_with_when_and_what_it_was(case: Case, edited: bool) -> None:
    cause = Cause(when="2026-11-24T03:00:00+00:00", why="no run needed it", by="root")
    digest, key = case.digest("sft"), str(case.record.stages["sft"].stage_key)
    remove(case.workspace, digest, key, cause)
    if edited:
        file = case.workspace.store / "removed" / digest / "manifest.json"
        file.chmod(0o644)
        file.write_bytes(file.read_bytes().replace(b'"size":', b'"size": '))
    report = case.audit("fake@champion")
    [sft] = [each for each in report.artifacts if each.digest == digest]
    [files] = [check for check in sft.checks if check.subject == "files"]
    if edited:
        assert (files.outcome, report.exit_code) == ("wrong", 1)
        assert "manifest.json: sha256 is" in files.detail
        return
    assert found(report) == []
    assert report.exit_code == 2
    assert files.outcome == "unchecked"
    assert files.detail.startswith("removed on 2026-11-24T03:00:00+00:00 by root: no run needed it; it was ")
    assert {edge.role for edge in sft.parents} == {"init", "data"}, "the walk goes on beyond it"


def remove(workspace: Workspace, digest: str, stage_key: str, cause: Cause) -> None:
    """Remove one artifact as ``vantage gc`` does."""
    garbage = garbage_of(workspace.storage, cause)
    assert garbage.remove_refs([stage_key], needed=tuple) == [stage_key]
    assert garbage.remove_object(digest, needed=tuple)


def test_a_run_that_moved_an_alias_to_a_version_decided_about_it_as_well() -> None:
    """A run that made a model, but whose gate was closed, keeps the movement of the version that another run published."""
    published = Publish.model_construct(
        registered_model="chat", alias="champion", artifact=SimpleNamespace(digest="d")
    )
    moved = MoveAlias.model_construct(registered_model="chat", alias="champion", digest="d")
    of_another_version = moved.model_copy(update={"digest": "e"})
    recorded = [
        SimpleNamespace(run_id=run_id, operation=operation, digest=digest)
        for run_id, operation, digest in (
            ("publishes", published, "d"), ("moves", moved, "d"), ("publishes", moved, "d"), ("elsewhere", of_another_version, "e")
        )
    ]  # fmt: skip
    evidence: Any = SimpleNamespace(once=lambda key, make: recorded)
    assert deciding_runs(evidence, "chat", "d", "champion") == ["publishes", "moves"]
    assert (
        deciding_runs(evidence, "chat", "d", "other")
        == deciding_runs(evidence, "chat", "d", None)
        == ["publishes"]
    )
