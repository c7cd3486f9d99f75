"""Train critics of one policy, from worse than a constant to nearly all that can be known."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from docs.critic_boundary.study.setting import Responses, Setting
from vantage.algorithms.value_loss import value_loss
from vantage.models.heads import ScalarModel, load_critic, values
from vantage.models.sequences import Sequences
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.tasks.rollout.minibatches import minibatches
from vantage.tasks.rollout.rollouts import per_token
from vantage.tasks.training.optimization import make_optimizer, update_weights
from vantage.tasks.training.seeds import derive_seed

NUM_ROLLOUTS = 8
"""Rollouts of the value stage's batch size that the critic learns from, the value stage's epochs each."""
NUM_ORACLE_ROLLOUTS = 4
"""The first of them, on which the oracle's chances are counted."""
STOPS = (4, 8, 64)
"""Updates after which a copy of the critic is kept, beside the first (the reward model) and the last."""
REWARD_MODEL, PRETRAINED, FRESH, ORACLE = "reward model", "pretrained", "fresh head", "oracle"
MICROBATCH = 64
PATH_BIN = 8
"""Tokens of one part of the greedy response, over which the oracle's chance of success is one number."""


@dataclass(frozen=True)
class Oracle:
    """The value of a prefix by what no network has to learn: whether it agrees with the greedy response so far.

    −1 (wrong) after the first token that differs; before, 2·p − 1 with the share p of responses that end right of
    those that agree so far with as many tokens of the greedy response left.
    """

    chances: dict[int, float]
    """Greedy tokens left // `PATH_BIN` → p."""

    def values(self, agrees: Tensor, left: Tensor, mask: Tensor) -> Tensor:
        """Return values (B,T) for the prefixes before each token."""
        on_path = torch.zeros(mask.shape)
        for part, chance in self.chances.items():
            on_path[left // PATH_BIN == part] = 2 * chance - 1
        return torch.where(agrees, on_path, -1.0).masked_fill(~mask, 0.0)


def pretrain(setting: Setting, rollouts: list[Responses]) -> Iterator[tuple[str, ScalarModel]]:
    """Yield name and copy of one critic as it learns Monte-Carlo returns from the reward model on: at each stop, and the last."""
    work = setting.pretraining
    critic = load_critic(setting.folders["reward"], seed=0)
    yield REWARD_MODEL, copy.deepcopy(critic)
    optimizer = make_optimizer(critic, weight_decay=work.weight_decay)
    total = len(rollouts) * work.epochs * work.batch_size // work.minibatch_size
    step = 0
    for number, responses in enumerate(rollouts):
        for epoch in minibatches(responses.sequences, work, seed=setting.seed, iteration=number):
            for rows in epoch:
                micro = responses.sequences.select(rows)
                targets = responses.returns[rows, : micro.response_ids.shape[1]]
                value_loss(values(critic, micro), None, targets, micro.response_mask).loss.backward()
                update_weights(optimizer, critic, work, step=step, total_steps=total)
                step += 1
                if step in STOPS:
                    yield f"stopped at {step}", copy.deepcopy(critic)
    yield PRETRAINED, critic


def fresh_critic(setting: Setting) -> ScalarModel:
    """Return the policy's trunk with a new head, which has learned nothing."""
    return load_critic(setting.folders["sft"], seed=derive_seed(setting.seed, "study head"))


def training_prompts(setting: Setting, number: int) -> list[int]:
    """Return the prompts of one rollout that the critic learns from; nothing is measured on them."""
    size = setting.pretraining.batch_size
    return setting.order[number * size : (number + 1) * size]


def training_rollouts(setting: Setting) -> list[Responses]:
    """Return everything that the critic learns from."""
    return [
        setting.respond(training_prompts(setting, number), stream="study pretraining", number=number, count=1)
        for number in range(NUM_ROLLOUTS)
    ]


def predict(critic: ScalarModel, sequences: Sequences) -> Tensor:
    """Return values (B,T), 0 outside the mask."""
    said = per_token(
        lambda part: {"values": values(critic, part)},
        sequences,
        limits=PassLimits(MICROBATCH),
        computes="values",
    )
    return said["values"]


def fit_oracle(setting: Setting, rollouts: list[Responses]) -> Oracle:
    """Return the chances of success along the greedy response, counted on the first of what the critic learns from."""
    outcomes: dict[int, list[bool]] = {}
    for number, responses in enumerate(rollouts[:NUM_ORACLE_ROLLOUTS]):
        agrees, left = along_greedy(setting, responses, training_prompts(setting, number), count=1)
        here = agrees & responses.mask
        for part, outcome in zip(
            (left[here] // PATH_BIN).tolist(), (responses.returns[here] > 0).tolist(), strict=True
        ):
            outcomes.setdefault(part, []).append(outcome)
    return Oracle({part: sum(outcomes[part]) / len(outcomes[part]) for part in sorted(outcomes)})


def along_greedy(
    setting: Setting, responses: Responses, indices: list[int], *, count: int
) -> tuple[Tensor, Tensor]:
    """Return whether the prefix before each token agrees with the greedy response (B,T), and the greedy tokens left (B,T)."""
    greedy = setting.greedy(indices).sequences
    sampled = responses.sequences.response_ids
    width = sampled.shape[1]
    wanted = torch.full((len(indices), width), -1)
    shared = min(width, greedy.response_ids.shape[1])
    wanted[:, :shared] = greedy.response_ids.masked_fill(~greedy.response_mask, -1)[:, :shared]
    wanted, lengths = wanted.repeat_interleave(count, 0), greedy.lengths.repeat_interleave(count, 0)
    same = (sampled == wanted).to(torch.int64).cumprod(dim=1).to(torch.bool)
    before = torch.cat([torch.ones(len(sampled), 1, dtype=torch.bool), same[:, :-1]], dim=1)
    left = (lengths[:, None] - torch.arange(width)).clamp(min=0)
    return before, left
