"""Sampling responses: left-padded batches with a key-value cache, rows leaving the batch as they end."""

import inspect
import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.kv_cache import make_room, needs_mask
from models.pass_counts import count_prompts, count_sampled
from models.row_lengths import on_device
from models.stop_strings import StopStrings
from schemas.recipe.pass_limits import UNLIMITED, PassLimits

SHRINK_AT = 0.9
"""The batch is cut to its unfinished rows when they are no more than this share of it (a cut copies the cache)."""
LATE = {"cpu": 0, "cuda": 1}
"""By how many tokens the number of unfinished rows is known late: a GPU that is asked at each token has nothing to do until
Python has started the next one. A response that has ended is computed for so many tokens more, which changes none."""


_Response = tuple[list[int], bool, list[float]]
"""Ids, whether it ended, and the log-probability of each id."""


@dataclass(frozen=True)
class Samples:
    """Responses to N prompts, in the order of the prompts."""

    responses: list[list[int]]
    """Ids of each response, with the end-of-sequence token or the tokens of the stop string that ended it."""
    ended: list[bool]
    """Whether an end-of-sequence token or a stop string was reached."""
    logprobs: list[list[float]]
    """Log-probability of each id, in nats, under softmax(logits / temperature)."""


@dataclass(frozen=True)
class InStep:
    """How ranks sample from a sharded model: as many passes on each, whatever it has to sample."""

    forward: Callable[..., Any]
    """The model, through a method that gathers the weights."""
    num_batches: int
    """Of the rank that has most."""
    all_ended: Callable[[bool], bool]
    """From whether this rank's responses have ended to whether those of all ranks have."""


def sample(
    model: PreTrainedModel,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    eos_token_ids: Collection[int],
    pad_token_id: int,
    seed: int,
    greedy: bool = False,
    stop_strings: StopStrings | None = None,
    limits: PassLimits = UNLIMITED,
    rows: slice = slice(None),
    in_step: InStep | None = None,
    on_token: Callable[[int, int], None] | None = None,
    on_batch: Callable[[list[int], list[list[int]]], None] | None = None,
) -> Samples:
    """Sample one response to each prompt at `rows` from softmax(logits / temperature), the whole vocabulary.

    A row's random numbers depend on `seed`, its place in `prompts` and `max_new_tokens` alone: the global random
    state, the limits and the other rows have no part in them. Repeat a prompt for several samples.

    Args:
        greedy: take the likeliest token instead.
        stop_strings: a response also ends with the token that completes one of these.
        limits: of one batch, see `batches`.
        rows: which of the prompts; their responses are the same whatever else is sampled here.
        in_step: of a sharded model, all of whose ranks make every pass together; None: a whole model.
        on_token: called before each token with the number of responses that have ended, and the token's number (from 1).
        on_batch: called when a batch has ended and another follows, with places in `prompts` and their responses' ids.

    Raises:
        ValueError: no prompts, an empty one, or a prompt and response that exceed the model's positions.
        FloatingPointError: the model's logits are not numbers.
    """
    _check(model, prompts, max_new_tokens=max_new_tokens, temperature=temperature)
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(len(prompts), max_new_tokens, generator=generator, dtype=torch.float64)
    wanted = range(len(prompts))[rows]
    of_batches = [
        [wanted[place] for place in batch]
        for batch in batches([len(prompts[i]) for i in wanted], limits, max_new_tokens=max_new_tokens)
    ]
    responses: dict[int, _Response] = {}
    was_training = model.training
    model.eval()
    try:
        started = 0
        for number in range(len(of_batches) if in_step is None else in_step.num_batches):
            # where none is left, the first prompt keeps step with the other ranks: sampled, and left out
            batch = of_batches[number] if number < len(of_batches) else [0]
            sampled = _sample_batch(
                model,
                [prompts[i] for i in batch],
                None if greedy else uniform[batch],
                in_step=in_step,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                endings=_Endings(eos_token_ids, stop_strings, len(batch), model.device),
                pad_token_id=pad_token_id,
                on_token=None if on_token is None else partial(_shift, on_token, started),
            )
            for place, response in zip(batch, sampled, strict=True):
                responses.setdefault(place, response)
            started += len(batch)
            if on_batch is not None and number + 1 < len(of_batches):
                on_batch(batch, [ids for ids, _, _ in sampled])
    finally:
        model.train(was_training)
    found = [responses[i] for i in wanted]
    if not all(math.isfinite(value) for *_, logprobs in found for value in logprobs):
        raise FloatingPointError("the model's logits are not finite; go back to weights that are")
    return Samples(
        responses=[ids for ids, _, _ in found],
        ended=[ended for _, ended, _ in found],
        logprobs=[logprobs for _, _, logprobs in found],
    )


def batches(lengths: Sequence[int], limits: PassLimits, *, max_new_tokens: int) -> list[list[int]]:
    """Which prompts are sampled side by side, by their places: the shortest first, as many as ``limits`` allow.

    Positions are those of the cache at its end: each row has the longest prompt and `max_new_tokens` more.

    Args:
        lengths: tokens of each prompt.
    """
    found: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        at_once = limits.rows_of(lengths[place] + max_new_tokens, len(lengths))
        if found and len(found[-1]) < at_once:
            found[-1].append(place)
        else:
            found.append([place])
    return found


class _Endings:
    """Which rows of a batch end, token by token."""

    def __init__(
        self, eos_token_ids: Collection[int], strings: StopStrings | None, count: int, device: torch.device
    ) -> None:
        self._eos = torch.tensor(sorted(eos_token_ids), dtype=torch.long, device=device)
        self._strings = strings
        self._said: list[list[int]] = [[] for _ in range(count)]

    def after(self, tokens: Tensor, rows: Tensor, active: Tensor) -> Tensor:
        """Which of the active rows end with these tokens; all (b,), ``rows`` as the batch counts them."""
        ends = torch.isin(tokens, self._eos)
        if self._strings is not None:
            ends = ends | torch.tensor(
                list(map(self._completes, tokens.tolist(), rows.tolist(), active.tolist())),
                device=ends.device,
            )
        return ends & active

    def _completes(self, token: int, row: int, is_active: bool) -> bool:
        assert self._strings is not None
        if is_active:
            self._said[row].append(token)
        return is_active and self._strings.complete(self._said[row])


class _Unfinished:
    """How many rows of a batch have not ended."""

    def __init__(self, count: int, *, late: int) -> None:
        """``late``: tokens; see `LATE`."""
        self._count, self._late = count, late
        self._coming: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()

    def after(self, active: Tensor) -> int:
        """After a token by which ``active`` (b,) rows have not ended: their number, or that of an earlier token."""
        event = torch.cuda.Event() if active.device.type == "cuda" else None
        self._coming.append((active.sum().to("cpu", non_blocking=True), event))
        if event is not None:
            event.record()
        if len(self._coming) > self._late:
            count, event = self._coming.popleft()
            if event is not None:
                event.synchronize()
            self._count = int(count)
        return self._count


@torch.no_grad()
def _sample_batch(
    model: PreTrainedModel,
    prompts: list[list[int]],
    uniform: Tensor | None,
    *,
    in_step: InStep | None,
    max_new_tokens: int,
    temperature: float,
    endings: _Endings,
    pad_token_id: int,
    on_token: Callable[[int, int], None] | None,
) -> list[_Response]:
    """The response to each prompt; `uniform` (B, max_new_tokens) in [0, 1), None: greedy."""
    device = model.device
    # a prompt is read once, whatever number of responses it has
    distinct = {prompt: place for place, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    prompt_of = torch.tensor([distinct[tuple(prompt)] for prompt in prompts], device=device)
    input_ids, attention_mask = _left_pad(list(distinct), pad_token_id, device)
    uniform = None if uniform is None else uniform.to(device)
    ids = torch.full((len(prompts), max_new_tokens), pad_token_id, device=device)
    logprobs = torch.zeros(len(prompts), max_new_tokens, device=device)
    lengths = torch.full((len(prompts),), max_new_tokens, device=device)
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    rows = torch.arange(len(prompts), device=device)  # of the batch that is still in the cache
    active = torch.ones_like(rows, dtype=torch.bool)
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters  # not where ALiBi does it
    cache, num_active = None, len(prompts)
    unfinished = _Unfinished(num_active, late=0 if in_step else LATE.get(device.type, 0))
    prompt_lengths = [len(prompt) for prompt in prompts]
    width, is_padded = max(prompt_lengths), True
    count_prompts(input_ids.numel(), sum(map(len, distinct)))
    for step in range(max_new_tokens):
        if on_token is not None:
            on_token(len(prompts) - num_active, step + 1)
        if step:
            count_sampled(len(rows), ended=len(rows) - num_active)
        positions = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        output = (model if in_step is None else in_step.forward)(
            input_ids=input_ids,
            attention_mask=attention_mask if is_padded else None,
            **({"position_ids": positions} if takes_positions else {}),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache, logits = output.past_key_values, output.logits[:, -1]
        if step == 0:
            make_room(cache, prompt_of, most=max_new_tokens - 1)
            is_padded = needs_mask(cache, prompt_lengths, width)
            logits, attention_mask = logits[prompt_of], attention_mask[prompt_of]
        distribution = (logits.float() / temperature).log_softmax(dim=-1)
        tokens = distribution.argmax(dim=-1) if uniform is None else _draw(distribution, uniform[rows, step])
        ids[rows, step] = torch.where(active, tokens, ids[rows, step])
        logprobs[rows, step] = distribution.gather(1, tokens[:, None])[:, 0]
        ends = endings.after(tokens, rows, active)
        lengths[rows] = torch.where(ends, step + 1, lengths[rows])
        ended[rows] |= ends
        active &= ~ends
        num_active = min(unfinished.after(active), len(rows))
        if num_active == 0 if in_step is None else in_step.all_ended(num_active == 0):
            break
        attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(rows), 1)], dim=1)
        if 0 < num_active <= SHRINK_AT * len(rows):
            kept = [place for place, is_active in enumerate(active.tolist()) if is_active]
            if not kept:
                break
            num_active, places = len(kept), on_device(kept, device)
            cache.batch_select_indices(places)
            prompt_lengths = [prompt_lengths[place] for place in kept]
            is_padded = needs_mask(cache, prompt_lengths, width)
            rows, tokens, attention_mask = rows[places], tokens[places], attention_mask[places]
            active = active[places]
        input_ids = tokens[:, None]
    return [
        (row[:length], is_ended, chosen[:length])
        for row, is_ended, chosen, length in zip(
            *(each.tolist() for each in (ids, ended, logprobs, lengths)), strict=True
        )
    ]


def _shift(on_token: Callable[[int, int], None], before: int, ended: int, token: int) -> None:
    on_token(before + ended, token)


def _draw(distribution: Tensor, uniform: Tensor) -> Tensor:
    """Tokens (B,) by inversion: the first whose cumulative probability exceeds the row's uniform number (B,).

    In float64, since a sum over a large vocabulary in float32 would lose the rare tokens.
    """
    cumulative = distribution.double().exp().cumsum(dim=-1)
    threshold = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, threshold, right=True)[:, 0].clamp(max=distribution.shape[-1] - 1)


def _left_pad(
    prompts: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    input_ids = torch.tensor(
        [[*[pad_token_id] * (width - len(prompt)), *prompt] for prompt in prompts], device=device
    )
    starts = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
    return input_ids, (torch.arange(width, device=device) >= starts[:, None]).long()


def _check(
    model: PreTrainedModel, prompts: list[list[int]], *, max_new_tokens: int, temperature: float
) -> None:
    if not prompts or not all(prompts):
        raise ValueError(
            "there is no prompt, or one without tokens; give every row at least one token (such as BOS)"
        )
    if not temperature > 0 or max_new_tokens < 1:
        raise ValueError(
            f"temperature={temperature} must be above 0 and max_new_tokens={max_new_tokens} at least 1"
        )
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(map(len, prompts))
    if positions is not None and longest + max_new_tokens > positions:
        raise ValueError(
            f"a prompt of {longest} tokens and max_new_tokens={max_new_tokens} exceed the model's {positions} "
            "positions; lower generation.max_prompt_tokens or generation.max_response_tokens"
        )
