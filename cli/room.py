"""Estimate for ``vantage init`` how many tokens prompts and responses need, and how large a model is."""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any


def lengths_for(model: str, measured: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[int, int]:
    """Return limits in tokens within which nearly all prompts and responses fit, and for which the model has positions.

    Args:
        measured: the first rows of each dataset, in our columns.
    """
    vocabulary, positions = _shape_of(model)
    bytes_per_token = (
        3 if vocabulary is None or vocabulary > 5000 else 1
    )  # a small vocabulary has short tokens
    prompts = [row["prompt"] or "" for rows in measured for row in rows]
    others = ("response", "chosen", "rejected")
    responses = [row[name] or "" for rows in measured for row in rows for name in others if name in row]
    prompt = _room(prompts, bytes_per_token)
    response = max(_room(responses, bytes_per_token), 64) if responses else 256
    if positions is not None and prompt + response > positions:
        prompt = min(prompt, positions // 2)
        response = min(response, positions - prompt)
    return prompt, response


def _room(texts: list[str], bytes_per_token: int) -> int:
    """Return the tokens of the 99th percentile with room for a chat template, rounded up to a multiple of 32, from 32
    to 1,024."""
    lengths = sorted(len(text.encode()) for text in texts)
    # with few texts this is the longest
    longest = lengths[ceil(0.99 * (len(lengths) - 1))] // bytes_per_token + 16
    return min(1024, max(32, -(-longest // 32) * 32))


def _shape_of(model: str) -> tuple[int | None, int | None]:
    """Return the size of the vocabulary and the number of positions; None if the configuration lacks them."""
    from vantage.models.model_config import UnreadableConfig, read_config

    try:
        fields = read_config(model).fields
    except UnreadableConfig:
        return None, None
    positions = fields.get("max_position_embeddings") or fields.get("n_positions")
    return fields.get("vocab_size"), positions


def num_weights(model: str) -> int | None:
    """Return the number of a model's weights; None if its configuration is not enough to count them."""
    from vantage.models.model_config import UnreadableConfig, read_config

    try:
        return read_config(model).num_weights
    except UnreadableConfig:
        return None
