"""Compute the losses of policy and critic on one minibatch, by the recipe's switches.

Every denominator is that of the whole minibatch, so micro-batches and ranks change only memory and time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from vantage.algorithms.aggregation import aggregate, denominator_of
from vantage.algorithms.covariance import selected_kl_loss, selected_tokens
from vantage.algorithms.kl_loss import exact_kl_loss, old_kl_loss, reference_kl_loss
from vantage.algorithms.policy_loss import PolicyLoss, positive_example_nll
from vantage.algorithms.value_loss import ValueLoss
from vantage.models.logprobs import LogProbs
from vantage.models.row_lengths import on_device
from vantage.models.sequences import Sequences
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.stages import PolicyOptimization
from vantage.tasks.rollout.rollouts import Rollout
from vantage.tasks.training import nonfinite
from vantage.tasks.training.gradients import backward, settle
from vantage.tasks.training.likelihood import accumulate_nll
from vantage.tasks.training.metric_sums import LossSums, MetricSums
from vantage.tasks.training.optimization import autocast
from vantage.tasks.training.passes import passes_of
from vantage.tasks.updates.actor_critic import ActorCritic
from vantage.tasks.updates.critic_losses import critic_loss, predictions
from vantage.tasks.updates.estimates import Estimates, own_advantages
from vantage.tasks.updates.surrogates import LossTokens, surrogate_loss


@dataclass(frozen=True)
class Coefficients:
    """Weights of terms of the policy's loss, as their controllers have set them; 0 leaves a term out."""

    kl_penalty: float = 0.0
    """β of the KL(old‖new) penalty."""
    entropy: float = 0.0
    """Weight of the entropy bonus."""


@dataclass(frozen=True)
class Minibatch:
    """The rows of a rollout from which one optimiser step learns, with the denominators of its losses."""

    rollout: Rollout
    estimates: Estimates
    rows: Tensor
    """Row numbers in the rollout, (b,)."""
    advantages: Tensor
    """(b,T), as the surrogate uses them."""
    policy_denominator: int
    num_tokens: int
    num_positive_tokens: int
    selected: Tensor | None = None
    """(b,T'): the tokens that ``covariance`` has selected, if the switch is on; T' is the longest response of these rows."""

    def parts(self, limits: PassLimits) -> "Iterator[Microbatch]":
        """Yield this rank's rows of the minibatch, pass by pass."""
        minibatch = self.rollout.sequences.select(self.rows)
        for part in passes_of(minibatch, limits):
            places = on_device(part.rows, self.rows.device)
            rows, sequences = self.rows[places], part.select(minibatch)
            width = sequences.response_ids.shape[1]
            yield Microbatch(
                whole=self,
                sequences=sequences,
                policy_mask=self.estimates.policy_mask[rows, :width],
                advantages=self.advantages[places, :width],
                is_positive=self.estimates.is_positive[rows],
                rows=rows,
                weight=part.weight,
                is_last=part.is_last,
                selected=None if self.selected is None else self.selected[places, :width],
            )


@dataclass(frozen=True)
class Microbatch:
    """Some rows of a minibatch in one forward pass."""

    whole: Minibatch
    sequences: Sequences
    policy_mask: Tensor
    advantages: Tensor
    is_positive: Tensor
    rows: Tensor
    weight: float
    """0 for a pass that only keeps in step with the other ranks; else 1."""
    is_last: bool = False
    """Whether no other pass over the minibatch follows, on any rank."""
    selected: Tensor | None = None
    """(b,T): the tokens that ``covariance`` has selected, if the switch is on."""

    def of(self, per_token: Tensor) -> Tensor:
        """Return the microbatch's rows of a (B,T) tensor of the rollout."""
        return per_token[self.rows, : self.policy_mask.shape[1]]


def minibatch_of(
    rollout: Rollout, estimates: Estimates, rows: Tensor, work: PolicyOptimization, *, max_length: int
) -> Minibatch:
    """Return the minibatch of the given rows; ``max_length`` is the longest response that sampling allows."""
    algorithm, mask = work.algorithm, estimates.policy_mask[rows]
    denominator = denominator_of(mask, aggregation=algorithm.aggregation, max_length=max_length)
    advantages = own_advantages(estimates, rows, algorithm)
    if rollout.importance is not None:
        advantages = advantages * rollout.importance.weights[rows]
    return Minibatch(
        rollout=rollout,
        estimates=estimates,
        rows=rows,
        advantages=advantages,
        policy_denominator=max(denominator, 1),  # if all were filtered out, every sum is 0 too
        num_tokens=int(rollout.sequences.response_mask[rows].sum()),
        num_positive_tokens=int((mask & estimates.is_positive[rows, None]).sum()),
    )


def accumulate_losses(
    networks: ActorCritic,
    minibatch: Minibatch,
    work: PolicyOptimization,
    *,
    coefs: Coefficients,
    learning: Sequence[str] = ("policy", "critic"),
    ptx: Sequences | None = None,
) -> dict[str, float]:
    """Add the gradients of one minibatch to policy and critic, micro-batch by micro-batch; returns its metrics.

    Args:
        coefs: coefficients as their controllers have set them.
        learning: networks that get a gradient; the others are not computed.
        ptx: demonstrations whose NLL is added with ``ptx_coef``.

    Raises:
        TrainingDiverged: a loss is not finite, and this is not tolerated.
    """
    sums, policy_learns = MetricSums(), "policy" in learning
    is_guarded = (
        work.algorithm.trust_region_kl is not None
    )  # the trust region repeats a step from this rank's own gradients
    losses = LossSums(*(("policy_loss", "surrogate_loss", "entropy") if policy_learns else ()))
    for micro in minibatch.parts(work.pass_limits):
        if policy_learns:
            _accumulate_policy_loss(
                networks,
                micro,
                work,
                coefs=coefs,
                sums=sums,
                losses=losses,
                completes=micro.is_last and ptx is None and not is_guarded,
            )
        if networks.critic is not None and networks.critic_learns and "critic" in learning:
            with autocast(work.arithmetic, micro.policy_mask.device):
                predicted = predictions(networks.critic, micro.sequences, work.algorithm.critic_head)
            regression = value_loss_of(predicted, micro, work)
            backward(micro.weight * regression.loss, networks.critic, is_last=micro.is_last)
            _add_value_loss(regression, micro, sums, losses)
    ptx_nll = {}
    if ptx is not None and policy_learns:
        ptx_nll["ptx_nll"] = accumulate_nll(
            networks.policy,
            ptx,
            temperature=1.0,
            limits=work.pass_limits,
            precision=work.arithmetic,
            coef=work.algorithm.ptx_coef,
            completes=not is_guarded,
        ).nll

    totals = losses.totals() | ptx_nll
    for name, loss_value in totals.items():
        if not isfinite(loss_value):
            nonfinite.meet(name, loss_value, remedy="lower the learning rate, or look at the rollout")
            for network in set(learning) & networks.modules.keys():
                settle(networks.modules[network])
                nonfinite.spoil_gradient(networks.modules[network])
    return {**with_effective_share(sums.means()), **totals}


def with_effective_share(means: dict[str, float]) -> dict[str, float]:
    """Return the means, with the effective sample size of the ratios in place of their mean square."""
    squared = means.pop("ratio_squared", None)
    if squared:
        means["effective_sample_share"] = means["ratio"] ** 2 / squared
    return means


def _accumulate_policy_loss(
    networks: ActorCritic,
    micro: Microbatch,
    work: PolicyOptimization,
    *,
    coefs: Coefficients,
    sums: MetricSums,
    losses: LossSums,
    completes: bool,
) -> None:
    """Add the gradient of the policy, and of a value head on its trunk; ``sums`` and ``losses`` are updated.

    Args:
        completes: whether the policy's gradient is complete with this micro-batch.
    """
    predicted = predict(networks, micro, work)
    surrogate, policy_loss = policy_loss_of(predicted, micro, work, coefs=coefs, sums=sums)
    losses.add("policy_loss", policy_loss, micro.weight)
    losses.add("surrogate_loss", surrogate, micro.weight)
    if predicted.values is not None:
        regression = value_loss_of(predicted.values, micro, work)
        policy_loss = policy_loss + work.algorithm.value_coef * regression.loss
        _add_value_loss(regression, micro, sums, losses)
    backward(micro.weight * policy_loss, networks.policy, is_last=completes)
    assert predicted.entropy is not None
    entropy = predicted.entropy.detach()[micro.sequences.response_tokens()].sum()
    losses.add("entropy", entropy.double() / micro.whole.num_tokens, micro.weight)


def predict(networks: ActorCritic, micro: Microbatch, work: PolicyOptimization) -> LogProbs:
    """Return the policy's present log-probabilities of the micro-batch, and the other inputs of the losses, in one pass
    of its trunk."""
    switches = work.algorithm
    wants_full_kl = switches.kl_loss_coef and switches.kl_loss_kind == "full"
    with autocast(work.arithmetic, micro.policy_mask.device):
        return networks.policy.logprobs(
            micro.sequences,
            temperature=networks.temperature,
            with_entropy=True,
            reference=networks.models.reference if wants_full_kl else None,
            with_values=networks.policy.value_head is not None,
        )


def surrogate_of(logprobs: Tensor, micro: Microbatch, work: PolicyOptimization) -> PolicyLoss:
    """Return the surrogate that the switches describe, without the tokens that clip-cov has selected."""
    old_logprobs, advantages = micro.of(micro.whole.rollout.logprobs), micro.advantages
    if micro.selected is not None and work.algorithm.covariance == "clip":
        advantages = advantages.masked_fill(micro.selected, 0.0)
    tokens = LossTokens(logprobs, old_logprobs, advantages, micro.policy_mask, micro.whole.policy_denominator)
    return surrogate_loss(tokens, work.algorithm)


def policy_loss_of(
    predicted: LogProbs,
    micro: Microbatch,
    work: PolicyOptimization,
    *,
    coefs: Coefficients,
    sums: MetricSums,
) -> tuple[Tensor, Tensor]:
    """Return the surrogate plus all weighted terms: imitation of right responses, entropy, both KLs.

    Metrics of the parts are added to ``sums``.
    """
    switches, mask = work.algorithm, micro.policy_mask
    aggregation, denominator = switches.aggregation, micro.whole.policy_denominator
    old_logprobs = micro.of(micro.whole.rollout.logprobs)
    surrogate = surrogate_of(predicted.logprobs, micro, work)
    sums.add(surrogate, micro.weight)
    # Without a right response the sum is 0, whatever the denominator
    num_positive_tokens = max(micro.whole.num_positive_tokens, 1)
    imitation = positive_example_nll(
        predicted.logprobs, mask, micro.is_positive, denominator=num_positive_tokens
    )
    sums.add(imitation, micro.weight)
    total = surrogate.loss + switches.positive_nll_coef * imitation.loss
    if coefs.entropy:
        assert predicted.entropy is not None
        entropy = aggregate(predicted.entropy, mask, aggregation=aggregation, denominator=denominator)
        total = total - coefs.entropy * entropy
    if switches.kl_loss_coef:
        if switches.kl_loss_kind == "full":
            assert predicted.full_kl is not None
            to_reference = exact_kl_loss(
                predicted.full_kl, mask, aggregation=aggregation, denominator=denominator
            )
        else:
            assert micro.whole.rollout.ref_logprobs is not None
            to_reference = reference_kl_loss(
                predicted.logprobs,
                micro.of(micro.whole.rollout.ref_logprobs),
                old_logprobs,
                mask,
                kind=switches.kl_loss_kind,
                through_ratio=switches.kl_loss_gradient == "unbiased",
                aggregation=aggregation,
                denominator=denominator,
            )
        sums.add(to_reference, micro.weight)
        total = total + switches.kl_loss_coef * to_reference.loss
    if coefs.kl_penalty:
        to_old = old_kl_loss(
            predicted.logprobs,
            old_logprobs,
            mask,
            kind=switches.kl_penalty_kind,
            aggregation=aggregation,
            denominator=denominator,
        )
        sums.add(to_old, micro.weight)
        total = total + coefs.kl_penalty * to_old.loss
    if micro.selected is not None:
        sums.add(selected_tokens(micro.selected, mask), micro.weight)
        if switches.covariance == "kl":
            held = selected_kl_loss(
                predicted.logprobs,
                old_logprobs,
                mask,
                micro.selected,
                aggregation=aggregation,
                denominator=denominator,
            )
            sums.add(held, micro.weight)
            total = total + switches.covariance_kl_coef * held.loss
    return surrogate.loss, total


def value_loss_of(predicted: Tensor, micro: Microbatch, work: PolicyOptimization) -> ValueLoss:
    """Return the critic's loss over all tokens, including those that the policy does not learn from."""
    estimates = micro.whole.estimates
    assert estimates.old_values is not None
    assert estimates.targets is not None
    return critic_loss(
        predicted,
        micro.of(estimates.old_values),
        micro.of(estimates.targets),
        micro.sequences.response_mask,
        head=work.algorithm.critic_head,
        shards=None if estimates.shards is None else estimates.shards[micro.rows],
        value_clip_range=work.algorithm.value_clip_range,
        denominator=micro.whole.num_tokens,
    )


def _add_value_loss(regression: ValueLoss, micro: Microbatch, sums: MetricSums, losses: LossSums) -> None:
    sums.add(regression, micro.weight)
    losses.add("value_loss", regression.loss, micro.weight)


@torch.no_grad()
def surrogate_and_old_kl(
    networks: ActorCritic, minibatch: Minibatch, work: PolicyOptimization
) -> tuple[float, float]:
    """Return the surrogate loss, and KL(old‖new) in nats per token, of the present policy."""
    sums, losses = MetricSums(), LossSums("surrogate_loss")
    for micro in minibatch.parts(work.pass_limits):
        with autocast(work.arithmetic, micro.policy_mask.device):
            logprobs = networks.policy.logprobs(micro.sequences, temperature=networks.temperature).logprobs
        surrogate = surrogate_of(logprobs, micro, work)
        sums.add(surrogate, micro.weight)
        losses.add("surrogate_loss", surrogate.loss, micro.weight)
    return losses.totals()["surrogate_loss"], sums.means().get("approx_kl", 0.0)
