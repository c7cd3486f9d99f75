"""Find the makers of the artifacts that a text in MLflow names: every answer that its writer may have had."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from vantage.ledger.entries import StageEntry
from vantage.ledger.page_links import ArtifactKey, Link, artifact_key
from vantage.ledger.replay import Replay
from vantage.review.audit.evidence import Evidence
from vantage.runs.record import RunRecord
from vantage.runs.view import Missing
from vantage.schemas.kind import MODELS
from vantage.schemas.records.artifacts import Artifact
from vantage.storage.refs import Ref

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.audited_entries import MlflowRun

SHOWN_PAGE = "page"
"""Placeholder for the address of any page: the targets of links are not compared."""
Makers = dict[ArtifactKey, Link]


def possible_makers(
    evidence: Evidence, stages: "Iterable[tuple[StageEntry, MlflowRun]]"
) -> tuple[Makers, ...]:
    """Return artifact → its maker, for all artifacts that stages name, by each source that a writer may have had.

    The sources are MLflow's tags; the tags and the stages' own runs; the tags and the records of the workspace. A maker
    that MLflow did not know when a stage was recorded may have been known when the text was written. Then the tag may
    even name another run: one that has found the artifact, and was sent before the run that made it.

    Args:
        stages: each stage with its run of MLflow.
    """
    known: Makers = {}
    own: Makers = {}
    recorded: Makers = {}
    for stage, run in stages:
        known |= _named_by_tags(evidence, stage, run)
        own |= _itself(stage, run)
        recorded |= _recorded(evidence, stage)
    return known, own | known, recorded | known, known | recorded


def mlflow_run(evidence: Evidence, run_id: str, step: str | None) -> "MlflowRun | None":
    """Return MLflow's run of a stage (None: the parent run); None: there is none, or MLflow does not answer."""
    replay = evidence.replay(run_id)
    if not isinstance(replay, Replay):
        return None
    runs = evidence.mlflow_runs(replay.opened.experiment, run_id)
    return None if isinstance(runs, Missing) else next(iter(runs.get(step, [])), None)


def _named_by_tags(evidence: Evidence, stage: StageEntry, run: "MlflowRun") -> Makers:
    """Return the makers that the tags of the stage's run name, which other checks compare."""
    links = {}
    for artifact, tag in _named(stage):
        named = run.tags.get(tag)
        tags = None if named is None else _tags_of(evidence, named)
        if tags is not None:
            links[artifact_key(artifact)] = _link(tags)
    return links


def _itself(stage: StageEntry, run: "MlflowRun") -> Makers:
    """Return the stage's own run as the maker, which MLflow shows for a reused artifact if it knows no other."""
    return {} if stage.artifact is None else {artifact_key(stage.artifact): _link(run.tags)}


def _recorded(evidence: Evidence, stage: StageEntry) -> Makers:
    """Return the makers of artifacts by the refs and records of the workspace."""
    links = {}
    for artifact, _ in _named(stage):
        ref = evidence.ref(artifact.stage_key)
        record = evidence.record(ref.run_id) if isinstance(ref, Ref) else None
        steps = record.stages.items() if isinstance(record, RunRecord) else ()
        made = next((name for name, each in steps if each.stage_key == artifact.stage_key), None)
        if made is not None and isinstance(record, RunRecord):
            model = SHOWN_PAGE if artifact.kind in MODELS else None
            links[artifact_key(artifact)] = Link(SHOWN_PAGE, f"{made} of run {record.run_id}", model)
    return links


def _named(stage: StageEntry) -> Iterator[tuple[Artifact, str]]:
    """Yield the artifacts whose makers a text names, each with the tag that names MLflow's run."""
    for role, given in stage.inputs.items():
        yield given.artifact, f"vantage.parent.{role}.run"
    if stage.artifact is not None:
        yield stage.artifact, "vantage.reused_from"


def _link(tags: Mapping[str, str]) -> Link:
    """Return the link to a run of MLflow with these tags."""
    model = SHOWN_PAGE if "vantage.model" in tags else None
    return Link(SHOWN_PAGE, f"{tags.get('vantage.stage')} of run {tags.get('vantage.run_id')}", model)


def _tags_of(evidence: Evidence, mlflow_run_id: str) -> Mapping[str, str] | None:
    tags = evidence.once(
        ("tags", mlflow_run_id), lambda: evidence.ask(lambda server: server.tags_of(mlflow_run_id))
    )
    return None if isinstance(tags, Missing) else tags
