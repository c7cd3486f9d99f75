"""Check the pages of a run and of its stages in MLflow: they are derived again from the outbox by the functions that write them."""

from collections.abc import Iterator, Set
from typing import TYPE_CHECKING

from vantage.ledger.entries import RunEntry
from vantage.ledger.expected.changes import Change, FileChange, PagesChange, RunChange
from vantage.ledger.expected.texts import TAG_LENGTH
from vantage.ledger.notes import PAGES, run_links, run_note, stage_note
from vantage.ledger.operations import Publish
from vantage.ledger.replay import OutboxLine, Replay
from vantage.review.audit.card_texts import Compared, best, compare_cards
from vantage.review.audit.cards import NOTE
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.makers import SHOWN_PAGE, mlflow_run, possible_makers
from vantage.review.audit.sent import SentTo, changes_of, sent_to
from vantage.runs.view import Missing
from vantage.schemas.records.audit import Check

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.audited_entries import MlflowRun


def page_checks(evidence: Evidence, run_id: str, replay: Replay) -> Iterator[Check]:
    """Yield the check of the texts of the run's page and of those of its stages; nothing if MLflow has none of them."""
    sent = sent_to(evidence, run_id, replay)
    if isinstance(sent, Missing):
        return  # the check of MLflow's entry reports it
    num_agreeing = 0
    for step in (None, *replay.entry.stages):
        run = mlflow_run(evidence, run_id, step)
        compared = None if run is None else _compared(evidence, replay, sent, step, run)
        if compared is None:
            continue
        if compared.outcome == "ok":
            num_agreeing += 1
        else:
            subject = f"page of {step or 'the run'} in MLflow"
            yield Check(subject=subject, outcome=compared.outcome, detail=compared.detail)
    if num_agreeing:
        yield Check(subject="pages in MLflow", detail=f"{num_agreeing} texts")


def _compared(
    evidence: Evidence, replay: Replay, sent: SentTo, step: str | None, run: "MlflowRun"
) -> Compared | None:
    """Return the comparison of one page; None: its text may not have been written."""
    found = run.tags.get(NOTE, "")
    written = list(_writings(evidence, replay, step))
    certain = [line.end for line, is_certain in written if is_certain and line.end in sent.ends]
    if not found and not certain:
        return None
    # Operations that are being sent now may have arrived without being noted as sent.
    states = [line.entry for line, _ in written if line.end >= max(certain, default=0)]
    not_taken = {
        each.operation.registered_model
        for each in replay.lines
        if isinstance(each.operation, Publish) and each.end not in sent.ends
    }
    results = (
        compare_cards(found, text, limit=TAG_LENGTH, wording=PAGES)
        for entry in reversed(states)
        for text in _texts(evidence, entry, step, refused=not_taken)
    )
    return best(results) if states else None


def _writings(evidence: Evidence, replay: Replay, step: str | None) -> Iterator[tuple[OutboxLine, bool]]:
    """Yield the operations after which the page may have been written, and whether it was in any case.

    The run's page is also written when the outbox has been sent, which may be after any operation. The file of a bill of
    materials may have been removed before it was sent, and then no page is written.
    """
    for line, its_changes in changes_of(evidence, replay.entry.run_id, replay):
        is_certain = any(_writes(each, line.entry, step) for each in its_changes)
        has_bill = any(
            isinstance(each, FileChange) and each.stage == step and each.has_page for each in its_changes
        )
        if is_certain or has_bill or step is None:
            yield line, is_certain


def _writes(change: Change, entry: RunEntry, step: str | None) -> bool:
    """Return whether a change writes the page of a stage (None: of the run)."""
    if isinstance(change, RunChange):
        return change.stage == step and change.has_page
    return isinstance(change, PagesChange) and step in entry.stages


def _texts(evidence: Evidence, entry: RunEntry, step: str | None, *, refused: Set[str]) -> Iterator[str]:
    """Yield every text that the page may have had in this state of the run."""
    names = entry.stages if step is None else (step,)
    runs = ((entry.stages[name], mlflow_run(evidence, entry.run_id, name)) for name in names)
    makers = possible_makers(evidence, [(stage, run) for stage, run in runs if run is not None])
    pages = dict.fromkeys(entry.stages, SHOWN_PAGE)
    for each in makers:
        if step is not None:
            yield stage_note(entry, step, SHOWN_PAGE, each, pages)
            continue
        for without in dict.fromkeys((frozenset(), frozenset(refused))):
            links = run_links(entry, all_runs=SHOWN_PAGE, run_page=SHOWN_PAGE, refused=without)
            yield run_note(entry, pages, each, links)
