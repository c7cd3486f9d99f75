"""Check a Hugging Face folder without loading it: no tensor library is loaded, and no weight is read.

`config.json`, the tokenizer and the headers of the safetensors have to belong to one model. A refusal names the file,
the field and the rule. Nothing is allocated for the files before the check.
"""

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
MAX_JSON_BYTES = 256 * 2**20
MAX_HEADER_BYTES = 100 * 2**20
"""Most bytes of a safetensors file's header, equal to the library's own limit."""

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Type of a safetensors tensor → bits of one element."""

LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
COUNTED = (
    *LAYERS, *HEADS, *EXPERTS, "vocab_size", "hidden_size", "n_embd", "intermediate_size", "n_inner", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "n_positions",
)  # fmt: skip
"""Fields of a configuration that are counts of at least 1, whatever the model."""
MAX_COUNT = 2**31 - 1
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight", "wpe.weight")

LAYER = re.compile(r"\.(\d{1,9})\.")


class UnsafeModel(ValueError):
    """A model folder that is refused: it is incomplete, its parts do not belong together, or it could run code."""


@dataclass(frozen=True)
class Tensor:
    """A tensor as the header of its file describes it."""

    shape: tuple[int, ...]
    file: str

    @property
    def elements(self) -> int:
        """Return the number of its elements."""
        return prod(self.shape)


def check_agreement(folder: Path) -> dict[str, Tensor]:
    """Refuse a folder whose configuration, weights and tokenizer do not belong to one model.

    Returns:
        Name → tensor of all its weights.

    Raises:
        UnsafeModel: the folder is refused; the error has one line for each problem.
    """
    config = read_json_object(folder / "config.json")
    tensors = read_tensors(folder)
    found = [
        *_counts(config),
        *_heads(config),
        *_sizes(config, tensors),
        *_vocabulary(folder, config),
    ]
    if found:
        raise UnsafeModel("\n".join(f"{folder}: {problem}" for problem in found))
    return tensors


# -- files


def read_json_object(path: Path) -> dict[str, Any]:
    """Return a JSON file that holds an object.

    Raises:
        UnsafeModel: the file is missing, too large, no JSON, or holds something else.
    """
    value = parse_json(path)
    if not isinstance(value, dict):
        raise UnsafeModel(f"{path} holds no JSON object; fetch or write it again")
    return value


def parse_json(path: Path) -> Any:
    """Return a JSON file's value; infinities and NaN, which are no JSON, are refused.

    Raises:
        UnsafeModel: the file is missing, too large, or no JSON.
    """
    if not path.is_file():
        raise UnsafeModel(f"{path} is missing")
    if path.stat().st_size > MAX_JSON_BYTES:
        raise UnsafeModel(f"{path} is larger than {MAX_JSON_BYTES} bytes")
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UnsafeModel(f"{path} is no JSON: {error}; fetch or write it again") from error


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return name → tensor of a folder's weights, from one file or from those that its index lists; only headers are
    read.

    Raises:
        UnsafeModel: there are no weights, a file is no valid safetensors file, or the index does not fit the files.
    """
    if (folder / WEIGHTS).is_file():
        return read_header(folder / WEIGHTS)
    index = folder / WEIGHTS_INDEX
    if not index.is_file():
        raise UnsafeModel(
            f"{folder} has neither {WEIGHTS} nor {WEIGHTS_INDEX}; save the model as safetensors"
        )
    listed = read_json_object(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise UnsafeModel(f"{index} lists no weights (weight_map: tensor → file); fetch or write it again")
    shards: dict[str, dict[str, Tensor]] = {}
    for name, file in listed.items():
        if not isinstance(file, str) or not _is_beside(folder, file):
            raise UnsafeModel(
                f"{index} lists {str(file)[:100]!r}, which is no safetensors file beside it; fetch it"
            )
        shards.setdefault(file, read_header(folder / file) if file not in shards else {})
        if name not in shards[file]:
            raise UnsafeModel(
                f"{folder / file} lacks {name[:100]!r}, which {WEIGHTS_INDEX} says it holds; fetch it again"
            )
    return {name: shards[file][name] for name, file in listed.items()}


def _is_beside(folder: Path, file: str) -> bool:
    plain = file.endswith(".safetensors") and Path(file).name == file and "\0" not in file and len(file) < 256
    return plain and (folder / file).is_file()


def read_header(path: Path) -> dict[str, Tensor]:
    """Return name → tensor of one safetensors file, whose header has to account for every byte of it.

    Raises:
        UnsafeModel: the file is no valid safetensors file.
    """
    try:
        with path.open("rb") as file:
            [length] = struct.unpack("<Q", file.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"its header would be {length} bytes long")
            header = json.loads(file.read(length), parse_constant=_no_number)
        tensors, end = {}, 0
        metadata = header.get("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise ValueError("its __metadata__ is no mapping of texts, which loaders ask for")
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            end = _check_entry(name, entry, end)
            tensors[name] = Tensor(tuple(entry["shape"]), path.name)
        if path.stat().st_size != 8 + length + end:
            raise ValueError(f"its header accounts for {8 + length + end} bytes of {path.stat().st_size}")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, struct.error) as error:
        reason = str(error)[:200] or type(error).__name__
        raise UnsafeModel(
            f"{path} is no valid safetensors file ({reason}); fetch or write it again"
        ) from error
    return tensors


def _check_entry(name: str, entry: dict[str, Any], begin: int) -> int:
    """Return the end of a tensor that begins at ``begin``; ValueError if its entry contradicts that."""
    shape, (start, end) = entry["shape"], entry["data_offsets"]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in (*shape, start, end)):
        raise ValueError(f"{name[:100]!r} has a shape or place that is no whole number")
    if min(shape, default=0) < 0 or start != begin or (end - start) * 8 != prod(shape) * BITS[entry["dtype"]]:
        raise ValueError(f"{name[:100]!r} does not lie where its shape and type put it")
    return int(end)


# -- what has to agree


def _counts(config: dict[str, Any]) -> Iterator[str]:
    """Yield problems of fields that should be counts; lists (one count per layer) are left to the model's own class."""
    for field in COUNTED:
        value = config.get(field)
        if value is None or isinstance(value, list):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
            if field in EXPERTS and value == 0:  # a model of a mixture of experts with no expert
                continue
            shown = json.dumps(value)[:60]
            yield f"config.json: {field}={shown} is no whole number from 1 to {MAX_COUNT}; correct it, or fetch it again"


def _count(config: dict[str, Any], *fields: str) -> tuple[str, int] | None:
    """Return the first of these fields with a count in the configuration, and its count."""
    for field in fields:
        value = config.get(field)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
            return field, value
    return None


def _heads(config: dict[str, Any]) -> Iterator[str]:
    heads, shared = _count(config, *HEADS), _count(config, "num_key_value_heads")
    if heads and shared and heads[1] % shared[1]:
        yield (
            f"config.json: {heads[0]}={heads[1]} is not a multiple of num_key_value_heads={shared[1]}; "
            "the two belong to different models"
        )


def _sizes(config: dict[str, Any], tensors: dict[str, Tensor]) -> Iterator[str]:
    """Yield numbers of the configuration that the weights contradict."""
    layers = _count(config, *LAYERS)
    if layers:
        numbered = {int(found) for name in tensors for found in LAYER.findall(name)}
        most = max(numbered, default=-1) + 1
        if layers[1] > max(most, len(tensors)) or (numbered and layers[1] > most):
            yield f"config.json: {layers[0]}={layers[1]}, but the weights have {most} layers; fetch both again"
    experts = _count(config, *EXPERTS)
    total = sum(tensor.elements for tensor in tensors.values())
    if experts and experts[1] > total:
        yield f"config.json: {experts[0]}={experts[1]}, but the weights have {total} numbers; fetch both again"
    for fields, embedding in ((("vocab_size",), EMBEDDINGS[:-1]), (("n_positions",), EMBEDDINGS[-1:])):
        rows = _count(config, *fields)
        for name, tensor in tensors.items():
            if rows and name.endswith(embedding) and tensor.shape[:1] != (rows[1],):
                stored = f"{name} in {tensor.file} has {tensor.shape[0] if tensor.shape else 0} rows"
                yield f"config.json: {rows[0]}={rows[1]}, but {stored}; the two belong to different models"


def _vocabulary(folder: Path, config: dict[str, Any]) -> Iterator[str]:
    """Yield problems of a tokenizer.json: it is invalid, or has more ids than the model has rows."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return  # the folder has another form of tokenizer, or none; loading will report that
    tokenizer = read_json_object(path)
    try:
        ids = list(_ids(tokenizer))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        yield f"tokenizer.json has no vocabulary that could be read ({reason}); fetch or write it again"
        return
    size = _count(config, "vocab_size")
    if size and ids and max(ids) >= size[1]:
        yield (
            f"tokenizer.json has ids up to {max(ids)}, config.json only vocab_size={size[1]}; "
            "use the tokenizer that belongs to the model"
        )


def _ids(tokenizer: dict[str, Any]) -> Iterator[int]:
    vocabulary = tokenizer["model"]["vocab"]
    found = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    added = [token["id"] for token in tokenizer.get("added_tokens") or ()]
    for number in (*found, *added):
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise ValueError(f"{json.dumps(number)[:60]} is no id")
        yield number
