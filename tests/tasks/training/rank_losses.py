"""Compute the gradient and the metrics of every loss of the stages, with its rows shared out over ranks.

    WITH_TORCH.run_main("tests.tasks.training.rank_losses", MODEL, WORLD_SIZE, OUTPUT)

forks WORLD_SIZE gloo processes, which write them as safetensors and JSON. ``test_ranks.py`` compares their sum with
those of one process.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import distributed, nn

from tests.support.on_ranks import fork_ranks
from vantage.models.folders import load_policy, load_tokenizer
from vantage.models.heads import ScalarModel, fresh_value_head, reward_with_language_head, value_from_policy
from vantage.models.policy import PolicyModel
from vantage.models.sequences import collate
from vantage.schemas.recipe.algorithm import Algorithm, Returns
from vantage.schemas.recipe.called_server import TeacherServer
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.resolved import (
    ResolvedDirectPreferenceOptimization,
    ResolvedKahnemanTverskyOptimization,
    ResolvedRewardModelling,
    ResolvedValuePretraining,
)
from vantage.schemas.recipe.stages import PolicyOptimization
from vantage.schemas.records.job import StageJob
from vantage.tasks import dpo, kto, reward_model
from vantage.tasks.data.examples import Codec, Completions, Rankings
from vantage.tasks.rewards.asking import Form
from vantage.tasks.rewards.scoring import Scorer, Scores
from vantage.tasks.rollout.engine import load_engine
from vantage.tasks.rollout.rollout_models import RolloutModels
from vantage.tasks.rollout.rollouts import Rollout, Sampled, Scored, build_rollout
from vantage.tasks.training import ranks
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.best_weights import keep_if_best
from vantage.tasks.training.gradients import add_gradients
from vantage.tasks.training.likelihood import accumulate_nll
from vantage.tasks.training.stage_state import BestSoFar
from vantage.tasks.training.writer import writes_files
from vantage.tasks.updates.actor_critic import ActorCritic
from vantage.tasks.updates.against_reference import Models
from vantage.tasks.updates.covariances import with_selected_tokens
from vantage.tasks.updates.estimates import estimate
from vantage.tasks.updates.policy_losses import (
    Coefficients,
    accumulate_losses,
    minibatch_of,
    surrogate_and_old_kl,
)
from vantage.tasks.updates.sampled_kl import accumulate_sampled_kl, measure_sampled_kl, teacher_logprobs
from vantage.tasks.updates.teacher import Pair, accumulate_reverse_kl, measure_reverse_kl
from vantage.tasks.updates.teacher_server import ServedTeacher
from vantage.tasks.updates.value_regression import accumulate_value_loss

LENGTHS = [5, 1, 7, 2, 3, 9, 4]
"""Tokens of the responses. The three ranks have 11, 4 and 16 of them; the first has two passes, the others one."""
ROWS = list(range(7))
IDS = [[7 + (row * 5 + place) % 80 for place in range(length)] for row, length in enumerate(LENGTHS)]
PROMPTS = [[1, 20 + row, *range(30, 30 + row % 3)] for row in range(7)]
SEQUENCES = collate(PROMPTS, IDS, pad_token_id=0)
MAX_LENGTH = 9
LEARNING_RATE = 1e-3
"""A rate that every stage names and no loss reads."""

NOISE = torch.randn(7, MAX_LENGTH, generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")

Metrics = dict[str, float]
Loss = Callable[[Path, list[int]], tuple[nn.Module, Metrics]]
"""Function of the model's folder and the minibatch's rows. Returns the network with the gradient of this rank's rows,
and the metrics."""


def with_tokens(metrics: Metrics, num_tokens: int) -> Metrics:
    """Return the metrics with the number of tokens read, which is summed over ranks: a rank without rows of its own reads none."""
    return {**metrics, "num_tokens": num_tokens}


def likelihood(folder: Path, rows: list[int]) -> tuple[nn.Module, Metrics]:
    policy = PolicyModel(load_policy(folder))
    found = accumulate_nll(
        policy, SEQUENCES.select(rows), temperature=0.8, limits=PassLimits(2), precision="float32"
    )
    return policy, {"nll": found.nll}


def packed_likelihood(folder: Path, rows: list[int]) -> tuple[nn.Module, Metrics]:
    """Compute the loss of packed rows, each a pass. Of three ranks the first packs 7 with 6 tokens, and 4 alone, the
    second 6 with 4, and the third 13 and 11 alone.
    """
    policy = PolicyModel(load_policy(folder))
    minibatch = SEQUENCES.select(rows)
    found = accumulate_nll(
        policy, minibatch, temperature=0.8, limits=PassLimits(1), precision="float32", packing=True
    )
    return policy, {"nll": found.nll}


def pairs() -> Completions:
    """Return seven pairs, in which each response is chosen over the one before it."""
    responses = {"chosen": IDS, "rejected": [IDS[row - 1] for row in range(7)]}
    return Completions(PROMPTS, responses, pad_token_id=0, num_too_long=0)


def bradley_terry(folder: Path, rows: list[int]) -> tuple[nn.Module, Metrics]:
    work = ResolvedRewardModelling(
        kind="reward_model",
        init="model",
        data="pairs",
        centre_coef=0.1,
        lm_coef=0.5,
        learning_rate=LEARNING_RATE,
        microbatch_size=2,
    )
    reward = reward_with_language_head(folder, seed=1, device=CPU)
    return reward, with_tokens(*reward_model.accumulate_pairs(reward, pairs(), rows, work))


def ranking(folder: Path, rows: list[int]) -> tuple[nn.Module, Metrics]:
    """Compute rankings of seven prompts, of which one has only ties."""
    responses = [[IDS[row], IDS[row - 1], IDS[row - 2]] for row in range(7)]
    places = [[0, 0, 0] if row == 1 else [0, 1, 1] if row % 2 else [2, 0, 1] for row in range(7)]
    rankings = Rankings(PROMPTS, responses, places, pad_token_id=0, num_too_long=0)
    work = ResolvedRewardModelling(
        kind="reward_model",
        init="model",
        rankings="rankings",
        learning_rate=LEARNING_RATE,
        microbatch_size=2,
    )
    reward = reward_with_language_head(folder, seed=1, device=CPU)
    return reward, with_tokens(*reward_model.accumulate_rankings(reward, rankings, rows, work))


@dataclass(frozen=True)
class Preferences:
    """The loss of a ``dpo`` stage with the given switches."""

    switches: dict[str, Any]

    def __call__(self, folder: Path, rows: list[int]) -> tuple[nn.Module, Metrics]:
        work = ResolvedDirectPreferenceOptimization.model_validate(
            {
                "kind": "dpo",
                "init": "model",
                "data": "pairs",
                "beta": 0.3,
                "learning_rate": LEARNING_RATE,
                "microbatch_size": 2,
                **self.switches,
            }
        )
        models = Models(
            policy=PolicyModel(load_policy(folder)),
            reference=reference_of(folder) if work.reads_reference else None,
            temperature=0.8,
        )
        return models.policy, with_tokens(*dpo.accumulate_preferences(models, pairs(), rows, work))


def labelled(folder: Path, rows: list[int]) -> tuple[nn.Module, Metrics]:
    """Compute labelled responses: every third is desirable. The reference point is of all ranks' rows, of which two
    have one prompt.
    """
    work = ResolvedKahnemanTverskyOptimization(
        kind="kto",
        init="model",
        reference="model",
        data="labelled",
        beta=0.3,
        desirable_weight=2.0,
        learning_rate=LEARNING_RATE,
        microbatch_size=2,
    )
    prompts = [PROMPTS[0], *PROMPTS[:6]]
    labels = [int(row % 3 == 0) for row in range(7)]
    data = Completions(prompts, {"response": IDS}, pad_token_id=0, num_too_long=0, labels=labels)
    policy = PolicyModel(load_policy(folder))
    policy.load_state_dict(
        reference_of(folder).state_dict()
    )  # to which mismatched responses are likelier than to the reference
    models = Models(policy=policy, reference=frozen(folder), temperature=0.8)
    return models.policy, with_tokens(*kto.accumulate_labelled(models, data, rows, work))


def value_regression(folder: Path, rows: list[int]) -> tuple[nn.Module, Metrics]:
    work = ResolvedValuePretraining(
        kind="value_pretraining",
        policy="p",
        init="p",
        reference="p",
        reward="r",
        prompts="d",
        returns=Returns(),
        learning_rate=LEARNING_RATE,
        microbatch_size=2,
    )
    critic = value_from_policy(folder, seed=2)
    rollout = rollout_of(folder, rows, Algorithm.model_validate("ppo"))
    returns = NOISE[rows, : rollout.logprobs.shape[1]]
    all_rows = torch.arange(len(rows))
    return critic, accumulate_value_loss(critic, rollout, returns, all_rows, work)


def reverse_kl(folder: Path, rows: list[int]) -> tuple[nn.Module, Metrics]:
    """Return the gradient of a minibatch, and the measurement of held-out responses, of which two have one prompt."""
    policy = PolicyModel(load_policy(folder))
    pair = Pair(policy, reference_of(folder), temperature=0.8, precision="float32")
    found = accumulate_reverse_kl(pair, SEQUENCES.select(rows), PassLimits(2))
    measured = measure_reverse_kl(pair, SEQUENCES, torch.tensor([0, 0, 1, 2, 3, 4, 5]), PassLimits(2))
    return policy, {
        "reverse_kl": found.reverse_kl,
        "entropy": found.entropy,
        "sum of log-probabilities": found.logprobs.sum().item(),
        "measured": measured.value,
        "standard error": measured.standard_error,
    }


class InProcess(ServedTeacher):
    """A served teacher whose answers are computed here, by the first rank alone."""

    def __init__(self, teacher: PolicyModel) -> None:
        self._server, self._proof, self._teacher = TeacherServer(url="http://t", model="t"), "", teacher

    def _answers(self, form: Form, asked: Sequence[Mapping[str, Any]]) -> list[str]:
        assert ranks.rank() == 0
        rows = collate(
            *([each[ids] for each in asked] for ids in ("prompt_ids", "response_ids")), pad_token_id=0
        )
        with torch.no_grad():
            logprobs = self._teacher.logprobs(rows, temperature=0.8).logprobs
        return [
            json.dumps(row[mask].tolist()) for row, mask in zip(logprobs, rows.response_mask, strict=True)
        ]


@dataclass(frozen=True)
class SampledKL:
    """The same loss, estimated from sampled tokens, which come from another policy than the one that learns."""

    is_served: bool

    def __call__(self, folder: Path, rows: list[int]) -> tuple[nn.Module, Metrics]:
        policy, held = PolicyModel(load_policy(folder)), reference_of(folder)
        teacher = InProcess(held) if self.is_served else held
        pair = Pair(policy, teacher, temperature=0.8, precision="float32")
        sequences = SEQUENCES.select(rows)
        old = 0.1 * NOISE[rows, : sequences.response_ids.shape[1]] - 4.0
        texts = [""] * len(rows)
        sampled = Sampled(texts, list(texts), texts, sequences, torch.ones(len(rows), dtype=torch.bool), old)
        taught = teacher_logprobs(pair, SEQUENCES, PassLimits(2))[rows, : old.shape[1]]
        found = accumulate_sampled_kl(pair, sampled, taught, PassLimits(2))
        measured = measure_sampled_kl(pair, SEQUENCES, torch.tensor([0, 0, 1, 2, 3, 4, 5]), PassLimits(2))
        return policy, {
            "reverse_kl": found.reverse_kl,
            "entropy": found.entropy,
            "sum of log-probabilities": found.logprobs.sum().item(),
            "measured": measured.value,
            "standard error": measured.standard_error,
        }


@cache
def frozen(folder: Path) -> PolicyModel:
    """Return the policy as it was before any update."""
    return PolicyModel(load_policy(folder)).requires_grad_(False)


@cache
def reference_of(folder: Path) -> PolicyModel:
    """Return the same network with other weights."""
    reference = PolicyModel(load_policy(folder))
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return reference.requires_grad_(False)


def rollout_of(folder: Path, rows: list[int], algorithm: Algorithm) -> Rollout:
    """Return these rows as a rollout of a policy that is off the one that learns; three of the seven were cut off."""
    sequences = SEQUENCES.select(rows)
    shape = sequences.response_mask.shape
    noise = (0.2 * NOISE[rows, : shape[1]]).masked_fill(~sequences.response_mask, 0.0)
    with torch.no_grad():
        logprobs, ref_logprobs = (
            policy.logprobs(sequences, temperature=0.8).logprobs
            for policy in (frozen(folder), reference_of(folder))
        )
    scores = NOISE[rows, 0]
    texts = [str(row) for row in rows]
    sampled = Sampled(
        prompts=texts,
        answers=[None] * len(rows),
        responses=texts,
        sequences=sequences,
        ended=torch.tensor([row % 3 != 1 for row in rows]),
        sampler_logprobs=logprobs,
    )
    return build_rollout(
        Scored(sampled, Scores(total=scores, weighted_sum=scores, by_term={})),
        logprobs + noise,
        ref_logprobs,
        returns=algorithm,
        moments=None,
        kl_coef=algorithm.kl_coef,
        max_length=MAX_LENGTH,
    )


@dataclass(frozen=True)
class PolicyLoss:
    """The losses of one policy update with the given switches."""

    switches: dict[str, Any]

    def __call__(self, folder: Path, rows: list[int]) -> tuple[nn.Module, Metrics]:
        """Return the gradient of policy and critic."""
        work = PolicyOptimization.model_validate(
            {
                "kind": "policy_optimization",
                "algorithm": self.switches,
                "init": "model",
                "critic": "value" if Algorithm.model_validate(self.switches).reads_critic else None,
                "ptx": "demonstrations",
                "reward": "main",
                "prompts": "prompts",
                "batch_size": 112,
                "minibatch_size": 112,
                "microbatch_size": 2,
            }
        )
        algorithm = work.algorithm
        networks = self._networks(folder, algorithm)
        rollout = rollout_of(folder, rows, algorithm)
        if algorithm.shared_trunk:
            found = networks.policy.logprobs(rollout.sequences, temperature=0.8, with_values=True)
            assert found.values is not None
            rollout = replace(rollout, values=found.values.detach())
        estimates = estimate(rollout, algorithm, old_values=networks.values(rollout))
        all_rows = torch.arange(len(rows))
        minibatch = minibatch_of(rollout, estimates, all_rows, work, max_length=MAX_LENGTH)
        minibatch = with_selected_tokens(networks, minibatch, work, seed=3, step=5)
        metrics = accumulate_losses(
            networks,
            minibatch,
            work,
            coefs=Coefficients(algorithm.kl_penalty_coef, algorithm.entropy_coef),
            ptx=SEQUENCES.select(rows) if algorithm.ptx_coef else None,
        )
        surrogate, old_kl = surrogate_and_old_kl(networks, minibatch, work)
        metrics |= {"measured_surrogate": surrogate, "measured_old_kl": old_kl}
        return nn.ModuleList(networks.modules.values()), metrics

    def _networks(self, folder: Path, algorithm: Algorithm) -> ActorCritic:
        causal_lm = load_policy(folder)
        value_head = fresh_value_head(causal_lm, seed=2) if algorithm.shared_trunk else None
        policy = PolicyModel(causal_lm, value_head)
        critic: ScalarModel | None = None
        modules: dict[str, nn.Module] = {"policy": policy}
        if algorithm.reads_critic:
            critic = value_from_policy(folder, seed=2)
            modules["critic"] = critic
        generation = Generation(max_response_tokens=MAX_LENGTH, temperature=0.8)
        codec = Codec(load_tokenizer(folder), generation, chat=None)
        models = RolloutModels(
            policy=policy,
            engine=load_engine(policy, codec, limits=PassLimits(2)),
            reference=reference_of(folder),
            scorer=Scorer((), None),
            codec=codec,
            limits=PassLimits(2),
            precision="float32",
        )
        return ActorCritic(models, critic, modules, optimizers={}, learning_rates={})


PPO: dict[str, Any] = {"preset": "ppo"}
WITH_KL_LOSS = {**PPO, "kl_loss_coef": 0.5}
SELECTED = {"covariance_share": 0.2, "covariance_low": -9.0, "covariance_high": 9.0}
"""Switches that select six of the 31 tokens of the three ranks."""
LOSSES: dict[str, Loss] = {
    "SFT NLL": likelihood,
    "SFT NLL, packed": packed_likelihood,
    "Bradley-Terry, centring and NLL": bradley_terry,
    "ranking": ranking,
    "DPO": Preferences({}),
    "KTO": labelled,
    "IPO of means": Preferences({"loss": "ipo", "length_normalised": True}),
    "SimPO": Preferences({"loss": "simpo", "beta": 2.0, "target_margin": 1.0, "label_smoothing": 0.1}),
    "ORPO": Preferences({"loss": "orpo"}),
    "distillation": reverse_kl,
    "distillation of sampled tokens": SampledKL(is_served=False),
    "distillation by a server": SampledKL(is_served=True),
    "value loss": value_regression,
    "token": PolicyLoss({**PPO, "aggregation": "token"}),
    "sequence": PolicyLoss({**PPO, "aggregation": "sequence"}),
    "sequence_sum": PolicyLoss({**PPO, "aggregation": "sequence_sum"}),
    "constant": PolicyLoss({**PPO, "aggregation": "constant"}),
    "overlong filter and entropy": PolicyLoss({**PPO, "overlong_filter": True, "entropy_coef": 0.3}),
    "KL loss k2": PolicyLoss({**WITH_KL_LOSS, "kl_loss_kind": "k2", "aggregation": "sequence"}),
    "KL loss k3": PolicyLoss({**WITH_KL_LOSS, "kl_loss_kind": "k3"}),
    "full KL loss": PolicyLoss({**WITH_KL_LOSS, "kl_loss_kind": "full"}),
    "KL to the old policy": PolicyLoss({"preset": "ppo_kl_penalty"}),
    "positive NLL": PolicyLoss({"preset": "vapo", "length_adaptive_alpha": 0.5, "positive_threshold": 0.0}),
    "ptx": PolicyLoss({"preset": "ppo_max", "reward_scaling": "none", "ptx_coef": 0.7}),
    "normalised by minibatch": PolicyLoss({"preset": "ppo_max_normalised", "reward_scaling": "none"}),
    "shared trunk": PolicyLoss({**PPO, "shared_trunk": True, "entropy_coef": 0.1}),
    "plain gradient": PolicyLoss({"preset": "a2c"}),
    "ratio of the response": PolicyLoss(
        {**PPO, "ratio_level": "sequence", "aggregation": "sequence", "clip_range_high": 0.01}
    ),
    "clipped weight": PolicyLoss({**PPO, "surrogate": "clipped_weight"}),
    "soft gate": PolicyLoss({**PPO, "surrogate": "soft_gate", "soft_gate_negative": 3.0}),
    "geometric mean": PolicyLoss({"preset": "grpo", "samples_per_prompt": 7, "surrogate": "geometric_mean"}),
    "clip-cov": PolicyLoss({**PPO, **SELECTED, "covariance": "clip"}),
    "kl-cov": PolicyLoss({**PPO, **SELECTED, "covariance": "kl"}),
    "unbiased KL loss": PolicyLoss({**WITH_KL_LOSS, "kl_loss_kind": "k3", "kl_loss_gradient": "unbiased"}),
}


def gradient_of(network: nn.Module) -> torch.Tensor:
    """Return every parameter's gradient in one row; 0 where there is none."""
    parameters = network.parameters()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])


def agreements(scratch: Path, rank: int) -> dict[str, Any]:
    """Return what the ranks make of a loop in which each has a say of its own."""
    network = nn.Linear(1, 1)
    job = cast(
        StageJob,
        SimpleNamespace(
            run_id="0001-test", scratch=scratch, inputs={}, work=SimpleNamespace(checkpoint_every=2)
        ),
    )
    steps: list[int] = []
    with Attempt(
        job,
        total=9,
        modules={"network": network},
        optimizers={},
        state=BestSoFar(),
        keeps_best=True,
    ) as attempt:
        for step in attempt.remaining():
            # the first rank measures 0, 1, 2 …, the others the other way round
            measured = float(step if rank == 0 else -step)
            keep_if_best(attempt, network, measured, metric="score", iteration=step)
            if rank == 1 and step == 2:
                attempt.stop()
            attempt.finish_step({"loss": 1.0}, num_tokens=10 + rank, headline="loss")
            steps.append(step)
    return {
        "steps": steps,
        "state": asdict(attempt.state),
        "any": [ranks.any_rank(rank == 1), ranks.any_rank(False)],
        "text": [
            ranks.agreed_text(f"µ of rank {rank}" * (rank + 1)),
            ranks.agreed_text("" if rank == 0 else "b"),
        ],
        "total": [
            ranks.total(rank + 1),
            ranks.total(0.5 + rank),
            ranks.total(torch.tensor([1, rank])).tolist(),
        ],
        "rows": list(range(7))[ranks.own(7)],
        "writes": writes_files(),
    }


def work(rank: int, world_size: int, folder: Path, output: Path) -> None:
    """Write the sum of the ranks' gradients, each rank's metrics, and what they agreed on."""
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{output / 'rendezvous'}", rank=rank, world_size=world_size
    )
    gradients, metrics = {}, {}
    for name, loss in LOSSES.items():
        network, metrics[name] = loss(folder, ROWS)
        add_gradients(network)
        gradients[name] = gradient_of(network)
    said = {"metrics": metrics, "agreements": agreements(output / "scratch", rank)}
    (output / f"{rank}.json").write_text(json.dumps(said))
    if rank == 0:
        save_file(gradients, output / "gradients.safetensors")
    distributed.barrier()
    distributed.destroy_process_group()


def main() -> None:
    """Run the ranks of a model's folder, and end as the worst of them."""
    folder, world_size, output = sys.argv[1:]
    fork_ranks(int(world_size), work, Path(folder), Path(output))
