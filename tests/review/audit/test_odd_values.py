"""An audit copes with values that no version of MLflow writes, in each column of its database: SQLite takes any value in any column.

An audit ends by itself, and never says that all agrees where the page of columns says that a change is found.
``python -m tests.review.audit.every_odd_value`` stores each of them in each column, in some 600 audits.
"""

import sqlite3
from contextlib import closing

import pytest

from tests.review.audit.tampering import Case, found
from tests.review.audit.test_mlflow_columns import EXIT_CODES, ROWS, documented
from vantage.ledger.to_mlflow.audited_runs import AuditedServer, Unanswered

pytestmark = pytest.mark.slow

BYTES = b"\xff\xfe\x00\x80bytes"
LONG = "x" * 3_000_000
VALUES = {
    "nothing": None,
    "bytes": BYTES,
    "a very long text": LONG,
    "another type": 1.5,
    "infinity": float("inf"),
}
NOT_STORED = {"experiments.experiment_id"}
"""SQLite itself keeps this one a whole number."""
SAME_TO_MLFLOW = {
    ("experiments.workspace", "nothing"),  # the default workspace
    ("metrics.is_nan", "nothing"),  # false
    ("latest_metrics.is_nan", "nothing"),
    ("model_versions.storage_location", "nothing"),  # it loads from source, which is the same place
    ("registered_model_aliases.version", "another type"),  # 1.5 is version 1
    ("logged_models.lifecycle_stage", "bytes"),  # anything but deleted
    ("logged_models.lifecycle_stage", "a very long text"),
    ("logged_models.lifecycle_stage", "another type"),
    ("logged_models.lifecycle_stage", "infinity"),
}
CRASHED = {
    *("tags.key", "metrics.step", "input_tags.name", "datasets.digest", "datasets.dataset_source"),
    *("logged_models.experiment_id", "logged_model_tags.tag_key", "registered_model_tags.key"),
}
"""Columns in which nothing, or bytes, once ended an audit with a traceback, or passed."""


def store(case: Case, column: str, value: object) -> bool:
    """Put a value into one row, past the constraints of the schema; returns whether it had another one."""
    table, name = column.split(".")
    path = case.workspace.root / "mlflow.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_master SET sql = replace(sql, 'NOT NULL', '') WHERE type = 'table'")
        connection.commit()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA ignore_check_constraints = ON")
        where = f"rowid = (SELECT rowid FROM {table} WHERE {ROWS.get(table, '1')} LIMIT 1)"
        [(before,)] = connection.execute(f"SELECT {name} FROM {table} WHERE {where}").fetchall()
        connection.execute(f"UPDATE {table} SET {name} = ? WHERE {where}", (value,))
        connection.commit()
    return bool(before != value)


def fault(case: Case, column: str, kind: str) -> str:
    """Return what is wrong with the audit of the run after a value was stored; empty: nothing."""
    is_changed = store(case, column, VALUES[kind])
    report = case.audit()
    is_allowed_to_pass = (
        not is_changed or (column, kind) in SAME_TO_MLFLOW or EXIT_CODES[documented()[column]] == 0
    )
    if report.exit_code not in (
        (0, 2) if is_allowed_to_pass else (1, 2)
    ):  # 2: MLflow itself does not read it
        return f"exit code {report.exit_code}: {found(report)}"
    return "" if len(report.model_dump_json()) < 1_000_000 else "the report is as long as the text"


@pytest.mark.parametrize("column", sorted(CRASHED))
@pytest.mark.parametrize(
    "kind", ["nothing", *(pytest.param(each, marks=pytest.mark.slow) for each in VALUES if each != "nothing")]
)
def test_no_value_ends_an_audit_or_hides_a_change(short_case: Case, column: str, kind: str) -> None:
    assert fault(short_case, column, kind) == ""


@pytest.mark.parametrize("target", [None, "fake@champion"])
@pytest.mark.parametrize("column", ["model_versions.storage_location", "logged_models.artifact_location"])
def test_an_address_that_no_file_can_have_is_wrong(short_case: Case, column: str, target: str | None) -> None:
    store(short_case, column, LONG)
    report = short_case.audit(target)
    assert report.exit_code == 1
    assert len(report.model_dump_json()) < 1_000_000


@pytest.mark.parametrize(
    "column", ["runs.status", "tags.value", "registered_models.workspace", "registered_model_aliases.alias"]
)
def test_a_report_is_not_as_long_as_a_text_in_mlflow(short_case: Case, column: str) -> None:
    assert fault(short_case, column, "a very long text") == ""


@pytest.mark.parametrize("value", ["edited", "", None, "../../x", "A" * 64], ids=repr)
def test_a_version_whose_digest_was_edited_is_wrong(short_case: Case, value: str | None) -> None:
    """The outcome is wrong, and not "no such target", since somebody deploys this model."""
    with closing(sqlite3.connect(short_case.workspace.root / "mlflow.db")) as connection:
        connection.execute(
            "UPDATE model_version_tags SET value = ? WHERE name = 'fake' AND key = 'vantage.digest'", (value,)
        )
        connection.commit()
    report = short_case.audit("fake@champion")
    assert report.exit_code == 1
    assert any(
        "the tag vantage.digest of version 1 is" in each and "which is no digest" in each
        for each in found(report)
    )


@pytest.mark.parametrize("question", ["model", "tags_of", "versions_of", "version", "run"])
def test_an_mlflow_that_dies_in_the_middle_is_said(
    short_case: Case, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    def dies(server: AuditedServer, *given: object) -> object:
        server._why_not = "MLflow does not answer (it has died)"
        raise Unanswered(server._why_not)

    answers = getattr(AuditedServer, question)
    asked = []

    def asks(server: AuditedServer, *given: object) -> object:
        asked.append(given)
        return answers(server, *given) if len(asked) < 2 else dies(server)

    for method in (dies, asks):  # at the first question of this kind, and at the second
        monkeypatch.setattr(AuditedServer, question, method)
        report = short_case.audit()
        assert report.exit_code == 2
        assert any("it has died" in each for each in found(report, "unchecked"))


def test_the_entry_of_a_run_of_mlflow_that_cannot_be_read_is_not_wrong(short_case: Case) -> None:
    target = short_case.mlflow_run("sft")
    store(short_case, "metrics.value", "no number")
    report = short_case.audit(target)
    assert (report.exit_code, found(report)) == (2, [])
