"""Sample on a GPU by steps that are captured once and replayed for each token; docs/decisions/0037.

A step is captured for few numbers of rows and few lengths of the cache. The plain loop also computes the first token of
each capture, for some rows: if the two differ by more than rounding, or a step cannot be captured, the plain loop goes
on from there, and the log has the reason.
"""

import logging
import os
from collections.abc import Callable, Mapping
from functools import cache as once
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from vantage.models.captured_steps import CapturedSteps, Unusable
from vantage.models.cuda_graphs import Capture, CudaGraphs
from vantage.models.kv_cache import make_room
from vantage.models.late_counts import LateReads, Unfinished
from vantage.models.one_token import NO_TOKEN, SDPA, Slots, attention_of, configs_of
from vantage.models.packing import takes_positions
from vantage.models.partial_responses import Endings, PartialResponses
from vantage.models.pass_counts import count_fallback, count_sampled
from vantage.models.row_lengths import on_device
from vantage.models.static_cache import Bucket, StaticCache, holds_all_tokens, length_for

CAPTURES: Mapping[str, Callable[[], Capture]] = {"cuda": CudaGraphs}
"""Kind of device → class that captures its steps."""
SWITCH = "VANTAGE_CUDA_GRAPHS"
"""Environment variable; 0: steps are not captured."""
FEWEST_TOKENS = 16
"""Length up to which responses are sampled by the plain loop: a capture takes about as long as five tokens of that loop."""
FEWEST_ROWS = 8
"""Number of rows below which ended rows stay: a step of fewer rows takes as long, since it reads all weights."""

_log = logging.getLogger(__name__)


def replayed_steps(
    model: PreTrainedModel,
    *,
    most: int,
    temperature: float,
    pad_token_id: int,
    is_beside_another: bool,
) -> "ReplayedSteps | None":
    """Return replayed steps for all batches of one call of `sample`, during which the weights do not change; None: the
    plain loop is needed.

    Args:
        most: most tokens of a response.
        is_beside_another: whether another thread uses the device meanwhile.
    """
    capture = CAPTURES.get(model.device.type)
    if capture is None or os.environ.get(SWITCH) == "0" or most < FEWEST_TOKENS:
        return None
    reason = _unfit(model, is_beside_another=is_beside_another)
    if reason:
        _fall_back(reason)
        return None
    steps = CapturedSteps(model, capture(), most=most, temperature=temperature, pad_token_id=pad_token_id)
    return ReplayedSteps(steps, type(model).__name__)


def _unfit(model: PreTrainedModel, *, is_beside_another: bool) -> str | None:
    """Return the reason why this model's steps are not captured, if it is known before a first try."""
    name = type(model).__name__
    if is_beside_another:
        return "another thread uses the GPU meanwhile (rollout.ahead), and a capture would disturb it"
    if not getattr(model, "_can_compile_fullgraph", False):
        return f"transformers marks {name} as one whose forward pass cannot be compiled as a whole"
    if not takes_positions(model):
        return f"{name} does not take the positions of its tokens"
    attention = attention_of(configs_of(model))
    return None if attention == SDPA else f"{name} attends by {attention}, and {SDPA} is needed"


def _fall_back(reason: str) -> None:
    count_fallback()
    _tell(reason)


@once
def _tell(reason: str) -> None:
    """Warn once, however often it happens."""
    _log.warning("sampling without CUDA graphs, which is slower: %s", reason)


class ReplayedSteps:
    """Draws all but the first tokens of batches by captured steps."""

    def __init__(self, steps: CapturedSteps, model_name: str) -> None:
        self._steps, self._model_name = steps, model_name
        self._gave_up = False

    @property
    def forward(self) -> Callable[..., Any]:
        """The model, for prompts."""
        return self._steps.forward

    def close(self) -> None:
        """Free the memory on the device."""
        self._steps.close()

    def go_on(
        self,
        batch: PartialResponses,
        prompts: Cache,
        prompt_of: Tensor,
        endings: Endings,
        on_token: Callable[[int, int], None],
    ) -> bool:
        """Draw the rest of a batch that has its first tokens; returns whether any were drawn.

        Then ``batch.is_done`` shows whether all tokens were drawn; if not, ``prompts`` has become the cache of the
        batch's rows.

        Args:
            prompts: the cache of distinct prompts.
            prompt_of: (b,): number of each row's prompt among them.
        """
        if self._gave_up:
            count_fallback()
            return False
        if not holds_all_tokens(prompts):
            self._give_up(f"{self._model_name} keeps keys and values of a window, or other states")
            return False
        run, reason = _Run(self._steps, batch, endings), None
        try:
            run.begin(prompts, prompt_of)
            run.draw_all(on_token)
        except Unusable as error:
            reason = str(error)
        if reason is not None:  # after the block, since the error kept tensors alive
            has_drawn = run.hand_back(prompts)
            self._give_up(reason)
            return has_drawn
        batch.is_done = True
        return True

    def _give_up(self, reason: str) -> None:
        self._gave_up = True
        self._steps.close()
        _fall_back(reason)


class _Run:
    """Samples one batch, from its second token on."""

    def __init__(self, steps: CapturedSteps, batch: PartialResponses, endings: Endings) -> None:
        self._steps, self._batch, self._endings = steps, batch, endings
        self._widths = _widths(len(batch.rows))
        self._spoken = LateReads(late=steps.late)
        self._unfinished = Unfinished(len(batch.rows), late=steps.late)
        self._unread = 0
        """Number of tokens that have not been searched for stop strings."""
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
        """Leave the batch to the plain loop, with its cache in ``prompts``; returns False if both are unchanged."""
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
        """Return the bucket for one more token."""
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
        """Fill the slots with the present state of the batch's rows."""
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
        """Copy the present state of the rows back to the batch."""
        batch = self._batch
        for name in ("ids", "logprobs", "lengths", "ended"):
            getattr(batch, name)[batch.rows] = getattr(self._slots, name)

    def _next_width(self) -> int:
        """Return the next smaller number of rows that can be computed at once; -1: there is none."""
        rows = len(self._batch.rows)
        return next((width for width in self._widths if width < rows), -1)

    def _let_rows_leave(self) -> int:
        """Keep the unfinished rows, and so many others that one of the few numbers of rows results; returns how many
        are active."""
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
        """Read the newest tokens, or those of an earlier step, and end the rows in which they complete a stop
        string."""
        if self._endings.has_strings:
            self._unread += 1
            self._end_by(self._spoken.after(self._slots.spoken))

    def _read_all(self) -> None:
        while self._unread:
            self._end_by(self._spoken.next())

    def _end_by(self, spoken: Tensor | None) -> None:
        """End the rows in which these tokens (b,) complete a stop string; they are the oldest tokens that were not
        searched yet."""
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
    """Return the numbers of rows that can be computed at once, the largest first; each is half of the one before."""
    found = [rows]
    while found[-1] > FEWEST_ROWS:
        found.append(-(-found[-1] // 2))
    return found
