"""Small models and tokenizers that the tests of `models` share."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.models.byte_tokenizer import build_byte_tokenizer
from vantage.models.builtin import build_builtin
from vantage.models.folders import load_policy, load_tokenizer

torch.set_num_threads(1)


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
    """A tokenizer that no other test changes."""
    return build_byte_tokenizer()
