"""Parse a recipe's `model.source`, and compute a digest of everything that decides its import. No tensor library is loaded."""

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vantage.models.adapter_check import check_adapter
from vantage.models.folder_check import check_agreement
from vantage.schemas.recipe.inputs import Model
from vantage.schemas.recipe.sources import (
    Builtin,
    Gguf,
    Hub,
    LocalPath,
    Package,
    PinnedSource,
    Registered,
    StageOfRun,
    model_source,
)
from vantage.schemas.source_files import (
    check_unchanged,
    copy_hashed,
    hash_file,
    model_limit,
)

BUILTIN_VERSIONS = {"tiny": 1, "nano": 1}
"""Version of each built-in model, raised when its weights or tokenizer change."""

IMPORTED_SUFFIXES = frozenset({".safetensors", ".json", ".jinja", ".model", ".txt"})
"""Files of a Hugging Face folder that an import may read."""

COMMIT = re.compile(r"[0-9a-f]{40}")


Source = Builtin | Hub | Gguf | LocalPath
"""A parsed source; `package:NAME` becomes the path of its GGUF file."""


def parse_source(source: str, *, base: Path = Path()) -> Source:
    """Parse `model.source`, and find its files; relative paths start from `base`.

    `package:NAME` is the one `.gguf` file of an installed Python distribution.

    Raises:
        ValueError: unknown name, missing file, no or several GGUF files, a hub source without revision.
    """
    match model_source(source):
        case Builtin(name=name) as builtin:
            if name not in BUILTIN_VERSIONS:
                raise ValueError(
                    f"model.source={source!r}: there is no such built-in model; known: {_known()}"
                )
            return builtin
        case Package(name=name):
            return Gguf(_packaged_gguf(name))
        case Gguf(path=path):
            path = base / path.expanduser()
            if not path.is_file():
                raise ValueError(f"model.source={source!r}: {path} is no file; give the path of a .gguf file")
            return Gguf(path)
        case Hub(repository=repository, revision=revision) as hub:
            if not revision or not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
                raise ValueError(
                    f"model.source={source!r}: write hub:org/name@revision; without a revision the model could change"
                )
            return hub
        case Registered():
            raise ValueError(
                f"model.source={source!r}: a registered model is no source of its own here; name it under models"
            )
        case StageOfRun() as stage:
            raise ValueError(
                f"model.source={source!r} is a stage of a run, which only a run of a recipe fetches; give the folder that "
                f"`vantage export {stage.named} FOLDER` writes"
            )
        case LocalPath(path=path):
            path = base / path.expanduser()
            if not path.is_dir():
                raise ValueError(
                    f"model.source={source!r}: {path} is no folder; use a Hugging Face folder, {_known()}, gguf:FILE, "
                    "package:NAME or hub:org/name@revision"
                )
            return LocalPath(path)


def source_digest(source: str, *, base: Path = Path()) -> str:
    """Return the sha256 of everything that determines the import: the files' digests, a built-in model's version, a hub
    model's commit.

    Raises:
        ValueError: see `parse_source`; or a hub revision that is no commit and cannot be looked up.
        UnsafeModel: the files of a folder do not belong together, see `vantage.models.folder_check`.
        SourceTooLarge: the files together exceed the limit.
    """
    limit, parsed = model_limit(), parse_source(source, base=base)
    if isinstance(parsed, LocalPath):
        check_agreement(parsed.path)
    return _digest(parsed, lambda path: hash_file(path, limit))


def import_digest(model: Model) -> str:
    """Return the sha256 of everything that decides the import of a recipe's model: ``source_digest``, and an adapter's files.

    For a registered model, and for a stage of another run, it is the content digest that the run has pinned; nothing is looked up.

    Raises:
        ValueError, UnsafeModel, SourceTooLarge: see `source_digest` and `vantage.models.adapter_check.check_adapter`.
    """
    if isinstance(model.origin, PinnedSource):
        if model.origin.digest is None:
            raise ValueError(
                f"{model.source!r} is no model of known content yet; a run pins it when it begins"
            )
        return model.origin.digest
    whole = source_digest(model.whole)
    if model.adapter is None:
        return whole
    check_adapter(model.adapter)
    return _with_adapter(whole, model.adapter, lambda path: hash_file(path, model_limit()))


def copy_adapter(model: Model, scratch: Path, *, whole: str, planned: str | None) -> None:
    """Copy the adapter's files into ``scratch``.

    Args:
        whole: `source_digest` of the base model.
        planned: the `import_digest` in the stage key; None: none was computed before.

    Raises:
        SourceChanged: the adapter or the model has changed since the plan.
    """
    assert model.adapter is not None, "asked for by name"
    limit = model_limit()
    found = _with_adapter(whole, model.adapter, lambda path: copy_hashed(path, scratch / path.name, limit))
    check_unchanged(model.source, planned=planned, found=found)


def _with_adapter(whole: str, folder: Path, digest_of: Callable[[Path], str]) -> str:
    content = {"model": whole, "adapter": {path.name: digest_of(path) for path in imported_files(folder)}}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def copy_source(source: str, scratch: Path, *, planned: str | None = None, base: Path = Path()) -> Source:
    """Copy a folder's or a GGUF file's bytes into `scratch`, so that they cannot change between their check and their load.

    Returns the source with the path of its copy; a hub source with its commit; a built-in source unchanged.

    Args:
        planned: the `source_digest` in the stage key; None: none was computed before.

    Raises:
        SourceChanged: the source has changed since the plan.
        ValueError, SourceTooLarge: as `source_digest`.
    """
    parsed, limit = parse_source(source, base=base), model_limit()
    if isinstance(parsed, Hub):
        parsed = replace(parsed, revision=resolve_commit(parsed))
    found = _digest(parsed, lambda path: copy_hashed(path, scratch / path.name, limit))
    check_unchanged(source, planned=planned, found=found)
    match parsed:
        case LocalPath():
            return LocalPath(scratch)
        case Gguf(path=path):
            return Gguf(scratch / path.name)
        case _:
            return parsed


def _digest(parsed: Source, digest_of: Callable[[Path], str]) -> str:
    content: dict[str, object]
    match parsed:
        case Builtin(name=name):
            content = {"builtin": name, "version": BUILTIN_VERSIONS[name]}
        case Gguf(path=path):
            content = {"gguf": digest_of(path)}
        case Hub(repository=repository):
            content = {"hub": repository, "commit": resolve_commit(parsed)}
        case LocalPath(path=path):
            files = imported_files(path)
            model_limit().check(path, sum(file.stat().st_size for file in files))
            content = {"folder": {file.name: digest_of(file) for file in files}}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def imported_files(folder: Path) -> list[Path]:
    """Return the files directly in a Hugging Face folder that an import may read."""
    return sorted(path for path in folder.iterdir() if path.suffix in IMPORTED_SUFFIXES and path.is_file())


def resolve_commit(source: Hub) -> str:
    """Return the commit of a hub source; asks the hub only when the recipe names a branch or tag.

    Raises:
        ValueError: the hub cannot be reached or does not know the revision.
    """
    if COMMIT.fullmatch(source.revision):
        return source.revision
    from huggingface_hub import HfApi  # takes half a second, which a plan without hub models does not need

    try:
        commit = HfApi().model_info(source.repository, revision=source.revision).sha
    except Exception as error:  # a network can fail in many ways
        raise ValueError(
            f"model.source: the hub did not say which commit {source.repository}@{source.revision} is "
            f"({type(error).__name__}: {error}); name the 40-digit commit, or use a folder"
        ) from error
    return str(commit)


def _packaged_gguf(name: str) -> Path:
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise ValueError(
            f"model.source='{Package(name)}': the package is not installed; pip install {name}"
        ) from error
    found = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise ValueError(
            f"model.source='{Package(name)}': the package has {len(found)} .gguf files where one is needed; "
            "name the file with gguf:FILE"
        )
    return found[0]


def _known() -> str:
    return ", ".join(str(Builtin(name)) for name in sorted(BUILTIN_VERSIONS))
