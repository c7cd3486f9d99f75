"""Find the artifacts of a storage that runs and registered models still need."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from vantage.runs.record import REMOVED, RunRecord
from vantage.schemas.recipe.sources import StageOfRun
from vantage.schemas.records.extensions import state_key
from vantage.schemas.records.stored_answers import answers_key
from vantage.storage.refs import Ref


@dataclass(frozen=True)
class NeededArtifacts:
    """Stage keys and objects that must stay in the storage."""

    stage_keys: frozenset[str]
    digests: frozenset[str]
    """Digests of the objects."""


def needed_artifacts(runs: Iterable[RunRecord], refs: Mapping[str, Ref]) -> NeededArtifacts:
    """Return the artifacts that kept runs need, and those that the models published by any run need.

    A kept run needs the keys of its stages, their refs, the objects of both, and the models of other runs that it has
    pinned. A published model needs its own object and everything that it was made from, so that its lineage can be
    audited when its run is gone. The training state of a stage, and the answers of its judges, stay as long as the
    stage's artifact.

    Args:
        runs: all runs; those with status ``removed`` need only their published models.
        refs: stage key → ref, for the whole storage.
    """
    records = list(runs)
    kept = [run for run in records if run.status != REMOVED]
    keys = {key for run in kept for key in _keys_of(run)}
    digests = {stage.digest for run in kept for stage in run.stages.values() if stage.digest}
    digests |= {digest for run in kept for digest in _copied_by(run)}
    digests |= {copy.digest for run in records for copy in run.copies.values()}
    made_by: dict[str, set[str]] = defaultdict(set)
    for key, ref in refs.items():
        made_by[ref.artifact.digest].add(key)
    while True:
        artifacts = [refs[key].artifact for key in keys if key in refs]
        more = {artifact.digest for artifact in artifacts}
        more |= {parent for artifact in artifacts for parent in artifact.parents.values()}
        digests |= more
        # Take all stages that made equal content: one of them may have only copied it, which does not show its origin.
        new = {key for digest in digests for key in made_by.get(digest, ())}
        # Keep also the training states that longer stages go on from, and the stored answers that gave scores.
        beside = {each for key in keys for each in (state_key(key), answers_key(key))}
        new |= beside & refs.keys()
        new -= keys
        if not new:
            return NeededArtifacts(frozenset(keys), frozenset(digests))
        keys |= new


def _copied_by(run: RunRecord) -> set[str]:
    """Return the content digests of other runs' models that the run has pinned, even if it has not copied them yet."""
    sources = (model.origin for model in (run.recipe.model, *run.recipe.models.values()))
    return {each.digest for each in sources if isinstance(each, StageOfRun) and each.digest is not None}


def _keys_of(run: RunRecord) -> set[str]:
    recorded = {stage.stage_key for stage in run.stages.values() if stage.stage_key}
    shorter = {each.stage_key for stage in run.stages.values() for each in stage.shorter}
    return recorded | shorter | set(run.used_keys.values())
