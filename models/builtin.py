"""The built-in models: Llamas of random weights with a character tokenizer. ``tiny`` has 0.67 million weights, ``nano``
0.47 million.

With them, a whole pipeline runs from scratch on two CPU cores. Their tokenizer knows every printable ASCII character
and the newline, so that users can also pass their own plain text.
"""

import json
import string
from pathlib import Path

import torch
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
)
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from vantage.models.model_config import BUILTIN_CONFIGS, MAX_BUILTIN_LENGTH

PAD, BOS, EOS, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"
CHARACTERS = "\n" + " " + string.digits + string.ascii_letters + string.punctuation
VOCABULARY = (PAD, BOS, EOS, UNKNOWN, *CHARACTERS)
INITIALIZER_RANGE = 0.08
"""Standard deviation of the random weights: about 1/sqrt(width). With the usual 0.02, which suits models ten
times as wide, training needs its first hundreds of steps to enlarge the weights."""


def build_builtin(name: str, folder: Path, *, seed: int) -> None:
    """Write a model, ``tiny`` or ``nano``, as a Hugging Face folder: the same bytes for the same seed and library versions.

    The global random state of torch does not change. The folder is created if it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = builtin_config(name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder, safe_serialization=True)
    write_tokenizer(folder)


def builtin_config(name: str) -> LlamaConfig:
    """Return the shape of a built-in model; embeddings are tied, since a hundred characters need no second table."""
    shape = {field: value for field, value in BUILTIN_CONFIGS[name].items() if field != "model_type"}
    return LlamaConfig(
        **shape,
        initializer_range=INITIALIZER_RANGE,
        pad_token_id=VOCABULARY.index(PAD),
        bos_token_id=VOCABULARY.index(BOS),
        eos_token_id=VOCABULARY.index(EOS),
    )


def write_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`: one token per character, `<s>` before every text."""
    tokenizer = Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNKNOWN)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, BOS, EOS, UNKNOWN])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, VOCABULARY.index(BOS))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "model_max_length": MAX_BUILTIN_LENGTH,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
