"""The parts of one PPO iteration, by the code that stages run, on networks with random weights."""

import os
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from benchmarks.gpu.sizes import Fit, Rollout, Size
from vantage.algorithms.policy_loss import clipped_surrogate
from vantage.algorithms.value_loss import value_loss
from vantage.models.heads import ScalarModel, scores, values
from vantage.models.pass_counts import PassCounts, taken_counts
from vantage.models.policy import PolicyModel
from vantage.models.replayed_steps import SWITCH
from vantage.models.sampling import sample
from vantage.models.scalar_head import fresh_head
from vantage.models.sequences import Sequences, collate
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.tasks.training.metric_sums import LossSums
from vantage.tasks.training.optimization import Precision, autocast, frozen_dtype, make_optimizer, take_step
from vantage.tasks.training.passes import passes_of

PAD = 0
LEARNING_RATE = 1e-6
KL_COEF = 0.05


class Iteration:
    """Networks, a rollout, and the parts that are timed, each of which leaves what the next one needs."""

    def __init__(
        self, size: Size, rollout: Rollout, fit: Fit, *, device: torch.device, precision: Precision
    ) -> None:
        self.rollout, self.device, self.precision = rollout, device, precision
        self._sampling = PassLimits(rows=fit.sampled_rows)
        self._limits = PassLimits(tokens=fit.pass_tokens)
        config = config_of(size, rollout.total_tokens)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            policy, reference = (LlamaForCausalLM(config) for _ in range(2))
            critic, reward = (LlamaModel(config) for _ in range(2))
        self.policy = PolicyModel(policy).to(device)
        self.reference = PolicyModel(reference).to(device).requires_grad_(False)
        self.critic = ScalarModel(critic, fresh_head(critic, seed=1, bias=True)).to(device)
        reward.to(frozen_dtype(precision))  # type: ignore[arg-type]
        self.reward = ScalarModel(reward, fresh_head(reward, seed=2, bias=False)).to(device)
        self.reward.requires_grad_(False)
        self.optimizers = {
            module: make_optimizer(module, weight_decay=0.0) for module in (self.policy, self.critic)
        }
        draw = torch.Generator().manual_seed(2)
        sizes = (rollout.prompts, rollout.prompt_tokens)
        self._prompts = torch.randint(1, size.vocab_size, sizes, generator=draw).tolist()
        self._seed = 0
        self.counts = PassCounts()
        """Counts of the newest sampling."""
        self.sequences: Sequences
        self.rewards: Tensor
        self.old_logprobs: Tensor
        self.ref_logprobs: Tensor
        self.old_values: Tensor

    def parts(self) -> Mapping[str, Callable[[], None]]:
        """Return name → function that does the part, in the order in which they come."""
        return {
            "sampling": self.sample,
            "reward": self.score,
            "old log-probabilities": partial(self._read_logprobs, self.policy, "old_logprobs"),
            "reference": partial(self._read_logprobs, self.reference, "ref_logprobs"),
            "old values": self.value,
            "policy update": self.update_policy,
            "critic update": self.update_critic,
        }

    def sample(self) -> None:
        """Sample a response to each prompt, ``samples`` times."""
        self._seed += 1
        taken_counts()
        prompts = [prompt for prompt in self._prompts for _ in range(self.rollout.samples)]
        with autocast(self.precision, self.device):
            samples = sample(
                self.policy.causal_lm,
                prompts,
                max_new_tokens=self.rollout.response_tokens,
                temperature=1.0,
                eos_token_ids=(),
                pad_token_id=PAD,
                seed=self._seed,
                limits=self._sampling,
            )
        self.counts = taken_counts()
        self.sequences = collate(prompts, samples.responses, pad_token_id=PAD).to(self.device)

    def sample_plainly(self) -> None:
        """Sample the same without CUDA graphs."""
        before = os.environ.get(SWITCH)
        os.environ[SWITCH] = "0"
        try:
            self.sample()
        finally:
            if before is None:
                del os.environ[SWITCH]
            else:
                os.environ[SWITCH] = before

    @torch.no_grad()
    def score(self) -> None:
        """Score each response."""
        self.rewards = torch.zeros(len(self.sequences), device=self.device)
        for part in passes_of(self.sequences, self._limits):
            with autocast(self.precision, self.device):
                part.put(scores(self.reward, part.select(self.sequences)), into=self.rewards)

    @torch.no_grad()
    def value(self) -> None:
        """Compute values of each token's prefix, before the update."""
        self.old_values = torch.zeros(self.sequences.response_ids.shape, device=self.device)
        for part in passes_of(self.sequences, self._limits):
            with autocast(self.precision, self.device):
                part.put(values(self.critic, part.select(self.sequences)), into=self.old_values)

    @torch.no_grad()
    def _read_logprobs(self, model: PolicyModel, name: str) -> None:
        found = torch.zeros(self.sequences.response_ids.shape, device=self.device)
        for part in passes_of(self.sequences, self._limits):
            with autocast(self.precision, self.device):
                part.put(model.logprobs(part.select(self.sequences), temperature=1.0).logprobs, into=found)
        setattr(self, name, found)

    def update_policy(self) -> None:
        """Make one epoch: PPO's surrogate of the responses' scores, an optimiser step for each minibatch."""
        shaped = self.rewards - KL_COEF * (self.old_logprobs - self.ref_logprobs).sum(dim=1)
        advantages = (shaped - shaped.mean())[:, None].expand_as(self.old_logprobs)

        def loss(micro: Sequences, rows: Tensor, denominator: int) -> Tensor:
            predicted = self.policy.logprobs(micro, temperature=1.0, with_entropy=True)
            width = micro.response_ids.shape[1]
            return clipped_surrogate(
                predicted.logprobs,
                self.old_logprobs[rows, :width],
                advantages[rows, :width],
                micro.response_mask,
                clip_range_low=0.2,
                clip_range_high=0.2,
                dual_clip=None,
                aggregation="token",
                denominator=denominator,
            ).loss

        self._update(self.policy, loss)

    def update_critic(self) -> None:
        """Make one epoch of regression on the responses' scores."""
        targets = self.rewards[:, None].expand_as(self.old_values)

        def loss(micro: Sequences, rows: Tensor, denominator: int) -> Tensor:
            width = micro.response_ids.shape[1]
            return value_loss(
                values(self.critic, micro).float(),
                self.old_values[rows, :width],
                targets[rows, :width],
                micro.response_mask,
                value_clip_range=0.2,
                denominator=denominator,
            ).loss

        self._update(self.critic, loss)

    def _update(
        self, module: PolicyModel | ScalarModel, loss: Callable[[Sequences, Tensor, int], Tensor]
    ) -> None:
        order = torch.randperm(len(self.sequences), generator=torch.Generator().manual_seed(self._seed))
        for rows in order.chunk(self.rollout.minibatches):
            minibatch, on_device = self.sequences.select(rows), rows.to(self.device)
            denominator, losses = sum(minibatch.known.responses), LossSums()
            for part in passes_of(minibatch, self._limits):
                with autocast(self.precision, self.device):
                    found = loss(part.select(minibatch), on_device[part.rows], denominator)
                found.backward()
                losses.add("loss", found)
            losses.totals()
            take_step(self.optimizers[module], module, learning_rate=LEARNING_RATE, max_grad_norm=1.0)


def config_of(size: Size, positions: int) -> LlamaConfig:
    """Return what transformers builds the networks from."""
    return LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_heads,
        num_key_value_heads=size.num_kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=positions,
        tie_word_embeddings=size.has_tied_head,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=None,
    )
