"""Sample responses in left-padded batches with a key-value cache; rows leave the batch when they end."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from vantage.models.gathered_weights import kept_gathered
from vantage.models.kv_cache import keep_rows, make_room, needs_mask, position_bytes, without_gaps
from vantage.models.late_counts import LATE, Unfinished
from vantage.models.packing import takes_positions
from vantage.models.partial_responses import Endings, PartialResponses, Response
from vantage.models.pass_counts import count_prompts, count_sampled
from vantage.models.replayed_steps import ReplayedSteps, replayed_steps
from vantage.models.row_lengths import on_device
from vantage.models.stop_strings import StopStrings
from vantage.schemas.recipe.pass_limits import UNLIMITED, PassLimits

SHRINK_AT = 0.95
"""Share of unfinished rows at which the batch is cut to these rows."""


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
    """Settings for ranks that sample from a sharded model: every rank makes the same number of passes, whatever it
    samples."""

    forward: Callable[..., Any]
    """The model, through a method that gathers the weights."""
    num_batches: int
    """Number of batches of the rank with the most batches."""
    all_ended: Callable[[bool], bool]
    """Function from whether this rank's responses have ended to whether those of all ranks have ended."""
    reserved: int = 0
    """Bytes of this rank's memory that other parts will allocate later."""


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
    is_beside_another: bool = False,
    on_token: Callable[[int, int], None] | None = None,
    on_batch: Callable[[list[int], list[list[int]]], None] | None = None,
) -> Samples:
    """Sample one response to each prompt at `rows` from softmax(logits / temperature), the whole vocabulary.

    The random numbers of a row depend only on `seed`, its place in `prompts` and `max_new_tokens`. The global random
    state, the limits and the other rows do not change them. Repeat a prompt for several samples.

    Args:
        greedy: whether to take the likeliest token instead.
        stop_strings: a response also ends with the token that completes one of these.
        limits: bounds of one batch, see `batches`.
        rows: places of the prompts to sample; their responses do not depend on the other prompts in the call.
        in_step: settings for a sharded model, whose ranks make every pass together; None: a whole model.
        is_beside_another: whether another thread uses the device meanwhile.
        on_token: called before each token with the number of responses that have ended, and the token's number (from 1).
        on_batch: called when a batch has ended and another follows, with places in `prompts` and their responses' ids.

    Raises:
        ValueError: no prompts, an empty one, or a prompt and response that exceed the model's positions.
        FloatingPointError: the model's logits are not numbers.
    """
    check_lengths(model, prompts, max_new_tokens=max_new_tokens, temperature=temperature)
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(len(prompts), max_new_tokens, generator=generator, dtype=torch.float64)
    wanted = range(len(prompts))[rows]
    of_batches = [
        [wanted[place] for place in batch]
        for batch in batches([len(prompts[i]) for i in wanted], limits, max_new_tokens=max_new_tokens)
    ]
    drawing = _Drawing(max_new_tokens, temperature, eos_token_ids, pad_token_id, stop_strings, in_step)
    responses: dict[int, Response] = {}
    started = 0
    with (
        _without_dropout(model),
        _replayed(model, drawing, is_beside_another=is_beside_another) as replayed,
        _gathered_once(model, drawing, [[len(prompts[i]) for i in batch] for batch in of_batches]),
    ):
        for number in range(len(of_batches) if in_step is None else in_step.num_batches):
            # A rank without further prompts samples the first one again, to make as many passes; the response is
            # dropped
            batch = of_batches[number] if number < len(of_batches) else [0]
            sampled = _sample_batch(
                model,
                [prompts[i] for i in batch],
                None if greedy else uniform[batch],
                drawing,
                on_token=_nothing if on_token is None else partial(_shift, on_token, started),
                replayed=replayed,
            )
            for place, response in zip(batch, sampled, strict=True):
                responses.setdefault(place, response)
            started += len(batch)
            if on_batch is not None and number + 1 < len(of_batches):
                on_batch(batch, [ids for ids, _, _ in sampled])
    return samples_of([responses[i] for i in wanted])


@dataclass(frozen=True)
class _Drawing:
    """Settings of drawing tokens and ending responses, the same in all batches."""

    max_new_tokens: int
    temperature: float
    eos_token_ids: Collection[int]
    pad_token_id: int
    stop_strings: StopStrings | None
    in_step: InStep | None


@contextmanager
def _without_dropout(model: PreTrainedModel) -> Iterator[None]:
    """Turn dropout off inside the block; a model that was training trains again after it."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def _replayed(
    model: PreTrainedModel, drawing: _Drawing, *, is_beside_another: bool
) -> Iterator[ReplayedSteps | None]:
    """Yield the object that captures the model's steps as graphs and replays them; None if that is not possible."""
    replayed = None
    if drawing.in_step is None:
        replayed = replayed_steps(
            model,
            most=drawing.max_new_tokens,
            temperature=drawing.temperature,
            pad_token_id=drawing.pad_token_id,
            is_beside_another=is_beside_another,
        )
    try:
        yield replayed
    finally:
        if replayed is not None:
            replayed.close()


@contextmanager
def _gathered_once(
    model: PreTrainedModel, drawing: _Drawing, lengths: Sequence[Sequence[int]]
) -> Iterator[None]:
    """Keep sharded weights gathered inside the block if memory suffices beside the keys and values of the largest batch.

    Args:
        lengths: tokens of the prompts of each batch.
    """
    if drawing.in_step is None:
        yield
        return
    positions = (len(batch) * (max(batch) + drawing.max_new_tokens) for batch in lengths)
    beside = max(positions, default=0) * position_bytes(model) + drawing.in_step.reserved
    with kept_gathered(model, beside=beside):
        yield


def samples_of(found: list[Response]) -> Samples:
    """Return the responses as one value.

    Raises:
        FloatingPointError: a log-probability is not finite.
    """
    if not all(math.isfinite(value) for *_, logprobs in found for value in logprobs):
        raise FloatingPointError("the model's logits are not finite; go back to weights that are")
    return Samples(
        responses=[ids for ids, _, _ in found],
        ended=[ended for _, ended, _ in found],
        logprobs=[logprobs for _, _, logprobs in found],
    )


def batches(lengths: Sequence[int], limits: PassLimits, *, max_new_tokens: int) -> list[list[int]]:
    """Return which prompts are sampled together, by their places: the shortest first, as many as ``limits`` allow.

    A row's positions are those of the cache at its end: the longest prompt and `max_new_tokens` more.

    Args:
        lengths: number of tokens of each prompt.
    """
    found: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lengths.__getitem__):
        at_once = limits.rows_of(lengths[place] + max_new_tokens, len(lengths))
        if found and len(found[-1]) < at_once:
            found[-1].append(place)
        else:
            found.append([place])
    return found


@torch.no_grad()
def _sample_batch(
    model: PreTrainedModel,
    prompts: list[list[int]],
    uniform: Tensor | None,
    drawing: _Drawing,
    *,
    on_token: Callable[[int, int], None],
    replayed: ReplayedSteps | None,
) -> list[Response]:
    """Return the response to each prompt; `uniform` (B, max_new_tokens) in [0, 1), None: greedy."""
    device, most, in_step = model.device, drawing.max_new_tokens, drawing.in_step
    batch = PartialResponses.of(prompts, uniform, most=most, pad_token_id=drawing.pad_token_id, device=device)
    endings = Endings(drawing.eos_token_ids, drawing.stop_strings, len(batch.ids), device)
    forward = (model if replayed is None else replayed.forward) if in_step is None else in_step.forward
    # A prompt is read once, however many responses it has
    distinct = {prompt: place for place, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
    prompt_of = torch.tensor([distinct[tuple(prompt)] for prompt in prompts], device=device)
    input_ids, attention_mask = _left_pad(list(distinct), drawing.pad_token_id, device)
    count_prompts(input_ids.numel(), sum(map(len, distinct)))
    on_token(0, 1)
    output = forward(
        input_ids=input_ids,
        attention_mask=attention_mask,
        **_positions(takes_positions(model), attention_mask, input_ids.shape[1]),
        past_key_values=None,
        use_cache=True,
        logits_to_keep=1,
    )
    cache = output.past_key_values
    batch.draw(output.logits[:, -1][prompt_of], temperature=drawing.temperature, endings=endings)
    del output
    taken = replayed is not None and replayed.go_on(batch, cache, prompt_of, endings, on_token)
    if not taken:
        make_room(cache, prompt_of, most=most - 1)
    if not taken or not batch.is_done:
        _go_on(model, batch, cache, drawing, endings=endings, on_token=on_token)
    return batch.responses()


def _go_on(
    model: PreTrainedModel,
    batch: PartialResponses,
    cache: Cache,
    drawing: _Drawing,
    *,
    endings: Endings,
    on_token: Callable[[int, int], None],
) -> None:
    """Draw token after token until all responses have ended or reached their limit."""
    device, count, in_step = model.device, len(batch.ids), drawing.in_step
    starts = on_device([batch.width - length for length in batch.prompt_lengths], device)
    columns = torch.arange(batch.width + batch.drawn - 1, device=device)
    attention_mask = (columns >= starts[:, None]).long()
    is_told = takes_positions(model)
    unfinished = Unfinished(len(batch.rows), late=0 if in_step else LATE.get(device.type, 0))
    is_padded = needs_mask(cache, batch.prompt_lengths, batch.width)
    while True:
        num_active = min(unfinished.after(batch.active), len(batch.rows))
        if num_active == 0 if in_step is None else in_step.all_ended(num_active == 0):
            return
        if batch.drawn == batch.most:
            return
        attention_mask = torch.cat([attention_mask, attention_mask.new_ones(len(batch.rows), 1)], dim=1)
        if 0 < num_active <= SHRINK_AT * len(batch.rows):
            kept = without_gaps(batch.active.tolist())
            if not kept:
                return
            num_active, places = len(kept), keep_rows(cache, kept, device)
            batch.keep(kept, places)
            attention_mask = attention_mask[places]
            is_padded = needs_mask(cache, batch.prompt_lengths, batch.width)
        on_token(count - num_active, batch.drawn + 1)
        count_sampled(len(batch.rows), ended=len(batch.rows) - num_active)
        output = (model if in_step is None else in_step.forward)(
            input_ids=batch.tokens[:, None],
            attention_mask=attention_mask if is_padded else None,
            **_positions(is_told, attention_mask, 1),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.past_key_values
        batch.draw(output.logits[:, -1], temperature=drawing.temperature, endings=endings)


def _positions(is_told: bool, attention_mask: Tensor, width: int) -> dict[str, Tensor]:
    """Return the positions of the last ``width`` tokens as an argument; empty for a model without positions (ALiBi)."""
    return {"position_ids": (attention_mask.cumsum(dim=1) - 1).clamp(min=0)[:, -width:]} if is_told else {}


def _nothing(ended: int, token: int) -> None:
    """Report nothing."""


def _shift(on_token: Callable[[int, int], None], before: int, ended: int, token: int) -> None:
    on_token(before + ended, token)


def _left_pad(
    prompts: Sequence[Sequence[int]], pad_token_id: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    input_ids = torch.tensor(
        [[*[pad_token_id] * (width - len(prompt)), *prompt] for prompt in prompts], device=device
    )
    starts = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
    return input_ids, (torch.arange(width, device=device) >= starts[:, None]).long()


def check_lengths(
    model: PreTrainedModel, prompts: list[list[int]], *, max_new_tokens: int, temperature: float
) -> None:
    """Refuse prompts that the model cannot respond to, see ``sample``.

    Raises:
        ValueError: no prompts, an empty one, or a prompt and response that exceed the model's positions.
    """
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
