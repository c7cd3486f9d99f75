"""Sample responses for a stage: the interface of an engine, and the engine that samples in this process."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from vantage.models.policy import PolicyModel
from vantage.models.sampling import InStep, Samples, batches, sample
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rollout import Sampling
from vantage.tasks.data.examples import Codec
from vantage.tasks.training import progress, ranks
from vantage.tasks.training.optimization import Precision, autocast

LOOP = Sampling()
"""Sampling by the loop of this process."""


class Listener(Protocol):
    """Processes responses while others are still sampled."""

    def sampled(self, rows: Sequence[int], responses: Sequence[list[int]]) -> None:
        """Receive the ids of some responses, by their rows among all; each response is received at most once."""

    def keep_up(self) -> None:
        """Return at once; it is called before each token that is sampled."""

    def give_up(self) -> None:
        """Forget the received responses: nobody needs them any longer."""


class RolloutEngine(Protocol):
    """Samples from a policy, in this process or another. Inside its context it may sample ahead of what is asked for."""

    @property
    def took_begun(self) -> bool:
        """Return whether the responses since the last ``begin`` were begun before the policy's last update."""

    def __enter__(self) -> Self:
        """Let ``begin`` sample beside other work from now on. Does nothing for an engine that does not sample ahead."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the sampling that was begun."""

    def begin(
        self,
        prompts: Sequence[list[int]],
        *,
        count: int,
        seed: int,
        listener: Listener | None = None,
    ) -> None:
        """Begin to sample responses that ``generate`` will be asked for; an engine that does not sample ahead does nothing.

        The listener receives this rank's responses in a thread. It never receives responses that it has not got when
        ``generate`` returns them.
        """

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        count: int,
        seed: int,
        greedy: bool = False,
        listener: Listener | None = None,
    ) -> Samples:
        """Sample ``count`` responses to each prompt's ids, those to one prompt adjacent, with the log-probability of each id.

        The same seed, prompts and weights give the same responses. ``greedy`` takes the likeliest ids instead. The
        listener may receive some of this rank's responses before all are sampled.
        """

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Sample from these weights (name → tensor of the causal language model) from now on."""

    def tensors(self) -> dict[str, Tensor]:
        """Return tensors of begun responses for a checkpoint; empty if the engine never begins ahead."""

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the responses in ``tensors``."""


@dataclass(frozen=True)
class Origin:
    """The weights from which responses are sampled beside the training."""

    digest: str
    """Digest of the weights, at most 13 hexadecimal digits."""
    gap: float
    """Mean |Δ| of log-probabilities between engine and policy on fixed rows, in nats per token."""
    iteration: int | None
    """Iterations of the stage that had ended when the policy had these weights; None: an older checkpoint, so not
    known."""


@runtime_checkable
class SamplesBeside(Protocol):
    """Samples beside the training, in another thread, for ``vantage.tasks.rollout.ahead``."""

    codec: Codec

    def hold(self) -> Origin | None:
        """Keep the policy's present weights for ``sample_own``, however the policy changes meanwhile; None: without an
        origin."""

    def release(self) -> None:
        """Drop the copy of these weights that is kept for a failure: ``sample_own`` has ended, and other weights
        follow."""

    def weights(self) -> dict[str, Tensor]:
        """Return the trained weights of ``hold``, by name, for a checkpoint; empty: they are not kept."""

    def sample_own(
        self,
        repeated: list[list[int]],
        mine: slice,
        *,
        seed: int,
        on_token: Callable[[int, int], None],
        listener: Listener | None,
    ) -> Samples:
        """Sample one response to each of the prompts at ``mine``, from the weights of ``hold``.

        Args:
            on_token: called often with the number of responses that have ended and the number of the token; an error
                that it raises ends the sampling.
            listener: may receive some of the responses before all are sampled.
        """


class SamplesWhenAsked:
    """Base of engines that never sample ahead: the part of ``RolloutEngine`` that does nothing for them."""

    @property
    def took_begun(self) -> bool:
        """See ``RolloutEngine``; nothing is ever begun."""
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """See ``RolloutEngine``; there is nothing to stop."""

    def begin(
        self,
        prompts: Sequence[list[int]],
        *,
        count: int,
        seed: int,
        listener: Listener | None = None,
    ) -> None:
        """See ``RolloutEngine``; does nothing."""

    def tensors(self) -> dict[str, Tensor]:
        """See ``RolloutEngine``; nothing is ever begun."""
        return {}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """See ``RolloutEngine``; ``tensors`` is empty."""


@dataclass(frozen=True)
class LocalEngine(SamplesWhenAsked):
    """Samples in this process, only when asked, from the tensors that train or from a copy of them."""

    policy: PolicyModel
    codec: Codec
    limits: PassLimits
    """Limits of the responses that are sampled together."""
    precision: Precision
    """Precision of the computation, the same as in training if the policy learns from the responses."""
    is_beside_another: bool = False
    """Whether another thread uses the device while this one samples."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        count: int,
        seed: int,
        greedy: bool = False,
        listener: Listener | None = None,
    ) -> Samples:
        """See ``RolloutEngine`` and ``vantage.models.sampling.sample``."""
        repeated = [prompt for prompt in prompts for _ in range(count)]
        limit = self.codec.generation.max_response_tokens

        def show(ended: int, token: int) -> None:
            progress.phase("sampling", ended, len(repeated), note=f"token {token} of {limit}")
            if listener is not None:
                listener.keep_up()

        mine = ranks.own(len(repeated))
        progress.computing(*self._largest_batch(repeated[mine]))
        on_batch = None if listener is None else listener.sampled
        own = self.sample_own(repeated, mine, seed=seed, greedy=greedy, on_token=show, on_batch=on_batch)
        return of_all_ranks(own, mine, count=len(repeated), max_length=limit)

    def sample_own(
        self,
        repeated: list[list[int]],
        mine: slice,
        *,
        seed: int,
        greedy: bool = False,
        on_token: Callable[[int, int], None],
        on_batch: Callable[[list[int], list[list[int]]], None] | None = None,
    ) -> Samples:
        """Sample only this rank's responses: one to each of the prompts at ``mine``."""
        with autocast(self.precision, self.policy.device):
            return sample(
                self.policy.causal_lm,
                repeated,
                max_new_tokens=self.codec.generation.max_response_tokens,
                temperature=self.codec.generation.temperature,
                eos_token_ids=self.codec.stop_token_ids,
                stop_strings=self.codec.stop_strings,
                pad_token_id=self.codec.pad_token_id,
                seed=seed,
                greedy=greedy,
                limits=self.limits,
                rows=mine,
                in_step=self._in_step(repeated),
                is_beside_another=self.is_beside_another,
                on_token=on_token,
                on_batch=on_batch,
            )

    def _batches(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        limit = self.codec.generation.max_response_tokens
        return batches(list(map(len, prompts)), self.limits, max_new_tokens=limit)

    def _largest_batch(self, prompts: Sequence[list[int]]) -> tuple[int, int]:
        """Return rows and positions of the batch with the most positions."""
        limit = self.codec.generation.max_response_tokens
        sizes = [
            (len(batch), len(batch) * (max(len(prompts[place]) for place in batch) + limit))
            for batch in self._batches(prompts)
        ]
        return max(sizes, key=lambda size: size[1], default=(0, 0))

    def _in_step(self, prompts: Sequence[list[int]]) -> InStep | None:
        if not ranks.are_sharded():
            return None
        return InStep(
            forward=self.policy.next_logits,
            num_batches=max(
                len(self._batches(prompts[first :: ranks.world_size()]))
                for first in range(ranks.world_size())
            ),
            all_ended=lambda ended: not ranks.any_rank(not ended),
        )

    @torch.no_grad()
    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Copy the weights, except those that are the model's own tensors already.

        Raises:
            KeyError: the model has no weight of this name.
        """
        own = dict(self.policy.causal_lm.named_parameters())
        for name, weight in weights:
            if own[name] is not weight:
                own[name].copy_(weight)


def of_all_ranks(own: Samples, rows: slice, *, count: int, max_length: int) -> Samples:
    """Return all ``count`` responses from all ranks; this rank's own are those at ``rows``."""
    if ranks.world_size() == 1:
        return own
    ids = torch.zeros(count, max_length, dtype=torch.int64)
    logprobs = torch.zeros(count, max_length, dtype=torch.float64)
    lengths, ended = torch.zeros(2, count, dtype=torch.int64)
    for place, row in enumerate(range(count)[rows]):
        length = len(own.responses[place])
        ids[row, :length] = torch.tensor(own.responses[place])
        logprobs[row, :length] = torch.tensor(own.logprobs[place], dtype=torch.float64)
        lengths[row], ended[row] = length, own.ended[place]
    ids, logprobs, lengths, ended = map(ranks.total, (ids, logprobs, lengths, ended))
    widths = lengths.tolist()
    return Samples(
        responses=[row[:width] for row, width in zip(ids.tolist(), widths, strict=True)],
        ended=ended.bool().tolist(),
        logprobs=[row[:width] for row, width in zip(logprobs.tolist(), widths, strict=True)],
    )


def load_engine(
    policy: PolicyModel,
    codec: Codec,
    *,
    limits: PassLimits,
    precision: Precision = "float32",
    rollout: Sampling = LOOP,
) -> RolloutEngine:
    """Return the engine that samples from ``policy``; it must receive the weights whenever they have changed."""
    if rollout.is_served:
        from vantage.tasks.rollout.remote_engine import RemoteEngine  # that module imports this one

        return RemoteEngine(policy, codec, rollout=rollout, limits=limits, precision=precision)
    if rollout.engine == "vllm":
        from vantage.tasks.rollout.vllm_engine import VllmEngine  # that module imports this one

        return VllmEngine(policy, codec, rollout=rollout, limits=limits, precision=precision)
    return LocalEngine(policy, codec, limits, precision)
