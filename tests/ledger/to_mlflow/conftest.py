"""Make models as the store has them."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from vantage.models.builtin import build_builtin
from vantage.storage.sealed_folders import seal


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a policy as the store has it: a Hugging Face folder, and the store's manifest beside."""
    folder = tmp_path_factory.mktemp("models") / "policy"
    build_builtin("tiny", folder, seed=3)
    seal(folder)
    return folder


@pytest.fixture(scope="session")
def other_policy(policy: Path) -> Path:
    """Return the same model under another manifest."""
    folder = policy.with_name("other-policy")
    shutil.copytree(policy, folder, ignore=shutil.ignore_patterns("manifest.json"))
    (folder / "README.md").write_text("another")
    seal(folder)
    return folder


@pytest.fixture(scope="session")
def reward(policy: Path) -> Path:
    """Return a reward model of the same kind, with weights of its own."""
    folder = policy.with_name("reward")
    config = LlamaConfig.from_pretrained(policy)
    config.num_labels = 1
    torch.manual_seed(0)
    LlamaForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(policy).save_pretrained(folder)
    seal(folder)
    return folder
