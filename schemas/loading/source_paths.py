"""Resolve the sources of model, data and verifiers to absolute paths, and check that they exist.

A path that cannot be looked up (too long, with a NUL, a cycle of links, in an unreadable folder) raises
``UnresolvablePath``, and nothing else.
"""

import stat
from collections.abc import Callable
from pathlib import Path as File
from typing import Any

from vantage.schemas.loading.overrides import Override
from vantage.schemas.problems import (
    Path,
    Problem,
    quote,
    suggest,
)
from vantage.schemas.recipe.builtin_verifiers import SOURCES
from vantage.schemas.recipe.sources import (
    Builtin,
    Gguf,
    Hub,
    HubDataset,
    HubFiles,
    LocalPath,
    Package,
    Registered,
    StageOfRun,
    bare_stage_of_run,
    data_source,
    file_source,
    model_source,
)
from vantage.schemas.recipe.verifiers import EXACT_MATCH
from vantage.schemas.source_files import PLAIN_FORMATS, data_format, files_of, saved_files, why_not_saved

_NO_FILE = "there is no file"
_NO_FOLDER = "there is no folder"
UNSET_SOURCE = "?"
"""Placeholder for a source that the user has to give."""
BUILTIN_MODELS = (str(Builtin("tiny")), str(Builtin("nano")))
BUILTIN_DATA = tuple(
    str(Builtin(name, kind))
    for name in ("arithmetic", "arithmetic_long", "arithmetic_habit")
    for kind in ("demonstrations", "preferences", "labelled_responses", "prompts")
)


class UnresolvablePath(ValueError):
    """A path that cannot be looked up; the message contains the reason."""


def absolute(path: str | File, start: File) -> File:
    """Return the path relative to ``start``, with ``~`` and links followed.

    Raises:
        UnresolvablePath: the path cannot be resolved.
    """
    try:
        return (start / File(path).expanduser()).resolve()
    # RuntimeError: a cycle of links, or no home folder; ValueError: a NUL or another invalid character
    except (OSError, RuntimeError, ValueError) as error:
        raise UnresolvablePath(_why(error)) from None


def mode_of(file: File) -> int:
    """Return ``st_mode`` of a path; 0 if nothing exists there.

    Raises:
        UnresolvablePath: it cannot be looked up.
    """
    try:
        return file.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0
    except (OSError, ValueError) as error:
        raise UnresolvablePath(_why(error)) from None


def is_file(file: File) -> bool:
    """Return whether the path is a regular file (no folder, pipe or device).

    Raises:
        UnresolvablePath: it cannot be looked up.
    """
    return stat.S_ISREG(mode_of(file))


def _why(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def resolve_sources(
    plain: Any,
    folder: File,
    here: File,
    placed: dict[Path, Override],
    *,
    needs_files: bool = True,
) -> tuple[Any, list[Problem]]:
    """Return the plain recipe with absolute paths, and the problems of its sources.

    Relative paths start at ``folder``; those set by an override (``placed``) start at ``here``. Without
    ``needs_files``, files of data, verifiers and benchmarks may be missing.
    """
    if not isinstance(plain, dict):
        return plain, []
    problems: list[Problem] = []
    models: list[tuple[Path, Any]] = [(("model",), plain.get("model"))]
    models += [(("models", name), value) for name, value in _items(plain.get("models"))]
    sections: tuple[tuple[Path, Any, _Resolve], ...] = (
        *((owner, value, _model_source) for owner, value in models),
        *((("data", name), value, _data_source) for name, value in _items(plain.get("data"))),
        *((("verifiers", name), value, _verifier_source) for name, value in _items(plain.get("verifiers"))),
        *((("benchmarks", name), value, _folder_of_tasks) for name, value in _items(plain.get("benchmarks"))),
    )
    for owner, model in models:
        problems += _resolve_base(owner, model, folder, here, placed)
    for owner, value, resolve_source in sections:
        if not isinstance(value, dict) or not isinstance(value.get("source"), str):
            continue
        path, source = (*owner, "source"), value["source"]
        if source == UNSET_SOURCE:
            remedy = f"give it with --set {'.'.join(map(str, path))}=…"
            problems.append(Problem(path, "is left open by this recipe", remedy))
            continue
        try:
            value["source"], found = resolve_source(
                path, source, here if _is_overridden(path, placed) else folder
            )
            may_be_missing = not needs_files and owner[0] not in ("model", "models")
            unimportant = (_NO_FILE, _NO_FOLDER) if may_be_missing else ()
            problems += (each for each in found if not each.message.startswith(unimportant))
        except UnresolvablePath as error:
            problems.append(
                Problem(path, f"{quote(source)} cannot be looked up ({error})", "correct the path")
            )
    for owner, model in models:
        problems += _adapter_problems(owner, model)
    problems += _resolve_key(plain.get("sign"), folder, here, placed, needs_files=needs_files)
    return plain, problems


def _resolve_key(
    sign: Any, folder: File, here: File, placed: dict[Path, Override], *, needs_files: bool
) -> list[Problem]:
    """Make the path of the signing key absolute; returns its problems. The key itself is read when a run is planned."""
    if not isinstance(sign, dict) or not isinstance(sign.get("key"), str):
        return []
    path = ("sign", "key")
    try:
        key = absolute(sign["key"], here if _is_overridden(path, placed) else folder)
        missing = needs_files and not is_file(key)
    except UnresolvablePath as error:
        return [Problem(path, f"{quote(sign['key'])} cannot be looked up ({error})", "correct the path")]
    sign["key"] = str(key)
    remedy = "name the file of a private key, which `vantage keys new FILE` makes"
    return [Problem(path, f"{_NO_FILE} {key}", remedy)] if missing else []


def _adapter_problems(owner: Path, model: Any) -> list[Problem]:
    """Return the problem of an adapter without its base model, or of a base without an adapter."""
    if not isinstance(model, dict) or not isinstance(model.get("source"), str):
        return []
    name = ".".join(map(str, owner))
    source, has_base = model_source(model["source"]), isinstance(model.get("base"), str)
    try:
        is_adapter = isinstance(source, LocalPath) and is_file(source.path / "adapter_config.json")
    except UnresolvablePath:  # another check reports this
        return []
    if is_adapter and not has_base:
        remedy = f"name the model that it was trained on as {name}.base: a folder, or hub:ORGANISATION/NAME@REVISION"
        return [Problem((*owner, "source"), "is an adapter, which alone is no model", remedy)]
    if has_base and not is_adapter:
        remedy = f"name a folder with adapter_config.json as {name}.source, or leave base out"
        return [
            Problem(
                (*owner, "base"),
                f"is the model beneath an adapter, and {name}.source names no adapter",
                remedy,
            )
        ]
    return []


def _resolve_base(
    owner: Path, model: Any, folder: File, here: File, placed: dict[Path, Override]
) -> list[Problem]:
    """Make the path of a model's ``base`` absolute; returns its problems."""
    if not isinstance(model, dict) or not isinstance(model.get("base"), str):
        return []
    path, base = (*owner, "base"), model["base"]
    try:
        model["base"], found = _model_source(path, base, here if _is_overridden(path, placed) else folder)
    except UnresolvablePath as error:
        return [Problem(path, f"{quote(base)} cannot be looked up ({error})", "correct the path")]
    return found


_Resolve = Callable[[Path, str, File], tuple[str, list[Problem]]]


def _items(named: Any) -> list[tuple[str, Any]]:
    return list(named.items()) if isinstance(named, dict) else []


def _is_overridden(path: Path, placed: dict[Path, Override]) -> bool:
    return any(path[:length] in placed for length in range(1, len(path) + 1))


def _model_source(path: Path, source: str, start: File) -> tuple[str, list[Problem]]:
    match model_source(source):
        case Builtin():
            known, remedy = source in BUILTIN_MODELS, suggest(source, BUILTIN_MODELS)
            return source, [] if known else [
                Problem(path, f"there is no built-in model {quote(source)}", remedy)
            ]
        case Hub() as named:
            problem = Problem(
                path, f"{quote(source)} names no revision", "write hub:ORGANISATION/NAME@REVISION"
            )
            return source, [] if named.is_well_formed else [problem]
        case Package() as named:
            problem = Problem(path, f"{quote(source)} is not the name of a package", "write package:NAME")
            return source, [] if named.is_well_formed else [problem]
        case Registered() as named:
            return source, _problems_of_registered(path, source, named)
        case StageOfRun() as named:
            return source, _problems_of_stage(path, source, named)
        case Gguf(path=file):
            file = absolute(file, start)
            problem = Problem(path, f"there is no file {file}", "name a .gguf file")
            return str(Gguf(file)), [] if is_file(file) else [problem]
        case LocalPath(path=folder):
            folder = absolute(folder, start)
            stage = bare_stage_of_run(source)
            if stage is None:
                return str(folder), _problems_of_folder(path, folder)
            if mode_of(folder):
                remedy = f"write ./{source} or {stage}"
                return source, [Problem(path, f"{quote(source)} means a folder and a stage of a run", remedy)]
            return str(stage), _problems_of_stage(path, source, stage)


def _problems_of_registered(path: Path, source: str, named: Registered) -> list[Problem]:
    if path[0] != "models" or path[-1] != "source":
        message = f"{quote(source)} is a registered model, which stages sample from and compare with"
        remedy = "name it under models; or take its folder, which `vantage export` writes"
        return [Problem(path, message, remedy)]
    if not named.is_well_formed:
        remedy = "write models:/NAME@ALIAS or models:/NAME/VERSION"
        return [Problem(path, f"{quote(source)} names no version of a registered model", remedy)]
    return []


def _problems_of_stage(path: Path, source: str, named: StageOfRun) -> list[Problem]:
    if path[-1] == "base":
        message = f"{quote(source)} is a stage of a run, and adapters here belong to a model from elsewhere"
        remedy = f"name the folder that `vantage export {named.named} FOLDER` writes"
        return [Problem(path, message, remedy)]
    if not named.is_well_formed:
        remedy = "write RUN/STAGE, as in latest/policy or 0007/sft"
        return [Problem(path, f"{quote(source)} names no stage of a run", remedy)]
    return []


def _problems_of_folder(path: Path, folder: File) -> list[Problem]:
    if not stat.S_ISDIR(mode_of(folder)):
        remedy = "name a Hugging Face folder, builtin:tiny, gguf:FILE, package:NAME, hub:ORGANISATION/NAME@REVISION, or RUN/STAGE (latest/policy)"
        return [Problem(path, f"there is no folder {folder}", remedy)]
    if is_file(folder / "adapter_config.json"):
        if path[-1] == "base":
            return [
                Problem(path, f"{folder} is an adapter itself", "name the whole model that it was trained on")
            ]
        return []
    if not is_file(folder / "config.json"):
        return [Problem(path, f"{folder} has no config.json", "name a Hugging Face model folder")]
    return []


def _data_source(path: Path, source: str, start: File) -> tuple[str, list[Problem]]:
    named = data_source(source)
    if isinstance(named, HubDataset):
        remedy = (
            "write hub:ORGANISATION/NAME@COMMIT with the 40 digits of a commit, or …@COMMIT/FILE; "
            "a branch or a tag could change"
        )
        problem = Problem(path, f"{quote(source)} names no commit of a dataset", remedy)
        return source, [] if named.is_well_formed else [problem]
    if isinstance(named, HubFiles):
        return source, _problems_of_hub_files(path, source, named)
    if isinstance(named, Builtin):
        problem = Problem(path, f"there is no built-in data {quote(source)}", suggest(source, BUILTIN_DATA))
        return source, [] if source in BUILTIN_DATA else [problem]
    file = saved_files(absolute(named.path, start))
    if data_format(file) is None:
        message = f"{quote(source)} is not in a known format"
        remedy = why_not_saved(file) or f"name a {', '.join(PLAIN_FORMATS)} file, or builtin:NAME/KIND"
        return str(file), [Problem(path, message, remedy)]
    if not files_of(file):
        return str(file), [Problem(path, f"{_NO_FILE} that {file} matches", "correct the pattern")]
    return str(file), _missing(path, files_of(file)[0])


def _problems_of_hub_files(path: Path, source: str, named: HubFiles) -> list[Problem]:
    if not named.is_well_formed:
        remedy = "write hub:ORGANISATION/NAME@COMMIT/FILE with the 40 digits of a commit; a branch or a tag could change"
        return [Problem(path, f"{quote(source)} names no file at a commit", remedy)]
    if data_format(named.files) is None:
        remedy = f"name {', '.join(PLAIN_FORMATS)} files of the repository; loading scripts are never run"
        return [Problem(path, f"{quote(source)} is not in a known format", remedy)]
    return []


def _verifier_source(path: Path, source: str, start: File) -> tuple[str, list[Problem]]:
    named = file_source(source)
    if isinstance(named, Builtin):
        problem = Problem(path, f"there is no built-in verifier {quote(source)}", suggest(source, SOURCES))
        return source, [] if source in SOURCES else [problem]
    file = absolute(named.path, start)
    if file.suffix != ".py":
        return str(file), [
            Problem(path, f"{quote(source)} is no Python file", f"name a .py file, or {EXACT_MATCH}")
        ]
    return str(file), _missing(path, file)


def _folder_of_tasks(path: Path, source: str, start: File) -> tuple[str, list[Problem]]:
    folder = absolute(source, start)
    if not stat.S_ISDIR(mode_of(folder)):
        remedy = "name a folder with definitions of lm-eval tasks (.yaml)"
        return str(folder), [Problem(path, f"{_NO_FOLDER} {folder}", remedy)]
    return str(folder), []


def _missing(path: Path, file: File) -> list[Problem]:
    return [] if is_file(file) else [Problem(path, f"{_NO_FILE} {file}", "correct the path")]
