"""Export a model as a Hugging Face folder that servers load, with a card, its provenance and MLflow's description.

The weights and the tokenizer are the artifact's own files, each compared with the manifest while it is copied. Only
``generation_config.json`` is written again, so that a server samples as the recipe does and stops at the same tokens.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vantage.ledger.entries import RunEntry
from vantage.review.exports.exported_card import MadeBy, model_card
from vantage.runs.named_models import PROVENANCE_FILE, DamagedModel, NamedModel
from vantage.schemas.records.sampling import ModelOpened
from vantage.storage.durable_files import (
    hidden_beside,
    make_folder,
    move_folder,
    sync_file,
    sync_folder,
)
from vantage.storage.measured_file import METRICS_FILE
from vantage.storage.sealed_folders import MANIFEST, find_problems, read_manifest
from vantage.storage.signatures import KEY_FILE, SIGNATURE, STATEMENT, SignedStatement

CARD = "README.md"
GENERATION = "generation_config.json"
OWN_HEAD = "head.safetensors"
"""File of a scalar head beside its trunk, for models for which transformers has no class."""
SIGNATURES = "signatures"
"""Folder of the artifact's statements and signatures, if it is signed: ``KEY/STATEMENT/``."""
_SHORT = 16
"""Number of a digest's characters in the name of a folder."""
_CHUNK = 2**22


class ExportRefused(ValueError):
    """The folder's path is taken, or the model has no format that other programs load."""


def check_target(target: Path) -> None:
    """Refuse a path that is not free for a new folder.

    Raises:
        ExportRefused: the path is a file, or a folder that is not empty.
    """
    if target.is_dir() and not target.is_symlink():
        if any(target.iterdir()):
            raise ExportRefused(
                f"{target} is not empty, and nothing is written over; remove it, or name another"
            )
    elif os.path.lexists(target):
        raise ExportRefused(f"{target} exists and is no folder; name another")


def export(
    model: NamedModel,
    opened: ModelOpened | None,
    target: Path,
    *,
    merged: Path | None = None,
    signatures: Sequence[SignedStatement] = (),
    entry: RunEntry | None = None,
    made_by: MadeBy | None = None,
    known_as: Path | None = None,
) -> dict[str, Any]:
    """Write the folder, which appears complete or not at all; returns the content of ``vantage.json``.

    Args:
        model: a model that a run has made.
        opened: the sampling settings of a policy; None: a reward model.
        target: a new or an empty folder.
        merged: for adapters, the whole model that ``check_adapters`` and ``SamplingProcess.merge`` have made.
        signatures: signatures of the artifact; they are copied unchanged to ``signatures/``.
        entry: the run that made or reused the model, for the card; None: the run is not in this workspace.
        made_by: the run that made the model, if ``entry`` is another run.
        known_as: name by which the card's commands load the model; None: the folder.

    Raises:
        ExportRefused: see ``check_target``; or the reward model has a format of our own.
        DamagedModel: a file does not match the manifest.
        OSError: the disk fails.
    """
    assert model.folder is not None and model.origin is not None, "made by a run"
    target = target.absolute()
    check_target(target)
    source = merged or model.folder
    expected = None if merged else _manifest(model, source)
    if (source / OWN_HEAD).is_file():
        raise ExportRefused(
            f"{model.label} has a head of Vantage's own form, since transformers has no sequence classification of this "
            "architecture; servers cannot load it"
        )
    make_folder(target.parent)
    staging = hidden_beside(target, f".partial-{secrets.token_hex(4)}")
    staging.mkdir()
    try:
        files = _copy_files(model, source, expected, staging)
        if opened is not None:
            settings = generation_settings(_generation_of(source), model, opened)
            _write(staging / GENERATION, json.dumps(settings, indent=2, sort_keys=True) + "\n")
        _describe_for_mlflow(model, staging)
        signed = _copy_signatures(signatures, staging)
        facts = provenance(model, opened, files) | ({"signatures": signed} if signed else {})
        _write(staging / PROVENANCE_FILE, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
        card = model_card(model, opened, folder=known_as or target, entry=entry, made_by=made_by)
        _write(staging / CARD, card)
        for root, _, names in os.walk(staging):
            for name in names:
                sync_file(Path(root, name))
            sync_folder(Path(root))
        move_folder(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return facts


def generation_settings(stored: Mapping[str, Any], model: NamedModel, opened: ModelOpened) -> dict[str, Any]:
    """Return ``generation_config.json``: the recipe's sampling settings for the whole vocabulary, and all of its stop
    tokens."""
    stops = list(opened.stop_token_ids)
    special = {
        name: stored[name]
        for name in ("bos_token_id", "pad_token_id", "transformers_version")
        if name in stored
    }
    return {
        **special,
        "eos_token_id": stops[0] if len(stops) == 1 else stops,
        "do_sample": True,
        "temperature": model.generation.temperature,
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": model.generation.max_response_tokens,
    }


def provenance(model: NamedModel, opened: ModelOpened | None, files: Mapping[str, str]) -> dict[str, Any]:
    """Return the content of ``vantage.json``.

    Args:
        files: path → sha256 of the artifact's files that were copied unchanged.
    """
    origin = model.origin
    assert origin is not None, "made by a run"
    facts: dict[str, Any] = {
        "kind": model.kind,
        "recipe": origin.recipe,
        "run_id": origin.run_id,
        "stage": origin.stage,
        "digest": origin.digest,
        **({} if origin.base is None else {"merged_into": origin.base}),
        "stage_key": origin.stage_key,
        "parents": {
            role: {"digest": digest} | ({"stage": origin.stages[role]} if role in origin.stages else {})
            for role, digest in sorted(origin.parents.items())
        },
        "metrics": dict(origin.metrics),
        "gates": list(origin.verdicts),
        "provenance": dict(origin.provenance),
        "generation": model.generation.model_dump(mode="json"),
        "chat": model.chat if opened is None else opened.uses_chat,
        "files": dict(files),
    }
    if opened is not None:
        facts["stop_tokens"] = list(opened.stop_tokens)
    return facts


def check_adapters(model: NamedModel) -> None:
    """Read every byte of adapters and of their base model, which are about to be merged.

    Raises:
        DamagedModel: a file does not match its manifest.
    """
    origin = model.origin
    assert origin is not None and model.folder is not None and model.base is not None, "adapters of a run"
    for folder, digest in ((model.folder, origin.digest), (model.base, origin.base)):
        problems = find_problems(folder, digest=digest)
        if problems:
            raise DamagedModel(f"{model.label} is damaged: {'; '.join(problems)}; run the recipe again")


def _manifest(model: NamedModel, folder: Path) -> dict[str, str]:
    """Return path → sha256 of the artifact's files."""
    assert model.origin is not None, "made by a run"
    try:
        records = read_manifest(folder, digest=model.origin.digest)
    except (ValueError, OSError) as error:
        raise DamagedModel(f"{model.label} is damaged ({error}); run the recipe again") from error
    return {path: str(record["sha256"]) for path, record in records.items()}


def _copy_files(
    model: NamedModel, source: Path, expected: Mapping[str, str] | None, staging: Path
) -> dict[str, str]:
    """Copy the files that servers read; returns path → sha256 of each unchanged file.

    Args:
        expected: path → sha256; None: not checked, since the files were made a moment ago.
    """
    left_out = {MANIFEST, METRICS_FILE, *((GENERATION,) if model.kind == "policy" else ())}
    paths = expected or [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
    copied = {}
    for path in sorted(set(paths) - left_out):
        (staging / path).parent.mkdir(parents=True, exist_ok=True)
        copied[path] = _copy_hashed(source / path, staging / path)
        if expected is not None and copied[path] != expected[path]:
            raise DamagedModel(
                f"{model.label} is damaged: sha256 of {path} is {copied[path]}, must be {expected[path]}; run the recipe "
                "again, which makes it anew"
            )
    return copied


def _copy_signatures(signatures: Sequence[SignedStatement], staging: Path) -> dict[str, list[str]]:
    """Copy statements with their signatures and keys; returns key id → folders with its statements."""
    copied: dict[str, list[str]] = {}
    for each in signatures:
        folder = Path(SIGNATURES, each.key_id[:_SHORT], each.name[:_SHORT])
        (staging / folder).mkdir(parents=True)
        (staging / folder / STATEMENT).write_bytes(each.statement)
        (staging / folder / SIGNATURE).write_bytes(each.signature)
        if each.public_key is not None:
            (staging / folder.parent / KEY_FILE).write_bytes(each.public_key)
        copied.setdefault(each.key_id, []).append(folder.as_posix())
    return copied


def _copy_hashed(source: Path, target: Path) -> str:
    """Copy a file; returns the sha256 of the copied bytes."""
    digest = hashlib.sha256()
    try:
        reading = source.open("rb")
    except FileNotFoundError as error:
        raise DamagedModel(f"{source} is missing; run the recipe again, which makes it anew") from error
    with reading, target.open("xb") as writing:
        while chunk := reading.read(_CHUNK):
            digest.update(chunk)
            writing.write(chunk)
    return digest.hexdigest()


def _generation_of(folder: Path) -> dict[str, Any]:
    path = folder / GENERATION
    return dict(json.loads(path.read_bytes())) if path.is_file() else {}


def _describe_for_mlflow(model: NamedModel, staging: Path) -> None:
    """Write ``MLmodel`` and the files that it needs, so that ``mlflow models serve -m FOLDER`` loads the folder."""
    from vantage.ledger.to_mlflow.model_description import write_description

    assert model.origin is not None, "made by a run"
    metadata = {
        "vantage.digest": model.origin.digest,
        "vantage.stage_key": model.origin.stage_key,
        "vantage.stage": model.origin.stage,
        "vantage.run_id": model.origin.run_id,
    }
    generation = model.generation
    params: dict[str, bool | int | float] | None = None
    if model.kind == "policy":
        params = {
            "do_sample": True,
            "temperature": generation.temperature,
            "max_new_tokens": generation.max_response_tokens,
            "return_full_text": False,
        }
    write_description(
        staging,
        staging,
        kind=model.kind,
        run_id=None,
        model_id=None,
        metadata=metadata,
        weights=".",
        params=params,
    )


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
