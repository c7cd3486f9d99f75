"""In a whole minibatch's losses on the tiny policy micro-batches change nothing, and the parts are what they claim."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.tasks.small_models import models_of
from vantage.algorithms.importance import importance_weights
from vantage.models.folders import load_policy
from vantage.models.sequences import Sequences, collate
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.stages import PolicyOptimization
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.examples import read_prompts
from vantage.tasks.rollout.rollout_models import RolloutModels
from vantage.tasks.rollout.rollouts import (
    Rollout,
    rollout_logprobs,
    sample_and_score,
    shape,
)
from vantage.tasks.training.nonfinite import TrainingDiverged
from vantage.tasks.updates.actor_critic import ActorCritic, load_actor_critic
from vantage.tasks.updates.covariances import with_selected_tokens
from vantage.tasks.updates.estimates import estimate
from vantage.tasks.updates.policy_losses import (
    Coefficients,
    Minibatch,
    accumulate_losses,
    minibatch_of,
    surrogate_and_old_kl,
)

CPU = torch.device("cpu")
MAX_LENGTH = 10
ROWS = 7

KL_LOSS = {"preset": "grpo", "samples_per_prompt": ROWS, "kl_loss_coef": 0.5}
GROUP = {"preset": "grpo", "samples_per_prompt": ROWS, "kl_loss_coef": 0.0}
SELECTED = {"covariance_share": 0.2, "covariance_low": -9.0, "covariance_high": 9.0}
SWITCHES: dict[str, dict[str, Any]] = {
    "k2 loss": {**KL_LOSS, "kl_loss_kind": "k2"},
    "k3 loss": {**KL_LOSS, "kl_loss_kind": "k3", "aggregation": "sequence_sum"},
    "abs loss": {**KL_LOSS, "kl_loss_kind": "abs", "aggregation": "token"},
    "full KL loss": {**KL_LOSS, "kl_loss_kind": "full"},
    "full KL loss over a constant": {**KL_LOSS, "kl_loss_kind": "full", "aggregation": "constant"},
    "KLPEN by k3": {"preset": "ppo_kl_penalty"},
    "KLPEN by k1": {"preset": "ppo_kl_penalty", "kl_penalty_kind": "k1", "aggregation": "sequence"},
    "ptx": {"preset": "ppo_max", "reward_scaling": "none", "ptx_coef": 0.7},
    "shared trunk": {"preset": "ppo", "shared_trunk": True, "entropy_coef": 0.1},
    "overlong filter": {
        "preset": "ppo",
        "overlong_filter": True,
        "entropy_coef": 0.1,
        "whiten_advantages": False,
    },
    "dual clip": {"preset": "dapo", "samples_per_prompt": ROWS, "dual_clip": 1.1},
    "normalise and clip": {
        "preset": "ppo_max_normalised",
        "reward_scaling": "none",
        "value_clip_range": 0.05,
    },
    "positive NLL": {"preset": "vapo", "samples_per_prompt": ROWS, "positive_threshold": -100.0},
    "plain gradient": {"preset": "rloo", "samples_per_prompt": ROWS},
    "ratio of the response": {**GROUP, "ratio_level": "sequence"},
    "clipped weight": {**GROUP, "surrogate": "clipped_weight"},
    "soft gate": {**GROUP, "surrogate": "soft_gate"},
    "geometric mean": {**GROUP, "surrogate": "geometric_mean"},
    "clip-cov": {**GROUP, **SELECTED, "covariance": "clip"},
    "kl-cov": {**GROUP, **SELECTED, "covariance": "kl", "aggregation": "token"},
    "unbiased KL loss": {**KL_LOSS, "kl_loss_kind": "k1", "kl_loss_gradient": "unbiased"},
}


@dataclass(frozen=True)
class Rolled:
    """Responses of the tiny policy, and what an update of them needs."""

    job: StageJob
    models: RolloutModels
    rollout: Rollout
    ptx: Sequences

    def work(self, switches: dict[str, Any], *, microbatch_size: int | None = None) -> PolicyOptimization:
        """Return the stage's configuration under these switches."""
        algorithm = Algorithm.model_validate(switches)
        critic = "value" if algorithm.reads_critic else None
        update = {"algorithm": algorithm, "critic": critic, "microbatch_size": microbatch_size}
        return self.job.work.model_copy(update=update)  # type: ignore[return-value]

    def networks(self, work: PolicyOptimization) -> ActorCritic:
        """Return fresh networks of this configuration, beside the reference of the rollout."""
        return load_actor_critic(self.job.model_copy(update={"work": work}), CPU)

    def minibatch(self, networks: ActorCritic, work: PolicyOptimization) -> Minibatch:
        """Return all responses as one minibatch; the values that are clipped around are off those of now."""
        found = rollout_logprobs(
            networks.policy,
            self.rollout.sequences,
            self.models,
            with_values=networks.policy.value_head is not None,
        )
        rollout = replace(self.rollout, values=found.values)
        old_values = networks.values(rollout)
        estimates = estimate(rollout, work.algorithm, old_values=old_values)
        if old_values is not None:
            noise = torch.randn(old_values.shape, generator=torch.Generator().manual_seed(1))
            estimates = replace(estimates, old_values=old_values + 0.1 * noise)
        minibatch = minibatch_of(rollout, estimates, torch.arange(ROWS), work, max_length=MAX_LENGTH)
        return with_selected_tokens(networks, minibatch, work, seed=3, step=5)

    def update(
        self, switches: dict[str, Any], *, microbatch_size: int | None = None, with_ptx: bool = True
    ) -> tuple[ActorCritic, dict[str, float]]:
        """Return fresh networks with the gradient of the whole minibatch, and its metrics."""
        work = self.work(switches, microbatch_size=microbatch_size)
        networks = self.networks(work)
        ptx = self.ptx if work.algorithm.ptx_coef and with_ptx else None
        metrics = accumulate_losses(
            networks,
            self.minibatch(networks, work),
            work,
            coefs=Coefficients(work.algorithm.kl_penalty_coef, work.algorithm.entropy_coef),
            ptx=ptx,
        )
        return networks, metrics


@pytest.fixture(scope="module")
def rolled(pipeline: Any) -> Rolled:
    """Return responses that were sampled by another policy than the one that learns, against an untrained reference.

    So ratios are off 1, clips bind and KLs are not 0. Some are cut off and some are not.
    """
    job = pipeline.job("policy")
    job = job.model_copy(
        update={
            "generation": Generation(max_prompt_tokens=48, max_response_tokens=MAX_LENGTH),
            "inputs": {**job.inputs, "reference": pipeline.folder("model")},
        }
    )
    models = models_of(job, reference=job.inputs["reference"])
    codec = models.codec
    prompts = read_prompts(job.inputs["prompts"], "train", codec)
    scored = sample_and_score(models, prompts, list(range(ROWS)), seed=3)
    mask = scored.sampled.sequences.response_mask
    # Three were cut off: by this flag, since so short a limit cuts off nearly all
    ended = torch.tensor([True, False, True, True, False, True, False])
    scored = replace(scored, sampled=replace(scored.sampled, ended=ended))
    rollout = shape(models, scored, returns=Algorithm.model_validate("ppo"))
    noise = torch.randn(mask.shape, generator=torch.Generator().manual_seed(0))
    old_logprobs = rollout.logprobs + (0.3 * noise).masked_fill(~mask, 0.0)
    ptx = collate([[5, 6, 7], [5], [6, 7]], [[8, 9, 10, 11], [12], [9, 9]], pad_token_id=codec.pad_token_id)
    return Rolled(job, models, replace(rollout, logprobs=old_logprobs), ptx)


def gradients_of(networks: ActorCritic) -> torch.Tensor:
    """Return every parameter's gradient in one row; 0 where there is none."""
    parameters = [p for module in networks.modules.values() for p in module.parameters()]
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])


def policy_gradient_of(networks: ActorCritic) -> torch.Tensor:
    parameters = list(networks.policy.causal_lm.parameters())
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters])


def assert_same_gradient(found: torch.Tensor, expected: torch.Tensor) -> None:
    scale = expected.abs().max()
    assert scale > 0
    torch.testing.assert_close(found / scale, expected / scale, atol=2e-5, rtol=0)


# The purpose of a case must show in its metrics
SEEN = {
    "KLPEN": "old_kl",
    "ptx": "ptx_nll",
    "dual": "dual_clip_fraction",
    "normalise": "value_clip_fraction",
    "shared": "value_loss",
    "overlong": "clip_fraction",
    "positive": "positive_nll",
    "plain": "approx_kl",
    "ratio": "clip_fraction",
    "clipped": "weight_clip_fraction",
    "soft": "gate_slope",
    "geometric": "clip_fraction",
    "clip-cov": "covariance_fraction",
    "kl-cov": "covariance_kl",
}


@pytest.mark.parametrize("name", list(SWITCHES))
def test_micro_batches_leave_every_gradient_unchanged(rolled: Rolled, name: str) -> None:
    whole, metrics = rolled.update(SWITCHES[name])
    split, split_metrics = rolled.update(SWITCHES[name], microbatch_size=2)
    assert_same_gradient(gradients_of(split), gradients_of(whole))
    assert split_metrics.keys() == metrics.keys()
    for metric, value in metrics.items():
        assert split_metrics[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), metric
    assert metrics[SEEN.get(name.split()[0], "kl_loss")] > 0


def test_rows_may_come_in_any_order(rolled: Rolled) -> None:
    """The advantages go with their rows into every micro-batch."""
    work = rolled.work({"preset": "ppo", "value_clip_range": None}, microbatch_size=3)
    gradients = []
    for rows in (torch.arange(ROWS), torch.tensor([4, 0, 6, 2, 1, 5, 3])):
        networks = rolled.networks(work)
        old_values = networks.values(rolled.rollout)
        estimates = estimate(rolled.rollout, work.algorithm, old_values=old_values)
        minibatch = minibatch_of(rolled.rollout, estimates, rows, work, max_length=MAX_LENGTH)
        accumulate_losses(networks, minibatch, work, coefs=Coefficients())
        gradients.append(gradients_of(networks))
    assert_same_gradient(gradients[1], gradients[0])


def test_a_response_that_was_filtered_out_pulls_the_policy_nowhere(rolled: Rolled) -> None:
    """The loss is that of the minibatch without it, advantages being given; the critic learns from it all the same."""
    switches = {**SWITCHES["overlong filter"], "kl_loss_coef": 0.1}
    filtered, metrics = rolled.update(switches)
    kept = torch.tensor([0, 2, 3, 5])
    work = rolled.work({**switches, "overlong_filter": False})
    networks = rolled.networks(work)
    old_values = networks.values(rolled.rollout)
    estimates = estimate(rolled.rollout, work.algorithm, old_values=old_values)
    minibatch = minibatch_of(rolled.rollout, estimates, kept, work, max_length=MAX_LENGTH)
    accumulate_losses(networks, minibatch, work, coefs=Coefficients(entropy=0.1))
    assert_same_gradient(policy_gradient_of(filtered), policy_gradient_of(networks))
    _, unfiltered = rolled.update({**switches, "overlong_filter": False})
    assert metrics["value_mse"] == unfiltered["value_mse"]
    assert metrics["entropy"] == pytest.approx(unfiltered["entropy"])


@pytest.mark.parametrize("covariance", ["clip", "kl"])
def test_weights_of_another_sampler_select_no_other_tokens(rolled: Rolled, covariance: str) -> None:
    """The weights act on the loss, while the covariance is that of the advantages themselves."""
    switches = {**GROUP, **SELECTED, "covariance": covariance, "rollout_correction": "tis"}
    work = rolled.work(switches)
    networks = rolled.networks(work)
    mask = rolled.rollout.sequences.response_mask
    weights = importance_weights(
        rolled.rollout.logprobs,
        rolled.rollout.logprobs + torch.arange(ROWS)[:, None],  # 1, 1/e, 1/e² …
        mask,
        correction="truncate",
    )
    weighted = replace(rolled, rollout=replace(rolled.rollout, importance=weights))
    plain, other = (each.minibatch(networks, work) for each in (rolled, weighted))
    assert plain.selected is not None and other.selected is not None
    assert plain.selected.any() and torch.equal(plain.selected, other.selected)
    assert not torch.allclose(plain.advantages[mask], other.advantages[mask])


@pytest.mark.parametrize("aggregation", ["token", "sequence", "sequence_sum", "constant"])
def test_where_all_were_filtered_out_the_policy_stays(rolled: Rolled, aggregation: str) -> None:
    sampled = replace(rolled.rollout.sampled, ended=torch.zeros(ROWS, dtype=torch.bool))
    all_cut_off = replace(rolled, rollout=replace(rolled.rollout, sampled=sampled))
    switches = {
        "preset": "ppo",
        "aggregation": aggregation,
        "overlong_filter": True,
        "normalise_advantages": True,
        "entropy_coef": 0.1,
        "kl_loss_coef": 0.1,
        "kl_penalty_coef": 0.1,
        "positive_nll_coef": 0.1,
        "positive_threshold": -100.0,
    }
    networks, metrics = all_cut_off.update(switches, microbatch_size=3)
    assert policy_gradient_of(networks).abs().max() == 0
    assert metrics["policy_loss"] == metrics["surrogate_loss"] == 0.0
    assert metrics["value_loss"] > 0
    assert gradients_of(networks).abs().max() > 0
    work = all_cut_off.work(switches)
    minibatch = all_cut_off.minibatch(networks, work)
    assert surrogate_and_old_kl(networks, minibatch, work) == (0.0, 0.0)


def test_demonstrations_add_their_weighted_nll_per_token(rolled: Rolled) -> None:
    """The NLL of the 4 + 1 + 2 tokens equals torch's cross-entropy on the model's own logits, row by row."""
    switches = SWITCHES["ptx"]
    with_ptx, metrics = rolled.update(switches, microbatch_size=2)
    without, _ = rolled.update(switches, with_ptx=False)
    oracle = load_policy(rolled.job.inputs["init"])
    rows = [([5, 6, 7], [8, 9, 10, 11]), ([5], [12]), ([6, 7], [9, 9])]
    nll = torch.zeros(())
    for prompt, response in rows:
        logits = oracle(torch.tensor([prompt + response])).logits[0]
        predicting = logits[len(prompt) - 1 : len(prompt) + len(response) - 1]
        nll = nll + cross_entropy(predicting, torch.tensor(response), reduction="sum")
    (nll / 7).backward()
    assert metrics["ptx_nll"] == pytest.approx((nll / 7).item(), rel=1e-5)
    expected = torch.cat([p.grad.flatten() for p in oracle.parameters() if p.grad is not None])
    assert_same_gradient((policy_gradient_of(with_ptx) - policy_gradient_of(without)) / 0.7, expected)


@pytest.mark.parametrize("microbatch_size", [None, 2])
def test_right_responses_are_imitated_per_token_of_those_that_the_filter_leaves(
    rolled: Rolled, microbatch_size: int | None
) -> None:
    """The loss equals torch's cross-entropy. Rows 0, 2, 3 and 5 ended, and of these all but the lowest are right."""
    ended, scores = [0, 2, 3, 5], rolled.rollout.scores.total.tolist()
    threshold = min(scores[row] for row in ended)
    right = [row for row in ended if scores[row] > threshold]
    switches = {**SWITCHES["overlong filter"], "positive_threshold": threshold}
    imitating, metrics = rolled.update(
        {**switches, "positive_nll_coef": 0.7}, microbatch_size=microbatch_size
    )
    without, _ = rolled.update({**switches, "positive_nll_coef": 0.0}, microbatch_size=microbatch_size)
    oracle, sequences = load_policy(rolled.job.inputs["init"]), rolled.rollout.sequences
    nll, num_tokens = torch.zeros(()), 0
    for row in right:
        prompt, response = sequences.prompt_rows()[row], sequences.response_rows()[row]
        logits = oracle(torch.tensor([prompt + response])).logits[0] / rolled.job.generation.temperature
        predicting = logits[len(prompt) - 1 : len(prompt) + len(response) - 1]
        nll = nll + cross_entropy(predicting, torch.tensor(response), reduction="sum")
        num_tokens += len(response)
    (nll / num_tokens).backward()
    assert 0 < len(right) < len(ended)
    assert metrics["positive_nll"] == pytest.approx((nll / num_tokens).item(), rel=1e-5)
    expected = torch.cat([p.grad.flatten() for p in oracle.parameters() if p.grad is not None])
    assert_same_gradient((policy_gradient_of(imitating) - policy_gradient_of(without)) / 0.7, expected)


def test_a_shared_trunk_learns_from_policy_loss_plus_weighted_value_loss(rolled: Rolled) -> None:
    """The gradient grows with value_coef by that of ½·mean (V − target)², V read by the head off the policy's trunk."""
    switches = {**SWITCHES["shared trunk"], "value_clip_range": None}
    weak, metrics = rolled.update({**switches, "value_coef": 0.5})
    strong, _ = rolled.update({**switches, "value_coef": 2.0})
    assert weak.critic is None
    assert list(weak.optimizers) == ["policy"]
    difference = (gradients_of(strong) - gradients_of(weak)) / 1.5

    work = rolled.work(switches)
    networks = rolled.networks(work)
    targets = rolled.minibatch(networks, work).estimates.targets
    assert targets is not None
    assert networks.policy.value_head is not None
    errors = []
    sequences = rolled.rollout.sequences
    for row, (start, length) in enumerate(
        zip(sequences.prompt_lengths.tolist(), sequences.lengths.tolist(), strict=True)
    ):
        hidden = networks.policy.causal_lm.base_model(sequences.input_ids[row : row + 1]).last_hidden_state[0]
        predicted = (
            hidden[start - 1 : start - 1 + length] @ networks.policy.value_head.weight[0]
            + networks.policy.value_head.bias
        )
        errors.append(predicted - targets[row, :length])
    value_loss = torch.cat(errors).square().mean() / 2
    value_loss.backward()
    assert metrics["value_loss"] == pytest.approx(value_loss.item(), rel=1e-5)
    assert_same_gradient(difference, gradients_of(networks))


def test_full_kl_reaches_the_policy_alone_and_is_that_of_its_logits(rolled: Rolled) -> None:
    """The loss is the mean over response tokens of Σ_v π(v)·(log π(v) − log π_ref(v)), over the whole vocabulary."""
    switches = {**SWITCHES["full KL loss"], "aggregation": "token"}
    on, metrics = rolled.update(switches)
    off, _ = rolled.update({**switches, "kl_loss_coef": 0.0})
    oracle = load_policy(rolled.job.inputs["init"])
    sequences, kls = rolled.rollout.sequences, []
    for row, (start, length) in enumerate(
        zip(sequences.prompt_lengths.tolist(), sequences.lengths.tolist(), strict=True)
    ):
        ids = sequences.input_ids[row : row + 1]
        places = slice(start - 1, start - 1 + length)
        log_p = oracle(ids).logits[0, places].log_softmax(dim=-1)
        assert on.models.reference is not None
        log_q = on.models.reference.causal_lm(ids).logits[0, places].log_softmax(dim=-1).detach()
        kls.append((log_p.exp() * (log_p - log_q)).sum(dim=-1))
    kl = torch.cat(kls).mean()
    kl.backward()
    assert metrics["kl_loss"] == pytest.approx(kl.item(), rel=1e-4)
    expected = torch.cat([p.grad.flatten() for p in oracle.parameters() if p.grad is not None])
    assert_same_gradient((policy_gradient_of(on) - policy_gradient_of(off)) / 0.5, expected)
    assert all(parameter.grad is None for parameter in on.models.reference.parameters())


def test_the_guard_measures_the_surrogate_that_is_trained(rolled: Rolled) -> None:
    for name in ("KLPEN by k3", "plain gradient", "dual clip", "soft gate", "clip-cov"):
        networks, metrics = rolled.update(SWITCHES[name])
        work = rolled.work(SWITCHES[name], microbatch_size=3)
        minibatch = rolled.minibatch(networks, work)
        surrogate, kl = surrogate_and_old_kl(networks, minibatch, work)
        assert surrogate == pytest.approx(metrics["surrogate_loss"], rel=1e-5, abs=1e-7), name
        assert kl == pytest.approx(metrics["approx_kl"], rel=1e-5), name


def test_the_policy_loss_is_the_surrogate_and_what_stands_beside_it(rolled: Rolled) -> None:
    """Only −0.1 · entropy is added to the surrogate, by the same mean."""
    _, metrics = rolled.update({"preset": "ppo", "entropy_coef": 0.1})
    expected = metrics["surrogate_loss"] - 0.1 * metrics["entropy"]
    assert metrics["policy_loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_stage_by_its_name(rolled: Rolled) -> None:
    logprobs = rolled.rollout.logprobs.clone()
    logprobs[0, 0] = float("nan")
    broken = replace(rolled, rollout=replace(rolled.rollout, logprobs=logprobs))
    with pytest.raises(TrainingDiverged, match="policy_loss is nan; lower the learning rate"):
        broken.update({"preset": "ppo"})
