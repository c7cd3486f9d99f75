"""MLflow's entry of a run or a stage, compared with what the outbox told."""

import json
from collections.abc import Iterator, Mapping, Set
from typing import TYPE_CHECKING

from vantage.ledger.expected.artifact_fields import ExpectedModel
from vantage.ledger.expected.runs import ExpectedRun, Row
from vantage.review.audit.evidence import Evidence, check_of
from vantage.review.audit.sent import SentTo, expected_of, sent_to
from vantage.runs.record import RunRecord
from vantage.runs.view import Broken, Missing
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.audit import Check
from vantage.schemas.records.facts import TAG

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.audited_runs import DatasetInput, LoggedModel, MlflowRun

_SUBJECT = "MLflow"
_SHOWN = 3
_OURS = (
    "vantage.gate.",
    "vantage.energy.",
    TAG,
    "vantage.provenance.",
    "vantage.source.",
    "vantage.parent.",
    "vantage.approval",
    "vantage.alias.",
)
_OURS_EXACTLY = frozenset(
    {
        "vantage.verdict",
        "vantage.digest",
        "vantage.stage_key",
        "vantage.kind",
        "vantage.remark",
        "vantage.warnings",
        "vantage.tokenizer_digest",
        "vantage.uri",
    }
)
"""Tags that nobody but the run itself has a reason to write."""


def mlflow_check(evidence: Evidence, run_id: str, stage: str | None) -> Check:
    """Tags, params, metric rows and dataset inputs of a stage's run (None: of the parent run), and whom they point to."""
    replay = evidence.replay(run_id)
    if isinstance(replay, Missing | Broken):
        return Check(
            subject=_SUBJECT, outcome="unchecked", detail=f"there is nothing to compare it with: {replay}"
        )
    runs = evidence.mlflow_runs(replay.opened.experiment, run_id)
    if isinstance(runs, Missing):
        return check_of(_SUBJECT, runs)
    sent = sent_to(evidence, run_id, replay)
    if isinstance(sent, Missing):
        return check_of(_SUBJECT, sent)
    required = sent.expected.get(stage, ExpectedRun())
    allowed = expected_of(evidence, run_id, replay).get(stage, ExpectedRun())
    found = runs.get(stage, [])
    if not found:
        return _absent(sent, required, stage)
    problems = [*_problems(required, allowed, found[0]), *_latest_problems(found[0])]
    problems += _pointers(evidence, found[0], runs.get(None, []), stage)
    problems += _model_problems(evidence, found[0], allowed)
    for double in found[1:]:
        contradicting = [*_problems(ExpectedRun(), allowed, double), *_other_tags(allowed, double)]
        problems += [
            f"a second run of MLflow ({double.run_id[:8]}) says it is this one: {each}"
            for each in contradicting
        ]
    if problems:
        return Check(subject=_SUBJECT, outcome="wrong", detail="; ".join(problems))
    if sent.remark:
        return Check(subject=_SUBJECT, outcome="unchecked", detail=sent.remark)
    if len(found) > 1:
        return Check(
            subject=_SUBJECT,
            outcome="note",
            detail=f"MLflow has {len(found)} runs that say they are this one",
        )
    return Check(subject=_SUBJECT, detail=_counts(found[0]))


def check_without_outbox(evidence: Evidence, record: RunRecord, step: str, artifact: Artifact) -> Check:
    """Return what is left to compare where the run's outbox is gone: digest, key, parents and headline metrics."""
    runs = evidence.mlflow_runs(record.recipe.recipe, record.run_id)
    if isinstance(runs, Missing):
        return check_of(_SUBJECT, runs)
    if not runs.get(step):
        return Check(
            subject=_SUBJECT,
            outcome="unchecked",
            detail=f"MLflow has no run of {step} of run {record.run_id}",
        )
    found = runs[step][0]
    tags = {"vantage.digest": artifact.digest, "vantage.stage_key": artifact.stage_key}
    tags |= {
        f"vantage.parent.{role}": digest
        for role, digest in artifact.parents.items()
        if f"vantage.parent.{role}" in found.tags
    }
    problems = list(_tag_problems(ExpectedRun(tags=tags), ExpectedRun(tags=dict(found.tags) | tags), found))
    if "vantage.reused_from" not in found.tags:
        values = {(name, value) for name, _, _, value in found.rows}
        problems += [
            f"metric {name} is not {value}, which is sealed in the artifact"
            for name, value in artifact.metrics.items()
            if value is not None and (name, value) not in values
        ]
    if problems:
        return Check(subject=_SUBJECT, outcome="wrong", detail="; ".join(problems))
    said = "its digest, parents and headline metrics agree; the rest cannot be compared, since the outbox is gone"
    return Check(subject=_SUBJECT, outcome="unchecked", detail=said)


def _absent(sent: SentTo, required: ExpectedRun, stage: str | None) -> Check:
    what = "the run" if stage is None else f"stage {stage}"
    if not required.tags:
        return Check(
            subject=_SUBJECT, outcome="unchecked", detail=sent.remark or f"MLflow was told nothing of {what}"
        )
    said = f"MLflow has no run of {what} any longer: it was deleted, or its vantage.run_id or vantage.stage was edited"
    return Check(subject=_SUBJECT, outcome="wrong", detail=said)


def _problems(required: ExpectedRun, allowed: ExpectedRun, found: "MlflowRun") -> Iterator[str]:
    yield from _tag_problems(required, allowed, found)
    yield from _named_problems("param", required.params, allowed.params, found.params)
    yield from _row_problems(required.rows, allowed.rows | allowed.optional_rows, found.rows)
    yield from _dataset_problems(required, allowed, found)


def _tag_problems(required: ExpectedRun, allowed: ExpectedRun, found: "MlflowRun") -> Iterator[str]:
    for name, value in required.tags.items():
        told = found.tags.get(name)
        if told not in (value, allowed.tags.get(name)):
            yield f"tag {name} is {_shown(told)}, and was sent as {_shown(value)}"
    for name, value in allowed.optional_tags.items():
        told = found.tags.get(name)
        if name not in required.tags and told not in (None, value, allowed.tags.get(name)):
            yield f"tag {name} is {_shown(told)}, and was sent as {_shown(value)}"
    for name in sorted(found.tags):
        is_ours = name in _OURS_EXACTLY or (name.startswith(_OURS) and not _is_pointer(name))
        if is_ours and name not in allowed.tags and name not in allowed.optional_tags:
            yield f"tag {name} is {_shown(found.tags[name])}, which nobody sent"


def _other_tags(allowed: ExpectedRun, found: "MlflowRun") -> Iterator[str]:
    """Yield tags with another value, of a run that may lack any of them."""
    for name, value in allowed.tags.items():
        if name in found.tags and name != "vantage.status" and found.tags[name] != value:
            yield f"tag {name} is {_shown(found.tags[name])}, and was sent as {_shown(value)}"


def _named_problems(
    what: str, required: Mapping[str, str], allowed: Mapping[str, str], found: Mapping[str, str]
) -> Iterator[str]:
    for name, value in required.items():
        if found.get(name) != value:
            yield f"{what} {name} is {_shown(found.get(name))}, and was sent as {_shown(value)}"
    for name in sorted(found.keys() - allowed.keys()):
        yield f"{what} {name} is {_shown(found[name])}, which nobody sent"


def _row_problems(required: Set[Row], allowed: Set[Row], found: Set[Row]) -> Iterator[str]:
    missing, added = sorted(required - found, key=_place), sorted(found - allowed, key=_place)
    instead = {(name, step): value for name, _, step, value in added}
    for name, _, step, value in missing[:_SHOWN]:
        told = instead.get((name, step))
        said = "is missing" if told is None else f"is {told:g}"
        yield f"metric {name} at step {step} {said}, and was sent as {value!r}"
    lost = {(name, step) for name, _, step, _ in missing}
    strange = [row for row in added if (row[0], row[2]) not in lost]
    for name, _, step, value in strange[:_SHOWN]:
        yield f"metric {name} at step {step} is {value:g}, which nobody sent"
    more = max(len(missing) - _SHOWN, 0) + max(len(strange) - _SHOWN, 0)
    if more:
        yield f"and {more} more rows"


def _latest_problems(found: "MlflowRun") -> Iterator[str]:
    """MLflow keeps the newest value of each metric a second time, and shows that one in its tables."""
    newest: dict[str, tuple[int, int]] = {}
    for name, time, step, _ in found.rows:
        newest[name] = max(newest.get(name, (step, time)), (step, time))
    values: dict[str, list[float]] = {}
    for name, time, step, value in found.rows:
        if newest[name] == (step, time):
            values.setdefault(name, []).append(value)
    for name, value in sorted(found.latest.items()):
        if name not in values:
            yield f"metric {name} is shown as {value:g}, and has no row"
        elif value not in values[name]:
            yield f"metric {name} is shown as {value!r}, and its newest row is {values[name][0]!r}"


def _dataset_problems(required: ExpectedRun, allowed: ExpectedRun, found: "MlflowRun") -> Iterator[str]:
    given = {each.tags.get("vantage.digest", ""): each for each in found.datasets}
    known = allowed.datasets | allowed.optional_datasets
    optional = {digest: tags for digest, tags in required.optional_datasets.items() if digest in given}
    for digest, tags in (required.datasets | optional).items():
        if digest not in given:
            yield f"dataset input {digest[:12]} is missing"
            continue
        dataset = given[digest]
        for name, value in tags.items():
            if dataset.tags.get(name) not in (value, known[digest].get(name)):
                yield f"dataset input {digest[:12]}: {name} is {_shown(dataset.tags.get(name))}, and was sent as {_shown(value)}"
        yield from _dataset_field_problems(dataset, allowed.dataset_fields[digest])
    for digest in sorted(given.keys() - known.keys()):
        yield f"dataset input {digest[:12] or 'without our digest'}: nobody sent it"


def _dataset_field_problems(dataset: "DatasetInput", sent: list[dict[str, str]]) -> Iterator[str]:
    """MLflow's own fields. One dataset that came from two sources has the first of them there, and both in the tags."""
    described = f"dataset input {sent[0]['digest'][:12]}"
    if dataset.digest != sent[0]["digest"]:
        yield f"{described} has the digest {dataset.digest[:12]} in MLflow's own field"
    if dataset.name not in {fields["name"] for fields in sent}:
        yield f"{described} has the name {_shown(dataset.name)}, and was sent as {_shown(sent[0]['name'])}"
    for field in sent[0].keys() & {"source", "profile"}:
        told, ours = _parsed(getattr(dataset, field)), _parsed(sent[0][field])
        if told != ours:
            yield f"{described} has the {field} {_shown(str(told))}, and was sent as {_shown(str(ours))}"


def _parsed(text: str) -> object:
    """Return a field of a dataset, without what may differ."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return (
        {name: each for name, each in value.items() if name != "source_sha256"}
        if isinstance(value, dict)
        else value
    )


def _model_problems(evidence: Evidence, found: "MlflowRun", allowed: ExpectedRun) -> Iterator[str]:
    """Yield the logged model of the stage's artifact: what MLflow's page of it says."""
    model_id = found.tags.get("vantage.model")
    if model_id is None:
        return
    tags, what = found.tags, f"logged model {model_id}"
    model = evidence.ask(lambda server: server.model(model_id))
    if model is None:
        yield f"tag vantage.model is {model_id}, which MLflow does not have"
        return
    if isinstance(model, Missing):
        return
    names = ("vantage.digest", "vantage.stage_key", "vantage.stage", "vantage.run_id")
    expected: dict[str, str | None] = {name: tags.get(name) for name in names}
    expected |= {name: value for name, value in tags.items() if _is_parent(name)}
    yield from _differing(what, model.tags, expected)
    for name in sorted(model.tags.keys() - expected.keys()):
        # adapters have a base among their parents, which is no input
        if name.startswith("vantage.") and not _is_parent(name):
            yield f"{what} has the tag {name}, which nobody sent"
    if model_id not in found.models:
        yield f"{what} is no longer an output of this run in MLflow"
    if model.run_id != found.run_id:
        yield f"{what} says that MLflow's run {model.run_id[:8]} made it"
    if allowed.model is None:
        return
    told, sent = _model_fields(model), _model_fields(allowed.model)
    for name in dict.fromkeys((*sent, *told)):
        if told.get(name) != sent.get(name):
            yield f"{what}: {name} is {_shown(told.get(name))}, and was sent as {_shown(sent.get(name))}"


def _model_fields(model: "LoggedModel | ExpectedModel") -> dict[str, str]:
    params = {f"params.{name}": value for name, value in model.params.items()}
    return {"name": model.name, "kind": model.kind, **params}


def _pointers(
    evidence: Evidence, found: "MlflowRun", parents: "list[MlflowRun]", stage: str | None
) -> Iterator[str]:
    """Yield the tags that point to others of MLflow's runs and models: what they point to is what they say."""
    tags = found.tags
    if stage is not None and parents and tags.get("mlflow.parentRunId") != parents[0].run_id:
        yield f"tag mlflow.parentRunId is {_shown(tags.get('mlflow.parentRunId'))}, and not the run's own {parents[0].run_id}"
    for name in filter(_is_pointer, sorted(tags)):
        role = name.removesuffix(".run")
        yield from _points_to(evidence, name, tags[name], {"vantage.digest": tags.get(role)})
    same = {name: tags.get(name) for name in ("vantage.digest", "vantage.stage_key")}
    if "vantage.reused_from" in tags:
        yield from _points_to(evidence, "vantage.reused_from", tags["vantage.reused_from"], same)


def _points_to(
    evidence: Evidence, name: str, mlflow_run_id: str, expected: Mapping[str, str | None]
) -> Iterator[str]:
    told = evidence.ask(lambda server: server.tags_of(mlflow_run_id))
    if told is None:
        yield f"tag {name} is {mlflow_run_id}, and MLflow has no such run"
    elif not isinstance(told, Missing):
        yield from _differing(f"tag {name} points to a run whose tag", told, expected)


def _differing(what: str, told: Mapping[str, str], expected: Mapping[str, str | None]) -> Iterator[str]:
    for tag, value in expected.items():
        if told.get(tag) != value:
            yield f"{what} {tag} is {_shown(told.get(tag))}, and must be {_shown(value)}"


def _is_parent(tag: str) -> bool:
    return tag.startswith("vantage.parent.") and not _is_pointer(tag)


def _is_pointer(tag: str) -> bool:
    return tag.startswith("vantage.parent.") and tag.endswith(".run")


def _place(row: Row) -> tuple[str, int, int]:
    return row[0], row[2], row[1]


def _counts(run: "MlflowRun") -> str:
    return f"{len(run.tags)} tags, {len(run.params)} params, {len(run.rows):,} metric rows"


def _shown(value: str | None) -> str:
    if value is None:
        return "absent"
    short = value if len(value) <= 60 else f"{value[:57]}…"
    return f"“{short}”"
