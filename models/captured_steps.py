"""The captured steps of one call of `sample`: one for each number of rows and length of the cache; docs/decisions/0037."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from vantage.models.cuda_graphs import Capture, Step
from vantage.models.late_counts import LATE
from vantage.models.one_token import CastWeights, Slots, configs_of, draw_one_token, one_token_attention
from vantage.models.partial_responses import Endings, log_distribution
from vantage.models.pass_counts import count_captured, count_replayed
from vantage.models.static_cache import Bucket, StaticCache
from vantage.models.value_reads import NoValueReads

MOST_GRAPHS = 64
"""Most captured steps that are kept; when there are more, all of them are dropped."""
CHECKED_ROWS = 8
"""Number of rows whose first token is also computed by the plain loop, for each capture."""
MAX_GAP = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Mean difference in nats between the two log-probabilities that rounding may cause, as in
`vantage.tasks.rollout.sampler_check`."""


class Unusable(Exception):
    """Steps cannot be captured, or their results differ from the plain loop's."""


class CapturedSteps:
    """Captures steps when they are needed, with the tensors that they read and write."""

    def __init__(
        self,
        model: PreTrainedModel,
        capture: Capture,
        *,
        most: int,
        temperature: float,
        pad_token_id: int,
    ) -> None:
        """Prepare to capture steps. ``most``: most tokens of a response."""
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

    def cache_for(self, prompts: Cache) -> StaticCache:
        """Return the cache that all batches share."""
        if self._static is None:
            self._static = StaticCache(prompts, dtype=self._dtype)
        return self._static

    def make_way(self, bucket: Bucket) -> None:
        """Drop the captured steps if this bucket would change their addresses."""
        assert self._static is not None
        if self._steps and not self._static.fits(bucket):
            self.drop_steps()

    def close(self) -> None:
        """Free the memory on the device."""
        self.drop_steps()
        self._slots.clear()
        self._static = None
        self.forward = self._model

    def drop_steps(self) -> None:
        """Forget all captured steps."""
        self._capture.end_all()
        self._steps.clear()

    def slots(self, rows: int, endings: Endings, *, greedy: bool) -> Slots:
        """Return the slots for this number of rows; the same number always gets the same slots."""
        if rows not in self._slots:
            assert self._static is not None
            self._slots[rows] = _empty_slots(
                rows, self._most, column=self._static.column, greedy=greedy, device=endings.eos.device
            )
        return self._slots[rows]

    def step(self, slots: Slots, endings: Endings) -> None:
        """Draw the next token of each row.

        Raises:
            Unusable: the step cannot be used; nothing was drawn or changed.
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
        """Capture the step, draw its first token, and compare it with the plain loop."""
        assert self._static is not None
        if len(self._steps) >= MOST_GRAPHS:
            self.drop_steps()
        saved = slots.saved()
        step = partial(
            _attending,
            self._configs,
            partial(
                draw_one_token,
                self.forward,
                self._static.layers(),
                slots,
                length=bucket.length,
                temperature=self._temperature,
                eos=endings.eos,
                pad_token_id=self._pad_token_id,
            ),
        )
        try:
            expected = self._plain(slots)
            with NoValueReads():  # type: ignore[no-untyped-call]
                step()
            slots.restore(saved)
            replay = self._capture(step, restore=partial(slots.restore, saved))
            replay()
            self._compare(expected, slots)
        except Exception as error:  # whatever the error is, the plain loop works
            slots.restore(saved)
            message = str(error).strip().partition("\n")[0]
            raise Unusable(
                message if isinstance(error, Unusable) else f"{type(error).__name__}: {message}"
            ) from error
        self._steps[bucket] = replay
        count_captured()

    def _plain(self, slots: Slots) -> Tensor:
        """Return log-probabilities (n, V) of the next token of some rows, computed by the plain loop."""
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
        """Refuse a first token whose log-probability differs from the plain loop's."""
        rows = len(expected)
        found = slots.logprobs[:rows].index_select(1, slots.drawn - 1)
        gap = float((expected.gather(1, slots.tokens[:rows, None]) - found).abs().mean())
        bound = MAX_GAP.get(self._dtype or self._model.dtype, MAX_GAP[torch.bfloat16])
        if not gap <= bound:  # NaN is refused too
            raise Unusable(
                f"a captured step of {type(self._model).__name__} is {gap:.3g} nats off the plain one, above {bound:g}"
            )


def _attending(configs: Sequence[PreTrainedConfig], step: Step) -> None:
    with one_token_attention(configs):
        step()


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
