"""The policy from which an engine beside the trainer samples: rules for its responses, and the proof that the engine
holds its weights."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vantage.models.adapters import without_adapters
from vantage.models.partial_responses import Response
from vantage.models.pass_counts import count_sampled
from vantage.models.policy import PolicyModel
from vantage.models.sampling import Samples, batches, check_lengths
from vantage.models.sequences import collate
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.tasks.data.examples import Codec
from vantage.tasks.rollout.held_weights import (
    NOTHING_SAMPLED,
    TOKENS,
    Proof,
    check_held,
    fixed_rows,
    logprobs_of_policy,
)
from vantage.tasks.rollout.sent_adapters import room_for
from vantage.tasks.training import ranks
from vantage.tasks.training.optimization import Precision, autocast


class BadResponse(RuntimeError):
    """An engine returned a response that is too short, or lacks log-probabilities."""


class SampledPolicy:
    """A policy, whole or with adapters on a base, its codec, and the arithmetic of its passes."""

    def __init__(
        self, policy: PolicyModel, codec: Codec, *, limits: PassLimits, precision: Precision
    ) -> None:
        """Hold the policy.

        Raises:
            ValueError: the policy has adapters that vLLM cannot apply.
        """
        self.adapters = room_for(policy.causal_lm)
        """Room for the policy's adapters; None: it has none."""
        self.model, self.codec, self.precision = policy, codec, precision
        self._limits = limits
        self._of_base: Tensor | None = None
        self._now: Tensor | None = None
        self._before: Tensor | None = None
        self._earlier: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def vocab_size(self) -> int:
        """Number of ids that the model knows."""
        return int(self.model.causal_lm.config.get_text_config().vocab_size)

    @property
    def most_tokens(self) -> int:
        """Most tokens of a prompt with its response, and of a fixed row."""
        generation = self.codec.generation
        wanted = max(generation.max_prompt_tokens + generation.max_response_tokens, TOKENS + 1)
        positions = getattr(self.model.causal_lm.config.get_text_config(), "max_position_embeddings", None)
        return wanted if positions is None else min(wanted, positions)

    @property
    def fixed_rows(self) -> list[list[int]]:
        """Rows of ids that the policy and an engine read."""
        return fixed_rows(self.vocab_size, most=self.most_tokens - 1)

    def named(self, weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Return the weights by name.

        Raises:
            KeyError: the model has no weight of this name.
        """
        known = dict(self.model.causal_lm.named_parameters())
        named = dict(weights)
        for name in named:
            known[name]
        return named

    def repeated(self, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
        """Return each prompt ``count`` times in a row.

        Raises:
            ValueError: a prompt and its response exceed the model's positions.
        """
        repeated = [prompt for prompt in prompts for _ in range(count)]
        check_lengths(
            self.model.causal_lm,
            repeated,
            max_new_tokens=self.codec.generation.max_response_tokens,
            temperature=self.codec.generation.temperature,
        )
        return repeated

    def logprobs(self) -> Tensor:
        """Return the policy's log-probabilities of the fixed rows; those from before its last update are remembered.

        All ranks must call this if the weights are sharded.
        """
        # the base is frozen, so one reading is enough
        if self.adapters is not None and self._of_base is None:
            with without_adapters(self.model.causal_lm):
                self._of_base = self._read()
        found = self._read()
        if self._now is None or not torch.equal(self._now, found):
            self._before, self._now = self._now, found
        return found

    def prove(self, held: Tensor, own: Tensor, *, place: str = "", outcome: str = NOTHING_SAMPLED) -> Proof:
        """Compare an engine's log-probabilities of the fixed rows with those of the policy, which ``logprobs``
        returned.

        Args:
            place: place of the engine, if there are several.
            outcome: see ``check_held``.

        Raises:
            WeightsDiffer: the engine does not hold the policy's weights.
        """
        proof = check_held(
            held,
            own,
            self._before,
            earlier=self._earlier.get(place),
            base=self._of_base,
            precision=self.precision,
            outcome=outcome,
        )
        self._earlier[place] = own, held
        return proof

    def _read(self) -> Tensor:
        return logprobs_of_policy(
            self.model, self.fixed_rows, precision=self.precision, pad_token_id=self.codec.pad_token_id
        )

    def response(self, ids: list[int], logprobs: list[float]) -> Response:
        """Return a response, with whether it ended.

        Raises:
            BadResponse: the response is too short, or has another number of log-probabilities than tokens.
        """
        codec = self.codec
        strings = codec.stop_strings
        ended = bool(ids) and (
            ids[-1] in codec.stop_token_ids or (strings is not None and strings.complete(ids))
        )
        if not ids or not (ended or len(ids) == codec.generation.max_response_tokens):
            raise BadResponse(f"vLLM ended a response after {len(ids)} tokens without one that ends it")
        if len(logprobs) != len(ids):
            raise BadResponse(f"vLLM returned {len(logprobs)} log-probabilities for {len(ids)} tokens")
        count_sampled(len(ids), ended=0)
        return ids, ended, logprobs

    @torch.no_grad()
    def at_temperature(self, prompts: list[list[int]], samples: Samples) -> Samples:
        """Return the same responses with the policy's log-probabilities at the recipe's temperature."""
        generation, logprobs = self.codec.generation, dict[int, list[float]]()
        limit = generation.max_response_tokens
        own = list(batches(list(map(len, prompts)), self._limits, max_new_tokens=limit))
        most = -ranks.least(-len(own))
        for places in own + [[]] * (most - len(own) if ranks.are_sharded() else 0):
            read = collate(
                [prompts[place] for place in places] or [[self.codec.pad_token_id]],
                [samples.responses[place] for place in places] or [[self.codec.pad_token_id]],
                pad_token_id=self.codec.pad_token_id,
            ).to(self.model.device)
            with autocast(self.precision, self.model.device):
                found = self.model.logprobs(read, temperature=generation.temperature).logprobs.tolist()
            for place, row in zip(
                places, found, strict=False
            ):  # a pass without places only keeps in step with the other ranks
                logprobs[place] = row[: len(samples.responses[place])]
        return Samples(samples.responses, samples.ended, [logprobs[place] for place in range(len(prompts))])
