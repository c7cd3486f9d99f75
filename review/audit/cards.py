"""Check the cards of models in MLflow: they are derived again from the outbox by the functions that write them."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from vantage.ledger.entries import RunEntry, StageEntry
from vantage.ledger.expected.changes import PagesChange, RunChange, changes
from vantage.ledger.expected.texts import DESCRIPTION_LENGTH, TAG_LENGTH
from vantage.ledger.notes import ModelPages, model_note
from vantage.ledger.page_links import ArtifactKey, Link, artifact_key
from vantage.ledger.replay import OutboxLine, Replay
from vantage.review.audit.card_texts import Compared, compare_cards
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.publications import Recorded, publications
from vantage.review.audit.sent import sent_to
from vantage.runs.record import RunRecord
from vantage.runs.view import Missing
from vantage.schemas.kind import MODELS
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.audit import Check
from vantage.storage.refs import Ref

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.audited_entries import MlflowRun, MlflowVersion

SUBJECT = "card"
NOTE = "mlflow.note.content"
_PAGE = "page"
"""Placeholder for the address of any page: the targets of links are not compared."""


def model_card_checks(evidence: Evidence, run_id: str, step: str) -> Iterator[Check]:
    """Yield the check of the card on the page of the logged model that a stage of a run has made."""
    replay = evidence.replay(run_id)
    run = _mlflow_run(evidence, run_id, step)
    model_id = None if run is None else run.tags.get("vantage.model")
    if not isinstance(replay, Replay) or run is None or model_id is None:
        return
    sent, model = sent_to(evidence, run_id, replay), evidence.ask(lambda server: server.model(model_id))
    if isinstance(sent, Missing) or isinstance(model, Missing) or model is None:
        return  # the check of MLflow's entry reports it
    found = model.tags.get(NOTE, "")
    written = list(_writings(evidence, run_id, replay, step))
    first = max((each.end for each in written if each.end in sent.ends), default=0)
    # What is sent just now may be there already, and not be noted as sent.
    states = [each.entry for each in written if each.end >= first]
    if not states or not (found or replay.is_chained):
        return  # an earlier version wrote none
    results = [_compared(evidence, found, entry, step, run, None) for entry in states]
    compared = next((each for each in results if each.outcome != "wrong"), results[0])
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
    run = _mlflow_run(evidence, recorded.run_id, stage)
    if stage not in entry.stages or run is None or not (version.description or recorded.has_tag):
        return None
    registered = f"{version.name}/{version.version}"
    return _compared(evidence, version.description, entry, stage, run, registered)


def _compared(
    evidence: Evidence, found: str, entry: RunEntry, step: str, run: "MlflowRun", registered: str | None
) -> Compared:
    """Return the comparison of a card with the one of a state of a run.

    A maker that MLflow did not know when a stage was recorded may have been known when the card was written.
    """
    pages = ModelPages(run=_PAGE, run_of_all=_PAGE, readers=dict.fromkeys(entry.stages, _PAGE))
    pages = replace(pages, registered=registered)
    limit = TAG_LENGTH if registered is None else DESCRIPTION_LENGTH
    stage = entry.stages[step]
    known, others = _producers(evidence, stage, run), _recorded_producers(evidence, stage)
    results = [
        compare_cards(found, model_note(entry, step, pages, producers), limit=limit)
        for producers in (known, _itself(stage, run) | known, others | known)
    ]
    return next((each for each in results if each.outcome != "wrong"), results[0])


def _writings(evidence: Evidence, run_id: str, replay: Replay, step: str) -> Iterator[OutboxLine]:
    """Yield the operations that write the page of the stage's model."""
    changed = evidence.once(
        ("changes", run_id), lambda: [list(changes(each.entry, each.operation)) for each in replay.lines]
    )
    for each, its_changes in zip(replay.lines, changed, strict=True):
        stage = each.entry.stages.get(step)
        if stage is None or stage.artifact is None or stage.artifact.kind not in MODELS:
            continue
        for change in its_changes:
            is_own = isinstance(change, RunChange) and change.stage == step and change.shown is not None
            if is_own or isinstance(change, PagesChange):
                yield each
                break


def _producers(evidence: Evidence, stage: StageEntry, run: "MlflowRun") -> dict[ArtifactKey, Link]:
    """Return artifact → MLflow's run that made it, by the tags of the stage's run, which other checks compare."""
    links = {}
    for artifact, tag in _named(stage):
        named = run.tags.get(tag)
        tags = None if named is None else _tags_of(evidence, named)
        if tags is not None:
            links[artifact_key(artifact)] = _link(tags.get("vantage.stage"), tags.get("vantage.run_id"))
    return links


def _itself(stage: StageEntry, run: "MlflowRun") -> dict[ArtifactKey, Link]:
    """Return the stage's own run as the maker, which MLflow shows for a reused artifact if it knows no other."""
    made = stage.artifact
    return (
        {}
        if made is None
        else {artifact_key(made): _link(run.tags.get("vantage.stage"), run.tags.get("vantage.run_id"))}
    )


def _recorded_producers(evidence: Evidence, stage: StageEntry) -> dict[ArtifactKey, Link]:
    """Return the makers of artifacts by the refs and records of the workspace."""
    links = {}
    for artifact, _ in _named(stage):
        ref = evidence.ref(artifact.stage_key)
        record = evidence.record(ref.run_id) if isinstance(ref, Ref) else None
        steps = record.stages.items() if isinstance(record, RunRecord) else ()
        made = next((name for name, each in steps if each.stage_key == artifact.stage_key), None)
        if made is not None and isinstance(record, RunRecord):
            links[artifact_key(artifact)] = _link(made, record.run_id)
    return links


def _named(stage: StageEntry) -> Iterator[tuple[Artifact, str]]:
    """Yield the artifacts whose makers a card names, each with the tag that names MLflow's run."""
    for role, given in stage.inputs.items():
        yield given.artifact, f"vantage.parent.{role}.run"
    if stage.artifact is not None:
        yield stage.artifact, "vantage.reused_from"


def _link(stage: str | None, run_id: str | None) -> Link:
    return Link(run=_PAGE, run_name=f"{stage} of run {run_id}", model=_PAGE)


def _tags_of(evidence: Evidence, mlflow_run_id: str) -> Mapping[str, str] | None:
    tags = evidence.once(
        ("tags", mlflow_run_id), lambda: evidence.ask(lambda server: server.tags_of(mlflow_run_id))
    )
    return None if isinstance(tags, Missing) else tags


def _mlflow_run(evidence: Evidence, run_id: str, step: str) -> "MlflowRun | None":
    """Return MLflow's run of a stage; None: there is none, or MLflow does not answer."""
    replay = evidence.replay(run_id)
    if not isinstance(replay, Replay):
        return None
    runs = evidence.mlflow_runs(replay.opened.experiment, run_id)
    return None if isinstance(runs, Missing) else next(iter(runs.get(step, [])), None)
