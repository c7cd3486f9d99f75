"""Statuses, answers, movements of aliases, foreign tags and the order of lines are each compared with another record."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.review.audit.conftest import run_once
from tests.review.audit.tampering import Case, assert_found, edit_json, found, write
from tests.review.audit.test_decisions import Place
from tests.support.orchestrated import Witness
from vantage.flows.publishing.moving_aliases import roll_back
from vantage.ledger.outbox import BEFORE
from vantage.runs.record import RunRecord
from vantage.runs.run import read_runs

# Statuses, and tags that nobody sent


def stage_that_was_made_is_reused(case: Case) -> None:
    edit_json(case.run_json, lambda run: run["stages"]["policy"].update(status="reused"))


def stage_that_was_made_is_reused_in_no_time(case: Case) -> None:
    edit_json(case.run_json, lambda run: run["stages"]["policy"].update(status="reused", seconds=0.0))


def run_with_another_number(case: Case) -> None:
    """Give the run another number, so that ``vantage audit 1`` and ``latest`` lead to another run."""
    edit_json(case.run_json, lambda run: run.update(number=2))


def run_that_ended_is_failed(case: Case) -> None:
    edit_json(case.run_json, lambda run: run.update(status="failed"))


def sql_tag(case: Case, table: str, columns: str, *values: str | int) -> None:
    marks = ", ".join("?" for _ in values)
    case.sql(f"INSERT INTO {table} ({columns}) VALUES ({marks})", *values)


def foreign_tag_of_a_run(case: Case) -> None:
    sql_tag(case, "tags", "key, value, run_uuid", "vantage.reviewed_by", "ada", case.mlflow_run("policy"))


def foreign_pointer_of_a_run(case: Case) -> None:
    """Add a pointer that looks like a parent's, though there is no such parent."""
    sql_tag(
        case, "tags", "key, value, run_uuid",
        "vantage.parent.safety.run", case.mlflow_run("sft"), case.mlflow_run("policy"),
    )  # fmt: skip


def foreign_tag_of_a_registered_model(case: Case) -> None:
    sql_tag(case, "registered_model_tags", "name, key, value", "fake", "vantage.reviewed_by", "ada")


def alias_tag_of_no_alias(case: Case) -> None:
    sql_tag(case, "registered_model_tags", "name, key, value", "fake", "vantage.alias.production", "{}")


def foreign_tag_of_a_dataset(case: Case) -> None:
    case.sql(
        "INSERT INTO input_tags (input_uuid, name, value) SELECT input_uuid, 'vantage.license', 'free' FROM input_tags "
        "WHERE name = 'vantage.digest' AND value = ? LIMIT 1",
        case.digest("data.demonstrations"),
    )


def publication_of_a_stage_that_published_nothing(case: Case) -> None:
    sql_tag(
        case, "tags", "key, value, run_uuid", "vantage.published", "fake@champion version 1", case.mlflow_run("sft")
    )  # fmt: skip


def publication_in_the_list_of_runs(case: Case) -> None:
    case.sql(
        "UPDATE tags SET value = 'fake@production version 1' WHERE key = 'vantage.published' AND run_uuid IN "
        "(SELECT run_uuid FROM tags WHERE key = 'vantage.recipe')"
    )


def interruption_that_nobody_recorded(case: Case) -> None:
    sql_tag(case, "tags", "key, value, run_uuid", "vantage.interrupted", "it died", case.mlflow_run("sft"))


def sweep_that_nobody_ran(case: Case) -> None:
    sql_tag(case, "tags", "key, value, run_uuid", "vantage.sweep_id", "0001-sweep", case.mlflow_run("sft"))


def link_to_the_logged_model_removed(case: Case) -> None:
    """Remove the link to the logged model, whose page may then show anything."""
    case.sql("DELETE FROM tags WHERE key = 'vantage.model' AND run_uuid = ?", case.mlflow_run("policy"))


def status_in_mlflow(case: Case) -> None:
    case.sql("UPDATE runs SET status = 'FAILED' WHERE run_uuid = ?", case.mlflow_run("evaluation"))


def two_lines_swapped(case: Case) -> None:
    """Swap two lines. No line changes, and neither does the number of bytes that were sent."""
    lines = case.outbox.read_bytes().splitlines(keepends=True)
    at = next(at for at, line in enumerate(lines) if json.loads(line)["operation"] == "record_verdicts")
    lines[at], lines[at + 1] = lines[at + 1], lines[at]
    write(case.outbox, b"".join(lines))


def reason_of_the_same_length(case: Case) -> None:
    """Replace the reason by one of the same length: the outbox keeps its size, and nobody else has the name of the
    folder.
    """
    data = case.outbox.read_bytes()
    at = data.index(b"/workspace/store/objects/")
    write(case.outbox, data[:at] + b"/workspace/sTORE/objects/" + data[at + 25 :])


CASES: dict[Callable[[Case], None], tuple[str, str]] = {
    stage_that_was_made_is_reused: ("run ", "that policy was found in the store, and that it took"),
    stage_that_was_made_is_reused_in_no_time: ("run ", "the outbox records that policy was made, run.json that it was found"),
    run_with_another_number: ("run ", "its number is 2, and its id begins with 1"),
    run_that_ended_is_failed: ("run ", "run.json has the status failed, and by its stages the run is completed"),
    foreign_tag_of_a_run: ("policy: MLflow", "tag vantage.reviewed_by is “ada”, which nobody sent"),
    foreign_pointer_of_a_run: ("policy: MLflow", "tag vantage.parent.safety.run is"),
    foreign_tag_of_a_registered_model: ("policy: version fake/1", "tag vantage.reviewed_by of the registered model is “ada”"),
    alias_tag_of_no_alias: ("policy: version fake/1", "and no run moved that alias"),
    foreign_tag_of_a_dataset: ("MLflow", "vantage.license is “free”, which nobody sent"),
    publication_of_a_stage_that_published_nothing: ("sft: MLflow", "and it published no such version"),
    publication_in_the_list_of_runs: ("MLflow", "“fake@production version 1”, and it published no such version"),
    interruption_that_nobody_recorded: ("sft: MLflow", "tag vantage.interrupted is “it died”, which nobody sent"),
    sweep_that_nobody_ran: ("sft: MLflow", "and its parent is no such sweep"),
    link_to_the_logged_model_removed: ("policy: MLflow", "tag vantage.model is absent"),
    status_in_mlflow: ("evaluation: MLflow", "its status is FAILED, and was sent as FINISHED"),
    two_lines_swapped: ("run ", "a line was changed, swapped, added or taken out"),
    reason_of_the_same_length: ("run ", "a line was changed, swapped, added or taken out"),
}  # fmt: skip
"""A change by hand → the check of the run's audit that finds it, and a part of the finding."""


@pytest.mark.parametrize("tamper", CASES, ids=lambda tamper: tamper.__name__)
def test_it_is_found(case: Case, tamper: Callable[[Case], None]) -> None:
    """An audit finds this change of a status, tag or line, and names where."""
    assert_found(case, tamper, *CASES[tamper])


def test_a_completed_run_that_is_recorded_as_running_is_not_checked(case: Case) -> None:
    """The records differ so for a moment when a run is resumed, and for good if its process is killed in that moment."""
    edit_json(case.run_json, lambda run: run.update(status="running"))
    report = case.audit()
    assert (report.exit_code, found(report)) == (2, [])
    assert "run.json has the status running, the outbox completed" in found(report, "unchecked")[-1]


@pytest.mark.slow
def test_a_failed_run_that_is_recorded_as_completed_is_wrong(case: Case) -> None:
    (case.workspace.root / "refuse.txt").write_text("evaluation")
    run_once(case.workspace, case.original / "fake.yaml", "seed=18", in_process=False)
    [failed, *_] = read_runs(case.workspace)
    assert failed.status == "failed"
    assert found(case.audit(failed.run_id)) == []
    place = case.workspace.folder(failed.run_id) / "run.json"
    edit_json(place, lambda run: run.update(status="completed"))
    wrong = found(case.audit(failed.run_id))
    assert any(
        "run.json has the status completed, and by its stages the run is failed" in each for each in wrong
    ), wrong
    assert any("the outbox has the status failed, run.json completed" in each for each in wrong), wrong


def test_a_reused_stage_that_no_longer_names_who_made_it(
    case: Case, again: Callable[[Case], RunRecord]
) -> None:
    second = again(case)
    case.sql("DELETE FROM tags WHERE key = 'vantage.reused_from'")
    wrong = found(case.audit(second.run_id))
    assert any("policy: MLflow" in each and "tag vantage.reused_from is absent" in each for each in wrong), (
        wrong
    )


# An outbox of an earlier version


def test_an_outbox_whose_lines_have_no_sha256_is_audited_as_before(case: Case) -> None:
    lines = [json.loads(line) for line in case.outbox.read_bytes().splitlines()]
    assert all(line[BEFORE] for line in lines)
    old = b""
    for line in lines:
        del line[BEFORE]
        old += json.dumps(line).encode() + b"\n"
    write(case.outbox, old)
    edit_json(case.outbox.with_name("sent.json"), lambda sent: sent.update(dict.fromkeys(sent, len(old))))
    case.sql("DELETE FROM registered_model_tags")
    case.sql("DELETE FROM logged_model_metrics")
    report = case.audit()
    assert (report.exit_code, found(report), found(report, "unchecked")) == (0, [], [])


def test_each_line_has_the_sha256_of_those_before_it(case: Case) -> None:
    lines = case.outbox.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines):
        assert json.loads(line)[BEFORE] == hashlib.sha256(b"".join(lines[:number])).hexdigest()


# What people decided


@pytest.fixture
def decided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Return a workspace in which a person approved of a gate and of an alias."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    place = Place(tmp_path)
    place.publish_approved()
    return place


def answers(place: Place) -> list[Path]:
    return sorted((place.workspace.folder(place.record.run_id) / "approvals").glob("*.json"))


def test_an_answer_that_contradicts_the_record_is_wrong_and_one_that_is_gone_is_not_checked(
    decided: Place,
) -> None:
    assert decided.audit().exit_code == 0
    file = answers(decided)[0]
    whole = file.read_bytes()
    edit_json(file, lambda answer: answer.update(by="eve"))
    wrong = found(decided.audit())
    assert any("answers: run.json has the answer about" in each and "by eve" in each for each in wrong), wrong
    file.chmod(0o644)
    file.write_bytes(b"{")
    assert any("cannot be read" in each for each in found(decided.audit()))
    file.unlink()
    report = decided.audit()
    assert (report.exit_code, found(report)) == (2, [])
    assert "answers: the answer about" in found(report, "unchecked")[0]
    file.write_bytes(whole)
    assert decided.audit().exit_code == 0


def edit_alias_tag(place: Place, **changes: Any) -> None:
    tag = "vantage.alias.champion"
    said = json.loads(place.client.get_registered_model("asking").tags[tag])
    place.client.set_registered_model_tag("asking", tag, json.dumps(said | changes))


def test_who_moved_an_alias_and_why_is_compared(decided: Place) -> None:
    first = decided.record
    decided.publish_approved("seed=2")
    roll_back(decided.workspace, "asking", "champion", to=None, by="ada", reason="worse", watcher=Witness())
    [moved] = [
        check
        for _, check in decided.audit("asking@champion").every_check()
        if check.subject.startswith("alias ")
    ]
    assert f"moved by ada (ledger of run {first.run_id}), who gave as reason: worse" in moved.detail
    for changes in ({"by": "eve"}, {"reason": "better"}):
        edit_alias_tag(decided, **changes)
        wrong = found(decided.audit("asking@champion"))
        assert any(
            "alias asking@champion" in each and "of the registered model says" in each for each in wrong
        ), wrong
        edit_alias_tag(decided, by="ada", reason="worse")
    assert decided.audit("asking@champion").exit_code == 0
    outbox = decided.workspace.folder(first.run_id) / "ledger" / "outbox.jsonl"
    whole = outbox.read_bytes()
    write(outbox, whole.replace(b'"by": "ada", "login"', b'"by": "eve", "login"'))
    assert outbox.read_bytes() != whole
    wrong = found(decided.audit("asking@champion"))
    assert any("alias asking@champion" in each for each in wrong), wrong
    write(outbox, whole)
    decided.client.delete_registered_model_tag("asking", "vantage.alias.champion")
    report = decided.audit("asking@champion")
    assert (report.exit_code, found(report)) == (2, [])
