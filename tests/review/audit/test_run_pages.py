"""An audit derives the texts of the pages of runs and stages in MLflow again, and names the first sentence that differs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.review.audit.conftest import run_once
from tests.review.audit.tampering import Case, found
from vantage.runs.record import RunRecord
from vantage.runs.run import read_runs
from vantage.schemas.records.audit import AuditReport, Check

_OF = {"the run": "a.key = 'vantage.recipe'"}


def pages(report: AuditReport) -> list[Check]:
    return [check for _, check in report.every_check() if check.subject.startswith("page")]


def of(page: str) -> str:
    """Return the condition for the tag that has the text of a page."""
    chosen = _OF.get(page, f"a.key = 'vantage.stage' AND a.value = '{page}'")
    return f"key = 'mlflow.note.content' AND run_uuid IN (SELECT a.run_uuid FROM tags a WHERE {chosen})"


def text(case: Case, page: str) -> str:
    return case.select(f"SELECT value FROM tags WHERE {of(page)}")


def edit(case: Case, page: str, old: str, new: str) -> None:
    assert old in text(case, page)
    case.sql(f"UPDATE tags SET value = replace(value, ?, ?) WHERE {of(page)}", old, new)


def test_the_pages_of_a_run_agree_and_name_their_wording(case: Case) -> None:
    [check] = pages(case.audit())
    assert (check.outcome, check.detail) == ("ok", f"{1 + len(case.record.stages)} texts")
    for page in ("the run", "policy", "data.prompts"):
        assert "\nPage 1 of Vantage " in text(case, page)


@pytest.mark.parametrize(
    "page, old, new, said",
    [
        ("the run", "Recipe **fake** · completed", "Recipe **fake** · failed", "it has “Recipe **fake** · failed"),
        ("the run", "0.9: CLOSED", "0.9: passed", "0.9: passed"),
        ("policy", "attempt 1", "attempt 2", "derived from the records it is “**policy** · policy optimization · attempt 1"),
        ("strict", "- accuracy_gain 0.100", "- accuracy_gain 0.990", "accuracy_gain 0.990"),
        ("sft", "| data | dataset |", "| data | policy |", "| data | policy |"),
    ],
)  # fmt: skip
def test_a_changed_sentence_is_found(case: Case, page: str, old: str, new: str, said: str) -> None:
    edit(case, page, old, new)
    report = case.audit()
    [wrong] = [each for each in pages(report) if each.outcome == "wrong"]
    assert wrong.subject == f"page of {page} in MLflow"
    assert said in wrong.detail
    assert report.exit_code == 1


@pytest.mark.slow
def test_a_page_of_another_run_is_found(case: Case, again: Callable[[Case], RunRecord]) -> None:
    """The pages of a run name who made what it reuses."""
    second = again(case)
    assert [each.outcome for each in pages(case.audit(second.run_id))] == ["ok", "ok"]
    wrong = f"made by [policy of run {case.record.run_id}]"
    case.sql(
        "UPDATE tags SET value = replace(value, ?, 'made by [policy of run 0009-fake-ffffff]') "
        "WHERE key = 'mlflow.note.content' AND value LIKE ?",
        wrong,
        f"%**Reused:** {wrong}%",
    )
    [check] = [each for each in pages(case.audit(second.run_id)) if each.outcome == "wrong"]
    assert check.subject == "page of policy in MLflow"


def test_what_people_add_is_a_note_and_a_text_of_their_own_is_not_checked(case: Case) -> None:
    case.sql(f"UPDATE tags SET value = value || '\n\nAda looks at this.' WHERE {of('the run')}")
    report = case.audit()
    assert report.exit_code == 0
    assert any(
        "1 lines were added below it, from “Ada looks at this.”" in each for each in found(report, "note")
    )
    for own in ("Ada looks at this.", ""):
        case.sql(f"UPDATE tags SET value = ? WHERE {of('the run')}", own)
        report = case.audit()
        assert (report.exit_code, found(report)) == (2, [])
        assert (
            "there is no page of Vantage: its text was replaced or removed" in found(report, "unchecked")[0]
        )


def test_a_page_of_another_wording_could_not_be_compared(case: Case) -> None:
    edit(case, "policy", "Page 1 of Vantage", "Page 2 of Vantage")
    report = case.audit()
    assert (found(report, "unchecked"), report.exit_code) == ([], 0), (
        "its sentences are those of this version"
    )
    edit(case, "policy", "Parents:", "It reads:")
    report = case.audit()
    assert (report.exit_code, found(report)) == (2, [])
    assert "(page 2; this version writes page 1)" in found(report, "unchecked")[0]


def test_a_run_of_several_processes_has_the_pages_of_the_last(case: Case) -> None:
    """With another seed nothing is reused. The first process ends before the policy, and its page shows the steps until
    then."""
    run_once(case.workspace, case.original / "fake.yaml", "seed=18", until="policy")
    under_way = read_runs(case.workspace)[0]
    early = case.select(f"SELECT value FROM tags WHERE {of('the run')} AND value LIKE '%running%'")
    assert [each.outcome for each in pages(case.audit(under_way.run_id))] == ["ok", "ok"]
    run_once(case.workspace, case.original / "fake.yaml", "seed=18")
    report = case.audit(under_way.run_id)
    assert [(each.outcome, each.detail) for each in pages(report) if each.outcome != "ok"] == []
    case.sql(
        f"UPDATE tags SET value = ? WHERE {of('the run')} AND run_uuid IN "
        "(SELECT run_uuid FROM tags WHERE key = 'vantage.run_id' AND value = ?)",
        early,
        under_way.run_id,
    )
    assert any("page of the run in MLflow" in each for each in found(case.audit(under_way.run_id)))


def test_a_page_may_name_the_maker_that_was_not_known_when_its_run_was_recorded(
    short_case: Case, tmp_path: Path
) -> None:
    """Of runs that are sent at the same time, one may find an artifact whose maker MLflow does not know yet.

    Then a third run is recorded as a reuse of that one, and its page, which is written later, names the maker.
    """
    recipe = short_case.original / "fake.yaml"
    for _ in range(2):
        run_once(short_case.workspace, recipe)
    third, second, _ = read_runs(short_case.workspace)
    ids = {
        run.run_id: Case(short_case.workspace, run, tmp_path).mlflow_run("evaluation")
        for run in (third, second)
    }
    short_case.sql("DELETE FROM tags WHERE run_uuid = ? AND key = 'vantage.reused_from'", ids[second.run_id])
    short_case.sql(
        "UPDATE tags SET value = ? WHERE run_uuid = ? AND key = 'vantage.reused_from'",
        ids[second.run_id],
        ids[third.run_id],
    )
    report = short_case.audit(third.run_id)
    assert {check.outcome for check in pages(report)} == {"ok"}, found(report)
