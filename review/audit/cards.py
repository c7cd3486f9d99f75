"""Check the cards of models in MLflow: they are derived again from the outbox by the functions that write them."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from vantage.ledger.entries import RunEntry
from vantage.ledger.expected.changes import PagesChange, RunChange
from vantage.ledger.expected.texts import DESCRIPTION_LENGTH, TAG_LENGTH
from vantage.ledger.notes import ModelPages, model_note
from vantage.ledger.replay import OutboxLine, Replay
from vantage.review.audit.card_texts import Compared, best, compare_cards
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.makers import SHOWN_PAGE, mlflow_run, possible_makers
from vantage.review.audit.publications import Recorded, publications
from vantage.review.audit.sent import changes_of, sent_to
from vantage.runs.view import Missing
from vantage.schemas.kind import MODELS
from vantage.schemas.records.audit import Check

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.audited_entries import MlflowRun, MlflowVersion

SUBJECT = "card"
NOTE = "mlflow.note.content"


def model_card_checks(evidence: Evidence, run_id: str, step: str) -> Iterator[Check]:
    """Yield the check of the card on the page of the logged model that a stage of a run has made."""
    replay = evidence.replay(run_id)
    run = mlflow_run(evidence, run_id, step)
    model_id = None if run is None else run.tags.get("vantage.model")
    if not isinstance(replay, Replay) or run is None or model_id is None:
        return
    sent, model = sent_to(evidence, run_id, replay), evidence.ask(lambda server: server.model(model_id))
    if isinstance(sent, Missing) or isinstance(model, Missing) or model is None:
        return  # the check of MLflow's entry reports it
    found = model.tags.get(NOTE, "")
    written = list(_writings(evidence, run_id, replay, step))
    first = max((each.end for each in written if each.end in sent.ends), default=0)
    # Operations that are being sent now may have arrived without being noted as sent.
    states = [each.entry for each in written if each.end >= first]
    if not states or not (found or replay.is_chained):
        return  # an earlier version wrote none
    compared = best(_compared(evidence, found, entry, step, run, None) for entry in states)
    yield Check(subject=f"{SUBJECT} of its model in MLflow", outcome=compared.outcome, detail=compared.detail)


def version_card_checks(evidence: Evidence, version: "MlflowVersion") -> Iterator[Check]:
    """Yield the check of the card on the page of a version: the run that published it last wrote it."""
    digest = version.tags.get("vantage.digest")
    published = [each for each in publications(evidence, version.name) if each.digest == digest]
    results = [
        (each, compared)
        for each in reversed(published)
        if (compared := _against_publication(evidence, version, each)) is not None
    ]
    if not results:
        return  # the check of the version reports it, or an earlier version wrote no card
    subject = f"{SUBJECT} of version {version.name}/{version.version}"
    compared = results[0][1]
    earlier = next((each for each, result in results[1:] if result.outcome == "ok"), None)
    if compared.outcome == "wrong" and earlier is not None:
        detail = (
            f"it is as run {earlier.run_id} published it; run {results[0][0].run_id} has published it since"
        )
        compared = Compared("note", detail)
    yield Check(subject=subject, outcome=compared.outcome, detail=compared.detail)


def _against_publication(evidence: Evidence, version: "MlflowVersion", recorded: Recorded) -> Compared | None:
    """Return the comparison of a version's card with the one of a publication; None: the publication wrote none."""
    entry, stage = recorded.entry, recorded.operation.stage
    run = mlflow_run(evidence, recorded.run_id, stage)
    if stage not in entry.stages or run is None or not (version.description or recorded.has_tag):
        return None
    registered = f"{version.name}/{version.version}"
    return _compared(evidence, version.description, entry, stage, run, registered)


def _compared(
    evidence: Evidence, found: str, entry: RunEntry, step: str, run: "MlflowRun", registered: str | None
) -> Compared:
    """Return the comparison of a card with the one of a state of a run."""
    pages = ModelPages(run=SHOWN_PAGE, run_of_all=SHOWN_PAGE, readers=dict.fromkeys(entry.stages, SHOWN_PAGE))
    pages = replace(pages, registered=registered)
    limit = TAG_LENGTH if registered is None else DESCRIPTION_LENGTH
    stage = entry.stages[step]
    return best(
        compare_cards(found, model_note(entry, step, pages, makers), limit=limit)
        for makers in possible_makers(evidence, [(stage, run)])
    )


def _writings(evidence: Evidence, run_id: str, replay: Replay, step: str) -> Iterator[OutboxLine]:
    """Yield the operations that write the page of the stage's model."""
    for each, its_changes in changes_of(evidence, run_id, replay):
        stage = each.entry.stages.get(step)
        if stage is None or stage.artifact is None or stage.artifact.kind not in MODELS:
            continue
        for change in its_changes:
            is_own = isinstance(change, RunChange) and change.stage == step and change.shown is not None
            if is_own or isinstance(change, PagesChange):
                yield each
                break
