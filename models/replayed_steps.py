"""Sampling on a GPU by steps that are captured once and replayed, token after token; docs/decisions/0037.

A step is captured for few numbers of rows and few lengths of the cache. The first token of each capture is computed by the
plain loop too, for some rows: where the two differ by more than rounding, or something cannot be captured, the plain loop
goes on from there, and a line in the log says why.
"""

import logging
import os
from collections.abc import Callable, Mapping
from functools import cache as once
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from models.cuda_graphs import Capture, CudaGraphs, Step
from models.kv_cache import make_room
from models.late_counts import LATE, LateReads, Unfinished
from models.one_token import (
    NO_TOKEN,
    SDPA,
    CastWeights,
    Slots,
    attention_of,
    configs_of,
    draw_one_token,
    one_token_attention,
)
from models.packing import takes_positions
from models.partial_responses import Endings, PartialResponses, log_distribution
from models.pass_counts import count_captured, count_fallback, count_replayed, count_sampled
from models.row_lengths import on_device
from models.static_cache import Bucket, StaticCache, holds_all_tokens, length_for
from models.value_reads import NoValueReads

CAPTURES: Mapping[str, Callable[[], Capture]] = {"cuda": CudaGraphs}
"""Kind of device → what captures steps there."""
SWITCH = "VANTAGE_CUDA_GRAPHS"
"""Environment variable; 0: steps are not captured."""
FEWEST_TOKENS = 16
"""Responses that may have no more are sampled by the plain loop: a capture takes about as long as five of its tokens."""
FEWEST_ROWS = 8
"""Below, rows that have ended stay: a step of fewer takes as long, since it reads all weights."""
MOST_GRAPHS = 64
"""Of more, all are dropped."""
CHECKED_ROWS = 8
"""Whose first token is computed by the plain loop too."""
MAX_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Nats by which its log-probability may differ, on average, by rounding; as `tasks.rollout.sampler_check` has it."""

_log = logging.getLogger(__name__)


class _Unusable(Exception):
    """Steps cannot be captured, or do not compute what the plain loop does."""


def replayed_steps(
    model: PreTrainedModel,
    *,
    most: int,
    temperature: float,
    pad_token_id: int,
    is_beside_training: bool,
) -> "ReplayedSteps | None":
    """For all batches of one call of `sample`, whose weights stay as they are; None where the plain loop has to do.

    Args:
        most: tokens of a response.
        is_beside_training: another thread trains meanwhile.
    """
    capture = CAPTURES.get(model.device.type)
    if capture is None or os.environ.get(SWITCH) == "0" or most < FEWEST_TOKENS:
        return None
    reason = _unfit(model, is_beside_training=is_beside_training)
    if reason:
        _fall_back(reason)
        return None
    return ReplayedSteps(model, capture(), most=most, temperature=temperature, pad_token_id=pad_token_id)


def _unfit(model: PreTrainedModel, *, is_beside_training: bool) -> str | None:
    """Why this model's steps are not captured, as far as that can be seen before one is tried."""
    name = type(model).__name__
    if is_beside_training:
        return "responses are sampled beside the training, whose random numbers a capture would disturb"
    if not getattr(model, "_can_compile_fullgraph", False):
        return f"transformers says of {name} that its forward pass cannot be compiled as a whole"
    if not takes_positions(model):
        return f"{name} is not told the positions of its tokens"
    attention = attention_of(configs_of(model))
    return None if attention == SDPA else f"{name} attends by {attention}, and {SDPA} is needed"


def _fall_back(reason: str) -> None:
    count_fallback()
    _tell(reason)


@once
def _tell(reason: str) -> None:
    """Once, however often it happens."""
    _log.warning("sampling without CUDA graphs, which is slower: %s", reason)


class ReplayedSteps:
    """Draws the tokens of batches, after their first ones, by captured steps."""

    def __init__(
        self,
        model: PreTrainedModel,
        capture: Capture,
        *,
        most: int,
        temperature: float,
        pad_token_id: int,
    ) -> None:
        cast = CastWeights(model)
        self.forward: Callable[..., Any] = cast
        """The model, for prompts."""
        self.late = LATE.get(model.device.type, 0)
        self._dtype, self._configs = cast.dtype, configs_of(model)
        self._model, self._capture, self._most = model, capture, most
        self._temperature, self._pad_token_id = temperature, pad_token_id
        self._static: StaticCache | None = None
        self._slots: dict[int, Slots] = {}
        self._steps: dict[Bucket, Step] = {}
        self._gave_up = False

    def go_on(
        self,
        batch: PartialResponses,
        prompts: Cache,
        prompt_of: Tensor,
        endings: Endings,
        on_token: Callable[[int, int], None],
    ) -> bool:
        """Draw the tokens of a batch that has its first ones; whether any were drawn.

        Then ``batch.is_done`` says whether all were; where they were not, ``prompts`` has become the cache of the batch's rows.

        Args:
            prompts: the cache of distinct prompts.
            prompt_of: (b,): which of them each row has.
        """
        if self._gave_up:
            count_fallback()
            return False
        if not holds_all_tokens(prompts):
            self._give_up(f"{type(self._model).__name__} keeps keys and values of a window, or other states")
            return False
        run, reason = _Run(self, batch, endings), None
        try:
            run.begin(prompts, prompt_of)
            run.draw_all(on_token)
        except _Unusable as error:
            reason = str(error)
        if reason is not None:  # here, where the error holds no tensors any more
            self._give_up(reason)
            return run.hand_back(prompts)
        batch.is_done = True
        return True

    def _give_up(self, reason: str) -> None:
        self._gave_up, self.forward = True, self._model
        _fall_back(reason)

    def cache_for(self, prompts: Cache) -> StaticCache:
        """The cache, which all batches share."""
        if self._static is None:
            self._static = StaticCache(prompts, dtype=self._dtype)
        return self._static

    def make_way(self, bucket: Bucket) -> None:
        """Drop the captured steps whose addresses this bucket would not keep."""
        assert self._static is not None
        if self._steps and not self._static.fits(bucket):
            self.drop_steps()

    def drop_steps(self) -> None:
        """Forget all captured steps."""
        self._capture.wait()
        self._steps.clear()

    def slots(self, rows: int, endings: Endings, *, greedy: bool) -> Slots:
        """Those of so many rows: always the same."""
        if rows not in self._slots:
            assert self._static is not None
            self._slots[rows] = _empty_slots(
                rows, self._most, column=self._static.column, greedy=greedy, device=endings.eos.device
            )
        return self._slots[rows]

    def step(self, slots: Slots, endings: Endings) -> None:
        """Draw the next token of each row.

        Raises:
            _Unusable: nothing was drawn, and nothing is changed.
        """
        assert self._static is not None
        bucket = self._static.bucket
        known = self._steps.get(bucket)
        if known is not None:
            known()
        else:
            self._first_step(bucket, slots, endings)
        count_replayed()

    def _first_step(self, bucket: Bucket, slots: Slots, endings: Endings) -> None:
        """Capture the step, and draw its first token under the plain loop's eyes."""
        assert self._static is not None
        if len(self._steps) >= MOST_GRAPHS:
            self.drop_steps()
        cache, saved = self._static.layers(), slots.saved()

        def step() -> None:
            with one_token_attention(self._configs):
                draw_one_token(
                    self.forward,
                    cache,
                    slots,
                    length=bucket.length,
                    temperature=self._temperature,
                    eos=endings.eos,
                    pad_token_id=self._pad_token_id,
                )

        try:
            expected = self._plain(slots)
            with NoValueReads():
                step()
            slots.restore(saved)
            replay = self._capture(step, restore=partial(slots.restore, saved))
            replay()
            self._compare(expected, slots)
        except Exception as error:  # whatever it is that stands against it, the plain loop needs none of it
            slots.restore(saved)
            told = str(error).strip().partition("\n")[0]
            raise _Unusable(
                told if isinstance(error, _Unusable) else f"{type(error).__name__}: {told}"
            ) from error
        self._steps[bucket] = replay
        count_captured()

    def _plain(self, slots: Slots) -> Tensor:
        """Log-probabilities (n, V) of the next token of some rows, as the plain loop has them."""
        assert self._static is not None
        rows, tokens = min(CHECKED_ROWS, len(slots.tokens)), int(slots.column)
        starts = slots.starts[:rows, None]
        output = self.forward(
            input_ids=slots.tokens[:rows, None],
            attention_mask=(torch.arange(tokens + 1, device=starts.device) >= starts).long(),
            position_ids=tokens - starts,
            past_key_values=Cache(layers=list(self._static.plain_layers(tokens=tokens, rows=rows))),
            use_cache=True,
            logits_to_keep=1,
        )
        return log_distribution(output.logits[:, -1], self._temperature)

    def _compare(self, expected: Tensor, slots: Slots) -> None:
        """Refuse a first token whose log-probability is not what the plain loop found."""
        rows = len(expected)
        found = slots.logprobs[:rows].index_select(1, slots.drawn - 1)
        gap = float((expected.gather(1, slots.tokens[:rows, None]) - found).abs().mean())
        bound = MAX_GAP.get(self._dtype or self._model.dtype, MAX_GAP[torch.bfloat16])
        if not gap <= bound:  # NaN is refused too
            raise _Unusable(
                f"a captured step of {type(self._model).__name__} is {gap:.3g} nats off the plain one, above {bound:g}"
            )


class _Run:
    """One batch, from its second token on."""

    def __init__(self, steps: ReplayedSteps, batch: PartialResponses, endings: Endings) -> None:
        self._steps, self._batch, self._endings = steps, batch, endings
        self._widths = _widths(len(batch.rows))
        self._spoken = LateReads(late=steps.late)
        self._unfinished = Unfinished(len(batch.rows), late=steps.late)
        self._unread = 0
        """Tokens whose stop strings have not been looked for."""
        self._stopped: set[int] = set()
        """Responses that a stop string ended."""
        self._rows = list(range(len(batch.rows)))
        """The response of each row, on the host."""
        self._is_begun = False
        self._static: StaticCache
        self._slots: Slots

    def begin(self, prompts: Cache, prompt_of: Tensor) -> None:
        """Lay out the batch, and draw one token."""
        self._static = self._steps.cache_for(prompts)
        bucket = self._bucket(len(self._batch.rows))
        self._steps.make_way(bucket)
        self._static.load(prompts, prompt_of, bucket)
        self._take_slots()

    def draw_all(self, on_token: Callable[[int, int], None]) -> None:
        """Draw token after token until all responses have ended, or have all their tokens."""
        batch, count = self._batch, len(self._batch.ids)
        num_active = min(self._unfinished.after(self._slots.active), len(batch.rows))
        while num_active and batch.drawn < batch.most:
            self._make_space()
            on_token(count - num_active, batch.drawn + 1)
            self._steps.step(self._slots, self._endings)
            self._is_begun = True
            batch.drawn += 1
            count_sampled(len(batch.rows), ended=len(batch.rows) - num_active)
            self._look_for_strings()
            num_active = min(self._unfinished.after(self._slots.active), len(batch.rows))
            if num_active <= self._next_width():
                num_active = self._let_rows_leave()
        self._read_all()
        self._write_back()

    def hand_back(self, prompts: Cache) -> bool:
        """Leave the batch, and in ``prompts`` its cache, to the plain loop; False: it has both as they were."""
        self._steps.drop_steps()
        if self._is_begun:
            self._read_all()
            self._write_back()
            self._batch.active, self._batch.tokens = self._slots.active.clone(), self._slots.tokens.clone()
            tokens = self._batch.width + self._batch.drawn - 1
            prompts.layers[:] = self._static.plain_layers(tokens=tokens)
        self._static.release()
        if self._is_begun:
            rows = torch.arange(len(self._batch.rows), device=self._slots.tokens.device)
            make_room(prompts, rows, most=self._batch.most - self._batch.drawn)
        return self._is_begun

    def _bucket(self, rows: int) -> Bucket:
        """That holds one token more."""
        batch = self._batch
        return Bucket(rows, length_for(batch.width + batch.drawn, most=batch.width + batch.most))

    def _make_space(self) -> None:
        bucket = self._bucket(len(self._batch.rows))
        if bucket != self._static.bucket:
            self._move(torch.arange(bucket.rows, device=self._slots.tokens.device), bucket)

    def _move(self, places: Tensor, bucket: Bucket) -> None:
        self._steps.make_way(bucket)
        self._static.move(places, bucket, tokens=self._batch.width + self._batch.drawn - 1)

    def _take_slots(self) -> None:
        """Fill the slots of the batch's rows with what they have so far."""
        batch = self._batch
        greedy = batch.uniform is None
        slots = self._steps.slots(len(batch.rows), self._endings, greedy=greedy)
        if batch.uniform is not None:
            slots.uniform.copy_(batch.uniform[batch.rows])
        slots.tokens.copy_(batch.tokens)
        starts = [batch.width - length for length in batch.prompt_lengths]
        slots.starts.copy_(on_device(starts, slots.starts.device))
        slots.active.copy_(batch.active)
        for name in ("ids", "logprobs", "lengths", "ended"):
            getattr(slots, name).copy_(getattr(batch, name)[batch.rows])
        slots.drawn.fill_(batch.drawn)
        slots.column.fill_(batch.width + batch.drawn - 1)
        self._slots = slots

    def _write_back(self) -> None:
        """Give the batch what its rows have so far."""
        batch = self._batch
        for name in ("ids", "logprobs", "lengths", "ended"):
            getattr(batch, name)[batch.rows] = getattr(self._slots, name)

    def _next_width(self) -> int:
        """The next smaller number of rows that are computed at once, or -1."""
        rows = len(self._batch.rows)
        return next((width for width in self._widths if width < rows), -1)

    def _let_rows_leave(self) -> int:
        """Keep the rows that have not ended, and as many others as make up one of the few numbers; returns how many are active."""
        self._read_all()
        batch, is_active = self._batch, self._slots.active.tolist()
        kept = [place for place, each in enumerate(is_active) if each]
        width = min(width for width in self._widths if width >= len(kept))
        if not kept or width == len(batch.rows):
            return len(kept)
        ended = [place for place, each in enumerate(is_active) if not each]
        kept_places = sorted([*kept, *ended[: width - len(kept)]])
        self._write_back()
        places = on_device(kept_places, self._slots.tokens.device)
        batch.active, batch.tokens = self._slots.active.clone(), self._slots.tokens.clone()
        batch.keep(kept_places, places)
        self._rows = [self._rows[place] for place in kept_places]
        self._move(places, self._bucket(width))
        self._take_slots()
        self._unfinished = Unfinished(len(kept), late=self._steps.late)
        return len(kept)

    def _look_for_strings(self) -> None:
        """Read the newest tokens, or those of an earlier step, and end the rows whose stop string they complete."""
        if self._endings.has_strings:
            self._unread += 1
            self._end_by(self._spoken.after(self._slots.spoken))

    def _read_all(self) -> None:
        while self._unread:
            self._end_by(self._spoken.next())

    def _end_by(self, spoken: Tensor | None) -> None:
        """End the rows whose stop string is completed by these tokens (b,), the oldest that have not been read."""
        if spoken is None:
            return
        drawn, rows = self._batch.drawn - self._unread + 1, self._rows
        self._unread -= 1
        completes = [
            token != NO_TOKEN and row not in self._stopped and self._endings.completes(token, row)
            for token, row in zip(spoken.tolist(), rows, strict=True)
        ]
        if any(completes):
            self._stopped.update(row for row, each in zip(rows, completes, strict=True) if each)
            ends = on_device(torch.tensor(completes), self._slots.active.device)
            self._slots.lengths.masked_fill_(ends, drawn)
            self._slots.ended.logical_or_(ends)
            self._slots.active.logical_and_(~ends)


def _widths(rows: int) -> list[int]:
    """Numbers of rows that are computed at once, the largest first: so many, and one half after the other."""
    found = [rows]
    while found[-1] > FEWEST_ROWS:
        found.append(-(-found[-1] // 2))
    return found


def _empty_slots(rows: int, most: int, *, column: Tensor, greedy: bool, device: torch.device) -> Slots:
    def numbers(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.long, device=device)

    flags = torch.zeros(2, rows, dtype=torch.bool, device=device)
    return Slots(
        tokens=numbers(rows),
        starts=numbers(rows),
        active=flags[0],
        ended=flags[1],
        lengths=numbers(rows),
        spoken=numbers(rows),
        drawn=numbers(1),
        column=column,
        uniform=torch.zeros(rows, 0 if greedy else most, dtype=torch.float64, device=device),
        ids=numbers(rows, most),
        logprobs=torch.zeros(rows, most, device=device),
    )
