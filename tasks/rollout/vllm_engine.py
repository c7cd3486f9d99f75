"""Sampling with vLLM in the stage's process: a `RolloutEngine` that proves what weights it holds, and is started again if it breaks."""

import logging
import tempfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor

from vantage.models.partial_responses import Response
from vantage.models.pass_counts import count_prompts
from vantage.models.policy import PolicyModel
from vantage.models.sampling import Samples, samples_of
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rollout import Sampling
from vantage.tasks.data.examples import Codec
from vantage.tasks.rollout.engine import Listener, SamplesWhenAsked
from vantage.tasks.rollout.held_weights import Proof
from vantage.tasks.rollout.running_vllm import Asked, Limits, RunningVllm, VllmFailed
from vantage.tasks.rollout.sampled_policy import BadResponse, SampledPolicy
from vantage.tasks.training import engine_record, progress, ranks
from vantage.tasks.training.optimization import Precision
from vantage.tasks.training.seeds import derive_seed

log = logging.getLogger(__name__)

MAX_RESTARTS = 2
"""How often vLLM is started again within one call of ``generate``."""

_running: RunningVllm | None = None
"""The vLLM that runs: one in a process, since each takes memory for its cache."""


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
            ValueError: vllm is not installed, the policy has adapters, or several processes do the stage.
        """
        if find_spec("vllm") is None:
            raise ValueError(
                "rollout.engine=vllm needs the package vllm, which is not installed; install it as docs/rollouts.md describes, or use "
                "engine: loop"
            )
        self._sampled = SampledPolicy(policy, codec, limits=limits, precision=precision)
        if ranks.world_size() > 1:
            raise ValueError(
                f"rollout.engine=vllm samples in one process, and {ranks.world_size()} ranks do this stage; use engine: loop, or one rank"
            )
        self._policy, self._codec, self._rollout = policy, codec, rollout
        self._weights: dict[str, Tensor] = dict(policy.causal_lm.named_parameters())
        self._vllm: RunningVllm | None = None
        self._proof: Proof | None = None
        self._num_asked = 0
        self._has_started = False

    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See ``RolloutEngine``; a running vLLM has them, and has proved it, when this returns. One that breaks is started again later.

        Raises:
            KeyError: the model has no weight of this name.
            WeightsDiffer: it does not hold the policy's weights afterwards.
        """
        self._weights = self._sampled.named(weights)
        if self._vllm is None or self._vllm.is_closed:
            return
        try:
            self._vllm.push(self._weights)
            self._prove(self._vllm)
        except VllmFailed as error:
            log.warning("%s; it is started again for the next responses", error)
            self.close()

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        count: int,
        seed: int,
        greedy: bool = False,
        listener: Listener | None = None,
    ) -> Samples:
        """See ``RolloutEngine``; a response's seed is derived from ``seed`` and its place.

        Raises:
            VllmFailed: vLLM failed more than ``MAX_RESTARTS`` times.
            WeightsDiffer: vLLM does not hold the policy's weights; nothing was sampled.
        """
        repeated = self._sampled.repeated(prompts, count)
        found: dict[int, Response] = {}
        failures = 0
        while len(found) < len(repeated):
            try:
                self._sample_missing(repeated, found, seed=seed, greedy=greedy, listener=listener)
            except VllmFailed as error:
                failures += 1
                engine_record.note_failure()
                self.close()
                done = f"{len(found)} of {len(repeated)} responses are there"
                if failures > MAX_RESTARTS or not self._has_started:
                    raise VllmFailed(
                        f"{error}; it was started again {failures - 1} times; {done}; run the same command again, set a lower "
                        "rollout.max_rows, or use rollout.engine: loop"
                    ) from error
                log.warning("%s; %s; starting vLLM again (%d of %d)", error, done, failures, MAX_RESTARTS)
        samples = samples_of([found[row] for row in range(len(repeated))])
        if greedy and self._codec.generation.temperature != 1.0:  # vLLM's are those of temperature 1
            return self._sampled.at_temperature(repeated, samples)
        return samples

    def close(self) -> None:
        """Stop vLLM, if it runs here."""
        if self._vllm is not None:
            self._vllm.close()
        self._vllm = None

    def _started(self) -> RunningVllm:
        """Return a vLLM that holds the weights that were given last, and has proved it."""
        global _running
        if self._vllm is None or self._vllm.is_closed:
            if _running is not None:
                _running.close()
            with tempfile.TemporaryDirectory(dir=self._codec.scratch, prefix="vllm-") as folder:
                self._vllm = RunningVllm(
                    self._policy,
                    Path(folder),
                    precision=self._sampled.precision,
                    limits=Limits(self._sampled.most_tokens, self._rollout.max_rows),
                )
            _running, self._has_started = self._vllm, True
            self._vllm.push(self._weights)
        proof = self._prove(self._vllm)
        engine_record.note_sampled(digest=proof.digest, gap=proof.gap)
        return self._vllm

    def _prove(self, vllm: RunningVllm) -> Proof:
        logprobs = self._sampled.logprobs()
        self._proof = self._sampled.prove(vllm.logprobs(self._sampled.fixed_rows), logprobs)
        log.info(
            "vLLM holds the policy's weights %s: mean |Δ| %.2g nats per token",
            *(self._proof.digest, self._proof.gap),
        )
        return self._proof

    def _sample_missing(
        self,
        repeated: list[list[int]],
        found: dict[int, Response],
        *,
        seed: int,
        greedy: bool,
        listener: Listener | None,
    ) -> None:
        """Sample the responses that are not in ``found`` yet, and put each there when it ends.

        Raises:
            VllmFailed: vLLM raised an error, or some responses did not come.
        """
        codec, limit = self._codec, self._codec.generation.max_response_tokens
        vllm = self._started()
        self._num_asked += 1
        rows = {f"{self._num_asked}-{row}": row for row in range(len(repeated)) if row not in found}
        asked = [Asked(name, repeated[row], derive_seed(seed, "response", row)) for name, row in rows.items()]
        count_prompts(*[sum(len(each) for each in set(map(tuple, repeated)))] * 2)
        steps = vllm.sample(
            asked,
            max_tokens=limit,
            temperature=0.0 if greedy else codec.generation.temperature,
            stop_token_ids=codec.stop_token_ids,
            is_complete=None if codec.stop_strings is None else codec.stop_strings.complete,
        )
        for number, ended in enumerate(steps, start=1):
            progress.phase("sampling", len(found), len(repeated), note=f"step {number} of vLLM")
            new = {rows[name]: self._response(*sampled) for name, sampled in ended.items()}
            found |= new
            if listener is not None:
                listener.keep_up()
                if new and len(found) < len(repeated):
                    listener.sampled(list(new), [ids for ids, _, _ in new.values()])
        missing = len(repeated) - len(found)
        if missing:
            raise VllmFailed(f"vLLM returned {len(asked) - missing} of {len(asked)} responses")

    def _response(self, ids: list[int], logprobs: list[float]) -> Response:
        try:
            return self._sampled.response(ids, logprobs)
        except BadResponse as error:
            raise VllmFailed(str(error)) from error
