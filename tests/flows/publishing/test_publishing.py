"""A model is registered, and its alias moves, when it should; a recording replaces the ledger."""

import hashlib
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vantage.flows.publishing import publishing
from vantage.flows.publishing.publishing import publish, question_about
from vantage.ledger.run_ledger import CopyStatus
from vantage.runs.record import PublishedCopy, StageRecord
from vantage.runs.workspace import Workspace
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.recipe import Publication
from vantage.schemas.recipe.rewards import Judge
from vantage.schemas.recipe.stage import Gate
from vantage.schemas.records.approvals import Approval
from vantage.schemas.records.artifacts import Evaluation
from vantage.schemas.records.verdicts import check_gate
from vantage.storage.store import Store


class Recorder:
    """A ledger that only remembers what it was asked to publish."""

    def __init__(self, version: str | None = "3", **said: Any) -> None:
        self.version = version
        self.copy = CopyStatus(**{"location": "/m", "repaired": (), "refused": None} | said)
        self.asked: list[tuple[str, str, str | None]] = []

    def publish(
        self,
        stage: str,
        artifact: Evaluation,
        folder: Path,
        registered_model: str,
        *,
        alias: str | None,
        by: str | None = None,
        newest: int | None = None,
    ) -> str | None:
        assert newest is None, "no run has recorded a movement"
        self.asked.append((stage, registered_model, alias))
        return self.version

    def copy_status(self, registered_model: str, artifact: Any) -> CopyStatus:
        return self.copy


EVALUATION = PolicyEvaluation(
    kind="evaluation",
    candidate="policy",
    baseline="sft",
    judge=Judge(verifier="arithmetic"),
    prompts="prompts",
)


def life_with(ledger: Recorder, *, files: dict[str, str] | None = None, **stages: StageRecord) -> Any:
    """Return a run whose stages have these records; ``files``: step → what its artifact holds, its own name if not given."""
    said: list[str] = []
    steps = {"model", "sft", *stages}
    record = SimpleNamespace(
        run_id="0002-fake-abcdef", stages=stages, copies={}, unpublished={}, refused_aliases={}, approvals=()
    )
    return SimpleNamespace(
        run=SimpleNamespace(
            record=record,
            update=lambda **changes: vars(record).update(changes),
            workspace=Workspace(Path("no-workspace")),
        ),
        recipe=SimpleNamespace(stages={"policy": None, "evaluation": EVALUATION}),
        inputs={
            "sft": {"init": "model"},
            "policy": {"init": "model"},
            "evaluation": {"candidate": "policy", "baseline": "sft"},
        },
        artifacts={
            name: Evaluation(
                uri="objects/x",
                digest=sha(f"{name} and its metrics"),
                stage_key=sha(name),
                parents={},
                files_digest=sha((files or {}).get(name, name)),
            )
            for name in steps
        },
        store=SimpleNamespace(
            folder=lambda artifact: Path("objects") / artifact.digest,
            exclusive=lambda stage_key, **of: nullcontext(),
        ),
        ledger=ledger,
        watcher=SimpleNamespace(say=lambda text, style="": said.append(text)),
        said=said,
    )


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def gated(status: str, *, gain: float) -> StageRecord:
    verdict = check_gate(Gate(metric="accuracy_gain", at_least=0.0), {"accuracy_gain": gain})
    return StageRecord.model_validate({"status": status, "verdicts": (verdict,)})


POLICY = StageRecord(status="completed")
PUBLICATION = Publication(stage="policy", registered_model="quickstart", alias="champion", after="evaluation")


@pytest.fixture(autouse=True)
def bills(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the stages whose bill of materials was recorded; tests/review/exports/test_bill_of_materials.py is about
    the bills.
    """
    told: list[str] = []
    monkeypatch.setattr("vantage.review.exports.bills.tell_bill", lambda run, step, **of: told.append(step))
    return told


def test_what_is_published_has_its_bill_told(bills: list[str]) -> None:
    publish(PUBLICATION, life_with(Recorder(), policy=POLICY, evaluation=gated("completed", gain=0.1)))
    assert bills == ["policy"]


def test_a_model_whose_bill_cannot_be_made_is_published_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: Any, step: str, **of: Any) -> None:
        raise ValueError("nobody knows what was installed")

    monkeypatch.setattr("vantage.review.exports.bills.tell_bill", refuse)
    ledger = Recorder()
    life = life_with(ledger, policy=POLICY, evaluation=gated("completed", gain=0.1))
    publish(PUBLICATION, life)
    assert ledger.asked == [("policy", "quickstart", "champion")]
    assert life.said[0] == "  there is no bill of materials of policy: nobody knows what was installed"


@pytest.mark.parametrize("status", ["completed", "reused"])
def test_the_alias_moves_when_the_gate_has_passed(status: str) -> None:
    ledger = Recorder()
    life = life_with(ledger, policy=POLICY, evaluation=gated(status, gain=0.1))
    publish(PUBLICATION, life)
    assert ledger.asked == [("policy", "quickstart", "champion")]
    assert life.said == ["  published policy as quickstart@champion: version 3"]


def test_a_gate_that_failed_but_continues_keeps_the_alias_where_it_is() -> None:
    ledger = Recorder()
    life = life_with(ledger, policy=POLICY, evaluation=gated("completed", gain=-0.1))
    publish(PUBLICATION, life)
    assert ledger.asked == [("policy", "quickstart", None)]
    assert any("champion stays where it is: gate of evaluation: accuracy_gain" in line for line in life.said)
    assert life.run.record.refused_aliases == {}, "the recipe said that the run goes on: exit code 0, not 78"


def test_what_a_person_rejected_is_in_the_record() -> None:
    policy = StageRecord(status="completed", stage_key=sha("key"), digest=sha("policy and its metrics"))
    life = life_with(Recorder(), policy=policy, evaluation=gated("completed", gain=0.1))
    asked = PUBLICATION.model_copy(update={"approve": True})
    question = question_about(asked, life)
    life.run.record.approvals = (
        Approval(question=question, approved=False, by="ada", reason="too long", time=0),
    )
    publish(asked, life)
    assert "too long" in life.run.record.refused_aliases["quickstart@champion"]


def test_why_an_alias_stayed_is_forgotten_once_it_moves() -> None:
    life = life_with(Recorder(), policy=POLICY, evaluation=gated("completed", gain=0.1))
    life.run.record.refused_aliases = {"quickstart@champion": "a gate", "other@champion": "another"}
    publish(PUBLICATION, life)
    assert life.run.record.refused_aliases == {"other@champion": "another"}


@pytest.mark.parametrize("status", ["gate_closed", "failed", "blocked", "resumable", "waiting"])
def test_nothing_is_published_after_a_stage_that_did_not_go_well(status: str) -> None:
    ledger = Recorder()
    life = life_with(ledger, policy=POLICY, evaluation=gated(status, gain=0.1))
    publish(PUBLICATION, life)
    assert ledger.asked == []
    assert "policy is not published as quickstart: evaluation is" in life.said[0]


def test_a_publication_without_a_gate_needs_its_own_stage_only() -> None:
    ledger = Recorder()
    publish(Publication(stage="policy", registered_model="m"), life_with(ledger, policy=POLICY))
    assert ledger.asked == [("policy", "m", None)]


def test_a_dead_ledger_is_said() -> None:
    life = life_with(Recorder(version=None), policy=POLICY, evaluation=gated("completed", gain=0.1))
    publish(PUBLICATION, life)
    assert "MLflow does not answer" in life.said[0]


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"policy": "model"}, "policy holds the weights of model, which it started from"),
        ({"policy": "sft"}, "policy holds the weights of sft, the baseline of evaluation"),
        ({"policy": "sft", "sft": "sft"}, "policy holds the weights of sft, the baseline of evaluation"),
    ],
)
@pytest.mark.parametrize("after", ["evaluation", None])
def test_an_alias_never_moves_to_a_model_that_is_not_new(
    files: dict[str, str], why: str, after: str | None
) -> None:
    """The alias stays even where every gate has passed, and where it waits for no gate."""
    ledger = Recorder()
    life = life_with(ledger, files=files, policy=POLICY, evaluation=gated("completed", gain=0.1))
    publish(PUBLICATION.model_copy(update={"after": after}), life)
    assert ledger.asked == [("policy", "quickstart", None)]
    assert life.said == [
        f"  champion stays where it is: {why}",
        "  published policy as quickstart: version 3",
    ]


def test_where_mlflow_keeps_its_copy_is_recorded_and_a_damaged_one_is_told() -> None:
    life = life_with(Recorder(repaired=("model: a: is missing",)), policy=POLICY)
    publish(Publication(stage="policy", registered_model="m"), life)
    copy = PublishedCopy(location="/m", digest=sha("policy and its metrics"), version="3")
    assert life.run.record.copies == {"m": copy}
    assert life.said == [
        "  MLflow's copy of m was damaged, and is made again from the store: model: a: is missing",
        "  published policy as m: version 3",
    ]


def test_a_copy_that_is_not_what_is_stored_is_no_publication() -> None:
    life = life_with(Recorder(version=None, location=None, refused="it differs"), policy=POLICY)
    publish(Publication(stage="policy", registered_model="m"), life)
    assert life.run.record.unpublished == {"m": "it differs"}
    assert life.said == ["  policy is not published as m: it differs"]


def test_runs_that_publish_one_artifact_do_so_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other holds the artifact's lock: this one shows for whom it waits, and publishes when it is free."""
    store, ledger = Store(tmp_path / "store"), Recorder()
    life = life_with(ledger, policy=POLICY, evaluation=gated("completed", gain=0.1))
    life.store = SimpleNamespace(folder=lambda artifact: Path("objects"), exclusive=store.exclusive)
    key = life.artifacts["policy"].stage_key
    with store.exclusive(key, holder="run 0001-fake-abcdef"):
        thread = threading.Thread(target=publish, args=(PUBLICATION, life))
        thread.start()
        deadline = time.monotonic() + 20
        while not any("publishing waits for run 0001-fake-abcdef" in line for line in life.said):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert ledger.asked == []
    thread.join(20)
    assert ledger.asked == [("policy", "quickstart", "champion")]

    monkeypatch.setattr(publishing, "LOCK_SECONDS", 0.1)
    with store.exclusive(key, holder="run 0001-fake-abcdef"):
        publish(PUBLICATION, life)
    assert len(ledger.asked) == 2, "it is not held up for ever"
