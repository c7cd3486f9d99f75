"""The hidden size of a recipe's model, read without loading it. No tensor library is loaded."""

import json
from pathlib import Path
from typing import Any

from vantage.models.gguf_header import read_gguf_header
from vantage.models.model_config import BUILTIN_CONFIGS
from vantage.models.source_digest import parse_source, resolve_commit
from vantage.schemas.recipe.sources import Builtin, Gguf, Hub, LocalPath

WIDTH_FIELDS = ("hidden_size", "n_embd", "d_model")
"""Names of the width in transformers' configurations."""
MAX_CONFIG_BYTES = 2**20


class UnknownWidth(ValueError):
    """The width of a model cannot be found."""


def hidden_size(source: str) -> int:
    """Return the width of the residual stream of the model that ``model.source`` names.

    Raises:
        UnknownWidth: its configuration does not contain the width, or cannot be read.
        ValueError: see ``vantage.models.source_digest.parse_source``.
    """
    match parse_source(source):
        case Builtin(name=name):
            return int(BUILTIN_CONFIGS[name]["hidden_size"])
        case Gguf(path=path):
            return _of_gguf(path)
        case Hub() as named:
            return _of_config(_hub_config(named))
        case LocalPath(path=path):
            return _of_config(path / "config.json")


def _of_config(path: Path) -> int:
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UnknownWidth(f"{path} cannot be read ({type(error).__name__})") from error
    return width_in_config(config, str(path))


def width_in_config(config: Any, what: str) -> int:
    """Return the width that a model's configuration contains. Raises UnknownWidth if there is none in ``what``."""
    for place in (config, config.get("text_config")) if isinstance(config, dict) else ():
        if isinstance(place, dict) and (width := _width_in(place)) is not None:
            return width
    raise UnknownWidth(f"{what} has none of {', '.join(WIDTH_FIELDS)}")


def _width_in(config: dict[str, Any]) -> int | None:
    widths = (config.get(name) for name in WIDTH_FIELDS)
    return next((width for width in widths if type(width) is int and width > 0), None)


def _of_gguf(path: Path) -> int:
    try:
        width = read_gguf_header(path).of_architecture("embedding_length")
    except ValueError as error:
        raise UnknownWidth(str(error)) from error
    if type(width) is not int or width < 1:
        raise UnknownWidth(f"{path} does not say its embedding_length; fetch it again")
    return width


def _hub_config(source: Hub) -> Path:
    from huggingface_hub import hf_hub_download

    commit = resolve_commit(source)
    try:
        return Path(hf_hub_download(source.repository, "config.json", revision=commit))
    except Exception as error:  # the hub's client has a type of error for each failure of a network
        raise UnknownWidth(
            f"the hub did not give config.json of {source.repository}@{source.revision} ({type(error).__name__}: {error})"
        ) from error
