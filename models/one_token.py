"""Draw one token for each row of a batch by tensor operations only: Python makes no decision and does not wait for the
device.

All tensors that this reads and writes are at fixed addresses (`Slots`, `vantage.models.static_cache`), so that the step
can be captured.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.pytorch_utils import Conv1D

from vantage.models.partial_responses import log_distribution, tokens_of

SDPA, GROUPED = "sdpa", "one_token_sdpa"
"""transformers' names of attention: its own, and `grouped_attention`."""
UNKNOWN = ("softcap", "s_aux", "sliding_window", "position_bias")
"""Options of attention that some layers use and `grouped_attention` lacks."""
NO_TOKEN = -1
"""Value in `Slots.spoken` for a row that had ended."""


@dataclass(frozen=True, eq=False)
class Slots:
    """The tensors of b rows that every step reads and writes."""

    tokens: Tensor
    """(b,): the last token of each row, which is not in the cache yet."""
    starts: Tensor
    """(b,): the column of each prompt's first token."""
    active: Tensor
    """(b,): rows that have not ended."""
    ended: Tensor
    """(b,)."""
    lengths: Tensor
    """(b,)."""
    spoken: Tensor
    """(b,): the newest token of each row that had not ended before it, else `NO_TOKEN`."""
    drawn: Tensor
    """(1,): number of tokens drawn for each row so far."""
    column: Tensor
    """(1,): the column of the cache that the next token is written to."""
    uniform: Tensor
    """(b, most): numbers in [0, 1) that draw the tokens; (b, 0): the likeliest tokens are taken."""
    ids: Tensor
    """(b, most)."""
    logprobs: Tensor
    """(b, most)."""

    def saved(self) -> dict[str, Tensor]:
        """Return copies of the tensors that a step changes, except those that the next step overwrites."""
        kept = ("tokens", "active", "ended", "lengths", "drawn", "column")
        return {each.name: getattr(self, each.name).clone() for each in fields(self) if each.name in kept}

    def restore(self, saved: Mapping[str, Tensor]) -> None:
        """Restore the tensors from `saved`."""
        for name, tensor in saved.items():
            getattr(self, name).copy_(tensor)


def draw_one_token(
    forward: Callable[..., Any],
    cache: Cache,
    slots: Slots,
    *,
    length: int,
    temperature: float,
    eos: Tensor,
    pad_token_id: int,
) -> None:
    """Draw the next token of each row, and write all changes into the slots and the cache of ``length`` columns."""
    columns = torch.arange(length, device=slots.tokens.device)
    visible = (columns >= slots.starts[:, None]) & (columns <= slots.column)
    output = forward(
        input_ids=slots.tokens[:, None],
        attention_mask=visible[:, None, None, :],
        position_ids=slots.column - slots.starts[:, None],
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    distribution = log_distribution(output.logits[:, -1], temperature)
    uniform = slots.uniform.index_select(1, slots.drawn)[:, 0] if slots.uniform.shape[1] else None
    tokens = tokens_of(distribution, uniform)
    chosen = distribution.gather(1, tokens[:, None])
    ends = (tokens[:, None] == eos).any(dim=1) & slots.active
    slots.ids.index_copy_(1, slots.drawn, tokens.masked_fill(~slots.active, pad_token_id)[:, None])
    slots.logprobs.index_copy_(1, slots.drawn, chosen)
    slots.spoken.copy_(tokens.masked_fill(~slots.active, NO_TOKEN))
    slots.lengths.copy_(torch.where(ends, slots.drawn + 1, slots.lengths))
    slots.ended.logical_or_(ends)
    slots.active.logical_and_(~ends)
    slots.tokens.copy_(tokens)
    slots.drawn.add_(1)
    slots.column.add_(1)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return attention of one token (B, heads, 1, D) over all columns that the mask (B, 1, 1, L) shows.

    Query heads that share keys are treated as several tokens, so that no key is copied. (transformers copies each key
    if there is a mask.)
    """
    asked = sorted(name for name in UNKNOWN if options.get(name) is not None)
    if asked or attention_mask is None or query.shape[2] != 1:
        raise ValueError(
            f"a step of one token has no attention with {', '.join(asked) or 'more tokens, or without a mask'}"
        )
    rows, heads, _, _ = query.shape
    groups = key.shape[1]
    found = scaled_dot_product_attention(
        query.reshape(rows, groups, heads // groups, -1), key, value, attn_mask=attention_mask, scale=scaling
    )
    return found.reshape(rows, 1, heads, -1), None


AttentionInterface.register(GROUPED, grouped_attention)


@contextmanager
def one_token_attention(configs: Sequence[PreTrainedConfig]) -> Iterator[None]:
    """Let layers with these configurations use `grouped_attention` inside the block, and `SDPA` after it."""
    try:
        for config in configs:
            config._attn_implementation = GROUPED
        yield
    finally:
        for config in configs:
            config._attn_implementation = SDPA


def attention_of(configs: Sequence[PreTrainedConfig]) -> str:
    """Return transformers' name of the attention in layers with these configurations; several names if they differ."""
    return ", ".join(sorted({str(config._attn_implementation) for config in configs}))


def configs_of(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """Return the configurations that the model's layers read."""
    found = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in found.values() if isinstance(config, PreTrainedConfig)]


class CastWeights:
    """A model whose matrices are cast once to autocast's type. Under autocast itself, they are cast again at each pass,
    and when another thread leaves autocast.

    Autocast keeps its casts in a cache that all threads share, and that each may clear. A captured step would go on
    reading the memory of such a cast.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Cast the present weights."""
        self._model = model
        device = model.device.type
        self._dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self._weights: dict[str, Tensor] = {}
        if self._dtype is not None:
            self._weights = {
                f"{name}.{part}": weight.detach().to(self._dtype)
                for name, module in model.named_modules()
                if isinstance(module, (nn.Linear, Conv1D))
                for part, weight in module.named_parameters(recurse=False)
                if weight.dtype == torch.float32
            }

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the type of the products; None: the type of the weights."""
        return self._dtype

    def __call__(self, **inputs: Any) -> Any:
        """Call the model, and return its output."""
        if not self._weights:
            return self._model(**inputs)
        return functional_call(self._model, self._weights, (), inputs, tie_weights=False)
