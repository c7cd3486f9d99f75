"""A damaged record is read or refused in a sentence, whatever was done to it."""

from collections import Counter
from pathlib import Path

import pytest

from tests.runs.damaged_records import Finished, finished_run, trial
from vantage.runs.workspace import Workspace

INPUTS = 60


@pytest.fixture
def finished(workspace: Workspace, tmp_path: Path) -> Finished:
    return finished_run(workspace, tmp_path)


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
