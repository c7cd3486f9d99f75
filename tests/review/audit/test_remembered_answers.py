"""Answers are remembered for equal rows alone: another value in any column of MLflow's database is another content."""

import shutil
from pathlib import Path

import pytest

from tests.review.audit.remembered_answers import LOGGED, REGISTERED, content_of
from tests.review.audit.tampering import Case
from tests.review.audit.test_mlflow_columns import change, documented

pytestmark = pytest.mark.slow


def test_another_value_in_any_column_is_another_content(short_case: Case, tmp_path: Path) -> None:
    original, changed = short_case.workspace.root / "mlflow.db", tmp_path / "changed.db"
    before = content_of(original)
    assert before is not None and content_of(original) == before
    for column in documented():
        shutil.copy(original, changed)
        change(changed, column)
        after = content_of(changed)
        assert after is not None
        table = column.partition(".")[0]
        of_models = table.startswith(REGISTERED)
        assert (after.of_runs == before.of_runs) is of_models, column
        assert (after.of_models == before.of_models) is (table in LOGGED), column
        assert (after.of_any_run == before.of_any_run) is (of_models or table in LOGGED), column
        runs = after.logged.keys() | before.logged.keys()
        others = [run for run in runs if after.logged.get(run) != before.logged.get(run)]
        assert bool(others) is (table in LOGGED), column
        assert len(others) <= 2, "the run, and another that has its rows now"


def test_a_database_that_cannot_be_read_has_no_content(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"no database" * 100)
    assert content_of(tmp_path / "mlflow.db") is None
