"""Single operations change in MLflow what was worked out by hand."""

import pytest

from tests.ledger.small_run import VERDICT
from tests.ledger.told_operations import FINISH_STAGE, OPEN_RUN, OPEN_STAGE, entry
from vantage.ledger.expected.changes import (
    Closing,
    FileChange,
    ListChange,
    PagesChange,
    RunChange,
    VersionChange,
    changes,
)
from vantage.ledger.operations import (
    CloseRun,
    FinishRun,
    LogBill,
    LogReport,
    Publish,
    RecordVerdicts,
    RunOutcome,
)


@pytest.mark.parametrize(
    "outcome, status",
    [
        ("completed", "FINISHED"),
        ("gate_closed", "FAILED"),
        ("waiting_approval", "SCHEDULED"),
        ("failed", "FAILED"),
        ("resumable", "KILLED"),
    ],
)
def test_a_run_ends_with_mlflows_word_for_its_outcome(outcome: RunOutcome, status: str) -> None:
    told = changes(entry(OPEN_RUN), FinishRun(time=9, outcome=outcome))
    assert list(told) == [
        RunChange(None, 9, {"vantage.status": outcome}, has_page=True, status=status, ended=9),
        ListChange(()),
        PagesChange(),
    ]


def test_the_verdict_on_a_run_is_a_tag_where_it_was_recorded() -> None:
    """An earlier version recorded none, and its runs have no such tag."""
    [end, *_] = changes(entry(OPEN_RUN), FinishRun(time=9, outcome="failed", conclusion="failed"))
    assert isinstance(end, RunChange)
    assert end.tags == {"vantage.status": "failed", "vantage.conclusion": "failed"}
    ended = FinishRun(time=9, outcome="resumable", conclusion="stopped")
    [_, again] = changes(entry(OPEN_RUN, ended, OPEN_RUN), OPEN_RUN)
    assert isinstance(again, RunChange)
    assert again.tags["vantage.conclusion"] == "under way"


def test_one_closed_gate_closes_the_verdict() -> None:
    closed = VERDICT.model_copy(update={"passed": False, "metric": "kl", "threshold": 0.1})
    verdicts = RecordVerdicts(time=4, stage="sft", verdicts=(VERDICT, closed))
    [change] = changes(entry(OPEN_RUN, OPEN_STAGE), verdicts)
    assert isinstance(change, RunChange)
    assert change.tags == {
        "vantage.verdict": "closed",
        "vantage.gate.test_nll": "test_nll 0.400 <= 1: passed",
        "vantage.gate.test_nll.evidence": '{"test_nll": 0.4}',
        "vantage.gate.kl": "kl 0.400 <= 0.1: CLOSED",
        "vantage.gate.kl.evidence": '{"test_nll": 0.4}',
    }


def test_only_a_run_that_is_opened_again_closes_what_its_dead_process_left() -> None:
    [first] = changes(entry(OPEN_RUN), OPEN_RUN)
    assert isinstance(first, RunChange)
    assert first.status is None
    closing, again = changes(entry(OPEN_RUN, OPEN_RUN), OPEN_RUN)
    reason = "its process died; the run was taken over"
    assert closing == Closing(OPEN_RUN.run_id, reason, OPEN_RUN.time, is_own=True)
    assert isinstance(again, RunChange)
    assert again.status == "RUNNING"


def test_what_belongs_to_another_run_or_is_a_file_or_a_version_is_no_change_of_a_stage() -> None:
    done = entry(OPEN_RUN, OPEN_STAGE, FINISH_STAGE)
    artifact = FINISH_STAGE.artifact
    assert artifact is not None
    publication = Publish(
        time=5, stage="sft", artifact=artifact, folder="/f", registered_model="tiny", alias=None
    )
    assert list(changes(done, publication)) == [VersionChange(publication, {})]
    other = CloseRun(time=6, run_id="0002-tiny-bbbbbb", reason="lost")
    assert list(changes(done, other)) == [Closing("0002-tiny-bbbbbb", "lost", 6, is_own=False)]
    assert list(changes(done, LogReport(time=7, file="/runs/report.html"))) == [
        FileChange(None, 7, "/runs/report.html", "report.html", "report of this run", has_page=False)
    ]
    assert list(changes(done, LogBill(time=8, stage="sft", file="/runs/sft.json"))) == [
        FileChange(
            "sft", 8, "/runs/sft.json", "bill_of_materials.cdx.json", "bill of materials", has_page=True
        )
    ]
