"""Read the configuration of a recipe's model, and count its weights from the headers of its files.

No tensor library is loaded, and nothing is fetched: a model of the hub is read from the local cache.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vantage.models.gguf_header import read_gguf_header
from vantage.models.source_digest import parse_source
from vantage.schemas.recipe.sources import Builtin, Gguf, Hub, LocalPath

MAX_BUILTIN_LENGTH = 512
"""Tokens of a prompt and its response that a built-in model can read."""
_TINY: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_BUILTIN_LENGTH,
    "tie_word_embeddings": True,
}
BUILTIN_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "tiny": _TINY,
    "nano": {
        **_TINY,
        "intermediate_size": 128,
        # For texts of about 100 tokens: with the usual 10,000, 7 of a head's 16 pairs turn by less than a radian within
        # them
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
}
"""The configurations of the built-in models, for which ``vantage.models.builtin`` makes weights."""
MAX_CONFIG_BYTES = 2**20
MAX_HEADER_BYTES = 2**27
_GGUF_FIELDS = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}


class UnreadableConfig(ValueError):
    """A model's configuration cannot be read on this machine."""


@dataclass(frozen=True)
class ModelConfig:
    """Facts of a model that are known without loading it."""

    fields: Mapping[str, Any]
    """Fields of a Hugging Face ``config.json``, of the language model alone."""
    num_weights: int | None
    """Number of weights in the files; None: there are no files here, or some weights are tied in a way that the files do
    not show."""
    folder: Path | None
    """Folder of the model's files; None: the model is built in, or a GGUF file."""


def read_config(source: str) -> ModelConfig:
    """Return the configuration of the model that ``model.source`` names.

    Raises:
        UnreadableConfig: the configuration does not exist, is not JSON, or is not on this machine.
        ValueError: see ``vantage.models.source_digest.parse_source``.
    """
    match parse_source(source):
        case Builtin(name=name):
            return ModelConfig(BUILTIN_CONFIGS[name], None, None)
        case Gguf(path=path):
            return _of_gguf(path)
        case Hub() as named:
            folder = _cached_folder(named)
        case LocalPath(path=path):
            folder = path
    return ModelConfig(_language_fields(folder / "config.json"), _count_weights(folder), folder)


def _language_fields(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise UnreadableConfig(
            f"{path} cannot be read ({type(error).__name__}); give a folder with its config.json"
        ) from error
    if not isinstance(config, dict):
        raise UnreadableConfig(f"{path} holds no mapping; give a model's config.json")
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def _count_weights(folder: Path) -> int | None:
    """Return elements of all tensors in the safetensors files; None without such files."""
    files = sorted(folder.glob("*.safetensors"))
    total = 0
    for file in files:
        header = _header(file)
        total += sum(_elements(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total if files else None


def _header(path: Path) -> dict[str, Any]:
    """Return the JSON at the beginning of a safetensors file: its length in 8 bytes, then name → dtype, shape, offsets."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
            for name, entry in header.items():
                if name != "__metadata__":
                    _elements(entry["shape"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnreadableConfig(f"{path} is no safetensors file ({error}); copy it again") from error
    return dict(header)


def _elements(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= int(size)
    return count


def _of_gguf(path: Path) -> ModelConfig:
    try:
        header = read_gguf_header(path)
    except ValueError as error:
        raise UnreadableConfig(str(error)) from error
    try:
        found: dict[str, Any] = {"model_type": str(header.metadata["general.architecture"])}
        for theirs, ours in _GGUF_FIELDS.items():
            if (value := header.of_architecture(theirs)) is not None:
                found[ours] = int(value)
        found["vocab_size"] = max(header.shapes["token_embd.weight"])
        found["tie_word_embeddings"] = "output.weight" not in header.shapes
        return ModelConfig(found, header.num_weights, None)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UnreadableConfig(
            f"{path} does not say its shape ({type(error).__name__}: {error}); give a Hugging Face folder"
        ) from error


def _cached_folder(source: Hub) -> Path:
    """Return the folder of the snapshot in the hub's local cache."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(source.repository, "config.json", revision=source.revision)
    if not isinstance(found, str):
        raise UnreadableConfig(
            f"model.source={str(source)!r}: its config.json is not in the local cache, and nothing is fetched for an "
            f"estimate; run `hf download {source.repository} config.json --revision {source.revision}`, or give a "
            "folder with --set model.source=FOLDER"
        )
    return Path(found).parent
