"""Sample with vLLM in the stage's process: a `RolloutEngine` that proves which weights it holds, and restarts a broken
vLLM."""

import logging
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor

from vantage.models.adapters import base_weights, write_adapters
from vantage.models.partial_responses import Response
from vantage.models.pass_counts import count_prompts
from vantage.models.policy import PolicyModel
from vantage.models.sampling import Samples, samples_of
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rollout import Sampling
from vantage.tasks.data.examples import Codec
from vantage.tasks.rollout.checksums import Checksums
from vantage.tasks.rollout.engine import Listener, SamplesWhenAsked, of_all_ranks
from vantage.tasks.rollout.held_weights import Proof
from vantage.tasks.rollout.running_vllm import Asked, Limits, RunningVllm, VllmCannotStart, VllmFailed
from vantage.tasks.rollout.sampled_policy import BadResponse, SampledPolicy
from vantage.tasks.training import engine_record, progress, ranks
from vantage.tasks.training.optimization import Precision
from vantage.tasks.training.seeds import derive_seed

log = logging.getLogger(__name__)

MAX_RESTARTS = 2
"""Most restarts of vLLM within one call of ``generate``."""

_running: RunningVllm | None = None
"""The running vLLM; there is one per process, since each takes memory for its cache."""


class VllmEngine(SamplesWhenAsked):
    """Samples with vLLM, which starts when the first responses are asked for; another engine's vLLM ends then."""

    def __init__(
        self,
        policy: PolicyModel,
        codec: Codec,
        *,
        rollout: Sampling,
        limits: PassLimits,
        precision: Precision,
    ) -> None:
        """Prepare to sample from the policy.

        Raises:
            ValueError: vllm is not installed, or it cannot apply the policy's adapters.
        """
        if find_spec("vllm") is None:
            raise ValueError(
                "rollout.engine=vllm needs the package vllm, which is not installed; install it as docs/rollouts.md describes, or use "
                "engine: loop"
            )
        self._sampled = SampledPolicy(policy, codec, limits=limits, precision=precision)
        self._policy, self._codec, self._rollout = policy, codec, rollout
        self._weights: dict[str, Tensor] = dict(policy.causal_lm.named_parameters())
        self._vllm: RunningVllm | None = None
        self._proof: Proof | None = None
        self._checksums = Checksums(rollout.checksums, precision)
        self._num_asked = 0
        self._has_started = False

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See ``RolloutEngine``; a running vLLM has proved that it has the weights when this returns. A broken vLLM is
        restarted later.

        Raises:
            KeyError: the model has no weight of this name.
            WeightsDiffer: vLLM does not hold the policy's weights afterwards.
            VllmFailed: vLLM failed on a rank of several.
        """
        self._weights = self._sampled.named(weights)
        if self._vllm is None or self._vllm.is_closed:
            return
        try:
            self._push(self._vllm)
            self._prove(self._vllm)
        except VllmFailed as error:
            self._close_until_asked(error)

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        count: int,
        seed: int,
        greedy: bool = False,
        listener: Listener | None = None,
    ) -> Samples:
        """See ``RolloutEngine``; a response's seed is derived from ``seed`` and its place. Each of several ranks samples its share.

        Raises:
            VllmCannotStart: vLLM does not start with this model.
            VllmFailed: vLLM failed more than ``MAX_RESTARTS`` times, or once on a rank of several.
            WeightsDiffer: vLLM does not hold the policy's weights; nothing was sampled.
        """
        repeated = self._sampled.repeated(prompts, count)
        own = ranks.own(len(repeated))
        found: dict[int, Response] = {}
        if repeated:
            found = self._drawn(
                repeated, range(len(repeated))[own], seed=seed, greedy=greedy, listener=listener
            )
        self._sleep()
        samples = samples_of([found[row] for row in sorted(found)])
        # for greedy samples vLLM reports log-probabilities at temperature 1
        if greedy and self._codec.generation.temperature != 1.0:
            samples = self._sampled.at_temperature(repeated[own], samples)
        limit = self._codec.generation.max_response_tokens
        return of_all_ranks(samples, own, count=len(repeated), max_length=limit)

    def _drawn(
        self,
        repeated: list[list[int]],
        rows: range,
        *,
        seed: int,
        greedy: bool,
        listener: Listener | None,
    ) -> dict[int, Response]:
        """Return this rank's responses: one to each of the prompts at ``rows``. If vLLM breaks, it is restarted for the
        missing ones.

        Raises:
            VllmCannotStart: vLLM does not start with this model.
            VllmFailed: vLLM failed more than ``MAX_RESTARTS`` times, or once on a rank of several.
        """
        found: dict[int, Response] = {}
        failures = 0
        while True:
            try:
                self._sample_missing(repeated, rows, found, seed=seed, greedy=greedy, listener=listener)
                return found
            except VllmFailed as error:
                failures += 1
                engine_record.note_failure()
                self._close_after(error)
                if not self._has_started:
                    raise VllmCannotStart(str(error)) from error
                done = f"{len(found)} of {len(rows)} responses are there"
                if ranks.world_size() > 1:
                    raise _of_one_rank(error) from error
                if failures > MAX_RESTARTS:
                    raise VllmFailed(f"{error}; it was started again {failures - 1} times; {done}") from error
                log.warning("%s; %s; starting vLLM again (%d of %d)", error, done, failures, MAX_RESTARTS)

    def _sleep(self) -> None:
        """Free vLLM's memory for the training that follows; a vLLM that cannot is restarted for the next responses."""
        if self._vllm is None:
            return
        try:
            self._vllm.sleep()
        except VllmFailed as error:
            self._close_until_asked(error)

    def _close_until_asked(self, error: VllmFailed) -> None:
        """Stop a broken vLLM, which is restarted for the next responses.

        Raises:
            VllmFailed: there are several ranks, whose vLLMs can only start together.
        """
        if ranks.world_size() > 1:
            raise _of_one_rank(error) from error
        log.warning("%s; it is started again for the next responses", error)
        self._close_after(error)

    def _close_after(self, error: BaseException | None) -> None:
        """Stop vLLM after an error, whose frames would hold vLLM's memory as long as the error is handled."""
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__
        self.close()

    def close(self) -> None:
        """Stop vLLM, if it runs here."""
        if self._vllm is not None:
            self._vllm.close()
        self._vllm = None

    def _started(self) -> RunningVllm:
        """Return a vLLM that has proved that it holds the newest weights."""
        global _running
        if self._vllm is None or self._vllm.is_closed:
            if _running is not None:
                _running.close()
            with tempfile.TemporaryDirectory(dir=self._codec.scratch, prefix="vllm-") as folder:
                self._vllm = RunningVllm(
                    self._policy,
                    Path(folder),
                    precision=self._sampled.precision,
                    limits=Limits(self._sampled.most_tokens, self._rollout.max_rows, self._sampled.adapters),
                )
            _running, self._has_started = self._vllm, True
            self._push(self._vllm)
        proof = self._prove(self._vllm)
        engine_record.note_sampled(
            digest=proof.digest, gap=proof.gap, iteration=engine_record.ended_iterations()
        )
        return self._vllm

    def _push(self, vllm: RunningVllm) -> None:
        """Give vLLM the newest weights: all of them, or the base once and the adapters each time."""
        progress.phase("giving weights to vLLM")
        has_adapters = self._sampled.adapters is not None
        if not (has_adapters and vllm.holds_base):
            weights = base_weights(self._weights) if has_adapters else self._weights
            hashed = self._checksums.begin(weights.values(), is_first=not vllm.holds_base)
            vllm.push(weights, hashed=hashed)
        if not has_adapters:
            return
        with tempfile.TemporaryDirectory(dir=self._codec.scratch, prefix="vllm-") as folder:
            write_adapters(self._policy.causal_lm, Path(folder), base=None, weights=self._weights)
            vllm.push_adapter(Path(folder))

    def _prove(self, vllm: RunningVllm) -> Proof:
        logprobs = self._sampled.logprobs()
        self._proof = self._sampled.prove(vllm.logprobs(self._sampled.fixed_rows), logprobs)
        self._checksums.compare("", vllm.checksums)
        log.info(
            "vLLM holds the policy's weights %s: mean |Δ| %.2g nats per token",
            *(self._proof.digest, self._proof.gap),
        )
        return self._proof

    def _sample_missing(
        self,
        repeated: list[list[int]],
        rows: range,
        found: dict[int, Response],
        *,
        seed: int,
        greedy: bool,
        listener: Listener | None,
    ) -> None:
        """Sample the responses at ``rows`` that are not in ``found`` yet, and put each there when it ends.

        Raises:
            VllmFailed: vLLM raised an error, or some responses did not come.
        """
        codec, limit = self._codec, self._codec.generation.max_response_tokens
        vllm = self._started()
        self._num_asked += 1
        names = {f"{self._num_asked}-{row}": row for row in rows if row not in found}
        asked = [
            Asked(name, repeated[row], derive_seed(seed, "response", row)) for name, row in names.items()
        ]
        count_prompts(*[sum(len(each) for each in {tuple(repeated[row]) for row in rows})] * 2)
        steps = vllm.sample(
            asked,
            max_tokens=limit,
            temperature=0.0 if greedy else codec.generation.temperature,
            stop_token_ids=codec.stop_token_ids,
            is_complete=None if codec.stop_strings is None else codec.stop_strings.complete,
        )
        for number, ended in enumerate(steps, start=1):
            progress.phase("sampling", len(found), len(rows), note=f"step {number} of vLLM")
            new = {names[name]: self._response(*sampled) for name, sampled in ended.items()}
            found |= new
            if listener is not None:
                listener.keep_up()
                if new and len(found) < len(rows):
                    listener.sampled(list(new), [ids for ids, _, _ in new.values()])
        missing = len(rows) - len(found)
        if missing:
            raise VllmFailed(f"vLLM returned {len(asked) - missing} of {len(asked)} responses")

    def _response(self, ids: list[int], logprobs: list[float]) -> Response:
        try:
            return self._sampled.response(ids, logprobs)
        except BadResponse as error:
            raise VllmFailed(str(error)) from error


def _of_one_rank(error: VllmFailed) -> VllmFailed:
    """Return the error that ends this rank, and so the attempt."""
    return VllmFailed(
        f"rank {ranks.rank()} of {ranks.world_size()}: {error}; the ranks' vLLMs start only together"
    )
