"""Find facts of a model that enter stage keys only if they matter. No tensor library is loaded, no template is
rendered."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from vantage.models.folder_check import read_json_object
from vantage.models.source_digest import parse_source
from vantage.models.tokenizer_digest import SPECIAL_ROLES, chat_template_of, content_of
from vantage.schemas.recipe.inputs import SourcedModel
from vantage.schemas.recipe.sources import Builtin, Gguf, Hub, LocalPath, PinnedSource

CLOCK = "clock"
"""The chat template asks for today's date; earlier versions gave it the machine's date."""
DATE = "date"
"""The chat template writes a date; if a date is passed by name (``date_string``), it never asks the clock."""
PADDING = "padding"
"""Padding is a token with another role, such as EOS; earlier versions did not train its embedding."""
UNKNOWN = "unknown"
"""The files are not on this machine when the key is made: a model of the hub, of MLflow, or of another run."""

_HEAD = 64 * 2**20
"""Bytes of a GGUF file that are searched for its chat template; the metadata are at the file's beginning."""


def facts_of(model: SourcedModel) -> frozenset[str]:
    """Return which of the facts above hold for a model.

    Raises:
        ValueError: there is no such source, see `vantage.models.source_digest.parse_source`; or its files are no JSON.
    """
    if isinstance(model.origin, PinnedSource):
        return frozenset({UNKNOWN})
    folders = [model.adapter] if model.adapter is not None else []
    match parse_source(model.whole):
        case LocalPath(path=path):
            folders.append(path)
        case Gguf(path=path):
            status = path.stat()
            return _of_gguf(path, status.st_size, status.st_mtime_ns)
        case Builtin():
            return frozenset()
        case Hub():
            return frozenset({UNKNOWN})
    # An adapter's own tokenizer replaces the model's
    folder = next((each for each in folders if (each / "tokenizer_config.json").is_file()), None)
    return frozenset() if folder is None else _of_folder(folder)


def _of_folder(folder: Path) -> frozenset[str]:
    settings = read_json_object(folder / "tokenizer_config.json")
    template = chat_template_of(folder, settings)
    return _of_template(str(template or "")) | ({PADDING} if _pads_with_another(folder, settings) else set())


def _pads_with_another(folder: Path, settings: Mapping[str, Any]) -> bool:
    former = folder / "special_tokens_map.json"
    named = {**(read_json_object(former) if former.is_file() else {}), **settings}
    roles = {role: content_of(named[role]) for role in SPECIAL_ROLES if named.get(role) is not None}
    pad = roles.pop("pad_token", None)
    return pad is None or pad in roles.values()


def _of_template(template: str) -> frozenset[str]:
    if "date_string" in template:
        return frozenset({DATE})
    return frozenset({CLOCK, DATE} if "strftime_now" in template else ())


@lru_cache(maxsize=8)
def _of_gguf(path: Path, size: int, changed: int) -> frozenset[str]:
    del size, changed  # they are only part of the cache's key, so that a changed file is read again
    with path.open("rb") as file:
        return _of_template(file.read(_HEAD).decode("latin-1"))
