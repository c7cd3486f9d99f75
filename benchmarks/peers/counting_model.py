"""A random tiny Llama that counts, so that any sampler's responses have the lengths that were drawn beforehand.

Lengths must not depend on whose sampler draws, and nobody's sampler should be changed for it. So they are in the weights: each
token stands for a state from 0 to 127, in one of two variants. The states' embeddings are orthogonal, and the output head gives
state s + 1, in both variants alike, nearly all of the probability after state s, and the end of sequence after the last. A
prompt whose last token is of state 128 − L has a response of L tokens, of which each but the last is one of two at random. All
other weights are random.
"""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from benchmarks.peers.workloads import BOS, EOS, PAD, SPECIAL_TOKENS, STATES, VARIANTS, Shape, character
from vantage.models.builtin import builtin_config
from vantage.models.folders import load_policy, load_tokenizer
from vantage.models.heads import ScalarModel, save_reward
from vantage.models.model_config import MAX_BUILTIN_LENGTH
from vantage.models.output_head import trunk
from vantage.models.scalar_head import fresh_head

EMBEDDING_NORM = 12.0
"""Large beside what the layers add, so that the state can still be read at the end."""
SHARPNESS = 5.0
"""Norm of a row of the output head."""


def build_counting_model(folder: Path, *, seed: int, shape: Shape = "tiny") -> None:
    """Write the policy as a Hugging Face folder; tokens that do not count are never sampled."""
    config = SHAPES[shape]()
    config.tie_word_embeddings = False
    config.pad_token_id, config.bos_token_id, config.eos_token_id = PAD, BOS, EOS
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
        columns, _ = torch.linalg.qr(torch.randn(config.hidden_size, STATES))
        code = columns.T
        embeddings, head = model.model.embed_tokens.weight, model.lm_head.weight
        first = len(SPECIAL_TOKENS)
        last = first + VARIANTS * STATES
        embeddings[first:last] = EMBEDDING_NORM * code.repeat_interleave(VARIANTS, dim=0)
        embeddings[first:last] += 0.02 * EMBEDDING_NORM * torch.randn(embeddings[first:last].shape)
        head.zero_()
        head[first + VARIANTS : last] = SHARPNESS * code[:-1].repeat_interleave(VARIANTS, dim=0)
        head[EOS] = SHARPNESS * code[-1]
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(folder)
    _write_tokenizer(folder)


def tiny_shape() -> LlamaConfig:
    """Return the built-in model's shape, with another vocabulary."""
    config = builtin_config("tiny")
    config.vocab_size = len(SPECIAL_TOKENS) + VARIANTS * STATES
    return config


def smollm2_shape() -> LlamaConfig:
    """Return the shape of HuggingFaceTB/SmolLM2-135M, with an output head of its own."""
    return LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
    )


SHAPES: dict[Shape, Callable[[], LlamaConfig]] = {"tiny": tiny_shape, "smollm2": smollm2_shape}


def build_reward(policy: Path, folder: Path, *, seed: int) -> None:
    """Write a reward model of the policy's trunk with a random head."""
    folder.mkdir(parents=True, exist_ok=True)
    backbone = trunk(load_policy(policy))
    model = ScalarModel(backbone, fresh_head(backbone, seed=seed, bias=False))
    save_reward(model, load_tokenizer(policy), folder, score_shift=0.0)


def _write_tokenizer(folder: Path) -> None:
    words = [*SPECIAL_TOKENS, *(character(s, v) for s in range(STATES) for v in range(VARIANTS))]
    tokenizer = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=SPECIAL_TOKENS[-1])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    begin = SPECIAL_TOKENS[BOS]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=[(begin, BOS)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL_TOKENS, strict=True))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **names,
        "model_max_length": MAX_BUILTIN_LENGTH,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
