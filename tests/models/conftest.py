"""Small models and tokenizers that the tests of `models` share."""

from pathlib import Path

import pytest
import torch
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
)
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from models.builtin import build_tiny
from models.folders import load_policy, load_tokenizer

torch.set_num_threads(1)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def shared() -> Path:
    """Data that is not part of the project."""
    folder = Path(__file__).parents[3] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("../shared is missing")
    return folder


@pytest.fixture(scope="session")
def stories(shared: Path) -> Path:
    """A real pretrained model of 260,000 parameters, whose tokenizer puts a space before every text."""
    return shared / "stories260k"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model's folder."""
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny(folder, seed=1)
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny)


@pytest.fixture
def tiny_policy(tiny: Path) -> PreTrainedModel:
    return load_policy(tiny)


@pytest.fixture
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE in the manner of GPT-2 with a few merges, ChatML's special tokens and its template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello"), ("Ċ", "Ċ"), ("Ġ", "Ġ")]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = special + alphabet + [a + b for a, b in merges]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
    )
