"""Plan a run: for each step, reuse, resume, run, wait for another step, or blocked, with reasons.

A plan changes nothing and starts nothing. A step's key needs the content digests of its inputs. They are unknown while
an input has not been computed; then the step waits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from vantage.attempts.jobs import RecipeStep, steps_of, threads_of
from vantage.attempts.launchers.waiting import what_it_waits_for
from vantage.attempts.machine import available_cpus, num_ranks
from vantage.attempts.provenance import drift, provenance
from vantage.ledger.operations import Input
from vantage.ledger.remarks import compared_with_itself, remark_on
from vantage.runs.extending import Place, place_of
from vantage.runs.gates import Standing, standing
from vantage.runs.models_of_runs import stage_behind
from vantage.runs.record import UNFINISHED, RunRecord, StageRecord
from vantage.runs.registered_models import missing_models, registered_version
from vantage.schemas.checks.few_prompts import few_prompts
from vantage.schemas.checks.warnings import warnings
from vantage.schemas.recipe.default_guards import described_guards
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.stage import Training
from vantage.schemas.recipe.work import Work
from vantage.schemas.records.approvals import Approval
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.attempt import Share
from vantage.schemas.records.stage_key import differences
from vantage.schemas.records.verdicts import Verdict, check_artifact_gate
from vantage.storage.refs import Lookup
from vantage.storage.storage import Storage
from vantage.tasks.rewards import sandbox
from vantage.tasks.training.progress import read_progress
from vantage.tasks.training.scratch import PROGRESS, REPORTS, read_committed

Action = Literal["reuse", "resume", "run", "wait", "blocked"]

_UNKNOWN = "unknown yet"
"""Placeholder for the digest of an input that does not exist yet, so that the rest of a key can be compared."""

_OF_A_MACHINE = ("device", "threads", "world_size")
"""Parts of the provenance that describe the machine that computes."""

_WHY_RERUN = {
    "failed": "failed before",
    "running": "interrupted before its first checkpoint",
    "resumable": "interrupted before its first checkpoint",
}
"""Status of the step in an earlier run → reason why it has no artifact."""


class DriftError(ValueError):
    """Code, libraries or machine have changed since the artifacts to reuse were made."""


@dataclass(frozen=True)
class PlannedStep:
    """The plan of one step."""

    name: str
    kind: str
    action: Action
    reasons: tuple[str, ...] = ()
    reads: Mapping[str, str] = field(default_factory=dict)
    """Role → step whose artifact it reads."""
    damage: tuple[str, ...] = ()
    """Problems of a stored artifact that cannot be reused."""
    drift: tuple[str, ...] = ()
    """Changes of provenance since the reused artifact was made, or since the resumed attempt."""
    at_step: int | None = None
    """Step of the checkpoint to resume from."""
    waits_for: tuple[str, ...] = ()
    stage_key: str | None = None
    digest: str | None = None
    artifact: Artifact | None = None
    """The reused artifact."""
    verdicts: tuple[Verdict, ...] = ()
    """The verdicts of the step's gates on the reused artifact."""
    stands: Standing = "open"
    """Whether steps that depend on the reused artifact may start."""
    pool: str | None = None
    """The work pool that computes the step; None: the process that executes the run."""
    guards: tuple[str, ...] = ()
    """The guards of the stage in words; empty: it has none, or nothing is computed."""
    nodes: int | None = None
    """Most nodes of a Ray cluster that compute the step together."""
    least_nodes: int | None = None
    """Fewest nodes that compute the step; None: ``nodes``."""

    @property
    def where(self) -> str:
        """Machines that compute the step, for display."""
        least = f"{self.least_nodes} to " if self.least_nodes else ""
        return (self.pool or "here") + (f", {least}{self.nodes} nodes" if self.nodes else "")

    extends: str | None = None
    """The shorter stage that the step goes on from, in words; None: there is none, or nothing is computed."""

    @property
    def label(self) -> str:
        """The action for display."""
        if self.action == "resume":
            return f"resume at {self.at_step}"
        return "extend" if self.action == "run" and self.extends else self.action

    def as_json(self) -> dict[str, Any]:
        """Return the step in the output of ``plan --json``."""
        values = {
            member.name: getattr(self, member.name)
            for member in fields(self)
            if member.name not in ("artifact", "reads", "stands")
        }
        return {**values, "verdicts": [verdict.model_dump(mode="json") for verdict in self.verdicts]}


def plan(
    recipe: ResolvedRecipe,
    store: Storage | None,
    runs: Sequence[RunRecord],
    *,
    approvals: tuple[Approval, ...] = (),
) -> list[PlannedStep]:
    """Return the plan for every step, in order.

    Args:
        recipe: the recipe to run.
        store: the store of artifacts; None: there is none yet.
        runs: earlier runs of the workspace, newest first; changes are relative to the newest of this recipe.
        approvals: answers of people that the run has; a new run has none.

    Raises:
        OSError, ValueError: a source cannot be read, or does not match the recipe.
    """
    unfinished = (run.run_id for run in runs if run.recipe == recipe and run.status in UNFINISHED)
    going_on = next(unfinished, None)
    earlier_runs = [run for run in runs if run.recipe.recipe == recipe.recipe]
    planned: dict[str, PlannedStep] = {}
    for name, step in steps_of(recipe).items():
        present = _provenance(step)  # for all steps: the code is read now, while there is only one thread
        earlier = _earlier_record(name, earlier_runs)
        read = {role: planned[other] for role, other in step.reads.items()}
        found = _plan_step(step, read, store, earlier, present, going_on, runs)
        if found.artifact is not None:
            stands = standing(name, found.artifact, found.verdicts, approvals)
            found = replace(found, stands=stands)
        least, most = step.resources.least_nodes, step.resources.most_nodes
        planned[name] = replace(
            found,
            reasons=(*registered_version(step.work), *stage_behind(step.work, store, runs), *found.reasons),
            reads=step.reads,
            pool=step.pool,
            nodes=None if step.resources.nodes is None else most,
            least_nodes=least if least < most else None,
            guards=_guards(step.work) if found.action in ("run", "resume", "wait") else (),
        )
    return list(planned.values())


def plan_warnings(recipe: ResolvedRecipe, steps: Sequence[PlannedStep]) -> list[str]:
    """Return warnings about the recipe: models that MLflow does not have yet, and gates with too few held-out prompts,
    if their number is known."""
    inputs = {step.name: step.reads for step in steps}
    counted = {step.name: step.artifact.metrics for step in steps if step.artifact is not None}
    return [
        *missing_models(recipe.models),
        *warnings(recipe, inputs),
        *few_prompts(recipe, inputs, counted),
        *sandbox.warnings(recipe.verifiers),
    ]


def check_drift(steps: Sequence[PlannedStep]) -> None:
    """Raise DriftError with all changes, if there are any."""
    changes = [f"{step.name}: {difference}" for step in steps for difference in step.drift]
    if changes:
        raise DriftError(
            f"--strict refuses what was made with other code or libraries ({'; '.join(changes)}); "
            "run without --strict, or in a new --workspace"
        )


def damage(steps: Sequence[PlannedStep]) -> dict[str, tuple[str, ...]]:
    """Return step → problems of its stored artifact."""
    return {step.name: step.damage for step in steps if step.damage}


def steps_in_store(steps: Sequence[PlannedStep]) -> set[str]:
    """Return steps whose artifact is in the store."""
    return {step.name for step in steps if step.action == "reuse"}


def needs_work(steps: Sequence[PlannedStep]) -> bool:
    """Return whether any step would be computed."""
    return any(step.action in ("resume", "run", "wait") for step in steps)


def _plan_step(
    step: RecipeStep,
    read: Mapping[str, PlannedStep],
    store: Storage | None,
    earlier: StageRecord | None,
    present: Mapping[str, str],
    going_on: str | None,
    runs: Sequence[RunRecord],
) -> PlannedStep:
    name, kind = step.name, step.work.kind
    obstacles = dict.fromkeys(obstacle for each in read.values() if (obstacle := _obstacle(each)))
    if obstacles:
        return PlannedStep(name, kind, "blocked", reasons=tuple(obstacles))

    digests = {role: each.digest or _UNKNOWN for role, each in read.items()}
    waits_for = tuple(dict.fromkeys(each.name for each in read.values() if each.digest is None))
    if waits_for:
        parts = step.key_parts(digests)
        changes = _changes(earlier.key_parts, parts) if earlier else []
        return PlannedStep(
            name, kind, "wait", reasons=(f"for {', '.join(waits_for)}", *changes), waits_for=waits_for
        )

    place = place_of(step, digests, store, lambda: runs, run_id=going_on or "")
    planned = _plan_place(place, read, store, earlier, present, going_on)
    return replace(
        planned,
        extends=None if planned.action == "reuse" else place.in_words,
        reasons=(*([place.in_words] if place.in_words else []), *planned.reasons, *place.refused),
    )


def _plan_place(
    place: Place,
    read: Mapping[str, PlannedStep],
    store: Storage | None,
    earlier: StageRecord | None,
    present: Mapping[str, str],
    going_on: str | None,
) -> PlannedStep:
    """Return the plan of a step whose inputs are all there."""
    name, kind, parts, key = place.step.name, place.step.work.kind, place.parts, place.key
    found = store.inspect(key) if store else Lookup(None)
    if found.ref is not None and not found.ref.serves(going_on or ""):
        ended = f"run {found.ref.run_id} {found.ref.artifact.ended_early}; this run trains to the end"
        return PlannedStep(name, kind, "run", reasons=(ended,), stage_key=key)
    if found.ref is not None:
        artifact = found.ref.artifact
        inputs = {
            role: Input(stage=each.name, artifact=each.artifact)
            for role, each in read.items()
            if each.artifact is not None
        }
        equal, remark = compared_with_itself(inputs), remark_on(artifact, inputs)
        verdicts = tuple(check_artifact_gate(gate, artifact, equal=equal) for gate in place.step.gates)
        return PlannedStep(
            name,
            kind,
            "reuse",
            reasons=(
                f"made by run {found.ref.run_id}",
                *([] if artifact.ended_early is None else [str(artifact.ended_early)]),
                *([remark] if remark else []),
                *(f"gate {verdict}" for verdict in verdicts),
            ),
            drift=tuple(drift(found.ref.provenance, present)),
            stage_key=key,
            digest=artifact.digest,
            artifact=artifact,
            verdicts=verdicts,
        )
    if store is not None and not found.damage and (holder := store.holder_of(key)):
        waits = what_it_waits_for(read_progress(store.reports(key, (PROGRESS,)) / PROGRESS))
        doing = f"being computed by {holder}" + (f", {waits}" if waits else "")
        reason = f"{doing}; a run waits for it, and reuses what it makes"
        return PlannedStep(name, kind, "run", reasons=(reason,), stage_key=key)
    at_step = _checkpointed(store, key)
    if at_step:
        begun = earlier if earlier and earlier.stage_key == key else None
        return PlannedStep(
            name,
            kind,
            "resume",
            reasons=(f"attempt {begun.attempt if begun else ''} was interrupted".replace("  ", " "),),
            drift=tuple(drift(begun.provenance, present)) if begun and begun.provenance else (),
            at_step=at_step,
            stage_key=key,
            damage=found.damage,
        )
    extends = place.extends is not None and not found.damage  # an extension needs no other reason to run
    reasons = () if extends else _reasons_to_run(found, earlier, parts)
    return PlannedStep(
        name,
        kind,
        "run",
        reasons=reasons,
        drift=() if place.extends is None else tuple(drift(place.extends.provenance, present)),
        stage_key=key,
        damage=found.damage,
    )


def _reasons_to_run(found: Lookup, earlier: StageRecord | None, parts: Mapping[str, Any]) -> tuple[str, ...]:
    if found.damage:
        damages = tuple(f"damaged: {damage}" for damage in found.damage)
        return (
            *damages,
            "a run keeps what is damaged in the store's quarantine, and makes the artifact again",
        )
    if earlier is None:
        return ("never run here",)
    return tuple(_changes(earlier.key_parts, parts)) or (
        _WHY_RERUN.get(earlier.status, "no artifact in the store"),
    )


def _changes(earlier: Mapping[str, Any], parts: Mapping[str, Any]) -> list[str]:
    """Return differences from the earlier run's key, except unknown digests."""
    return [change for change in differences(earlier, parts) if not change.endswith(_UNKNOWN)]


def _earlier_record(name: str, runs: Sequence[RunRecord]) -> StageRecord | None:
    """Return the step's record in the newest of the runs that has its key."""
    stages = (run.stages.get(name) for run in runs)
    return next((stage for stage in stages if stage and stage.key_parts), None)


def check_made(steps: Sequence[PlannedStep], stage: str) -> None:
    """Refuse a run of one stage if its inputs are not made.

    Raises:
        ValueError: a step before the stage would be computed, or has a closed gate.
    """
    missing = [step.name for step in steps if step.name != stage and step.action != "reuse"]
    if missing:
        raise ValueError(
            f"--only={stage} computes this stage alone, and {', '.join(missing)} would have to be computed before; "
            f"use --until {stage}"
        )
    if blocked := next((step for step in steps if step.name == stage and step.action == "blocked"), None):
        raise ValueError(f"--only={stage} cannot start: {'; '.join(blocked.reasons)}")


def _guards(work: Work) -> tuple[str, ...]:
    return described_guards(work) if isinstance(work, Training) else ()


def _obstacle(step: PlannedStep) -> str | None:
    """Return the reason why steps that depend on this one would not start, as far as known; None: they would."""
    if step.action == "blocked":
        return f"reads {step.name}, which would be blocked"
    if step.stands == "waiting_approval":
        return f"reads {step.name}, which waits for a person's approval"
    return f"reads {step.name}, whose gate is closed" if step.stands == "gate_closed" else None


def _provenance(step: RecipeStep) -> dict[str, str]:
    """Return the provenance of the step if it ran now, alone; the machines of a pool are not known here."""
    cpus = step.resources.cpus or available_cpus()
    share = Share(cpus=min(cpus, available_cpus()))
    present = provenance(
        step.work.kind, threads=threads_of(share, step.work), world_size=num_ranks(step.work, None)
    )
    of_machine = _OF_A_MACHINE if step.pool else ()
    return {part: value for part, value in present.items() if part not in of_machine}


def _checkpointed(store: Storage | None, key: str) -> int:
    """Return the step of the newest checkpoint of an interrupted attempt; 0: none."""
    return read_committed(store.reports(key, REPORTS))[0] if store else 0
