"""Make small models and tokenizers that the tests of `models` share."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.models.byte_tokenizer import build_byte_tokenizer
from tests.support.invented import save_story_model
from vantage.models.builtin import build_builtin
from vantage.models.folders import load_policy, load_tokenizer

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model as from the Hub, whose tokenizer puts a space before every text."""
    return save_story_model(tmp_path_factory.mktemp("stories"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the built-in model's folder."""
    folder = tmp_path_factory.mktemp("tiny")
    build_builtin("tiny", folder, seed=1)
    return folder


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny)


@pytest.fixture
def tiny_policy(tiny: Path) -> PreTrainedModel:
    return load_policy(tiny)


@pytest.fixture
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that no other test changes."""
    return build_byte_tokenizer()
