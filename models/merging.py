"""Merge adapters (LoRA) into their base model, as one plain Hugging Face folder that any library loads."""

from pathlib import Path

from vantage.models.folders import load_tokenizer, save_policy
from vantage.models.heads import load_scalar, save_reward
from vantage.models.scalar_sidecar import SIDECAR
from vantage.models.stored_models import load_stored_policy
from vantage.schemas.records.model_files import ModelFiles


def merge(files: ModelFiles, output: Path) -> None:
    """Write the whole model, W + (alpha / rank)·B·A in place of each W; the same files give the same bytes.

    Raises:
        UnsafeModel: see `vantage.models.stored_models.load_stored_policy`.
        ValueError: the files hold a value model.
    """
    has_tokenizer = (
        files.folder / "tokenizer_config.json"
    ).is_file()  # adapters of others may have no tokenizer
    tokenizer = load_tokenizer(files.folder if has_tokenizer or files.base is None else files.base)
    if (files.folder / SIDECAR).is_file():
        reward = load_scalar(files, role="reward")
        save_reward(reward, tokenizer, output, score_shift=reward.score_shift)
    else:
        save_policy(load_stored_policy(files), tokenizer, output)
