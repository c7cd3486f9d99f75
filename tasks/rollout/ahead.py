"""Sample the next responses while the present ones train; then the policy learns one step off-policy.

A thread samples from a copy of the policy from before the running update (frozen weights are shared), or waits for
servers that hold those weights. The responses depend only on the seed and those weights, never on whether sampling or
training finishes first.
"""

import copy
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from vantage.models.pass_counts import PassCounts, add_counts, taken_counts
from vantage.models.policy import PolicyModel
from vantage.models.sampling import Samples
from vantage.models.sharding import local, own_rows
from vantage.tasks.rollout.engine import (
    Listener,
    LocalEngine,
    Origin,
    RolloutEngine,
    SamplesBeside,
    of_all_ranks,
)
from vantage.tasks.rollout.listening_beside import ListeningBeside
from vantage.tasks.training import engine_record, preemption, progress, ranks
from vantage.tasks.training.phase_seconds import of_process

SECONDS_BETWEEN_REPORTS = 1.0
"""Seconds between two reports of the thread's progress while the stage waits for it."""


_WEIGHTS = "weights/"
"""Prefix of weights among the tensors for a checkpoint."""


class _Stopped(Exception):
    """The responses are no longer wanted."""


@dataclass(frozen=True)
class _BrokenOff:
    """Responses that were being sampled when the stage was asked to stop."""

    prompts: list[list[int]]
    """See ``_Begun``."""
    seed: int
    iteration: int | None
    """See ``Origin``."""
    weights: dict[str, Tensor]
    """Weights from which they are sampled, by name."""


@dataclass
class _Begun:
    """Responses that a thread samples, or has sampled."""

    prompts: list[list[int]]
    """Ids of the prompts, each repeated once per response."""
    seed: int
    own: Samples | None = None
    """Responses of this rank."""
    counts: PassCounts = field(default_factory=PassCounts)
    ended: int = 0
    """Responses of this rank that have ended."""
    origin: Origin | None = None
    """Weights from which they are sampled."""
    error: BaseException | None = None
    seconds: float = 0.0
    """Time that the thread took."""
    thread: threading.Thread | None = None
    listening: ListeningBeside | None = None
    """Passes this rank's responses on while others are sampled, and afterwards; None: nobody listens."""


class _LocalCopy:
    """A copy of the policy that samples in this process: a ``SamplesBeside``."""

    def __init__(self, engine: LocalEngine) -> None:
        self.codec = engine.codec
        self._policy = engine.policy
        self._copy = replace(engine, policy=_copied(engine.policy), is_beside_another=True)

    def hold(self) -> None:
        """See ``SamplesBeside``."""
        self._copy.take_weights(self._policy.causal_lm.named_parameters())

    def release(self) -> None:
        """See ``SamplesBeside``; nothing is kept for a failure."""

    def weights(self) -> dict[str, Tensor]:
        """See ``SamplesBeside``."""
        trained = {name for name, each in self._policy.causal_lm.named_parameters() if each.requires_grad}
        held = self._copy.policy.causal_lm.named_parameters()
        return {name: each.detach() for name, each in held if name in trained}

    def sample_own(
        self,
        repeated: list[list[int]],
        mine: slice,
        *,
        seed: int,
        on_token: Callable[[int, int], None],
        listener: Listener | None,
    ) -> Samples:
        """See ``SamplesBeside``."""
        on_batch = None if listener is None else listener.sampled
        return self._copy.sample_own(repeated, mine, seed=seed, on_token=on_token, on_batch=on_batch)


class AheadEngine:
    """A `RolloutEngine` that can begin with its next responses before they are asked for.

    Responses that were not begun are sampled when asked for, from the present policy. Outside its context, none are
    begun.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        """Sample beside this engine, which samples from the policy itself.

        Args:
            engine: a ``LocalEngine``, beside which a copy of the policy samples, or a ``SamplesBeside``: servers, which
                keep the old weights until all begun responses are there.
        """
        self._now = engine
        assert isinstance(engine, LocalEngine | SamplesBeside)
        self._codec = engine.codec
        self._is_shared = not isinstance(engine, LocalEngine)
        """Whether the engine itself samples beside the training, with only one version of the weights at a time."""
        self._beside: SamplesBeside = _LocalCopy(engine) if isinstance(engine, LocalEngine) else engine
        self._late: dict[str, Tensor] | None = None
        """Weights that servers get after they have sampled the begun responses."""
        self._begun: _Begun | None = None
        self._broken_off: _BrokenOff | None = None
        """A rollout that a request to stop interrupted, and that is begun again inside the context; None: there is
        none."""
        self._is_stopped = threading.Event()
        self.took_begun = False
        """Whether the responses since the last `begin` are those that were begun, from the policy before its last
        update."""

    def __enter__(self) -> Self:
        self._now.__enter__()
        self._set_beside_another(True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_stopped.set()
        if self._begun is not None and self._begun.thread is not None:
            self._begun.thread.join()
        self._forget_begun()
        self._set_beside_another(False)
        self._now.__exit__(kind, error, trace)

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the policy's own tensors, which `generate` reads; sampling beside the training gets its weights in
        `begin`."""
        if self._broken_off is not None:
            weights = self._begun_anew(dict(weights), self._broken_off)
        if self._is_shared and self._begun is not None:
            self._late = dict(weights)
        else:
            self._now.take_weights(weights)

    def _begun_anew(self, policy: dict[str, Tensor], broken_off: _BrokenOff) -> Iterable[tuple[str, Tensor]]:
        """Begin the interrupted rollout again, from its old weights; returns the policy's tensors as they were
        given."""
        self._broken_off = None
        now = {name: local(policy[name].detach()).clone() for name in broken_off.weights}
        _put(broken_off.weights, policy)
        try:
            self._now.take_weights(policy.items())
            self._start(broken_off.prompts, broken_off.seed, iteration=broken_off.iteration)
        finally:
            _put(now, policy, are_own_rows=True)
        return policy.items()

    def begin(
        self,
        prompts: Sequence[list[int]],
        *,
        count: int,
        seed: int,
        listener: Listener | None = None,
    ) -> None:
        """Begin to sample from the present policy, in parallel to later changes of the policy; see ``RolloutEngine``."""
        self._forget_begun()
        self._give_late()
        self._start([prompt for prompt in prompts for _ in range(count)], seed, listener=listener)

    def _start(
        self,
        repeated: list[list[int]],
        seed: int,
        *,
        listener: Listener | None = None,
        iteration: int | None = None,
    ) -> None:
        """Start the thread that samples from the present policy.

        Args:
            iteration: see ``Origin``; None: the present one.
        """
        origin = self._beside.hold()
        if origin is not None and iteration is not None:
            origin = replace(origin, iteration=iteration)
        stream = None
        is_on_gpu = isinstance(self._now, LocalEngine) and self._now.policy.device.type == "cuda"
        if is_on_gpu:  # without a stream of its own, each thread would wait for the other's queue
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
        begun = _Begun(repeated, seed, origin=origin)
        if listener is not None:
            begun.listening = ListeningBeside(listener)
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
        """See ``RolloutEngine``. If these responses were begun, they are returned: the listener of ``begin`` has received them, and
        this one does not."""
        begun, repeated = self._begun, [prompt for prompt in prompts for _ in range(count)]
        if begun is None or greedy or (begun.prompts, begun.seed) != (repeated, seed):
            if begun is not None and self._is_shared:
                self._wait_for(begun)
                ranks.wait()  # wait for the other ranks' responses too, before the servers get other weights
            self._give_late()
            return self._now.generate(prompts, count=count, seed=seed, greedy=greedy, listener=listener)
        own = self._joined(begun)
        if begun.listening is not None:
            begun.listening.stop()
        self._begun, self.took_begun = None, True
        if begun.origin is not None:
            engine_record.note_sampled(**vars(begun.origin))
        of_process.beside(begun.seconds)
        add_counts(begun.counts)
        limit = self._codec.generation.max_response_tokens
        return of_all_ranks(own, ranks.own(len(repeated)), count=len(repeated), max_length=limit)

    def tensors(self) -> dict[str, Tensor]:
        """Return the begun responses of all ranks for a checkpoint, once all are sampled; empty if none were begun.

        A stage of one process that is asked to stop does not wait: it returns the weights of the sampling instead.
        """
        begun = self._begun
        if begun is None:
            return {"lengths": torch.zeros(0, dtype=torch.int64)}
        origin = {} if begun.origin is None else _origin_tensors(begun.origin)
        asked = {
            **origin,
            "prompts": torch.tensor([each for row in begun.prompts for each in row]),
            "prompt_lengths": torch.tensor(list(map(len, begun.prompts))),
            "seed": torch.tensor([begun.seed]),
        }
        if weights := self._broken_off_by_request(begun):
            named = {f"{_WEIGHTS}{name}": each for name, each in weights.items()}
            return {**asked, **named, "lengths": torch.zeros(0, dtype=torch.int64)}
        limit, count = self._codec.generation.max_response_tokens, len(begun.prompts)
        found = of_all_ranks(self._joined(begun), ranks.own(count), count=count, max_length=limit)
        return {
            **asked,
            "lengths": torch.tensor(list(map(len, found.responses))),
            "ids": torch.tensor([each for row in found.responses for each in row]),
            "logprobs": torch.tensor([each for row in found.logprobs for each in row], dtype=torch.float64),
            "ended": torch.tensor(found.ended),
            "counts": ranks.total(torch.tensor([int(each) for each in vars(begun.counts).values()])),
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the responses in ``tensors``; each rank keeps its own."""
        lengths = tensors["lengths"].tolist()
        self._begun = self._broken_off = None
        weights = {
            name.removeprefix(_WEIGHTS): each for name, each in tensors.items() if name.startswith(_WEIGHTS)
        }
        if not lengths and not weights:
            return
        prompts = [row.tolist() for row in tensors["prompts"].split(tensors["prompt_lengths"].tolist())]
        seed, origin = int(tensors["seed"]), _origin_in(tensors)
        if weights:
            iteration = None if origin is None else origin.iteration
            self._broken_off = _BrokenOff(prompts, seed, iteration, weights)
            return
        mine = ranks.own(len(lengths))
        self._begun = _Begun(
            prompts=prompts,
            seed=seed,
            own=Samples(
                responses=[row.tolist() for row in tensors["ids"].split(lengths)][mine],
                ended=tensors["ended"].tolist()[mine],
                logprobs=[row.tolist() for row in tensors["logprobs"].split(lengths)][mine],
            ),
            counts=_counts_in(tensors),
            origin=origin,
        )

    def _sample(self, begun: _Begun, stream: torch.cuda.Stream | None) -> None:
        # All threads share one autocast cache. The thread that leaves the outermost autocast block empties it, also
        # during a training pass.
        torch.autocast_increment_nesting()
        start = time.monotonic()
        try:
            mine = ranks.own(len(begun.prompts))
            with torch.cuda.stream(stream):
                begun.own = self._beside.sample_own(
                    begun.prompts,
                    mine,
                    seed=begun.seed,
                    on_token=partial(self._go_on, begun),
                    listener=begun.listening,
                )
            if begun.listening is not None:
                begun.listening.ended(range(len(begun.prompts))[mine], begun.own.responses)
            begun.counts, begun.seconds = taken_counts(), time.monotonic() - start
        except _Stopped:
            pass
        except BaseException as error:  # raised again when the responses are asked for
            begun.error = error

    def _go_on(self, begun: _Begun, ended: int, token: int) -> None:
        begun.ended = ended
        if self._is_stopped.is_set():
            raise _Stopped

    def _forget_begun(self) -> None:
        """Drop the responses that were begun, and what the listener has begun with them: nobody will ask for them."""
        if self._begun is not None and self._begun.listening is not None:
            self._begun.listening.give_up()
        self._begun = None

    def _set_beside_another(self, is_beside: bool) -> None:
        if isinstance(self._now, LocalEngine):
            self._now = replace(self._now, is_beside_another=is_beside)

    def _give_late(self) -> None:
        """Give servers the weights for which they were still busy."""
        late, self._late = self._late, None
        if late is not None:
            with progress.outside():  # a validation only happens to be the first that wants them
                self._now.take_weights(late.items())

    def _broken_off_by_request(self, begun: _Begun) -> dict[str, Tensor]:
        """Wait for the responses, or until this process is asked to stop. In the second case, returns the weights of
        the sampling if responses are missing and the process must not wait for them; else nothing."""
        while begun.thread is not None and begun.thread.is_alive():
            if preemption.requested() and ranks.world_size() == 1 and (weights := self._beside.weights()):
                self._is_stopped.set()
                begun.thread.join()
                return {} if begun.own is not None or begun.error is not None else weights
            self._look_at(begun)
        return {}

    def _look_at(self, begun: _Begun) -> None:
        assert begun.thread is not None
        # A stage that waits here must not count as hanging. A validation that finds servers busy waits for the rollout.
        with progress.outside():
            progress.phase("waiting for responses", begun.ended, len(begun.prompts))
        begun.thread.join(SECONDS_BETWEEN_REPORTS)

    def _wait_for(self, begun: _Begun) -> None:
        while begun.thread is not None and begun.thread.is_alive():
            self._look_at(begun)
        if self._late is not None:  # else the next rollout may be sampled from these weights too
            self._beside.release()

    def _joined(self, begun: _Begun) -> Samples:
        self._wait_for(begun)
        if begun.error is not None:
            raise begun.error
        assert begun.own is not None, "only an engine that was left is stopped"
        return begun.own


@torch.no_grad()
def _put(weights: dict[str, Tensor], policy: dict[str, Tensor], *, are_own_rows: bool = False) -> None:
    """Copy weights into the policy's tensors, of which each rank may hold its own rows.

    Args:
        are_own_rows: whether the weights are this rank's rows; else they are whole.
    """
    for name, weight in weights.items():
        own = policy[name]
        is_cut = own is not local(own) and not are_own_rows
        local(own).copy_(weight[own_rows(len(weight))] if is_cut else weight)


def _origin_tensors(origin: Origin) -> dict[str, Tensor]:
    return {
        "origin": torch.tensor([int(origin.digest, 16)]),
        "origin_digits": torch.tensor([len(origin.digest)]),
        "origin_gap": torch.tensor([origin.gap], dtype=torch.float64),
        **({} if origin.iteration is None else {"origin_iteration": torch.tensor([origin.iteration])}),
    }


def _origin_in(tensors: dict[str, Tensor]) -> Origin | None:
    if "origin" not in tensors:
        return None
    digits = int(tensors["origin_digits"])
    return Origin(
        digest=f"{int(tensors['origin']):0{digits}x}",
        gap=float(tensors["origin_gap"]),
        iteration=int(tensors["origin_iteration"]) if "origin_iteration" in tensors else None,
    )


def _counts_in(tensors: dict[str, Tensor]) -> PassCounts:
    """Return the counts of all ranks, on the first rank; zeros if an older checkpoint has none."""
    return (
        PassCounts(*tensors["counts"].tolist()) if "counts" in tensors and not ranks.rank() else PassCounts()
    )


def _copied(policy: PolicyModel) -> PolicyModel:
    """Return a policy to sample from; it shares the frozen weights and has copies of those that train."""
    frozen = {id(each): each for each in policy.causal_lm.parameters() if not each.requires_grad}
    return PolicyModel(copy.deepcopy(policy.causal_lm, memo=dict(frozen)).requires_grad_(False))
