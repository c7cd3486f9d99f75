"""Check logged models: what MLflow's page of an artifact shows, and the files that ``models:/m-ID`` loads."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from vantage.ledger.expected.artifact_fields import ExpectedModel
from vantage.ledger.expected.runs import ExpectedRun, row_of
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.mlflow_tags import PREFIX, differing, is_parent, shown
from vantage.review.audit.served import logged_model_problems
from vantage.runs.view import Missing

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.audited_entries import LoggedModel, MlflowRun


def model_problems(
    evidence: Evidence,
    found: "MlflowRun",
    allowed: ExpectedRun,
    *,
    headline: Mapping[str, float | None],
    is_pending: bool,
) -> Iterator[str]:
    """Yield differences between the logged model of a stage's artifact and what the run sent.

    Args:
        found: MLflow's run of the stage.
        headline: metrics that the page must show.
        is_pending: MLflow may not have all operations yet.
    """
    model_id = found.tags.get("vantage.model")
    if model_id is None:
        if allowed.model is not None and "vantage.reused_from" not in found.tags and not is_pending:
            yield "tag vantage.model is absent, and the run has a logged model"
        return
    what = f"logged model {model_id}"
    model = evidence.ask(lambda server: server.model(model_id))
    if model is None:
        yield f"tag vantage.model is {model_id}, which MLflow does not have"
        return
    if isinstance(model, Missing):
        return
    yield from _tag_problems(what, found, model)
    if model_id not in found.models:
        yield f"{what} is no longer an output of this run in MLflow"
    if model.run_id != found.run_id:
        yield f"{what} says that MLflow's run {model.run_id[:8]} made it"
    if not model.root:
        yield f"{what} is in an experiment that MLflow does not have"
    if model.status != "READY" and not is_pending:
        yield f"{what} has the status {model.status}, and was sent as READY"
    if model.status_message:
        yield f"{what} has the message {shown(model.status_message)}, which nobody sent"
    rows = [*_row_problems(evidence, model), *_missing_rows(found, model, headline)]
    yield from (f"{what}: {each}" for each in rows)
    for problem in logged_model_problems(evidence, model_id, model, found.tags, is_pending=is_pending):
        yield f"{what}: {problem}"
    if allowed.model is None:
        return
    stored, sent = _fields(model), _fields(allowed.model)
    for name in dict.fromkeys((*sent, *stored)):
        if stored.get(name) != sent.get(name):
            yield f"{what}: {name} is {shown(stored.get(name))}, and was sent as {shown(sent.get(name))}"


def claimed_model_problems(evidence: Evidence, found: "MlflowRun", digests: set[str]) -> Iterator[str]:
    """Yield the logged models that claim to be outputs of a run, with its link or with our tags, and that nobody sent.

    Args:
        digests: digests of the artifacts that the run recorded for the stage; several, if it was trained further.
    """
    own = found.tags.get("vantage.model")
    known = {found.tags.get("vantage.digest")} if own is not None else set()
    for model_id in sorted({*found.models, *found.named_by} - {own}):
        model = evidence.ask(lambda server, model_id=model_id: server.model(model_id))  # type: ignore[misc]
        if model is None or isinstance(model, Missing):
            continue
        digest = model.tags.get("vantage.digest")
        if digest in digests - known:
            known.add(digest)
        elif model_id in found.models or any(name.startswith(PREFIX) for name in model.tags):
            yield f"logged model {model_id} claims to be an output of this run, and nobody sent it"


def read_model_problems(evidence: Evidence, found: "MlflowRun", parents: dict[str, str]) -> Iterator[str]:
    """Yield differences between the models that MLflow shows as inputs and those of the runs that made the inputs.

    Args:
        parents: tag → MLflow's run that it names.
    """
    known: set[str] = set()
    for run_id in parents.values():
        tags = evidence.once(
            ("tags", run_id),
            lambda run_id=run_id: evidence.ask(lambda server: server.tags_of(run_id)),  # type: ignore[misc]
        )
        if isinstance(tags, Missing):
            return
        if tags is not None and "vantage.model" in tags:
            known.add(tags["vantage.model"])
    for model_id in sorted(set(found.read_models) - known):
        yield f"logged model {model_id} is shown as an input, and no run sent it"
    for model_id in sorted(known - set(found.read_models)):
        yield f"logged model {model_id} is no longer an input of this run in MLflow"


def _tag_problems(what: str, found: "MlflowRun", model: "LoggedModel") -> Iterator[str]:
    names = ("vantage.digest", "vantage.stage_key", "vantage.stage", "vantage.run_id")
    expected: dict[str, str | None] = {name: found.tags.get(name) for name in names}
    expected |= {name: value for name, value in found.tags.items() if is_parent(name)}
    yield from differing(what, model.tags, expected)
    for name in sorted(model.tags.keys() - expected.keys()):
        # the base of adapters is among their parents, but is no input
        if name.startswith(PREFIX) and not is_parent(name):
            yield f"{what} has the tag {name}, which nobody sent"


def _row_problems(evidence: Evidence, model: "LoggedModel") -> Iterator[str]:
    """Yield metrics on the page of a model that the run which measured them does not have."""
    for point in model.rows:
        name, _, step, value = point.row
        run = _run(evidence, point.run_id)
        if isinstance(run, Missing):
            return
        if run is None or point.row not in run.rows:
            yield f"metric {name} at step {step} is {value!r}, which the run of MLflow that it names does not have"
        elif point.dataset not in {("", ""), *((each.name, each.digest) for each in run.datasets)}:
            yield f"metric {name} was measured on {shown(point.dataset[0])} ({point.dataset[1][:12]}), which that run has not read"


def _missing_rows(
    found: "MlflowRun", model: "LoggedModel", headline: Mapping[str, float | None]
) -> Iterator[str]:
    there = {(point.row[0], point.row[3]) for point in model.rows if point.run_id == found.run_id}
    for name, value in headline.items():
        if value is not None and (name, row_of(name, value, 0, 0)[3]) not in there:
            yield f"metric {name} is no longer shown as {value!r}"


def _run(evidence: Evidence, mlflow_run_id: str) -> "MlflowRun | Missing | None":
    return evidence.once(
        ("run", mlflow_run_id), lambda: evidence.ask(lambda server: server.run(mlflow_run_id))
    )


def _fields(model: "LoggedModel | ExpectedModel") -> dict[str, str]:
    params = {f"params.{name}": value for name, value in model.params.items()}
    return {"name": model.name, "kind": model.kind, **params}
