"""Gather what the annex of a report needs besides the report: files of the model, licences, settings, publications."""

import json
import math
import struct
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from vantage.review.reports.annex_xi import ModelFacts
from vantage.review.reports.gathered import Report
from vantage.review.reports.words import words
from vantage.runs.history import RunHistory
from vantage.runs.record import RunRecord
from vantage.runs.view import RunView
from vantage.runs.workspace import Workspace

_MOST_HEADER = 100_000_000
"""Most bytes of a weight file's header; a larger one is damaged."""
_ROWS = ("train_rows", "validation_rows", "test_rows")


def model_facts(workspace: Workspace, record: RunRecord, report: Report) -> ModelFacts:
    """Return the facts about the model that the report is about, without those that cannot be read."""
    models = report.decision.models if report.decision is not None else ()
    model = models[0] if models else None
    folder = None
    if model is not None and model.digest is not None and workspace.existing_storage is not None:
        with suppress(OSError, ValueError):
            folder = workspace.existing_storage.local_folder(model.digest)
    history = RunView.of(workspace, record).history
    generation = record.recipe.generation
    licence = record.recipe.licenses.get(model.step) if model is not None else None
    return ModelFacts(
        architecture=_architecture(folder),
        parameters=_parameters(folder),
        licence=None if model is None or licence is None else f"{licence} ({model.step})",
        prompt_tokens=generation.max_prompt_tokens,
        response_tokens=generation.max_response_tokens,
        released=tuple(_released(record, history)) if isinstance(history, RunHistory) else (),
        design=tuple(_design(record)),
        data=tuple(_data(record)),
    )


def _architecture(folder: Path | None) -> str | None:
    """Return ``LlamaForCausalLM: 4 layers, hidden size 128, vocabulary 100``, from the folder's ``config.json``."""
    if folder is None:
        return None
    try:
        config = json.loads((folder / "config.json").read_bytes())
        names = config["architectures"]
        sizes = [
            f"{text} {config[name]}"
            for name, text in (
                ("num_hidden_layers", "layers"),
                ("hidden_size", "hidden size"),
                ("num_attention_heads", "attention heads"),
                ("vocab_size", "vocabulary"),
            )
            if name in config
        ]
        return f"{', '.join(map(str, names))}: {', '.join(sizes)}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _parameters(folder: Path | None) -> int | None:
    """Return the number of values in the folder's weight files, from their headers alone."""
    files = sorted(folder.glob("*.safetensors")) if folder is not None else []
    if not files:
        return None
    try:
        return sum(map(_values_in, files))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error):
        return None


def _values_in(file: Path) -> int:
    """Return the number of values in a safetensors file: eight bytes with the header's length, then the header as JSON."""
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        if length > _MOST_HEADER:
            raise ValueError(f"the header of {file.name} has {length:,} bytes")
        header = json.loads(opened.read(length))
    return sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")


def _released(record: RunRecord, history: RunHistory) -> Iterator[str]:
    for name, operation in history.published.items():
        copy = record.copies.get(name)
        if copy is None:
            continue
        when = datetime.fromtimestamp(operation.time / 1000, UTC).strftime("%Y-%m-%d %H:%M UTC")
        version = f" version {copy.version}" if copy.version else ""
        alias = f", alias {operation.alias}" if operation.alias else ""
        yield f"Registered in MLflow as {name}{version}{alias} on {when} (stage {operation.stage})"


def _design(record: RunRecord) -> Iterator[str]:
    """Yield the method of each stage with the settings that differ from one recipe to the next, and what rewards consist of."""
    for name, stage in record.recipe.stages.items():
        settings = stage.model_dump(mode="json")
        shown = [
            f"{words(field)} {settings[field]}"
            for field in ("learning_rate", "epochs", "iterations", "batch_size", "reward")
            if settings.get(field) is not None
        ]
        algorithm = settings.get("algorithm")
        if isinstance(algorithm, dict):
            shown += [
                f"{words(field)} {algorithm[field]}"
                for field in ("preset", "advantage", "kl_coef")
                if algorithm.get(field) is not None
            ]
        with_settings = f" ({', '.join(shown)})" if shown else ""
        yield f"Stage {name}: {words(stage.kind)}{with_settings}"
    for name, reward in record.recipe.rewards.items():
        terms = [
            json.dumps(term.model_dump(mode="json", exclude_defaults=True), sort_keys=True)
            for term in reward.terms
        ]
        yield f"Reward {name}, which stages optimise: {' + '.join(terms)}"


def _data(record: RunRecord) -> Iterator[str]:
    for name, data in record.recipe.data.items():
        done = record.stages.get(f"data.{name}")
        metrics = done.metrics if done is not None else {}
        rows = [
            f"{metrics[metric]:,.0f} {metric.removesuffix('_rows')}"
            for metric in _ROWS
            if metrics.get(metric) is not None
        ]
        licence = record.recipe.licenses.get(f"data.{name}")
        digest = f", digest {done.digest}" if done is not None and done.digest else ""
        yield (
            f"{name}: source {data.source}, rows: {', '.join(rows) or 'not counted'}{digest}, "
            f"licence {licence or 'not recorded'}"
        )
