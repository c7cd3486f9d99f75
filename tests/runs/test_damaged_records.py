"""A damaged record is read or refused in a sentence, whatever was done to it."""

from collections import Counter
from pathlib import Path

import pytest

from tests.runs.damaged_records import Finished, finished_run, trial
from vantage.runs.workspace import Workspace

pytestmark = pytest.mark.slow

INPUTS, FEWER = 60, 20
UNIMPORTANT = {"sent.json", "movements", "progress", "judges' answers", "saved dataset", "description"}
"""Records whose damage is left out, done again, or is a finding of the audit."""


@pytest.fixture
def finished(workspace: Workspace, tmp_path: Path) -> Finished:
    return finished_run(workspace, tmp_path)


def test_damage_at_random_is_read_or_refused(finished: Finished) -> None:
    assert {"run.json", "ref", "manifest", "outbox", "policy"} < set(finished.files())
    for kind in finished.files():
        inputs = FEWER if kind in UNIMPORTANT else INPUTS
        ends = Counter(trial(number, kind, finished) for number in range(inputs))
        assert ends.total() == inputs
        if kind == "run.json":
            assert set(ends) == {"read", "RunError"}
        elif kind == "policy":
            assert set(ends) <= {"read", "BadPolicy"}
        elif kind == "ref":
            assert set(ends) == {"read"}, "a damaged ref is looked up as damage, and its stage runs"
        elif kind in UNIMPORTANT:
            assert set(ends) == {"read"}
        else:
            assert ends.total() > ends["read"]
