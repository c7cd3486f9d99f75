"""Open models by the names that people give them: a run and its stage, a registered model of MLflow, a folder.

Models that runs have made, and copies of them in MLflow, come with their recipe's settings for sampling.
"""

import json
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date as date_type
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from vantage.attempts.jobs import gates_of
from vantage.ledger import tracking
from vantage.runs.meanings import (
    AmbiguousName,
    Command,
    FolderNamed,
    OfRun,
    RegisteredNamed,
    RunNamed,
    SourceNamed,
    StageNamed,
    UnknownName,
    spelling,
)
from vantage.runs.names import Names
from vantage.runs.record import REMOVED, RunRecord
from vantage.runs.registry import MlflowRegistry
from vantage.runs.run import read_run, read_runs
from vantage.runs.view import Broken, Missing, RunView
from vantage.runs.workspace import RunError, Workspace
from vantage.schemas.kind import ArtifactKind
from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.inputs import DEFAULT_DATE, MODEL, Generation
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.records.artifacts import Artifact, StoredModel
from vantage.schemas.steps import OTHER_MODEL_PREFIX, dependencies

if TYPE_CHECKING:
    from vantage.ledger.to_mlflow.published_models import PublishedVersion

PROVENANCE_FILE = "vantage.json"
"""File of an exported folder with the model's origin and its settings for sampling."""
_DEFAULT_TOKENS = 256
"""Longest response, in tokens, for a folder that names none."""
_RUNS_SHOWN = 5
_KINDS: Mapping[str, str] = {
    "policy": "a policy",
    "reward_model": "a reward model",
    "value_model": "a critic",
}


class DamagedModel(OSError):
    """The stored files of a model cannot be used."""


@dataclass(frozen=True)
class Origin:
    """Origin of a model: the run and the stage that made it, and their inputs."""

    recipe: str
    run_id: str
    stage: str
    stage_key: str
    digest: str
    """Content digest of the artifact: sha256 of its manifest."""
    base: str | None
    """Content digest of the whole model beneath adapters; None: the artifact is a whole model."""
    parents: Mapping[str, str]
    """Role → content digest of the input."""
    stages: Mapping[str, str] = field(default_factory=dict)
    """Role → step that made the input; empty where the run is not in this workspace."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    verdicts: tuple[str, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Code, libraries and machine; empty where the run is not in this workspace."""


@dataclass(frozen=True)
class NamedModel:
    """A model that was found."""

    label: str
    """Description of the model, in words."""
    kind: ArtifactKind
    folder: Path | None
    """A Hugging Face folder; None: it has to be imported from ``source``."""
    generation: Generation
    chat: bool | None = None
    date: date_type = DEFAULT_DATE
    source: str | None = None
    base: Path | None = None
    """The base model, if this one consists only of adapters (LoRA)."""
    origin: Origin | None = None
    """The run and stage that made the model; None: no run is known to have made it."""


@contextmanager
def open_named_model(
    workspace: Workspace, named: str, command: Command, *, kinds: Collection[ArtifactKind]
) -> Iterator[NamedModel]:
    """Yield the model that ``named`` means; its files stay while the block runs.

    Args:
        workspace: the workspace with the runs.
        named: a name as docs/names.md describes it.
        command: the command, which accepts steps of runs, registered models, folders or sources.
        kinds: kinds of artifacts that are accepted.

    Raises:
        RunError: there is no such model, or it is of another kind; the message lists the models.
        DamagedModel, DamagedCopy: its files cannot be used.
    """
    registry = MlflowRegistry(workspace)
    try:
        found = Names(workspace, registry=registry).resolve(named, command)
    except UnknownName:
        raise RunError(_nothing_found(workspace, named, command, kinds)) from None
    if isinstance(found, SourceNamed):
        generation = Generation(max_response_tokens=_DEFAULT_TOKENS)
        yield NamedModel(named, "policy", None, generation, source=named)
    elif isinstance(found, FolderNamed):
        yield _checked(_in_folder(found.path), named, kinds)
    elif isinstance(found, RegisteredNamed):
        with _published(workspace, registry, found) as published:
            yield _checked(published, named, kinds)
    else:
        assert isinstance(found, OfRun), "no other meaning is accepted"
        record = read_run(workspace, found.run_id)
        step = _main_step(record, kinds) if isinstance(found, RunNamed) else found.step
        yield model_of(workspace, record, step, kinds)


def stage_beside(workspace: Workspace, named: str, other: str, command: Command) -> str | None:
    """Spell ``other`` as a stage or model of the run that ``named`` means; None: that run has none of this name, or there
    is no run.

    Raises:
        AmbiguousName: there is also a folder of that name.
    """
    try:
        found = Names(workspace).resolve(named, command)
        record = read_run(workspace, found.run_id) if isinstance(found, OfRun) else None
    except RunError:  # opening ``named`` reports the reason
        return None
    if record is None or other not in (MODEL, *other_model_steps(record.recipe), *record.recipe.stages):
        return None
    stage = StageNamed(record.run_id, other)
    if Path(other).is_dir():
        raise AmbiguousName(other, command, [stage, FolderNamed(Path(other))])
    return spelling(other, stage)


def model_of(
    workspace: Workspace, record: RunRecord, step: str, kinds: Collection[ArtifactKind]
) -> NamedModel:
    """Return the model that a step of a run has made.

    Raises:
        RunError: the step has made no model yet, or one of another kind.
        DamagedModel: the store no longer has the model.
    """
    ready = _steps_with_models(record, kinds)
    if step not in ready:
        raise RunError(_why_not(record, step, kinds))
    artifact = _artifact(workspace, record, step)
    base = artifact.base if isinstance(artifact, StoredModel) else None
    try:
        folder = workspace.storage.folder(artifact)
        beneath = None if base is None else workspace.storage.folder(_base(workspace, record, step, base))
    except ValueError as error:
        raise DamagedModel(
            f"{step} of run {record.run_id} is damaged ({error}); run the recipe again"
        ) from error
    stage = record.stages[step]
    return NamedModel(
        label=f"{step} of run {record.run_id}",
        kind=artifact.kind,
        folder=folder,
        generation=record.recipe.generation,
        chat=record.recipe.model.chat,
        date=record.recipe.model.date,
        base=beneath,
        origin=Origin(
            recipe=record.recipe.recipe,
            run_id=record.run_id,
            stage=step,
            stage_key=artifact.stage_key,
            digest=artifact.digest,
            base=base,
            parents=artifact.parents,
            stages=dependencies(record.recipe)[step],
            metrics=artifact.metrics,
            verdicts=tuple(map(str, stage.verdicts)) if gates_of(record.recipe, step) else (),
            provenance=stage.provenance,
        ),
    )


def _base(workspace: Workspace, record: RunRecord, step: str, digest: str) -> Artifact:
    """Return the whole model beneath a step's adapters, which another step of the run has made."""
    for other, stage in record.stages.items():
        if stage.digest == digest:
            return _artifact(workspace, record, other)
    raise DamagedModel(
        f"{step} of run {record.run_id} is adapters on {digest[:12]}, which no step of the run has made; run it again"
    )


def _artifact(workspace: Workspace, record: RunRecord, step: str) -> Artifact:
    artifact = RunView.of(workspace, record).artifact(step)
    if isinstance(artifact, Missing | Broken):
        raise DamagedModel(artifact)
    problems = workspace.storage.check_sizes(artifact)
    if problems:
        raise DamagedModel(
            f"{step} of run {record.run_id} is damaged: {'; '.join(problems)}; run the same recipe again, which makes it anew"
        )
    return artifact


def other_model_steps(recipe: ResolvedRecipe) -> list[str]:
    """Return ``models.NAME`` of the recipe's other models."""
    return [f"{OTHER_MODEL_PREFIX}{name}" for name in recipe.models]


def _makes(recipe: ResolvedRecipe, step: str) -> ArtifactKind | None:
    if step in (MODEL, *other_model_steps(recipe)):
        return "policy"
    return KINDS[recipe.stages[step].kind].makes if step in recipe.stages else None


def _steps_with_models(record: RunRecord, kinds: Collection[ArtifactKind]) -> list[str]:
    """Return the steps whose model exists: other models, the recipe's own, and the stages'."""
    return [
        step
        for step in (*other_model_steps(record.recipe), MODEL, *record.recipe.stages)
        if _makes(record.recipe, step) in kinds and step in record.stages and record.stages[step].digest
    ]


def _main_step(record: RunRecord, kinds: Collection[ArtifactKind]) -> str:
    """Return the run's main policy: the one that it publishes, else the last one that exists."""
    ready = [
        step
        for step in _steps_with_models(record, kinds)
        if (_makes(record.recipe, step) == "policy" or "policy" not in kinds)
        and step not in other_model_steps(record.recipe)
    ]
    published = [each.stage for each in record.recipe.publish if each.stage in ready]
    if published or ready:
        return (published or ready[-1:])[0]
    if record.status == REMOVED:
        raise RunError(f"run {record.run_id} was removed by `vantage gc`; run its recipe again")
    raise RunError(f"run {record.run_id} has made no policy yet; `vantage status {record.run_id}` shows it")


def _why_not(record: RunRecord, step: str, kinds: Collection[ArtifactKind]) -> str:
    ready = _steps_with_models(record, kinds)
    there = f"there are {', '.join(ready)}" if ready else "there is no other yet"
    if step not in (MODEL, *other_model_steps(record.recipe), *record.recipe.stages):
        return f"run {record.run_id} has no stage {step}; {there}"
    if step.startswith(OTHER_MODEL_PREFIX):
        other = record.recipe.models[step.removeprefix(OTHER_MODEL_PREFIX)]
        if other.stand_in is not None:
            return f"MLflow had no {step} when run {record.run_id} began, and {other.stand_in} stands in for it; name that"
    makes = _makes(record.recipe, step)
    if makes not in kinds:
        made = _KINDS.get(str(makes), f"no model ({makes})")
        return (
            f"{step} of run {record.run_id} is {made}, which is not what this command takes; {there}"
            if makes in _KINDS
            else f"{step} of run {record.run_id} makes {made}; {there}"
        )
    status = record.stages[step].status if step in record.stages else "waiting"
    return f"{step} of run {record.run_id} is {status.replace('_', ' ')} and has no model yet; {there}"


# A folder


def _in_folder(path: Path) -> NamedModel:
    """Return the model in a Hugging Face folder; an exported folder contains the recipe's settings for sampling."""
    config = _json_in(path / "config.json")
    if config is None and (path / "adapter_config.json").is_file():
        raise RunError(
            f"{path} holds adapters alone, without the model beneath them; name the stage that made them (RUN/STAGE)"
        )
    if config is None:
        raise RunError(
            f"{path} has no config.json that can be read; give a Hugging Face folder, or RUN/STAGE"
        )
    architectures = config.get("architectures") or [""]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise RunError(
            f"{path / 'config.json'}: architectures={str(architectures)[:100]} must be a list of names; give a Hugging Face folder, "
            "or RUN/STAGE"
        )
    kind: ArtifactKind = (
        "reward_model" if architectures[0].endswith("ForSequenceClassification") else "policy"
    )
    exported = _json_in(path / PROVENANCE_FILE) or {}
    settings = _json_in(path / "generation_config.json") or {}
    temperature = settings.get("temperature") if settings.get("do_sample") else None
    plain = {
        "max_response_tokens": _or(settings.get("max_new_tokens"), _DEFAULT_TOKENS),
        "temperature": _or(temperature, 1.0),
        "stop": [stop] if isinstance(stop := _or(settings.get("stop_strings"), []), str) else stop,
    }
    try:
        generation = Generation.model_validate(exported.get("generation", plain))
    except ValidationError as error:
        first = error.errors()[0]
        raise RunError(
            f"{path}: {'.'.join(map(str, first['loc']))} of {PROVENANCE_FILE} or generation_config.json: {first['msg']}; "
            "correct it"
        ) from None
    chat = exported.get("chat")
    return NamedModel(str(path), kind, path, generation, chat if isinstance(chat, bool) else None)


def _or(value: Any, default: Any) -> Any:
    """Return the value of a setting, or the default if there is none, or if it is 0, which some files use for "off"."""
    return default if value is None or (isinstance(value, int | float) and value == 0) else value


def _json_in(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes()) if path.is_file() else None  # a pipe would never end
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


# A registered model


@contextmanager
def _published(
    workspace: Workspace, registry: MlflowRegistry, named: RegisteredNamed
) -> Iterator[NamedModel]:
    """Yield MLflow's copy of a registered model, in a temporary folder."""
    found = registry.published(named)
    tracking.set_up_client()
    from vantage.ledger.to_mlflow.published_models import fetch_copy  # imports MLflow

    address = tracking.address(None, workspace.root)
    with tempfile.TemporaryDirectory(prefix="vantage-model-") as temporary:
        folder = fetch_copy(found, tracking_uri=address, target=Path(temporary))
        plain = _in_folder(folder)
        yield NamedModel(
            label=f"{found.name} version {found.version} ({found.stage} of run {found.run_id})",
            kind=plain.kind,
            folder=folder,
            generation=_generation_of(found) or plain.generation,
            chat=_chat_of(found),
            date=_date_of(found),
            origin=Origin(
                recipe=found.params.get("recipe", ""),
                run_id=found.run_id,
                stage=found.stage,
                stage_key=found.stage_key,
                digest=found.digest,
                base=None,
                parents=found.parents,
                **_recorded(workspace, found),
            ),
        )


def _generation_of(found: "PublishedVersion") -> Generation | None:
    """Return the settings of generation of the run that made a version; None: MLflow has none."""
    names = [f"generation.{name}" for name in Generation.model_fields]
    given = {name.partition(".")[2]: value for name in names if (value := found.param(name)) is not None}
    try:
        return Generation.model_validate(given) if given else None
    except ValidationError as error:
        raise found.unusable(f"generation.{error.errors()[0]['loc'][0]}") from None


def _chat_of(found: "PublishedVersion") -> bool | None:
    chat = found.param("model.chat")
    if chat is not None and not isinstance(chat, bool):
        raise found.unusable("model.chat")
    return chat


def _date_of(found: "PublishedVersion") -> date_type:
    try:
        return date_type.fromisoformat(str(found.param("model.date") or DEFAULT_DATE))
    except ValueError:
        raise found.unusable("model.date") from None


def _recorded(workspace: Workspace, found: "PublishedVersion") -> dict[str, Any]:
    """Return what the run that made a version recorded about it; empty: the run is not in this workspace."""
    try:
        record = read_run(workspace, found.run_id)
    except RunError:
        return {}
    stage = record.stages.get(found.stage)
    if stage is None or (stage.stage_key, stage.digest) != (found.stage_key, found.digest):
        return {}
    return {
        "stages": dependencies(record.recipe)[found.stage],
        "metrics": stage.metrics,
        "verdicts": tuple(map(str, stage.verdicts)),
        "provenance": stage.provenance,
    }


def _nothing_found(
    workspace: Workspace, named: str, command: Command, kinds: Collection[ArtifactKind]
) -> str:
    runs = read_runs(workspace)
    policies: tuple[ArtifactKind, ...] = ("policy",)
    wanted = kinds or policies
    listed = [
        f"{record.run_id} ({', '.join(_steps_with_models(record, wanted)) or 'no model yet'})"
        for record in runs[:_RUNS_SHOWN]
    ]
    there = (
        f"runs of {workspace.address}: {'; '.join(listed)}" if listed else f"{workspace.address} has no run"
    )
    more = f"; and {len(runs) - _RUNS_SHOWN} older ones" if len(runs) > _RUNS_SHOWN else ""
    return (
        f"{named} is no run, no folder, and no model that MLflow has; {there}{more}. Give "
        f"{command.forms} (--workspace PLACE: where the runs are)"
    )


def _checked(model: NamedModel, named: str, kinds: Collection[ArtifactKind]) -> NamedModel:
    if model.kind not in kinds:
        taken = " or ".join(_KINDS[kind] for kind in _KINDS if kind in kinds)
        raise RunError(f"{named} is {_KINDS[model.kind]}, which is not what this command takes; name {taken}")
    return model
