"""The built-in tiny model: a Llama of about a million random weights with a character tokenizer.

It exists so that a whole pipeline can be run, from nothing, on two CPU cores. Its tokenizer knows every printable
ASCII character and the newline, so that a reader can also put his own plain text through it.
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

PAD, BOS, EOS, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"
CHARACTERS = "\n" + " " + string.digits + string.ascii_letters + string.punctuation
VOCABULARY = (PAD, BOS, EOS, UNKNOWN, *CHARACTERS)
MAX_LENGTH = 512

HIDDEN_SIZE = 128
INTERMEDIATE_SIZE = 256
NUM_LAYERS = 4
NUM_HEADS = 4
INITIALIZER_RANGE = 0.08
"""Standard deviation of the random weights: about 1/sqrt(HIDDEN_SIZE). With the usual 0.02, which suits models ten
times as wide, training spends its first hundreds of steps on growing the weights."""


def build_tiny(folder: Path, *, seed: int) -> None:
    """Write the model as a Hugging Face folder: the same bytes for the same seed and library versions.

    The global random state of torch is left as it was. The folder is made if need be.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder, safe_serialization=True)
    write_tokenizer(folder)


def tiny_config() -> LlamaConfig:
    """Shape of the tiny model; embeddings are tied, since a hundred characters need no second table."""
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_HEADS,
        max_position_embeddings=MAX_LENGTH,
        initializer_range=INITIALIZER_RANGE,
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY.index(PAD),
        bos_token_id=VOCABULARY.index(BOS),
        eos_token_id=VOCABULARY.index(EOS),
    )


def write_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`: one token a character, `<s>` before every text."""
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
        "model_max_length": MAX_LENGTH,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
