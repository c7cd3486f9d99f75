"""An audit finds a logged model that somebody added beside a run's own; MLflow shows it as the run's, and loads it."""

import sqlite3
from contextlib import closing

import pytest

from tests.review.audit.tampering import Case, found

SAID = "claims to be an output of this run, and nobody sent it"
OF_MODELS = ("logged_model_tags", "logged_model_params", "logged_model_metrics")


def cloned(case: Case, *, is_linked: bool, has_tags: bool) -> None:
    """Add a logged model with other files beside that of SFT.

    Args:
        is_linked: MLflow's run of SFT names it among its outputs.
        has_tags: it has our tags, params and metrics.
    """
    with closing(sqlite3.connect(case.workspace.root / "mlflow.db")) as database:
        run = case.mlflow_run("sft")
        [(own,)] = database.execute(
            "SELECT model_id FROM logged_models WHERE source_run_id = ?", (run,)
        ).fetchall()
        other = f"m-{'f' * 32}"

        def copy(table: str, where: str, *values: str, **changed: str) -> None:
            names = [each[1] for each in database.execute(f"PRAGMA table_info({table})")]
            for row in database.execute(f"SELECT * FROM {table} WHERE {where}", values).fetchall():
                new = dict(zip(names, row, strict=True)) | changed
                marks = ", ".join("?" * len(new))
                database.execute(
                    f"INSERT INTO {table} ({', '.join(new)}) VALUES ({marks})", list(new.values())
                )

        copy("logged_models", "model_id = ?", own, model_id=other, artifact_location="file:///elsewhere")
        for table in OF_MODELS if has_tags else ():
            copy(table, "model_id = ?", own, model_id=other)
        if is_linked:
            copy(
                "inputs",
                "source_type = 'RUN_OUTPUT' AND destination_id = ?",
                own,
                destination_id=other,
                input_uuid="f" * 32,
            )
        database.commit()


@pytest.mark.parametrize(("is_linked", "has_tags"), [(True, True), (True, False), (False, True)])
def test_a_second_model_of_a_stage_is_wrong(short_case: Case, is_linked: bool, has_tags: bool) -> None:
    cloned(short_case, is_linked=is_linked, has_tags=has_tags)
    for target in (None, "fake@champion"):
        wrong = found(short_case.audit(target))
        assert any(f"logged model m-{'f' * 32} {SAID}" in each for each in wrong), wrong


def test_a_model_that_somebody_logged_for_themselves_is_theirs(short_case: Case) -> None:
    cloned(short_case, is_linked=False, has_tags=False)
    report = short_case.audit()
    assert (report.exit_code, found(report)) == (0, [])
