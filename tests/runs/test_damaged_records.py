"""A damaged record is read or refused in a sentence, whatever was done to it."""

from collections import Counter
from pathlib import Path

import pytest

from tests.runs.damaged_records import POLICY, Finished, trial
from tests.support.orchestrated import attempt_all, orchestrated
from vantage.ledger.outbox import Outbox
from vantage.runs.workspace import Workspace
from vantage.signing.policy import FILE

INPUTS = 60


@pytest.fixture
def finished(workspace: Workspace, recipe_file: Path) -> Finished:
    with orchestrated(workspace, recipe_file, in_process=True) as orchestrator:
        attempt_all(orchestrator)
        orchestrator.run.update(status="completed")
    run_id = orchestrator.run.record.run_id
    outbox = Outbox(workspace.root / "runs" / run_id / "ledger")
    for number in range(3):
        outbox.append({"kind": "metric", "values": {"loss": number / 3}, "step": number})
    (workspace.root / FILE).write_text(POLICY)
    return Finished(workspace, run_id)


def test_damage_at_random_is_read_or_refused(finished: Finished) -> None:
    assert set(finished.files()) == {"run.json", "ref", "manifest", "outbox", "policy"}
    for kind in finished.files():
        ends = Counter(trial(number, kind, finished) for number in range(INPUTS))
        assert ends.total() == INPUTS
        if kind == "run.json":
            assert set(ends) == {"read", "RunError"}
        elif kind == "policy":
            assert set(ends) <= {"read", "BadPolicy"}
        elif kind == "ref":
            assert set(ends) == {"read"}, "a damaged ref is looked up as damage, and its stage runs"
        else:
            assert ends.total() > ends["read"]
