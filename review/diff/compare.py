"""Compare two sides: recipe, stages, data, provenance, gates and metrics, as one record."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vantage.review.diff.fields import field_differences, recipe_differences
from vantage.review.diff.metrics import metric_differences, samples_of
from vantage.review.diff.paired import Samples
from vantage.review.diff.rows import row_difference
from vantage.review.diff.sides import Side, Step, expected_steps
from vantage.runs.workspace import Workspace
from vantage.schemas.records.difference import (
    DataDifference,
    Difference,
    FieldDifference,
    GateDifference,
    MetricDifference,
    ProvenanceDifference,
    Sharing,
    StageDifference,
)
from vantage.schemas.records.stage_key import differences
from vantage.storage.environments import DamagedEnvironment, read_environment
from vantage.storage.storage import Storage


@dataclass(frozen=True)
class Pair:
    """A step of A and the step of B that it is compared with."""

    a: Step
    b: Step


def compare(workspace: Workspace, a: Side, b: Side) -> Difference:
    """Return everything that differs between two sides; a note names files that cannot be read."""
    expected = a.is_recipe or b.is_recipe
    steps_a, steps_b = (_steps(side, expected) for side in (a, b))
    pairs, only_a, only_b = _paired(a, b, steps_a, steps_b)
    stages = (
        *(_stage(pair, expected) for pair in pairs),
        *(StageDifference(step=step.name, sharing="only_a", digest_a=step.record.digest) for step in only_a),
        *(StageDifference(step=step.name, sharing="only_b", digest_b=step.record.digest) for step in only_b),
    )
    alone = a.subject.stage is not None and b.subject.stage is not None
    found = Difference(
        a=a.subject,
        b=b.subject,
        recipe=recipe_differences(a.recipe, b.recipe, {*steps_a, *steps_b} if alone else None),
        stages=tuple(sorted(stages, key=lambda stage: _place(stage, [*steps_a, *steps_b]))),
        expected=expected,
    )
    return found if expected else _measured(workspace.existing_storage, a, b, pairs, found)


def _measured(
    storage: Storage | None, a: Side, b: Side, pairs: Sequence[Pair], found: Difference
) -> Difference:
    """Return the record with the parts that only computed stages have."""
    notes: list[str] = []
    differing = [pair for pair in pairs if _sharing(pair, expected=False) not in ("shared", "neither")]
    data: list[DataDifference] = []
    metrics: list[MetricDifference] = []
    for pair in differing:
        rows, samples, said = _of_files(storage, pair, a, b)
        data += rows
        notes += said
        if pair.a.record.metrics and pair.b.record.metrics:
            metrics += metric_differences(pair.a, pair.b, samples)
    provenance = _provenance(differing)
    libraries, unknown = _libraries(storage, provenance)
    return found.model_copy(
        update={
            "data": tuple(data),
            "provenance": provenance,
            "libraries": libraries,
            "gates": tuple(gate for pair in pairs for gate in _gates(pair)),
            "metrics": tuple(metrics),
            "notes": (*notes, *unknown),
        }
    )


def _steps(side: Side, expected: bool) -> dict[str, Step]:
    """Return the side's steps; with expected keys if the other side is a recipe."""
    if not expected or side.is_recipe:
        return dict(side.steps)
    return {name: step for name, step in expected_steps(side.recipe).items() if name in side.steps}


def _paired(
    a: Side, b: Side, steps_a: dict[str, Step], steps_b: dict[str, Step]
) -> tuple[list[Pair], list[Step], list[Step]]:
    """Return steps that are compared with one another, and steps of one side alone.

    Pairs the two named stages first, then steps of the same name, then steps of the same key (names are in no key).
    """
    of_b = dict(steps_b)
    partners: dict[str, Step] = {}
    if a.subject.stage in steps_a and b.subject.stage in of_b:
        partners[str(a.subject.stage)] = of_b.pop(str(b.subject.stage))
    for name in steps_a:
        if name not in partners and name in of_b and steps_a[name].kind == of_b[name].kind:
            partners[name] = of_b.pop(name)
    by_key = {step.key: name for name, step in of_b.items() if step.key is not None}
    for name, step in steps_a.items():
        if name not in partners and step.key in by_key:
            partners[name] = of_b.pop(by_key.pop(step.key))
    pairs = [Pair(steps_a[name], partners[name]) for name in steps_a if name in partners]
    return pairs, [step for name, step in steps_a.items() if name not in partners], list(of_b.values())


def _place(stage: StageDifference, order: Sequence[str]) -> int:
    return order.index(stage.step)


def _sharing(pair: Pair, expected: bool) -> Sharing:
    keys = {pair.a.key, pair.b.key}
    digests = {pair.a.record.digest, pair.b.record.digest}
    if not expected and digests == {None} and len(keys - {None}) < 2:
        return "neither"
    if None in keys:
        return "unknown"
    if len(keys) > 1:
        return "differs"
    if expected or len(digests) == 1:
        return "shared"
    return "unfinished" if None in digests else "not_reproduced"


def _stage(pair: Pair, expected: bool) -> StageDifference:
    sharing = _sharing(pair, expected)
    parts = [side.parts for side in (pair.a, pair.b)]
    return StageDifference(
        step=pair.a.name,
        step_b=pair.b.name if pair.b.name != pair.a.name else None,
        sharing=sharing,
        digest_a=pair.a.record.digest,
        digest_b=pair.b.record.digest,
        reasons=tuple(differences(*parts)) if sharing == "differs" and all(parts) else (),
    )


def _of_files(
    storage: Storage | None, pair: Pair, a: Side, b: Side
) -> tuple[list[DataDifference], tuple[Samples, Samples] | None, list[str]]:
    """Return the comparison of the artifacts' files: rows, samples of evaluations, and notes on what could not be compared."""
    damage = [
        f"{letter}: {problem}"
        for letter, step in (("A", pair.a), ("B", pair.b))
        if storage is not None and step.artifact is not None
        for problem in storage.check_sizes(step.artifact)
    ]
    notes: list[str] = []
    if not damage:
        try:
            rows: list[DataDifference] = []
            if pair.a.artifact is not None and pair.b.artifact is not None:
                rows += _rows(storage, pair)
            elif "dataset" in (getattr(each.artifact, "kind", None) for each in (pair.a, pair.b)):
                notes.append(f"{pair.a.name}: the store does not have the rows of both sides")
            samples, why = None, None
            if pair.a.record.metrics and pair.b.record.metrics:
                samples, why = samples_of(storage, (pair.a, a.recipe), (pair.b, b.recipe))
            return rows, samples, [*notes, *([] if why is None else [why])]
        except (OSError, ValueError) as error:  # the files have the right size but are no Parquet
            damage = [str(error).splitlines()[0]]
    notes.append(
        f"{pair.a.name}: files are damaged and not compared: {'; '.join(damage)}; `vantage audit` reads every byte"
    )
    return [], None, notes


def _rows(storage: Storage | None, pair: Pair) -> Iterator[DataDifference]:
    """Yield splits of a dataset whose rows differ."""
    a, b = pair.a.artifact, pair.b.artifact
    assert a is not None and b is not None, "both are in the store"
    if storage is None or a.kind != "dataset" or b.kind != "dataset" or a.files_digest == b.files_digest:
        return
    folders = [storage.folder(each) for each in (a, b)]
    for split in sorted({path.stem for folder in folders for path in folder.glob("*.parquet")}):
        files = [folder / f"{split}.parquet" for folder in folders]
        there = [file if file.is_file() else None for file in files]
        found = row_difference(*there)
        if found.added or found.removed:
            yield DataDifference(step=pair.a.name, split=split, **vars(found))


def _provenance(pairs: Sequence[Pair]) -> tuple[ProvenanceDifference, ...]:
    """Return the parts that differ, each with all of its stages."""
    steps: dict[tuple[str, str | None, str | None], list[str]] = {}
    for pair in pairs:
        ours, theirs = pair.a.record.provenance, pair.b.record.provenance
        if not ours or not theirs:  # no attempt of the stage computed anything
            continue
        for part in dict.fromkeys((*ours, *theirs)):
            if ours.get(part) != theirs.get(part):
                steps.setdefault((part, ours.get(part), theirs.get(part)), []).append(pair.a.name)
    return tuple(
        ProvenanceDifference(part=part, a=a, b=b, steps=tuple(names)) for (part, a, b), names in steps.items()
    )


def _libraries(
    storage: Storage | None, provenance: Sequence[ProvenanceDifference]
) -> tuple[tuple[FieldDifference, ...], list[str]]:
    """Return distributions whose versions differ between environments, and what could not be compared."""
    found: dict[str, FieldDifference] = {}
    notes = []
    for part in (each for each in provenance if each.part == "environment"):
        if storage is None or part.a is None or part.b is None:
            continue
        try:
            environments = [read_environment(storage, digest) for digest in (part.a, part.b)]
        except (DamagedEnvironment, ValueError) as error:
            notes.append(str(error))
            continue
        if None in environments:
            notes.append("the list of what was installed is not kept for both sides")
            continue
        listed = [{each.name: each.version for each in one.installed} for one in environments if one]
        found |= {each.field: each for each in field_differences(listed[0], listed[1])}
    return tuple(found[name] for name in sorted(found)), notes


def _gates(pair: Pair) -> Iterator[GateDifference]:
    """Yield gates whose threshold or verdict differs, or that one side does not have; a metric may have two, one each way."""
    bounds = []
    for step in (pair.a, pair.b):
        verdict_of = {(verdict.metric, verdict.relation): verdict for verdict in step.record.verdicts}
        bounds.append(
            {(g.metric, g.relation): (g, verdict_of.get((g.metric, g.relation))) for g in step.gates}
        )
    for metric, relation in dict.fromkeys(bound for gates in bounds for bound in gates):
        sides = [gates.get((metric, relation)) for gates in bounds]
        thresholds = [None if side is None else side[0] for side in sides]
        verdicts = [None if side is None else side[1] for side in sides]
        texts = [
            None if side is None else str(side[1] or f"{metric} {relation} {side[0].bound:g}")
            for side in sides
        ]
        if thresholds[0] != thresholds[1] or texts[0] != texts[1]:
            yield GateDifference(
                step=pair.a.name,
                metric=metric,
                a=texts[0],
                b=texts[1],
                threshold_differs=thresholds[0] != thresholds[1],
                passed_a=verdicts[0].passed if verdicts[0] else None,
                passed_b=verdicts[1].passed if verdicts[1] else None,
            )
