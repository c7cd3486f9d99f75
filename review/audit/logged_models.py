"""Logged models: what MLflow's page of an artifact shows, and the files that ``models:/m-ID`` loads."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vantage.ledger.expected.artifact_fields import ExpectedModel
from vantage.ledger.expected.runs import ExpectedRun, Row
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.mlflow_tags import PREFIX, differing, is_parent, shown
from vantage.review.audit.served import logged_model_problems
from vantage.runs.view import Missing

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.audited_entries import LoggedModel, MlflowRun


def model_problems(
    evidence: Evidence, found: "MlflowRun", allowed: ExpectedRun, *, is_pending: bool
) -> Iterator[str]:
    """Yield how the logged model of a stage's artifact differs from what the run sent.

    Args:
        found: MLflow's run of the stage.
        is_pending: MLflow may not have all operations yet.
    """
    model_id = found.tags.get("vantage.model")
    if model_id is None:
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
    if model.status != "READY" and not is_pending:
        yield f"{what} has the status {model.status}, and was sent as READY"
    if model.status_message:
        yield f"{what} has the message {shown(model.status_message)}, which nobody sent"
    yield from (f"{what}: {each}" for each in _row_problems(evidence, model))
    for problem in logged_model_problems(evidence, model_id, model, found.tags, is_pending=is_pending):
        yield f"{what}: {problem}"
    if allowed.model is None:
        return
    told, sent = _fields(model), _fields(allowed.model)
    for name in dict.fromkeys((*sent, *told)):
        if told.get(name) != sent.get(name):
            yield f"{what}: {name} is {shown(told.get(name))}, and was sent as {shown(sent.get(name))}"


def read_model_problems(evidence: Evidence, found: "MlflowRun", parents: dict[str, str]) -> Iterator[str]:
    """Yield how the models that MLflow shows as inputs differ from those of the runs that made the inputs.

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
        # adapters have a base among their parents, which is no input
        if name.startswith(PREFIX) and not is_parent(name):
            yield f"{what} has the tag {name}, which nobody sent"


def _row_problems(evidence: Evidence, model: "LoggedModel") -> Iterator[str]:
    """Yield metrics on the page of a model that the run which measured them does not have."""
    for point in model.rows:
        name, _, step, value = point.row
        rows = _rows_of(evidence, point.run_id)
        if isinstance(rows, Missing):
            return
        if rows is None or point.row not in rows:
            yield f"metric {name} at step {step} is {value!r}, which the run of MLflow that it names does not have"


def _rows_of(evidence: Evidence, mlflow_run_id: str) -> frozenset[Row] | Missing | None:
    return evidence.once(
        ("rows", mlflow_run_id), lambda: evidence.ask(lambda server: server.rows_of(mlflow_run_id))
    )


def _fields(model: "LoggedModel | ExpectedModel") -> dict[str, str]:
    params = {f"params.{name}": value for name, value in model.params.items()}
    return {"name": model.name, "kind": model.kind, **params}
