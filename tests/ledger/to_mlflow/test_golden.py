"""The writer makes MLflow contain what golden files hold, which no test writes."""

from pathlib import Path

import pytest

from tests.ledger.record_golden import SCENARIOS, record
from tests.ledger.recorded_contents import contents_of, read_golden, restore
from tests.ledger.small_run import client_of


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_same_operations_make_the_recorded_contents(name: str, workspace: Path) -> None:
    """MLflow contains what was recorded. After an intended change, ``python -m tests.ledger.record_golden`` records
    again.
    """
    assert record(name, workspace) == read_golden(name)


def test_restored_contents_are_those_that_were_recorded(workspace: Path) -> None:
    """Files among the artifacts, and which pages of models show a metric, are not restored."""
    recorded = read_golden("reused")["mlflow"]
    restore(recorded, client_of(workspace), artifacts=workspace / "mlartifacts")
    restored = contents_of(client_of(workspace))
    for model in (*recorded["models"].values(), *restored["models"].values()):
        del model["metrics"]
    assert restored == recorded
