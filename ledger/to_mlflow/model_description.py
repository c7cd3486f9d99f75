"""Write the files that MLflow needs to load a Hugging Face folder as a pipeline.

MLflow's own packing loads transformers and torch, which the orchestrating process never does, copies the weights once
more, and looks for a model card on a hub. The folder is already a model, so only its description is written here, in
MLflow's format: `MLmodel`, the requirements, and a second copy of the tokenizer where MLflow looks for it. The weights
go to `WEIGHTS` in the packed model.
"""

import json
import platform
import shutil
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from vantage.ledger.published_copies import EXAMPLES, TOKENIZER, WEIGHTS, belongs_to_tokenizer

_GREETING = "Hello"
REQUIREMENTS = ("mlflow", "safetensors", "torch", "transformers")

_TEXT = {"type": "string", "required": True}
_PIPELINES: dict[str, dict[str, Any]] = {
    "policy": {
        "task": "text-generation",
        "instance_type": "TextGenerationPipeline",
        "outputs": [_TEXT],
    },
    "reward_model": {
        "task": "text-classification",
        "instance_type": "TextClassificationPipeline",
        "outputs": [_TEXT | {"name": "label"}, {"type": "double", "name": "score", "required": True}],
    },
}

PUBLISHABLE = frozenset(_PIPELINES)
"""Kinds of artifact that transformers can load as a pipeline."""


class PublishingError(ValueError):
    """An artifact that cannot be published; the message contains the reason."""


def write_description(
    folder: Path,
    target: Path,
    *,
    kind: str,
    run_id: str | None,
    model_id: str | None,
    metadata: Mapping[str, str],
    weights: str = WEIGHTS,
    params: Mapping[str, bool | int | float] | None = None,
    example: str | None = None,
) -> None:
    """Write the files that make an MLflow model of the Hugging Face folder ``folder`` to the folder ``target``.

    Args:
        kind: the artifact's kind, one of `PUBLISHABLE`.
        run_id: MLflow's id of the run that made the artifact; None: MLflow does not know the model.
        model_id: MLflow's id of the logged model; None: as above.
        metadata: stored in ``MLmodel``.
        weights: path of the Hugging Face folder from ``target``.
        params: what a request may set, with its value in other requests; None: nothing.
        example: a prompt that shows what the model is given; None: a greeting.

    Adapters (LoRA) are described too, but MLflow itself does not load them: their base is no model of MLflow's.

    Raises:
        PublishingError: the folder is missing, or is no model with a tokenizer.
    """
    is_adapter = _is_adapter(folder)
    needed = (*([] if is_adapter else ["config.json"]), "tokenizer_config.json")
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise PublishingError(
            f"{folder} has no {' and no '.join(missing)}; only a whole model can be published"
        )
    described = describe(folder, kind=kind, metadata=metadata, weights=weights, params=params)
    _copy_tokenizer(folder, target / TOKENIZER)
    requirements = [f"{name}=={_public_version(name)}" for name in requirements_of(folder)]
    (target / "requirements.txt").write_text("\n".join(requirements) + "\n")
    environment = {
        "python": platform.python_version(),
        "build_dependencies": ["pip", "setuptools", "wheel"],
        "dependencies": ["-r requirements.txt"],
    }
    (target / "python_env.yaml").write_text(yaml.safe_dump(environment, sort_keys=False))

    texts = [_GREETING if example is None else example]
    for name, content in zip(EXAMPLES, (texts, {"inputs": texts}), strict=True):
        (target / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")

    description = {
        "flavors": described["flavors"],
        "metadata": described["metadata"],
        "mlflow_version": _public_version("mlflow"),
        "model_id": model_id,
        "model_size_bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        "model_uuid": uuid.uuid4().hex if model_id is None else model_id.removeprefix("m-"),
        "run_id": run_id,
        "saved_input_example_info": described["saved_input_example_info"],
        "signature": described["signature"],
        "utc_time_created": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S.%f"),
    }
    known = {name: value for name, value in description.items() if value is not None}
    (target / "MLmodel").write_text(yaml.safe_dump(known, sort_keys=False))


def describe(
    folder: Path,
    *,
    kind: str,
    metadata: Mapping[str, str],
    weights: str = WEIGHTS,
    params: Mapping[str, bool | int | float] | None = None,
) -> dict[str, Any]:
    """Return the content of the folder's ``MLmodel``, without fields that depend on when and where it is written; see
    ``write_description``."""
    flavors = (
        _adapter_flavors(folder, weights=weights)
        if _is_adapter(folder)
        else _pipeline_flavors(folder, kind, metadata, weights=weights)
    )
    return {
        "flavors": flavors,
        "metadata": dict(metadata),
        "saved_input_example_info": {
            "artifact_path": EXAMPLES[0],
            "serving_input_path": EXAMPLES[1],
            "type": "json_object",
        },
        "signature": {
            "inputs": json.dumps([_TEXT]),
            "outputs": json.dumps(_PIPELINES[kind]["outputs"]),
            "params": None if params is None else json.dumps([_param(*each) for each in params.items()]),
        },
    }


def requirements_of(folder: Path) -> tuple[str, ...]:
    """Return the packages that MLflow needs to load the folder."""
    return (*REQUIREMENTS, *(["peft"] if _is_adapter(folder) else []))


def _is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def _param(name: str, value: bool | int | float) -> dict[str, Any]:
    """Return one entry of MLflow's schema of params."""
    types = {bool: "boolean", int: "long", float: "double"}
    return {"name": name, "type": types[type(value)], "default": value, "shape": None}


def _pipeline_flavors(
    folder: Path, kind: str, metadata: Mapping[str, str], *, weights: str
) -> dict[str, Any]:
    architectures = json.loads((folder / "config.json").read_text()).get("architectures") or []
    if len(architectures) != 1:
        raise PublishingError(
            f"{folder / 'config.json'}: architectures={architectures}; it has to name one class"
        )
    pipeline = _PIPELINES[kind]
    return {
        "python_function": {
            "env": {"virtualenv": "python_env.yaml"},
            "loader_module": "mlflow.transformers",
            "python_version": platform.python_version(),
        },
        "transformers": {
            "code": None,
            "components": ["tokenizer"],
            "instance_type": pipeline["instance_type"],
            "model_binary": weights,
            "pipeline_model_type": architectures[0],
            "source_model_name": metadata.get("name", kind),
            "task": pipeline["task"],
            "tokenizer_type": "AutoTokenizer",
            "transformers_version": _public_version("transformers"),
        },
    }


def _adapter_flavors(folder: Path, *, weights: str) -> dict[str, Any]:
    """Return a flavor that MLflow does not know, so that it refuses to load adapters, and loads nothing else."""
    base = json.loads((folder / "base.json").read_text(encoding="utf-8"))["base"]
    return {
        "vantage_adapters": {"path": weights, "base_digest": base, "peft_version": _public_version("peft")}
    }


def _copy_tokenizer(folder: Path, target: Path) -> None:
    """Copy everything except weights: the files of a tokenizer depend on its class."""
    target.mkdir(parents=True)
    for path in folder.iterdir():
        if path.is_file() and belongs_to_tokenizer(path.name):
            shutil.copy(path, target / path.name)


@cache
def _public_version(package: str) -> str:
    """Return the version without the build's suffix (no index has ``2.13.0+cpu``)."""
    return version(package).partition("+")[0]
