"""Collect publications and movements of aliases, as the runs of the workspace recorded them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from vantage.ledger.entries import RunEntry
from vantage.ledger.expected.changes import VersionChange, changes
from vantage.ledger.operations import MoveAlias, Publish
from vantage.ledger.replay import OutboxLine, Replay
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.sent import is_taken, order_checks
from vantage.runs.record import REMOVED, RunRecord
from vantage.runs.view import Broken, Missing
from vantage.schemas.recipe.recipe import Publication, ResolvedRecipe


@dataclass(frozen=True)
class Recorded:
    """A publication, or a movement of an alias, that is in a run's outbox and that MLflow was sent."""

    run_id: str
    operation: Publish | MoveAlias
    entry: RunEntry
    """State of the run at that time."""
    recipe: ResolvedRecipe | None
    """The recipe of the run; None: another version of Vantage made it."""
    facts: Mapping[str, str] | None
    """Gates and measurements that the tags of the version must show; None: it is no publication."""
    has_tag: bool
    """Whether the registered model must have a tag about it; an earlier version wrote none for a publication."""

    @property
    def digest(self) -> str:
        """Content digest of the artifact that was published, or that the alias moved to."""
        operation = self.operation
        return operation.digest if isinstance(operation, MoveAlias) else operation.artifact.digest

    @property
    def by(self) -> str:
        """Return the person or run that moved the alias."""
        person = self.operation.by
        return f"run {self.run_id}" if person is None else f"{person} (ledger of run {self.run_id})"


def publications(evidence: Evidence, name: str) -> list[Recorded]:
    """Return every publication under a name by the runs of the workspace, in the order in which they happened."""
    return [each for each in _recorded(evidence, name) if isinstance(each.operation, Publish)]


def is_published(evidence: Evidence, run_id: str, name: str, digest: str) -> bool:
    """Return whether MLflow has received a publication by this run."""
    return any((each.run_id, each.digest) == (run_id, digest) for each in publications(evidence, name))


def movements(evidence: Evidence, name: str, alias: str) -> list[Recorded]:
    """Return every movement of an alias: by the runs at their end, by ``vantage publish`` and by ``vantage rollback``."""
    return [each for each in _recorded(evidence, name) if each.operation.alias == alias]


def unsettled(evidence: Evidence, name: str, alias: str) -> list[str]:
    """Return what may have moved an alias after the last movement that MLflow must show, in all runs of the workspace.

    Without this, an alias could be set back to an older version by damaging the records of the later run alone, which
    the audit of the older version does not walk.
    """
    moves = movements(evidence, name, alias)
    newest = moves[-1].operation.order if moves else None
    return [
        each for run_id in evidence.run_ids for each in _unsettled_by(evidence, run_id, name, alias, newest)
    ]


def _unsettled_by(
    evidence: Evidence, run_id: str, name: str, alias: str, newest: int | None
) -> Iterator[str]:
    replay, record = evidence.replay(run_id), evidence.record(run_id)
    copy = record.copies.get(name) if isinstance(record, RunRecord) else None
    if isinstance(record, RunRecord) and not _publishes(record, name):
        return
    if not isinstance(replay, Replay):
        if not (isinstance(record, RunRecord) and record.status == REMOVED) and (
            copy is not None or isinstance(replay, Broken)
        ):
            yield f"the outbox of run {run_id} cannot be read ({replay}), so whether it moved it later is not known"
        return
    if wrong := [each.detail for each in order_checks(evidence, run_id, replay) if each.outcome == "wrong"]:
        yield f"whether run {run_id} moved it later is not known: its outbox: {wrong[0]}"
    published = False
    for line in replay.lines:
        operation = line.operation
        if isinstance(operation, Publish | MoveAlias) and operation.registered_model == name:
            published = published or isinstance(operation, Publish)
            is_later = operation.alias == alias and (newest is None or operation.order > newest)
            if is_later and not is_taken(evidence, run_id, replay, line):
                yield (
                    f"run {run_id} recorded a later movement of it, and by the files beside its outbox MLflow was not sent it or "
                    "refused it; the next run sends what waits"
                )
    if copy is not None and not published:
        yield f"run {run_id} published {copy.digest[:12]} as {name}, and its outbox says nothing of it"


def _publishes(record: RunRecord, name: str) -> bool:
    return name in record.copies or any(each.registered_model == name for each in record.recipe.publish)


def _recorded(evidence: Evidence, name: str) -> list[Recorded]:
    return evidence.once(("recorded", name), lambda: _read_recorded(evidence, name))


def _read_recorded(evidence: Evidence, name: str) -> list[Recorded]:
    found = []
    for run_id in evidence.run_ids:
        replay = evidence.replay(run_id)
        for line in replay.lines if isinstance(replay, Replay) else ():
            operation = line.operation
            if isinstance(operation, Publish | MoveAlias) and operation.registered_model == name:
                assert isinstance(replay, Replay)
                if is_taken(evidence, run_id, replay, line):
                    facts = _facts(line)
                    has_tag = replay.is_chained or isinstance(operation, MoveAlias)
                    found.append(Recorded(run_id, operation, line.entry, _recipe(replay), facts, has_tag))
    return sorted(found, key=lambda each: each.operation.order)


def _facts(line: OutboxLine) -> Mapping[str, str] | None:
    versions = (each for each in changes(line.entry, line.operation) if isinstance(each, VersionChange))
    return next((each.facts for each in versions), None)


def required_steps(recorded: Recorded) -> list[str]:
    """Return the steps whose gates hold the alias back: the published stage, and the one it waits for."""
    recipe, stage = recorded.recipe, recorded.operation.stage
    after = [each.after for each in publications_of(recipe, recorded) if each.after]
    return list(dict.fromkeys([stage, *after]))


def publications_of(recipe: ResolvedRecipe | None, recorded: Recorded) -> list[Publication]:
    """Return the recipe's entries for a recorded publication or movement. A run moves only its recipe's aliases; a
    person may move any alias of a published model."""
    operation = recorded.operation
    return [
        each
        for each in (recipe.publish if recipe is not None else ())
        if (each.stage, each.registered_model) == (operation.stage, operation.registered_model)
        and (operation.by is not None or operation.alias in (each.alias, None))
    ]


def _recipe(replay: Replay) -> ResolvedRecipe | None:
    try:
        return ResolvedRecipe.model_validate(replay.opened.recipe)
    except ValidationError:
        return None


def gone(evidence: Evidence, name: str, digest: str | None) -> str:
    """Return the removed run that may have published the artifact; empty: there is none."""
    for run_id in evidence.run_ids:
        record = evidence.record(run_id)
        removed = isinstance(record, RunRecord) and record.status == REMOVED
        copy = record.copies.get(name) if isinstance(record, RunRecord) else None
        is_same = copy is not None and copy.digest == digest
        if removed and is_same and isinstance(evidence.replay(run_id), Missing):
            return f"run {run_id} published it and was removed since, with its outbox"
    return ""
