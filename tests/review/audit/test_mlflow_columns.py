"""Every column of MLflow's schema is documented, and an audit finds a change of it as the page describes."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import mlflow.store.model_registry.dbmodels.models
import mlflow.store.tracking.dbmodels.models  # noqa: F401 - adds its tables to the metadata
import pytest
from mlflow.store.db.base_sql_model import Base

from tests.review.audit.tampering import Case, found

PAGE = Path(__file__).parents[3] / "docs" / "audit_columns.md"
EXIT_CODES = {"not compared": 0, "wrong": 1, "not checked": 2}
OF_THE_SERVER = {"alembic_version", "workspaces"}
ROWS = {
    "experiments": "name = 'fake'",
    "runs": "name = 'sft'",
    "tags": "key = 'vantage.digest'",
    "params": "key = 'learning_rate'",
    "metrics": "key = 'loss'",
    "latest_metrics": "key = 'loss'",
    "inputs": "destination_type = 'RUN' AND destination_id IN (SELECT run_uuid FROM runs WHERE name = 'sft')",
    "datasets": "name = 'demonstrations'",
    "logged_models": "name = 'sft'",
    "logged_model_tags": "tag_key = 'vantage.digest'",
    "registered_models": "name = 'fake'",
    "model_versions": "name = 'fake'",
    "model_version_tags": "name = 'fake' AND key = 'vantage.digest'",
}
"""Table → condition for the row that is changed. In other tables it is any row."""
VALUES: dict[str, str | int] = {
    "runs.status": "FAILED",
    "runs.source_type": "JOB",
    "runs.lifecycle_stage": "deleted",
    "experiments.lifecycle_stage": "deleted",
    "logged_models.status": 3,
    "logged_models.lifecycle_stage": "deleted",
    "model_versions.status": "FAILED_REGISTRATION",
    "metrics.is_nan": 1,
    "latest_metrics.is_nan": 1,
}
"""Column → another value that the database accepts, where it does not accept every value."""
FAST = {"model_versions.storage_location", "logged_models.artifact_location", "runs.status"}


def documented() -> dict[str, str]:
    """Return column → what an audit finds after a change of it."""
    rows = re.findall(r"^\| `(\w+\.\w+)` \| (.+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    assert all(compared.startswith("–") == (outcome == "not compared") for _, compared, outcome in rows)
    return {column: outcome for column, _, outcome in rows}


def empty_tables() -> set[str]:
    """Return the tables that the page lists as empty."""
    text = (
        PAGE.read_text().partition("## Tables that Vantage leaves empty")[2].partition("`alembic_version`")[0]
    )
    return set(re.findall(r"`(\w+)`", text))


def change(database: Path, column: str) -> None:
    """Give one row another value in a column."""
    table, name = column.split(".")
    with closing(sqlite3.connect(database)) as connection:
        chosen = f"SELECT rowid, {name} FROM {table} WHERE {ROWS.get(table, '1')} LIMIT 1"
        row, value = connection.execute(chosen).fetchone()
        types = {each[1]: each[2] for each in connection.execute(f"PRAGMA table_info({table})")}
        is_number = isinstance(value, int | float) or (value is None and "INT" in types[name])
        other = VALUES.get(column, (value or 0) + 1 if is_number else "edited")
        connection.execute(f"UPDATE {table} SET {name} = ? WHERE rowid = ?", (other, row))
        connection.commit()


def test_every_column_of_the_installed_version_is_documented() -> None:
    columns = {
        f"{table.name}.{column.name}"
        for table in Base.metadata.tables.values()
        if table.name not in empty_tables() | OF_THE_SERVER
        for column in table.columns
    }
    assert columns == documented().keys()
    assert empty_tables() <= Base.metadata.tables.keys()
    assert set(documented().values()) == EXIT_CODES.keys()


@pytest.mark.slow
def test_a_run_leaves_the_other_tables_empty(case: Case) -> None:
    written = {column.partition(".")[0] for column in documented()}
    with closing(sqlite3.connect(case.workspace.root / "mlflow.db")) as connection:
        tables = [
            name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        ]
        filled = {name for name in tables if connection.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchone()}
    assert filled - OF_THE_SERVER == written


@pytest.mark.slow
def test_columns_that_are_not_compared_change_nothing(short_case: Case) -> None:
    """All such columns are changed at once, because an audit of each alone would end with 0 as well."""
    columns = [each for each, outcome in documented().items() if outcome == "not compared"]
    for column in sorted(columns, key="runs.name".__eq__):  # rows are chosen by this column, so it comes last
        change(short_case.workspace.root / "mlflow.db", column)
    report = short_case.audit()
    assert report.exit_code == 0, (found(report), found(report, "unchecked"))


@pytest.mark.parametrize(
    "column",
    [
        pytest.param(each, marks=() if each in FAST else pytest.mark.slow)
        for each, outcome in documented().items()
        if outcome != "not compared"
    ],
)
def test_a_changed_column_is_found_as_documented(short_case: Case, column: str) -> None:
    change(short_case.workspace.root / "mlflow.db", column)
    report = short_case.audit()
    assert report.exit_code == EXIT_CODES[documented()[column]], (found(report), found(report, "unchecked"))
