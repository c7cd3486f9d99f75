"""What a run would do with each step, and why: reuse, resume, run, wait for another step, or not start at all.

A plan changes nothing and starts nothing. A step's key needs the content digests of what it reads; where a step
before it has to run first, they are unknown, and the step waits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from flows.attempts.jobs import (
    gates_of,
    key_parts_of,
    resources_of,
    threads_of,
    work_of,
)
from flows.attempts.provenance import drift, provenance
from flows.machine import available_cpus
from flows.runs.run import RunRecord, StageRecord
from ledger.operations import Input
from ledger.sameness import compared_with_itself, remark_on
from schemas.checks.few_prompts import few_prompts
from schemas.checks.warnings import warnings
from schemas.recipe.recipe import ResolvedRecipe
from schemas.records.artifacts import Artifact
from schemas.records.attempt import Share
from schemas.records.stage_key import differences, stage_key
from schemas.records.verdicts import Verdict, check_artifact_gate
from schemas.steps import dependencies, ordered_steps
from storage.refs import Lookup
from storage.store import Store
from tasks.training.scratch import read_committed

Action = Literal["reuse", "resume", "run", "wait", "blocked"]

_UNKNOWN = "unknown yet"
"""Stands for the digest of an input that is still to be made, so that the rest of a key can be compared."""

_WHY_AGAIN = {
    "failed": "failed before",
    "running": "interrupted before its first checkpoint",
    "resumable": "interrupted before its first checkpoint",
}
"""Status that an earlier run left the same step in → why it has no artifact."""


class Drifted(ValueError):
    """Code, libraries or machine have changed since artifacts that would be reused were made."""


@dataclass(frozen=True)
class PlannedStep:
    """What would happen to one step."""

    name: str
    kind: str
    action: Action
    reasons: tuple[str, ...] = ()
    damage: tuple[str, ...] = ()
    """What is wrong with an artifact that is in the store and cannot be reused."""
    drift: tuple[str, ...] = ()
    """What an artifact that is reused, or an attempt that is resumed, was made with, where that has changed since."""
    at_step: int | None = None
    """The checkpoint that is gone on from."""
    waits_for: tuple[str, ...] = ()
    stage_key: str | None = None
    digest: str | None = None
    artifact: Artifact | None = None
    """What is reused."""
    verdicts: tuple[Verdict, ...] = ()
    """What the step's gates say of the artifact that is reused."""

    @property
    def said(self) -> str:
        """The action as it is printed."""
        return f"resume at {self.at_step}" if self.action == "resume" else self.action

    def as_json(self) -> dict[str, Any]:
        """What ``plan --json`` prints of the step."""
        told = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "artifact"}
        return {**told, "verdicts": [verdict.model_dump(mode="json") for verdict in self.verdicts]}


def plan(recipe: ResolvedRecipe, store: Store | None, runs: Sequence[RunRecord]) -> list[PlannedStep]:
    """The plan for every step, in order.

    Args:
        recipe: what is to be run.
        store: where artifacts are looked for; None where there is no store yet.
        runs: earlier runs of the workspace, newest first: what changed is said against the newest of this recipe.

    Raises:
        OSError, ValueError: a source outside cannot be read, or is not what the recipe says.
    """
    inputs = dependencies(recipe)
    steps: dict[str, PlannedStep] = {}
    for name in ordered_steps(recipe):
        present = _provenance(recipe, name)  # for all: the code is read now, while there is one thread only
        earlier = _earlier(recipe, name, runs)
        read = {role: steps[step] for role, step in inputs[name].items()}
        steps[name] = _plan_step(recipe, name, read, store, earlier, present)
    return list(steps.values())


def cautions(recipe: ResolvedRecipe, steps: Sequence[PlannedStep]) -> list[str]:
    """Warnings of the recipe itself, and of gates that its held-out prompts, as far as they are counted, tell little of."""
    counted = {step.name: step.artifact.metrics for step in steps if step.artifact is not None}
    return [*warnings(recipe), *few_prompts(recipe, counted)]


def refuse_drift(steps: Sequence[PlannedStep]) -> None:
    """Raise Drifted, with everything that has changed, where anything has."""
    told = [f"{step.name}: {difference}" for step in steps for difference in step.drift]
    if told:
        raise Drifted(
            f"--strict refuses what was made with other code or libraries ({'; '.join(told)}); "
            "run without --strict, or in a new --workspace"
        )


def damage(steps: Sequence[PlannedStep]) -> dict[str, tuple[str, ...]]:
    """Step → what is wrong with the artifact that the store has for it."""
    return {step.name: step.damage for step in steps if step.damage}


def in_store(steps: Sequence[PlannedStep]) -> set[str]:
    """Steps whose artifact is there."""
    return {step.name for step in steps if step.action == "reuse"}


def needs_work(steps: Sequence[PlannedStep]) -> bool:
    """Whether anything would be computed."""
    return any(step.action in ("resume", "run", "wait") for step in steps)


def _plan_step(
    recipe: ResolvedRecipe,
    name: str,
    read: Mapping[str, PlannedStep],
    store: Store | None,
    earlier: StageRecord | None,
    present: Mapping[str, str],
) -> PlannedStep:
    kind = work_of(recipe, name).kind
    obstacles = dict.fromkeys(obstacle for step in read.values() if (obstacle := _obstacle(step)))
    if obstacles:
        return PlannedStep(name, kind, "blocked", reasons=tuple(obstacles))

    digests = {role: step.digest or _UNKNOWN for role, step in read.items()}
    parts = key_parts_of(recipe, name, digests)
    waits_for = tuple(dict.fromkeys(step.name for step in read.values() if step.digest is None))
    if waits_for:
        changes = _changes(earlier.key_parts, parts) if earlier else []
        return PlannedStep(
            name, kind, "wait", reasons=(f"for {', '.join(waits_for)}", *changes), waits_for=waits_for
        )

    key = stage_key(parts)
    found = store.inspect(key) if store else Lookup(None)
    if found.ref is not None:
        artifact = found.ref.artifact
        inputs = {
            role: Input(stage=step.name, artifact=step.artifact)
            for role, step in read.items()
            if step.artifact is not None
        }
        equal, remark = compared_with_itself(inputs), remark_on(artifact, inputs)
        verdicts = tuple(check_artifact_gate(gate, artifact, equal=equal) for gate in gates_of(recipe, name))
        return PlannedStep(
            name,
            kind,
            "reuse",
            reasons=(
                f"made by run {found.ref.run_id}",
                *([remark] if remark else []),
                *(f"gate {verdict}" for verdict in verdicts),
            ),
            drift=tuple(drift(found.ref.provenance, present)),
            stage_key=key,
            digest=artifact.digest,
            artifact=artifact,
            verdicts=verdicts,
        )
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
    reasons = _reasons_to_run(found, earlier, parts)
    return PlannedStep(name, kind, "run", reasons=reasons, stage_key=key, damage=found.damage)


def _reasons_to_run(found: Lookup, earlier: StageRecord | None, parts: Mapping[str, Any]) -> tuple[str, ...]:
    if found.damage:
        told = tuple(f"damaged: {damage}" for damage in found.damage)
        return (*told, "a run keeps what is damaged in the store's quarantine, and makes the artifact again")
    if earlier is None:
        return ("never run here",)
    return tuple(_changes(earlier.key_parts, parts)) or (
        _WHY_AGAIN.get(earlier.status, "no artifact in the store"),
    )


def _changes(earlier: Mapping[str, Any], parts: Mapping[str, Any]) -> list[str]:
    """What differs from the earlier run's key, except what is not known yet."""
    return [change for change in differences(earlier, parts) if not change.endswith(_UNKNOWN)]


def _earlier(recipe: ResolvedRecipe, name: str, runs: Sequence[RunRecord]) -> StageRecord | None:
    """The step in the newest run of the recipe that got as far as its key."""
    stages = (run.stages.get(name) for run in runs if run.recipe.recipe == recipe.recipe)
    return next((stage for stage in stages if stage and stage.key_parts), None)


def _obstacle(step: PlannedStep) -> str | None:
    """Why what reads the step would not start, as far as that is known."""
    if step.action == "blocked":
        return f"reads {step.name}, which would be blocked"
    closed = any(not verdict.passed and verdict.on_fail == "stop" for verdict in step.verdicts)
    return f"reads {step.name}, whose gate is closed" if closed else None


def _provenance(recipe: ResolvedRecipe, name: str) -> dict[str, str]:
    """What the step would be made with if it ran now, alone."""
    cpus = resources_of(recipe, name).cpus or available_cpus()
    share = Share(cpus=min(cpus, available_cpus()))
    return provenance(work_of(recipe, name).kind, threads=threads_of(share))


def _checkpointed(store: Store | None, key: str) -> int:
    """The step of the newest checkpoint of an interrupted attempt; 0: none."""
    return read_committed(store.root / "scratch" / key)[0] if store else 0
