"""Find what a training stage goes on from: nothing, a shorter stage of an earlier run, or the same stage before its
gate extended it.

The result is a function of the store and of the runs' records. So the plan shows what a run will do, and a run that is
resumed finds the same result.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from vantage.attempts.jobs import RecipeStep
from vantage.runs.record import RunRecord, StageRecord
from vantage.schemas.recipe.extending import (
    PREVIOUS,
    PREVIOUS_ROLES,
    PREVIOUS_STATE,
    length_in_words,
    length_of,
    unit_of,
    why_not_extended,
    with_length,
)
from vantage.schemas.recipe.stage import Training
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.extensions import Shorter, state_key
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.records.verdicts import Verdict, check_artifact_gate
from vantage.storage.refs import DamagedRef, Ref
from vantage.storage.storage import Storage
from vantage.tasks.training.scratch import REPORTS, read_committed

Judge = Callable[[Artifact], tuple[Verdict, ...]]
"""Artifact of a step → the verdicts of its gates."""


@dataclass(frozen=True)
class Place:
    """The computation of a step, planned or done, and the shorter stages that it goes on from."""

    step: RecipeStep
    """The step, with the length that is computed."""
    parts: Mapping[str, Any]
    """Parts of the stage key."""
    inputs: Mapping[str, Artifact] = field(default_factory=dict)
    """The artifact and the training state that the computation goes on from; empty: it begins from nothing."""
    shorter: tuple[Shorter, ...] = ()
    """The shorter stages that the computation goes on from; each went on from the one before."""
    refused: tuple[str, ...] = ()
    """Why the computation does not go on from an existing shorter stage, or is not extended although a gate asks."""

    @property
    def key(self) -> str:
        """Return the stage key of the computation."""
        return stage_key(self.parts)

    @property
    def extends(self) -> Shorter | None:
        """The last shorter stage, from which the computation goes on; None: it begins from nothing."""
        return self.shorter[-1] if self.shorter else None

    @property
    def in_words(self) -> str | None:
        """Return in words what the computation goes on from; None: nothing."""
        return None if self.extends is None else self.extends.extended_to(self.step.work)


def place_of(
    step: RecipeStep,
    digests: Mapping[str, str],
    store: Storage | None,
    runs: Callable[[], Sequence[RunRecord]],
    *,
    run_id: str = "",
) -> Place:
    """Return the next computation of a step, or its last computation if the artifact is made.

    Args:
        digests: role → digest of each input.
        store: the store of artifacts; None: there is none yet.
        runs: reads the records of the workspace, newest first; called if the artifact is neither made nor under way.
        run_id: the run that computes it.
    """
    place = Place(step, step.key_parts(digests))
    if store is None or not isinstance(step.work, Training):
        return place
    place = _begun(place, digests, store, runs, run_id)
    return _extended_by_gates(place, digests, store, run_id)


def asks_to_extend(step: RecipeStep, verdicts: Sequence[Verdict]) -> bool:
    """Return whether closed gates of an artifact ask that its stage is trained further, and none stops the run."""
    closed = {verdict.on_fail for verdict in verdicts if not verdict.passed}
    return "extend" in closed and "stop" not in closed and isinstance(step.work, Training)


def extended_step(step: RecipeStep, parts: Mapping[str, Any]) -> RecipeStep:
    """Return the step with the length in the parts of a key, if its gates may have extended it to that length."""
    extend = step.work.extend if isinstance(step.work, Training) else None
    if extend is None:
        return step
    lengths = [length_of(step.work) + extend.by * count for count in range(extend.at_most + 1)]
    found = parts.get("configuration", {}).get(unit_of(step.work))
    return replace(step, work=with_length(step.work, found)) if found in lengths else step


def _begun(
    place: Place,
    digests: Mapping[str, str],
    store: Storage,
    runs: Callable[[], Sequence[RunRecord]],
    run_id: str,
) -> Place:
    """Return the place that goes on from the longest shorter stage of any run, unless the stage is made or under
    way."""
    assert isinstance(place.step.work, Training), "no other stage is trained further"
    whole = store.inspect(place.key)
    is_under_way = read_committed(store.reports(place.key, REPORTS))[0] > 0
    if whole.ref is not None or whole.damage or is_under_way:
        return place
    refused: list[str] = []
    for shorter, before in _of_other_lengths(place, runs()):
        ref = _made(store, shorter.stage_key, run_id)
        if ref is None or ref.artifact.digest != shorter.digest:
            continue
        if shorter.length == length_of(place.step.work):
            if (found := _made_before(place, shorter.stage_key, before, digests, store)) is not None:
                return found
            continue
        why = why_not_extended(with_length(place.step.work, shorter.length))
        known = shorter.model_copy(update={"provenance": dict(ref.provenance)})
        gone_on = why or _going_on(replace(place, shorter=before), ref.artifact, known, digests, store)
        if isinstance(gone_on, Place):
            return gone_on
        amount = length_in_words(shorter.length, unit_of(place.step.work))
        refused.append(f"does not extend {shorter.run_id}/{shorter.step} ({amount}): {gone_on}")
    return replace(place, refused=tuple(refused[:1]))


def _made_before(
    place: Place, key: str, before: tuple[Shorter, ...], digests: Mapping[str, str], store: Storage
) -> Place | None:
    """Return the place of an artifact of the wanted length that went on from stored shorter stages; None: there is
    none."""
    if not before:
        return None
    previous = before[-1].stage_key
    with suppress(DamagedRef):
        artifact, state = store.find(previous), store.find(state_key(previous))
        if artifact is not None and state is not None:
            roles = {PREVIOUS: artifact.artifact, PREVIOUS_STATE: state.artifact}
            found = replace(place, parts=_parts(place, digests, roles), inputs=roles, shorter=before)
            return found if found.key == key else None
    return None


def _extended_by_gates(place: Place, digests: Mapping[str, str], store: Storage, run_id: str) -> Place:
    """Return the place after as many extensions as closed gates have asked for so far."""
    work = place.step.work
    extend = work.extend if isinstance(work, Training) else None
    for _ in range(0 if extend is None else extend.at_most):
        assert extend is not None
        ref = _made(store, place.key, run_id)
        if ref is None:
            return place
        verdicts = tuple(check_artifact_gate(gate, ref.artifact) for gate in place.step.gates)
        if not asks_to_extend(place.step, verdicts):
            return place
        length = length_of(place.step.work)
        shorter = Shorter(
            run_id=ref.run_id,
            step=place.step.name,
            stage_key=ref.artifact.stage_key,
            digest=ref.artifact.digest,
            length=length,
            provenance=dict(ref.provenance),
            verdicts=verdicts,
        )
        longer = replace(place.step, work=with_length(place.step.work, length + extend.by))
        found = _going_on(replace(place, step=longer), ref.artifact, shorter, digests, store)
        if isinstance(found, str):
            return replace(place, refused=(*place.refused, f"is not extended: {found}"))
        place = found
    return place


def _going_on(
    place: Place,
    artifact: Artifact,
    shorter: Shorter,
    digests: Mapping[str, str],
    store: Storage,
) -> Place | str:
    """Return the place that goes on from a shorter stage's state, or why it cannot."""
    state = _state_of(artifact, store)
    if isinstance(state, str):
        return state
    roles = {PREVIOUS: artifact, PREVIOUS_STATE: state}
    parts = _parts(place, digests, roles)
    return replace(place, parts=parts, inputs=roles, shorter=(*place.shorter, shorter))


def _parts(place: Place, digests: Mapping[str, str], previous: Mapping[str, Artifact]) -> dict[str, Any]:
    """Return the parts of the key of a place that goes on from ``previous``."""
    return place.step.key_parts({**digests, **{role: each.digest for role, each in previous.items()}})


def _state_of(artifact: Artifact, store: Storage) -> Artifact | str:
    """Return the training state beside an artifact, or why there is none that can be used."""
    if artifact.ended_early is not None:
        by_itself = artifact.ended_early.by == "guard"
        why = (
            "a longer one would have ended there too"
            if by_itself
            else "so no state of all its steps was kept"
        )
        return f"it {artifact.ended_early}, {'and ' if by_itself else ''}{why}"
    found = store.inspect(state_key(artifact.stage_key))
    if found.damage:
        return f"its training state is damaged ({'; '.join(found.damage)})"
    if found.ref is None:
        return (
            "its training state was not kept, or it stopped before its last step; keep_state: true keeps the state of a stage "
            "that trains anew"
        )
    return found.ref.artifact


def _of_other_lengths(place: Place, runs: Sequence[RunRecord]) -> list[tuple[Shorter, tuple[Shorter, ...]]]:
    """Return stages of runs that differ from this one only by a length that is at most as large, the longest first.

    Each comes with the shorter stages that it went on from. These are also results of their own.
    """
    wanted = _without_length(place, place.parts)
    found: dict[str, tuple[Shorter, tuple[Shorter, ...]]] = {}
    for record in runs:
        for name, stage in record.stages.items():
            parts = stage.key_parts
            if parts.get("kind") != place.parts["kind"] or _without_length(place, parts) != wanted:
                continue
            whole = _as_shorter(place, record.run_id, name, stage)
            made = [*stage.shorter, *([] if whole is None else [whole])]
            for number, each in enumerate(made):
                plain = each.model_copy(
                    update={"verdicts": ()}
                )  # the verdicts belong to the gates that the stage had then
                found.setdefault(each.stage_key, (plain, tuple(made[:number])))
    asked = length_of(place.step.work)
    return sorted(
        (each for each in found.values() if each[0].length <= asked), key=lambda each: -each[0].length
    )


def _as_shorter(place: Place, run_id: str, name: str, stage: StageRecord) -> Shorter | None:
    """Return a stage of a run as one that a longer stage may go on from; None: it has made no artifact yet."""
    if stage.digest is None or stage.stage_key is None:
        return None
    length = float(stage.key_parts["configuration"][unit_of(place.step.work)])
    return Shorter(run_id=run_id, step=name, stage_key=stage.stage_key, digest=stage.digest, length=length)


def _without_length(place: Place, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of a key without the stage's length and without the inputs that it goes on from."""
    configuration, inputs = dict(parts.get("configuration", {})), dict(parts.get("inputs", {}))
    configuration.pop(unit_of(place.step.work), None)
    for role in PREVIOUS_ROLES:
        inputs.pop(role, None)
    return {**parts, "configuration": configuration, "inputs": inputs}


def _made(store: Storage, key: str, run_id: str) -> Ref | None:
    """Return the ref of an intact artifact that serves the run for the whole stage."""
    ref = store.inspect(key).ref
    return ref if ref is not None and ref.serves(run_id) else None
