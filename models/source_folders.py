"""Import a recipe's `model.source` as a checked, plain Hugging Face folder."""

import shutil
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AddedToken,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from vantage.models.builtin import build_builtin
from vantage.models.folder_check import UnsafeModel
from vantage.models.folders import (
    check_files,
    check_folder,
    complete_tokenizer,
    load_policy,
    load_tokenizer,
    parameter_shapes,
    refusing,
    save_policy,
)
from vantage.models.gguf_header import check_gguf_agreement, read_gguf_header
from vantage.models.merging import merge
from vantage.models.source_digest import (
    copy_adapter,
    copy_source,
    parse_source,
    source_digest,
)
from vantage.schemas.recipe.inputs import Model
from vantage.schemas.recipe.sources import Builtin, Gguf, Hub, LocalPath
from vantage.schemas.records.model_files import ModelFiles

__all__ = ["download", "import_model", "source_digest"]

HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")
CONTROL_TOKEN = 3
"""`tokenizer.ggml.token_type` of a special token."""


def import_model(
    source: str,
    output: Path,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    base: Path = Path(),
    planned: str | None = None,
    scratch: Path | None = None,
) -> None:
    """Write the model that `source` names to the folder `output`, weights in `dtype`.

    Args:
        seed: seed of a built-in model's random weights; other models ignore it.
        planned: expected `source_digest`; None: any.
        scratch: folder to which files are copied before they are read; None: the system's temporary folder.

    Raises:
        ValueError: see `vantage.models.source_digest.parse_source`; a GGUF tokenizer that cannot be repaired; the hub
            cannot be reached.
        SourceChanged, SourceTooLarge: see `vantage.models.source_digest.copy_source`.
        UnsafeModel: see `vantage.models.folders.check_folder`.
    """
    original = parse_source(source, base=base)
    if isinstance(original, LocalPath):
        check_folder(original.path)  # check all files there, even those that are not copied
    with tempfile.TemporaryDirectory(dir=scratch, prefix="source-") as folder:
        parsed = copy_source(source, Path(folder), planned=planned, base=base)
        if isinstance(parsed, Gguf):
            model, tokenizer = _load_gguf(parsed.path, dtype=dtype)
        else:
            if isinstance(parsed, Hub):
                download(parsed, Path(folder))
            elif isinstance(parsed, Builtin):
                build_builtin(parsed.name, Path(folder), seed=seed)
            tokenizer = load_tokenizer(Path(folder))  # a bad tokenizer is refused before the weights are read
            model = load_policy(Path(folder), dtype=dtype)
        try_out(model, source)
        save_policy(model, tokenizer, output)
    load_tokenizer(output)


def copy_model(folder: Path, output: Path) -> None:
    """Copy a policy that Vantage has published, byte for byte, so that its artifact has the same files as the published one.

    Raises:
        UnsafeModel: see `vantage.models.folders.check_folder`.
    """
    load_tokenizer(folder)
    try_out(load_policy(folder), str(folder))
    shutil.copytree(folder, output, dirs_exist_ok=True)


def import_with_adapter(
    model: Model, output: Path, *, seed: int, planned: str | None = None, scratch: Path | None = None
) -> None:
    """Write the model that results from a recipe's base model and adapter.

    Args:
        planned: expected `import_digest`; None: any.

    Raises:
        UnsafeModel: see `import_model`; or the adapter is not a plain one, or does not fit the model.
        ValueError, SourceChanged: see `import_model`.
    """
    assert model.adapter is not None, "asked for by name"
    check_files(model.adapter)  # check all files there, even those that are not copied
    with tempfile.TemporaryDirectory(dir=scratch, prefix="adapter-") as place:
        adapter, whole = Path(place) / "adapter", Path(place) / "model"
        adapter.mkdir()
        digest = source_digest(model.whole)
        copy_adapter(model, adapter, whole=digest, planned=planned)
        import_model(model.whole, whole, seed=seed, planned=digest, scratch=scratch)
        merge(ModelFiles(adapter, whole), output)


@torch.no_grad()
def try_out(model: PreTrainedModel, source: str) -> None:
    """Run a model on two tokens; this fails for nonsensical configurations or weights.

    Raises:
        UnsafeModel: the model fails, or its logits are no numbers.
    """
    with refusing(Path(source), "makes a model that cannot be run"):
        logits = model(torch.tensor([[0, 0]])).logits
    if not torch.isfinite(logits.float()).all():
        raise UnsafeModel(
            f"{source} gives logits that are no finite numbers: its weights hold NaN or infinities, or config.json has "
            "another number for a scale or an epsilon; fetch the model again"
        )


def download(source: Hub, scratch: Path) -> None:
    """Fetch a hub model whose revision is a commit."""

    from huggingface_hub import snapshot_download

    try:
        # Copy real files, since a cache's snapshot consists of symlinks that lead outside
        snapshot_download(
            source.repository, revision=source.revision, local_dir=scratch, allow_patterns=list(HUB_FILES)
        )
    except Exception as error:  # a network can fail in many ways
        raise ValueError(
            f"model.source='{source}' could not be downloaded "
            f"({type(error).__name__}: {error}); check the network, or use a folder"
        ) from error


def _load_gguf(path: Path, *, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Dequantise a GGUF file's weights, and set its tokenizer to the file's own metadata.

    Raises:
        UnsafeModel: the file is damaged, describes another model than it holds, or lacks some of its weights.
    """
    header = read_gguf_header(path)
    check_gguf_agreement(path, header)
    with refusing(path, "is no GGUF file that transformers reads"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True
        )
        tokenizer = repair_tokenizer(tokenizer, header.metadata, name=str(path))
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        wanted = sum(map(prod, parameter_shapes(config).values()))
        if wanted > header.num_weights:
            raise UnsafeModel(
                f"{path} describes a model of {wanted} numbers, and its tensors have {header.num_weights}; fetch it again"
            )
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path.parent,
            config=config,
            gguf_file=path.name,
            quantization_config=transformers.GgufConfig(gguf_file=path.name, dequantize=True),
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
        )
        model: PreTrainedModel = loaded[0]
        report: dict[str, set[str]] = loaded[1]
    if missing := sorted(report["missing_keys"]):  # they would stay random
        raise UnsafeModel(
            f"{path} lacks {len(missing)} parameters of its model, first {missing[:3]}; fetch it again"
        )
    for trace in (
        "_model_name_or_path",
        "unk_token_id",
    ):  # fields of the file's metadata, which no other configuration has
        if hasattr(model.config, trace):
            delattr(model.config, trace)
    return model, tokenizer


def repair_tokenizer(
    tokenizer: PreTrainedTokenizerBase, metadata: dict[str, Any], *, name: str
) -> PreTrainedTokenizerBase:
    """Set special tokens and chat template to the GGUF metadata; transformers may have got them wrong.

    Raises:
        ValueError: the vocabulary differs from the file's, no end-of-sequence token is named, or BOS is added
            against the file's rule.
    """
    tokens = metadata["tokenizer.ggml.tokens"]
    if tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) != tokens:
        raise ValueError(
            f"{name}: transformers read another vocabulary than the GGUF file has; use a folder instead"
        )
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    control = [token for token, kind in zip(tokens, kinds, strict=False) if kind == CONTROL_TOKEN]
    special = [AddedToken(token, special=True, normalized=False) for token in control]
    tokenizer.add_tokens(special, special_tokens=True)
    for role, key in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        if f"tokenizer.ggml.{key}" in metadata:
            setattr(tokenizer, role, tokens[metadata[f"tokenizer.ggml.{key}"]])
    if "tokenizer.ggml.eos_token_id" not in metadata:
        raise ValueError(f"{name}: the GGUF file names no end-of-sequence token; use a folder instead")
    if metadata.get("tokenizer.chat_template"):
        tokenizer.chat_template = metadata["tokenizer.chat_template"]
    adds_bos = tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    if adds_bos != metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        raise ValueError(
            f"{name}: the tokenizer {'adds' if adds_bos else 'lacks'} BOS against the GGUF file's rule"
        )
    return complete_tokenizer(tokenizer, name=name)
