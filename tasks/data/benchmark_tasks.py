"""Check definitions of lm-eval's tasks in a folder: data must be files of the folder, and nothing may come from elsewhere.

The package itself is not needed here, so that a folder is refused before anything runs.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from vantage.schemas.source_files import files_in

LOCAL_FORMATS = ("json", "csv", "parquet", "arrow", "text")
"""Values of ``dataset_path`` that name a format of local files; JSON lines are ``json``."""

_REFUSED = {
    "custom_dataset": "makes data by code; write them to a file, and name it in dataset_kwargs.data_files",
    "class": "is a task of Python; define it in YAML",
    "unsafe_code": "runs code that the model has written; a stage does not",
    "hf_evaluate": "loads a metric from the Hugging Face hub; name one of lm-eval's own, or `!function FILE.FUNCTION`",
}
"""Field of a definition → reason why it is refused."""


class UnusableTasks(ValueError):
    """A folder of tasks that cannot be run from local files."""


class _Loader(yaml.SafeLoader):
    """YAML in which ``!function`` is a name."""


def _name_of(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    if not isinstance(node, yaml.ScalarNode):
        raise yaml.constructor.ConstructorError(None, None, "!function names a function", node.start_mark)
    return loader.construct_scalar(node)


_Loader.add_constructor("!function", _name_of)


def check_tasks(folder: Path) -> None:
    """Refuse a folder whose definitions cannot be used.

    Raises:
        UnusableTasks: there is no definition, one cannot be read, or one needs something outside the folder.
    """
    names = [name for name in files_in(folder) if name.endswith(".yaml")]
    if not names:
        raise UnusableTasks(f"{folder} has no .yaml file; name a folder with definitions of lm-eval tasks")
    for name in names:
        try:
            definition = yaml.load((folder / name).read_text(encoding="utf-8"), Loader=_Loader)
        except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
            raise UnusableTasks(f"{name} is no YAML ({' '.join(str(error).split())}); correct it") from None
        for mapping in _mappings(definition):
            _check_fields(name, mapping)
            _check_includes(folder, name, mapping.get("include"))
            _check_data(folder, name, mapping)


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield a mapping and all mappings in it, since a group may contain the definitions of its tasks."""
    if isinstance(value, Mapping):
        yield value
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    for each in inner:
        yield from _mappings(each)


def _check_fields(name: str, mapping: Mapping[str, Any]) -> None:
    for field, why in _REFUSED.items():
        if mapping.get(field):
            raise UnusableTasks(f"{name}: {field}={mapping[field]!r} {why}")


def _check_includes(folder: Path, name: str, included: Any) -> None:
    for each in included if isinstance(included, list) else [] if included is None else [included]:
        place = ((folder / name).parent / str(each)).resolve()
        if not place.is_relative_to(folder.resolve()) or not place.is_file():
            raise UnusableTasks(f"{name}: include={each!r} is no file of {folder}; copy it there")


def _check_data(folder: Path, name: str, mapping: Mapping[str, Any]) -> None:
    origin = mapping.get("dataset_path")
    if origin is not None and origin not in LOCAL_FORMATS:
        raise UnusableTasks(
            f"{name}: dataset_path={origin!r} is a dataset of the Hugging Face hub or a script, and tasks read files of their "
            "folder; put its files there, and write dataset_path: json with dataset_kwargs: {data_files: {test: FILE.jsonl}} "
            f"(one of {', '.join(LOCAL_FORMATS)})"
        )
    given = mapping.get("dataset_kwargs")
    options = given if isinstance(given, Mapping) else {}
    if "data_dir" in options:
        raise UnusableTasks(f"{name}: dataset_kwargs.data_dir names no single files; name them in data_files")
    for file in _files_named(options.get("data_files")):
        place = (folder / str(file)).resolve()
        if "://" in str(file) or not place.is_relative_to(folder.resolve()) or not place.is_file():
            raise UnusableTasks(
                f"{name}: dataset_kwargs.data_files={file!r} is no file of {folder}; give its path from that folder on"
            )


def _files_named(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _files_named(each)
    elif value is not None:
        yield value
