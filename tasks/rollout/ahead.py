"""Responses that are sampled while the ones before train: of a policy that trains, one step off-policy.

A thread samples them from a copy of the policy as it was before the update that runs beside it; what is frozen is not
copied. What it draws depends on its seed and those weights alone, never on which of the two is done first.
"""

import copy
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from vantage.models.pass_counts import PassCounts, add_counts, taken_counts
from vantage.models.policy import PolicyModel
from vantage.models.sampling import Samples
from vantage.tasks.rollout.engine import Listener, LocalEngine, of_all_ranks
from vantage.tasks.training import progress, ranks

TOLD_EVERY_SECONDS = 1.0
"""How often it is told how far the thread is that is waited for."""


class _Stopped(Exception):
    """Nobody waits for the responses any more."""


@dataclass
class _Begun:
    """Responses that a thread samples, or has sampled."""

    prompts: list[list[int]]
    """Each as often as it has responses."""
    seed: int
    own: Samples | None = None
    """Of this rank."""
    counts: PassCounts = field(default_factory=PassCounts)
    ended: int = 0
    """Responses of this rank that have ended."""
    error: BaseException | None = None
    thread: threading.Thread | None = None


class AheadEngine:
    """A `RolloutEngine` whose next responses may have been begun before they are asked for.

    What was not begun is sampled at once, from the policy as it is. Nothing is begun before its context, or after it.
    """

    def __init__(self, engine: LocalEngine) -> None:
        """Sample beside this engine, which samples from the policy itself."""
        self._now = engine
        self._copy = replace(engine, policy=_copied(engine.policy), is_beside_another=True)
        self._begun: _Begun | None = None
        self._is_stopped = threading.Event()
        self.took_begun = False
        """Whether responses since the last `begin` were those that had been begun, by the policy before its last update."""

    def __enter__(self) -> Self:
        self._now = replace(self._now, is_beside_another=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_stopped.set()
        if self._begun is not None and self._begun.thread is not None:
            self._begun.thread.join()
        self._now = replace(self._now, is_beside_another=False)

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the policy's own tensors, which `generate` reads; the copy has its weights from `begin`."""
        self._now.take_weights(weights)

    def begin(self, prompts: Sequence[list[int]], *, count: int, seed: int) -> None:
        """Sample from the policy as it is now, beside whatever happens to it from here on."""
        self._copy.take_weights(self._now.policy.causal_lm.named_parameters())
        stream = None
        if self._now.policy.device.type == "cuda":  # of its own, or one waits for what the other has queued
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
        begun = _Begun([prompt for prompt in prompts for _ in range(count)], seed)
        begun.thread = threading.Thread(
            target=self._sample, args=(begun, stream), name="sampling ahead", daemon=True
        )
        self._begun, self.took_begun = begun, False
        begun.thread.start()

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        count: int,
        seed: int,
        greedy: bool = False,
        listener: Listener | None = None,
    ) -> Samples:
        """See ``RolloutEngine``; the responses that were begun, where they are these, of which no listener is told."""
        begun, repeated = self._begun, [prompt for prompt in prompts for _ in range(count)]
        if begun is None or greedy or (begun.prompts, begun.seed) != (repeated, seed):
            return self._now.generate(prompts, count=count, seed=seed, greedy=greedy, listener=listener)
        own = self._joined(begun)
        self._begun, self.took_begun = None, True
        add_counts(begun.counts)
        limit = self._now.codec.generation.max_response_tokens
        return of_all_ranks(own, ranks.own(len(repeated)), count=len(repeated), max_length=limit)

    def tensors(self) -> dict[str, Tensor]:
        """Return the responses that were begun, once all are sampled, as a checkpoint keeps them: of all ranks; none of what was not."""
        begun = self._begun
        if begun is None:
            return {"lengths": torch.zeros(0, dtype=torch.int64)}
        limit, count = self._now.codec.generation.max_response_tokens, len(begun.prompts)
        found = of_all_ranks(self._joined(begun), ranks.own(count), count=count, max_length=limit)
        return {
            "prompts": torch.tensor([each for row in begun.prompts for each in row]),
            "prompt_lengths": torch.tensor(list(map(len, begun.prompts))),
            "seed": torch.tensor([begun.seed]),
            "lengths": torch.tensor(list(map(len, found.responses))),
            "ids": torch.tensor([each for row in found.responses for each in row]),
            "logprobs": torch.tensor([each for row in found.logprobs for each in row], dtype=torch.float64),
            "ended": torch.tensor(found.ended),
            "counts": ranks.total(torch.tensor([int(each) for each in vars(begun.counts).values()])),
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Have what ``tensors`` gave; of the responses this rank's own."""
        lengths = tensors["lengths"].tolist()
        self._begun = None
        if not lengths:
            return
        mine = ranks.own(len(lengths))
        self._begun = _Begun(
            prompts=[row.tolist() for row in tensors["prompts"].split(tensors["prompt_lengths"].tolist())],
            seed=int(tensors["seed"]),
            own=Samples(
                responses=[row.tolist() for row in tensors["ids"].split(lengths)][mine],
                ended=tensors["ended"].tolist()[mine],
                logprobs=[row.tolist() for row in tensors["logprobs"].split(lengths)][mine],
            ),
            counts=_counts_in(tensors),
        )

    def _sample(self, begun: _Begun, stream: torch.cuda.Stream | None) -> None:
        # All threads have one autocast cache. Who leaves its outermost autocast empties it, between two parts of a pass that trains.
        torch.autocast_increment_nesting()
        try:
            mine = ranks.own(len(begun.prompts))
            with torch.cuda.stream(stream):
                go_on = partial(self._go_on, begun)
                begun.own = self._copy.sample_own(begun.prompts, mine, seed=begun.seed, on_token=go_on)
            begun.counts = taken_counts()
        except _Stopped:
            pass
        except BaseException as error:  # raised where the responses are asked for
            begun.error = error

    def _go_on(self, begun: _Begun, ended: int, token: int) -> None:
        begun.ended = ended
        if self._is_stopped.is_set():
            raise _Stopped

    def _joined(self, begun: _Begun) -> Samples:
        while begun.thread is not None and begun.thread.is_alive():
            begun.thread.join(TOLD_EVERY_SECONDS)
            # a stage that waits is not one that hangs
            progress.phase("sampling", begun.ended, len(begun.prompts))
        if begun.error is not None:
            raise begun.error
        assert begun.own is not None, "only an engine that was left is stopped"
        return begun.own


def _counts_in(tensors: dict[str, Tensor]) -> PassCounts:
    """Return what all ranks counted, on the first one; nothing where an older checkpoint does not say it."""
    return (
        PassCounts(*tensors["counts"].tolist()) if "counts" in tensors and not ranks.rank() else PassCounts()
    )


def _copied(policy: PolicyModel) -> PolicyModel:
    """Return a policy to sample from: frozen weights are the very same, what trains is copied."""
    frozen = {id(each): each for each in policy.causal_lm.parameters() if not each.requires_grad}
    return PolicyModel(copy.deepcopy(policy.causal_lm, memo=dict(frozen)).requires_grad_(False))
