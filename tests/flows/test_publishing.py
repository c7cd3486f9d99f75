"""When a model is registered, and when its alias moves; a recording stands in for the ledger."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flows.publishing import publish
from flows.runs import StageRecord
from schemas.recipe import Gate, Publication
from schemas.verdicts import judge


class Recorder:
    """A ledger that only remembers what it was asked to publish."""

    def __init__(self, version: str | None = "3") -> None:
        self.version = version
        self.asked: list[tuple[str, str, str | None]] = []

    def publish(
        self, stage: str, artifact: str, folder: Path, registered_model: str, *, alias: str | None
    ) -> str | None:
        self.asked.append((stage, registered_model, alias))
        return self.version


def life_with(ledger: Recorder, **stages: StageRecord) -> Any:
    said: list[str] = []
    return SimpleNamespace(
        run=SimpleNamespace(record=SimpleNamespace(stages=stages)),
        artifacts={name: name for name in stages},
        store=SimpleNamespace(folder=lambda artifact: Path("objects") / artifact),
        ledger=ledger,
        watcher=SimpleNamespace(say=lambda text, style="": said.append(text)),
        said=said,
    )


def gated(status: str, *, gain: float) -> StageRecord:
    verdict = judge(Gate(metric="accuracy_gain", at_least=0.0), {"accuracy_gain": gain})
    return StageRecord.model_validate({"status": status, "verdicts": (verdict,)})


POLICY = StageRecord(status="completed")
PUBLICATION = Publication(stage="policy", registered_model="quickstart", alias="champion", after="evaluation")


@pytest.mark.parametrize("status", ["completed", "reused"])
def test_the_alias_moves_when_the_gate_has_passed(status: str) -> None:
    ledger = Recorder()
    life = life_with(ledger, policy=POLICY, evaluation=gated(status, gain=0.1))
    publish(PUBLICATION, life)
    assert ledger.asked == [("policy", "quickstart", "champion")]
    assert life.said == ["  published policy as quickstart@champion: version 3"]


def test_a_gate_that_failed_but_continues_keeps_the_alias_where_it_is() -> None:
    ledger = Recorder()
    publish(PUBLICATION, life_with(ledger, policy=POLICY, evaluation=gated("completed", gain=-0.1)))
    assert ledger.asked == [("policy", "quickstart", None)]


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
