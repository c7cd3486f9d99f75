"""Hugging Face folders on disk: checked before anything in them is used, loaded, and saved byte-stably.

Weights are safetensors, everything else is JSON or text. Nothing here ever unpickles or runs code from a folder.
"""

import copy
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

from vantage.models.folder_check import (
    LAYER,
    Tensor,
    UnsafeModel,
    check_agreement,
    parse_json,
    read_header,
    read_json_object,
)
from vantage.models.output_head import check_output_head
from vantage.models.padding_token import train_every_row
from vantage.models.sharding import are_deferred, is_sharded, parameters_without_storage, whole_weights
from vantage.models.tokenizer_digest import tokenizer_digest

__all__ = [
    "UnsafeModel",
    "check_files",
    "check_folder",
    "load_config",
    "load_policy",
    "load_tokenizer",
    "save_policy",
    "save_tokenizer",
    "tokenizer_digest",
]

PICKLE_SUFFIXES = frozenset(
    {".bin", ".ckpt", ".dill", ".joblib", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth"}
)
MAX_SHARD_SIZE = "5GB"


def check_folder(folder: Path) -> dict[str, Tensor]:
    """Refuse a folder that is no complete, plain Hugging Face model in safetensors.

    Returns:
        Name → tensor of all its weights.

    Raises:
        UnsafeModel: a symlink that leads outside, a pickle (by suffix or by its first bytes), remote code
            (`auto_map`), an unknown `model_type`, quantised weights, missing or damaged safetensors, or a
            configuration, weights and a tokenizer that do not belong to one model.
    """
    check_files(folder)
    config = read_json_object(folder / "config.json")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsafeModel(
            f"{folder / 'config.json'}: model_type={model_type!r} is no causal language model that the installed "
            "transformers knows; use one that it has, or another version of transformers"
        )
    if (folder / "adapter_config.json").exists():
        raise UnsafeModel(
            f"{folder} holds an adapter, which may name any base model; merge it into its model first"
        )
    if "quantization_config" in config:
        raise UnsafeModel(
            f"{folder / 'config.json'}: the weights are quantised; dequantise them before training"
        )
    return check_agreement(folder)


def load_config(folder: Path) -> PreTrainedConfig:
    """Return the model's configuration with every kind of dropout set to 0, so that training computes the same as
    sampling.

    Raises:
        UnsafeModel: transformers refuses the configuration.
    """
    with refusing(folder / "config.json", "is no configuration that transformers reads"):
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    for name, value in config.to_dict().items():
        if ("dropout" in name or "pdrop" in name or "layerdrop" in name) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def load_policy(
    folder: Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """Load a causal language model onto `device`, in evaluation mode, without dropout, with neutral sampling defaults.

    Within `vantage.models.sharding.without_weights` the model has no weights.

    Raises:
        UnsafeModel: `check_folder` refuses the folder, or its weights do not fit its configuration.
        ValueError: log-probabilities of the model's output head would be computed wrongly.
    """
    tensors, config = check_folder(folder), load_config(folder)
    check_shapes(folder, config, tensors)
    if (folder / "generation_config.json").exists():
        with refusing(folder / "generation_config.json", "is none that transformers reads"):
            GenerationConfig.from_pretrained(folder)
    model = load_weights(AutoModelForCausalLM, folder, config, dtype=dtype)
    model.generation_config = neutral_generation_config(model.generation_config)
    if are_deferred():
        return model
    check_output_head(model)
    model.to(device)  # type: ignore[arg-type]  # transformers wraps it in a decorator that mypy takes for a method
    return model


@contextmanager
def refusing(place: Path, what: str) -> Iterator[None]:
    """Turn any error of a library on a folder's files into an `UnsafeModel` that names the place.

    transformers and tokenizers pass on whatever Python or Rust raise on a strange value: KeyError, TypeError,
    AssertionError, ZeroDivisionError, a bare Exception, a panic. Errors of the machine are raised as they are.
    """
    try:
        yield
    except (UnsafeModel, MemoryError):
        raise
    except BaseException as error:
        is_ours = isinstance(error, Exception) and type(error).__name__ != "OutOfMemoryError"
        is_of_disk = isinstance(error, OSError) and error.errno is not None
        if is_of_disk or not (is_ours or type(error).__name__ == "PanicException"):
            raise
        reason = " ".join(str(error).split())[:400] or type(error).__name__
        raise UnsafeModel(f"{place} {what}: {reason}; correct it, or fetch the model again") from error


def check_shapes(folder: Path, config: PreTrainedConfig, tensors: dict[str, Tensor]) -> None:
    """Refuse a configuration whose model cannot be filled from weights of these shapes; nothing is allocated.

    Raises:
        UnsafeModel: the model cannot be built, has more parameters than the weights have elements, or a parameter of
        another shape.
    """
    with refusing(folder / "config.json", "describes a model that cannot be built"):
        shapes = parameter_shapes(config)
    for name, shape in shapes.items():
        stored = tensors.get(name)
        if stored is not None and stored.shape != shape:
            raise UnsafeModel(
                f"{folder}: config.json asks for {name} of shape {shape}, {stored.file} has "
                f"{stored.shape}; the two belong to different models"
            )
    wanted, held = sum(map(math.prod, shapes.values())), sum(each.elements for each in tensors.values())
    if wanted > held:
        missing = sorted(name for name in shapes if name not in tensors)
        raise UnsafeModel(
            f"{folder}: config.json describes a model of {wanted} numbers, the safetensors have {held}: {len(missing)} "
            f"parameters are missing, first {missing[:3]}; config.json and weights belong to different models"
        )


def parameter_shapes(config: PreTrainedConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of the model that a configuration describes; nothing is allocated."""
    return _shapes(_Described(f"{type(config)} {config.to_json_string(use_diff=False)}", config))


@dataclass(frozen=True)
class _Described:
    """A configuration that equals others with the same text."""

    text: str
    config: PreTrainedConfig = field(compare=False)


@lru_cache(maxsize=4)
def _shapes(described: _Described) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter. Shapes are cached, since most networks of a stage have the same
    configuration."""
    config = copy.deepcopy(described.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=_attention_implementation(config), trust_remote_code=False
        )
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def load_weights(
    auto_class: type[Any], folder: Path, config: PreTrainedConfig, *, dtype: torch.dtype
) -> PreTrainedModel:
    """Build `auto_class`'s model for `config` and fill each of its parameters from a checked folder.

    Raises:
        UnsafeModel: a parameter is missing in the files or has another shape (transformers alone would leave it random
        and only warn); or the files have layers that the model lacks.
    """
    model: PreTrainedModel
    if are_deferred():
        with parameters_without_storage():
            model = auto_class.from_config(
                config,
                dtype=dtype,
                attn_implementation=_attention_implementation(config),
                trust_remote_code=False,
            )
        model.tie_weights()  # registering each parameter again has lost the ties
        return _ready(model, folder)
    model, report = auto_class.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation=_attention_implementation(config),
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    wrong = sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"])
    if wrong:
        raise UnsafeModel(
            f"{folder}: {len(wrong)} parameters are missing or misshapen in the safetensors, first {wrong[:3]}; "
            "config.json and weights belong to different models"
        )
    # Other unused tensors (a tied head, a buffer) are harmless; whole unused layers belong to another model.
    left = sorted(name for name in report["unexpected_keys"] if LAYER.search(name))
    if left:
        raise UnsafeModel(
            f"{folder}: {len(left)} tensors of the safetensors are in layers that config.json does not have, first "
            f"{left[:3]}; config.json and weights belong to different models"
        )
    return _ready(model, folder)


def _ready(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    train_every_row(model, folder)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.eval()
    return model


def save_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a plain Hugging Face folder; the same model and tokenizer give the same bytes every time.

    The generation configuration keeps only the special tokens' ids.

    Raises:
        ValueError: the tokenizer knows more ids than the model has embeddings.
    """
    check_embeddings(model, tokenizer)
    model.generation_config = neutral_generation_config(model.generation_config, tokenizer)
    save_weights(model, tokenizer, folder)


def save_weights(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write configuration, weights and tokenizer; for a sharded model the first rank gathers and writes the weights."""
    set_special_ids(model.config, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    if not is_sharded(model):
        model.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE)
    elif weights := whole_weights(model):
        model.save_pretrained(folder, max_shard_size=MAX_SHARD_SIZE, state_dict=weights)
    save_tokenizer(tokenizer, folder)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer that has an end-of-sequence and a padding token; the files stay as they are.

    If no padding token is named, it becomes the unknown token, or else the end-of-sequence token. Both are harmless:
    masks come from lengths, never from ids, and the token's embedding learns (`vantage.models.padding_token`).

    Raises:
        UnsafeModel: a symlink, pickle or remote code in the folder.
        ValueError: no end-of-sequence token, or no tokenizer of the `tokenizers` library.
    """
    check_files(folder)
    with refusing(folder, "has no tokenizer that transformers reads (tokenizer.json, tokenizer_config.json)"):
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, padding_side="left"
        )
    return complete_tokenizer(tokenizer, name=str(folder))


def complete_tokenizer(tokenizer: PreTrainedTokenizerBase, *, name: str) -> PreTrainedTokenizerBase:
    """Add the padding token that a loaded tokenizer lacks, by the rule of `load_tokenizer`; `name` is for errors.

    Raises:
        ValueError: no end-of-sequence token, or no tokenizer of the `tokenizers` library.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{name}: the tokenizer has no tokenizer.json form; convert it with the tokenizers library"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{name}: the tokenizer names no eos_token; set it in tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token if tokenizer.unk_token is None else tokenizer.unk_token
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the tokenizer's files, without fields that loading has added."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    settings = read_json_object(path)
    for trace in ("is_local", "local_files_only", "name_or_path", "trust_remote_code"):
        settings.pop(trace, None)
    path.write_text(
        json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def neutral_generation_config(
    config: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase | None = None
) -> GenerationConfig:
    """Return a generation configuration that keeps the special ids of `config` and drops every sampling default.

    A tokenizer's end-of-sequence token is added to the ids that end a response, its padding token replaces the old one.
    """
    eos = _ids(getattr(config, "eos_token_id", None))
    pad = getattr(config, "pad_token_id", None)
    if tokenizer is not None:
        eos = [tokenizer.eos_token_id] + [i for i in eos if i != tokenizer.eos_token_id]
        pad = tokenizer.pad_token_id
    return GenerationConfig(
        bos_token_id=getattr(config, "bos_token_id", None),
        eos_token_id=eos[0] if len(eos) == 1 else eos or None,
        pad_token_id=pad,
    )


def set_special_ids(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the tokenizer's special tokens into a model's configuration, in place."""
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id


def check_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a tokenizer whose ids exceed the model's embedding table.

    Raises:
        ValueError: an id exceeds the table.
    """
    embeddings = model.get_input_embeddings().weight
    assert isinstance(embeddings, torch.Tensor), "a table"
    num_embeddings = embeddings.shape[0]
    if len(tokenizer) > num_embeddings:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model only {num_embeddings} embeddings; "
            "use the tokenizer that belongs to the model"
        )


def read_tensor(folder: Path, name: str) -> torch.Tensor | None:
    """Return one tensor of a folder's `model*.safetensors`; None if there is none of that name."""
    for path in sorted(folder.glob("model*.safetensors")):
        with safe_open(path, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 -- not a mapping
                tensor: torch.Tensor = tensors.get_tensor(name)
                return tensor
    return None


def _attention_implementation(config: PreTrainedConfig) -> str:
    # scaled_dot_product_attention cannot cap attention scores and would silently leave the cap out
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "eager"
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return "sdpa" if model_class._supports_sdpa else "eager"  # BLOOM does not support sdpa


def _ids(value: int | list[int] | None) -> list[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise UnsafeModel(
            f"eos_token_id={value!r} in config.json or generation_config.json is neither an id nor a list of ids; "
            "correct it, or fetch the model again"
        )
    return ids


def check_files(folder: Path) -> None:
    """Refuse content that no folder may have, whatever its purpose.

    Raises:
        UnsafeModel: there is no folder, or it has a symlink that leads outside, a pickle, damaged safetensors, or
            remote code.
    """
    if not folder.is_dir():
        raise UnsafeModel(f"{folder} is no folder")
    root = folder.resolve()
    for path in _files(folder):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise UnsafeModel(
                f"{path} is a symlink that leads outside its folder; copy the file in its place"
            )
        if not path.is_file():
            continue
        if path.suffix.lower() in PICKLE_SUFFIXES:
            raise UnsafeModel(
                f"{path} is a pickle by its suffix, which may run code when it is loaded; delete it, or convert "
                "the weights to safetensors"
            )
        if path.suffix == ".safetensors":
            read_header(path)
        elif _looks_pickled(path):
            raise UnsafeModel(f"{path} is a pickle or a zip archive by its first bytes; delete it")
        elif path.suffix == ".json" and _has_remote_code(parse_json(path)):
            raise UnsafeModel(
                f"{path} asks for code of its own (auto_map, or a kernel of the hub); use a model that transformers has built in"
            )


def _files(folder: Path) -> Iterator[Path]:
    """Yield everything below a folder; symlinked folders are listed, not entered."""
    for path in sorted(folder.iterdir()):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _files(path)


def _looks_pickled(path: Path) -> bool:
    with path.open("rb") as file:
        start = file.read(4)
    # pickle protocols 2 to 5, or the zip archive that torch.save writes around one
    return (start[:1] == b"\x80" and start[1:2] in (b"\2", b"\3", b"\4", b"\5")) or start == b"PK\x03\x04"


def _names_kernel(name: str, value: Any) -> bool:
    """Return whether a field such as ``attn_implementation`` names a repository, whose native code transformers would load."""
    values = value.values() if isinstance(value, dict) else [value]
    return name.endswith("_implementation") and any(isinstance(each, str) and "/" in each for each in values)


def _has_remote_code(value: Any) -> bool:
    if isinstance(value, dict):
        return (
            "auto_map" in value
            or "custom_pipelines" in value
            or any(_names_kernel(name, each) for name, each in value.items())
            or any(map(_has_remote_code, value.values()))
        )
    return isinstance(value, list) and any(map(_has_remote_code, value))
