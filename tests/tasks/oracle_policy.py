"""Compute a whole stage of policy optimisation in float64 from the formulas, with none of our code but random streams.

Lists hold one tensor for each response. Nothing is padded or masked, and every sum over time is written out.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.tasks import oracle_critic_heads as heads
from tests.tasks import oracle_networks as nets
from tests.tasks import oracle_rollouts as rolls
from tests.tasks import oracle_surrogates as surrogates
from tests.tasks.oracle_networks import Optimizer, of_tokens
from tests.tasks.oracle_rollouts import Batch, Moments, mean
from tests.tasks.oracle_sums import Joint, gae, means, standardised, summed
from tests.tasks.unequal_inputs import BOS, EOS
from vantage.schemas.recipe.resolved import ResolvedPolicyOptimization
from vantage.schemas.records.job import StageJob

SURROGATE_ROUNDING = 1e-7


@dataclass
class Outcome:
    """What a stage should end with."""

    weights: dict[str, Tensor]
    """Weights of the best policy."""
    last: dict[str, dict[str, Tensor]]
    """Weights of every network after the last iteration."""
    first: dict[str, dict[str, Tensor]]
    """Weights of every network before the first iteration."""
    journal: list[dict[str, float]]
    best_iteration: int
    undone_because: set[str]
    """Why the trust-region guard took steps back; ``given up`` where no shorter one was good either."""
    epochs_ended: int = 0
    """Epochs that ended because the policy had moved too far."""
    measured: dict[str, float] = field(default_factory=dict)
    steered: dict[str, float] = field(default_factory=dict)
    """The coefficients as a further iteration would find them."""
    tracked: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict)
    """Prompt → running mean of its scores, and their weight."""
    memories: list[float] = field(default_factory=list)
    """Share of its weight that the past of each prompt kept, wherever one came again."""


@dataclass
class Rollout:
    batch: Batch
    scaled: list[float]
    old: list[Tensor]
    """log π of each token, as it was sampled."""
    of_reference: list[Tensor]
    """Log-distributions."""
    deltas: list[Tensor]
    """log π − log π_ref."""
    rewards: list[Tensor]
    advantages: list[Tensor]
    learns: list[bool]
    """Whether the policy learns from the response."""
    positive: list[bool]
    old_values: list[Tensor] | None
    targets: list[Tensor] | None
    critic_weight: float
    """Weight of the critic's advantages."""
    spread: list[Tensor] | None
    """Standard deviation over the heads of an ensemble."""


class PolicyStage:
    """The stage's networks and what moves with them."""

    def __init__(self, job: StageJob[ResolvedPolicyOptimization]) -> None:
        self.job, self.work, self.switches = job, job.work, job.work.algorithm
        self.temperature, self.limit = job.generation.temperature, job.generation.max_response_tokens
        self.policy = nets.language_model(job.inputs["init"])
        self.reference = nets.language_model(job.inputs["reference"])
        self.critic = self._critic()
        critic_folder = job.inputs.get("critic")
        self.moments = (
            Moments.of(critic_folder) if critic_folder and self.switches.reads_critic else Moments()
        )
        self.kl_coef, self.kl_penalty_coef = self.switches.kl_coef, self.switches.kl_penalty_coef
        self.entropy_c = self.entropy_coef = self.switches.entropy_coef
        self.optimizers = {
            name: Optimizer(module, self.work.weight_decay, self.work.max_grad_norm)
            for name, module in self.modules().items()
        }
        self.batches = 0
        self.critic_counts = True
        self.train, self.validation, self.test = (
            rolls.questions(job, split) for split in ("train", "validation", "test")
        )
        self.undone_because: set[str] = set()
        self.epochs_ended = 0
        self.collected: dict[tuple[int, ...], Batch] = {}
        self.kl_sum = 0.0
        self.memories: list[float] = []
        self.tracked: dict[tuple[int, ...], tuple[float, float]] = {}
        self.kl_then: dict[tuple[int, ...], float] = {}
        if self.work.rollouts is not None:
            prompts = rolls.collected(job.inputs["rollouts"], "train")
            self.collected = {tuple(each.prompts[0]): each for each in prompts}
            most = 1 / (1 - self.switches.tracker_memory_low)
            for prompt, each in self.collected.items():
                if self.switches.advantage != "tracked_mean":
                    break
                worth = rolls.scaled(job, self.switches, self.moments, each)
                self.tracked[prompt] = (mean(worth), min(len(each), most))
                self.kl_then[prompt] = 0.0

    def baseline(self, prompt: tuple[int, ...]) -> float:
        """Return a prompt's baseline, made of responses that were sampled beforehand."""
        a = self.switches
        if a.advantage == "tracked_mean":
            return self.tracked[prompt][0]
        worth = rolls.scaled(self.job, a, self.moments, self.collected[prompt])
        if a.advantage == "reference_mean":
            return mean(worth)
        return a.optimal_value_beta * math.log(mean([math.exp(r / a.optimal_value_beta) for r in worth]))

    def track(self, r: Rollout) -> None:
        """Update the running mean of each prompt with the rollout's scores, then add the KL by which the update moved the policy."""
        a = self.switches
        prompts = list(map(tuple, r.batch.prompts))
        for prompt in dict.fromkeys(prompts):
            value, weight = self.tracked[prompt]
            memory = min(
                max(
                    2 ** (-(self.kl_sum - self.kl_then[prompt]) / a.tracker_kl_half_life),
                    a.tracker_memory_low,
                ),
                a.tracker_memory_high,
            )
            if self.kl_then[prompt]:
                self.memories.append(memory)
            new = [score for score, of in zip(r.scaled, prompts, strict=True) if of == prompt]
            kept = memory * weight
            self.tracked[prompt] = ((kept * value + sum(new)) / (kept + len(new)), kept + len(new))
            self.kl_then[prompt] = self.kl_sum
        self.kl_sum += self.surrogate_and_kl(r, list(range(len(r.batch))))[1]

    def _critic(self) -> nets.Scalar | None:
        seed = nets.stream(self.job, "init")
        if self.switches.shared_trunk:
            return nets.Scalar(self.policy.model, *nets.fresh_head(self.policy.config.hidden_size, seed))
        if not self.switches.reads_critic:
            return None
        folder = self.job.inputs.get("critic") or self.job.inputs["fresh_critic"]
        critic = heads.with_head(nets.critic_model(folder, head_seed=seed), self.switches.critic_head, seed)
        for name, parameter in critic.named_parameters():
            kept = self.switches.freeze_critic == "attention" and ".self_attn." in name
            parameter.requires_grad_(not kept)
        return critic

    @property
    def learning_critic(self) -> nets.Scalar | None:
        """The critic, if it is not frozen as a whole."""
        return None if self.switches.freeze_critic == "all" else self.critic

    def modules(self) -> dict[str, nn.Module]:
        if self.switches.shared_trunk:
            assert self.critic is not None
            return {"policy": Joint(self.policy, self.critic)}
        critic = self.learning_critic
        return {"policy": self.policy} | ({"critic": critic} if critic is not None else {})

    # -- one rollout

    def sampled(self) -> tuple[Batch, float]:
        """Return the responses of one iteration, and the share of their groups that are uniform."""
        group, job = self.switches.samples_per_prompt, self.job

        def draw() -> Batch:
            indices = rolls.prompts_of_iteration(job, self.batches, group=group, count=len(self.train.ids))
            seed = nets.stream(job, "sampling", self.batches)
            self.batches += 1
            return rolls.sample_and_score(job, self.policy, self.train, indices, seed=seed)

        parts: list[Batch] = []
        mixed: list[tuple[int, int]] = []
        uniform: list[tuple[int, int]] = []
        wanted = self.work.batch_size // group
        drops, most = self.switches.drop_uniform_groups, self.switches.max_sampling_rounds
        while not parts or (drops and len(mixed) < wanted and len(parts) < most):
            parts.append(draw())
            for place in range(wanted):
                same = len(set(parts[-1].weighted_sums[place * group : (place + 1) * group])) == 1
                (uniform if same else mixed).append((len(parts) - 1, place))
        share = len(uniform) / (len(uniform) + len(mixed))
        if not drops:
            return parts[0], share
        taken = sorted((mixed + uniform)[:wanted])
        rows = [(parts[n], range(place * group, (place + 1) * group)) for n, place in taken]
        return rolls.joined(rows), share

    @torch.no_grad()
    def rollout(self) -> tuple[Rollout, float]:
        a = self.switches
        batch, share = self.sampled()
        if a.reward_scaling != "none":
            self.moments.add(batch.scores)
        scaled = rolls.scaled(self.job, a, self.moments, batch)
        said, of_reference = (
            nets.distributions(model, batch.prompts, batch.responses, self.temperature)
            for model in (self.policy, self.reference)
        )
        old, ref = of_tokens(said, batch.responses), of_tokens(of_reference, batch.responses)
        kl = rolls.kl_per_token(a.kl_kind, said, of_reference, batch)
        rewards = rolls.token_rewards(scaled, kl, self.kl_coef)
        old_values = spread = None
        if self.critic is not None:
            old_values = nets.values(self.critic, batch.prompts, batch.responses)
            if a.critic_head.ensemble is not None:
                several = heads.outputs(self.critic, batch.prompts, batch.responses)
                spread = [each.std(-1, correction=0) for each in several]
        learns = [end or not a.overlong_filter for end in batch.ended]
        weight = self.critic_weight(old_values, rewards)
        advantages = self.whitened(self.advantages(batch, scaled, kl, rewards, old_values, weight), learns)
        targets = None
        if old_values is not None:
            targets = [
                gae(r, v, a.gamma, a.lambda_value, final=f, horizon=a.gae_horizon) + v
                for r, v, f in zip(rewards, old_values, self.final_values(batch), strict=True)
            ]
        if not a.positive_nll_coef:
            positive = [False] * len(batch)
        elif a.positive_verifier is not None:
            positive = batch.right
        else:
            assert a.positive_threshold is not None
            positive = [score > a.positive_threshold for score in batch.scores]
        deltas = [p - q for p, q in zip(old, ref, strict=True)]
        return Rollout(
            batch,
            scaled,
            old,
            of_reference,
            deltas,
            rewards,
            advantages,
            learns,
            positive,
            old_values,
            targets,
            weight,
            spread,
        ), share

    def whitened(self, advantages: list[Tensor], learns: list[bool]) -> list[Tensor]:
        if not self.switches.whiten_advantages:
            return advantages
        kept = torch.cat([x for x, keeps in zip(advantages, learns, strict=True) if keeps])
        return standardised(advantages, kept)

    def critic_weight(self, old_values: list[Tensor] | None, rewards: list[Tensor]) -> float:
        a = self.switches
        if old_values is None or (a.critic_ev_threshold is None and not a.critic_blend):
            return 1.0
        explained = rolls.explained(old_values, [rolls.discounted(r, a.gamma) for r in rewards])
        if a.critic_blend:
            return min(max(explained, 0.0), 1.0)
        assert a.critic_ev_threshold is not None
        margin = 0.0 if self.critic_counts else a.critic_ev_hysteresis or 0.0
        self.critic_counts = explained > a.critic_ev_threshold + margin
        return 1.0 if self.critic_counts else 0.0

    def advantages(
        self,
        batch: Batch,
        scaled: list[float],
        kl: list[Tensor],
        rewards: list[Tensor],
        old_values: list[Tensor] | None,
        weight: float,
    ) -> list[Tensor]:
        a, group = self.switches, self.switches.samples_per_prompt
        if a.advantage == "gae":
            returns = [rolls.discounted(r, a.gamma) for r in rewards]
            m = torch.cat(returns).mean().item()
            if weight == 0:
                return [g - m for g in returns]
            goes_on = [a.bootstrap_truncated and not end for end in batch.ended]
            return [
                gae(
                    r,
                    m + weight * (v - m),
                    a.gamma,
                    self.lambda_policy(len(r)),
                    final=m + weight * (f - m) if goes else 0.0,
                    horizon=a.gae_horizon,
                )
                for r, v, f, goes in zip(
                    rewards, old_values or [], self.final_values(batch), goes_on, strict=True
                )
            ]
        if a.advantage == "returns_to_go":
            return [rolls.discounted(r, a.gamma) for r in rewards]
        if a.advantage == "greedy_baseline":
            greedy = rolls.sample_and_score(
                self.job,
                self.policy,
                rolls.Questions(batch.prompts, batch.answers),
                range(len(batch)),
                seed=0,
                greedy=True,
            )
            of_greedy = rolls.scaled(self.job, a, self.moments, greedy)
            above = [s - g for s, g in zip(scaled, of_greedy, strict=True)]
            return [rolls.discounted(r, a.gamma) for r in rolls.token_rewards(above, kl, self.kl_coef)]
        if self.collected:
            baselines = [self.baseline(tuple(prompt)) for prompt in batch.prompts]
            return [
                torch.full_like(r, r.sum().item() - baseline)
                for r, baseline in zip(rewards, baselines, strict=True)
            ]
        found = []
        for start in range(0, len(batch), group):
            totals = torch.stack([r.sum() for r in rewards[start : start + group]])
            if a.kl_credit == "token":
                totals = torch.tensor(scaled[start : start + group], dtype=torch.float64)
            if a.advantage == "leave_one_out":
                better = [totals[i] - (totals.sum() - totals[i]) / (group - 1) for i in range(group)]
            elif a.advantage == "group_mean":
                better = list(totals - totals.mean())
            else:
                better = list((totals - totals.mean()) / (totals.std() + 1e-6))
            found += [torch.full_like(rewards[start + i], better[i].item()) for i in range(group)]
        if a.kl_credit == "token":
            return [
                A - self.kl_coef * each.flip(0).cumsum(0).flip(0) for A, each in zip(found, kl, strict=True)
            ]
        return found

    def final_values(self, batch: Batch) -> list[float]:
        """Return the value after each response: the critic's for a truncated one if the switch is on, else 0."""
        if not self.switches.bootstrap_truncated:
            return [0.0] * len(batch)
        assert self.critic is not None
        whole = nets.scores(self.critic, batch.prompts, batch.responses)
        return [0.0 if end else value.item() for value, end in zip(whole, batch.ended, strict=True)]

    def lambda_policy(self, length: int) -> float:
        alpha = self.switches.length_adaptive_alpha
        if alpha is None:
            return self.switches.lambda_policy
        return min(max(1 - 1 / (alpha * length), 0.0), 1.0)

    # -- its updates

    def mean_over(self, per_token: Sequence[Tensor], learns: Sequence[bool]) -> Tensor:
        """Return the aggregation of the policy's loss, over the responses of one minibatch."""
        kept = [x for x, keeps in zip(per_token, learns, strict=True) if keeps]
        if not kept:
            return 0.0 * summed([x.sum() for x in per_token])
        kind = self.switches.aggregation
        if kind == "sequence":
            return summed([x.mean() for x in kept]) / len(kept)
        total = summed([x.sum() for x in kept])
        divisors = {
            "token": sum(map(len, kept)),
            "sequence_sum": len(kept),
            "constant": len(per_token) * self.limit,
        }
        return total / divisors[kind]

    def surrogate(self, new: list[Tensor], old: list[Tensor], advantages: list[Tensor]) -> list[Tensor]:
        """Return the surrogate of each token."""
        given = zip(new, old, advantages, strict=True)
        return [surrogates.of_response(n, o, A, self.switches) for n, o, A in given]

    def minibatch_advantages(self, r: Rollout, rows: list[int]) -> list[Tensor]:
        a = self.switches
        advantages = [r.advantages[i] for i in rows]
        kept = [x for x, i in zip(advantages, rows, strict=True) if r.learns[i]]
        if a.normalise_advantages and kept:
            advantages = standardised(advantages, torch.cat(kept))
        if a.advantage_clip is not None:
            advantages = [x.clamp(-a.advantage_clip, a.advantage_clip) for x in advantages]
        if a.mask_agreed_share is not None:
            assert r.spread is not None
            kept = heads.kept_where_heads_differ(r.spread, a.mask_agreed_share)
            advantages = [x * kept[i] for x, i in zip(advantages, rows, strict=True)]
        return advantages

    def said(self, r: Rollout, rows: list[int]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the policy's log-distributions now, and those of the tokens."""
        prompts, responses = ([x[i] for i in rows] for x in (r.batch.prompts, r.batch.responses))
        everything = nets.distributions(self.policy, prompts, responses, self.temperature)
        return everything, of_tokens(everything, responses)

    def losses(
        self, r: Rollout, rows: list[int], number: int
    ) -> tuple[dict[str, float], Tensor, Tensor | None]:
        """Return metrics, the policy's loss, and the critic's."""
        a = self.switches
        everything, new = self.said(r, rows)
        old, learns = [r.old[i] for i in rows], [r.learns[i] for i in rows]
        advantages = self.minibatch_advantages(r, rows)
        ells = [n - o for n, o in zip(new, old, strict=True)]
        selected = self.selected(rows, new, old, advantages, learns, number)
        if a.covariance == "clip":
            advantages = [torch.where(s, 0.0, A) for s, A in zip(selected, advantages, strict=True)]
        surrogate = self.mean_over(self.surrogate(new, old, advantages), learns)
        loss = surrogate
        entropies = [-(p.exp() * p).sum(-1) for p in everything]
        metrics = {
            "surrogate_loss": surrogate.item(),
            "entropy": torch.cat(entropies).mean().item(),
        }
        if any(learns):
            kept = torch.cat([x for x, keeps in zip(ells, learns, strict=True) if keeps]).detach()
            metrics["ratio"] = kept.exp().mean().item()
            metrics["approx_kl"] = (kept.exp() - 1 - kept).mean().item()
        positive = [new[k] for k, i in enumerate(rows) if r.positive[i] and r.learns[i]]
        if positive:
            nll = -torch.cat(positive).mean()
            metrics["positive_nll"] = nll.item()
            loss = loss + a.positive_nll_coef * nll
        loss = loss - self.entropy_coef * self.mean_over(entropies, learns)
        if a.kl_loss_coef:
            batch = rolls.joined([(r.batch, rows)])
            kl = rolls.kl_per_token(a.kl_loss_kind, everything, [r.of_reference[i] for i in rows], batch)
            if a.kl_loss_kind != "full":
                ratios = [ell.exp() for ell in ells]
                if a.kl_loss_gradient == "estimate":
                    ratios = [ratio.detach() for ratio in ratios]
                kl = [ratio * each for ratio, each in zip(ratios, kl, strict=True)]
            loss = loss + a.kl_loss_coef * self.mean_over(kl, learns)
        if self.kl_penalty_coef:
            kinds: dict[str, Callable[[Tensor], Tensor]] = {
                "k1": lambda ell: -ell,
                "k3": lambda ell: ell.exp() - 1 - ell,
            }
            to_old = [kinds[a.kl_penalty_kind](ell) for ell in ells]
            loss = loss + self.kl_penalty_coef * self.mean_over(to_old, learns)
        if a.covariance != "none" and any(learns):
            kept = torch.cat([s for s, keeps in zip(selected, learns, strict=True) if keeps])
            metrics["covariance_fraction"] = kept.double().mean().item()
        if a.covariance == "kl":
            # Where both policies are equal there is no gradient: neither here nor, but for rounding, in float32.
            held = [ell.abs() * s * (ell.abs() > 1e-5) for ell, s in zip(ells, selected, strict=True)]
            loss = loss + a.covariance_kl_coef * self.mean_over(held, learns)
        metrics["policy_loss"] = loss.item()
        value_loss = self.value_loss(r, rows)
        if value_loss is not None:
            metrics["value_loss"] = value_loss.item()
        if a.shared_trunk:
            assert value_loss is not None
            loss, value_loss = loss + a.value_coef * value_loss, None
        return metrics, loss, value_loss

    def selected(
        self,
        rows: list[int],
        new: list[Tensor],
        old: list[Tensor],
        advantages: list[Tensor],
        learns: list[bool],
        number: int,
    ) -> list[Tensor]:
        """Return the tokens that a covariance selects, drawn in the order of the rollout's rows."""
        if self.switches.covariance == "none":
            return [torch.zeros_like(n, dtype=torch.bool) for n in new]
        draw = torch.Generator().manual_seed(nets.stream(self.job, "covariance", number))
        order = sorted(range(len(rows)), key=rows.__getitem__)
        now, then, gains = ([each[i] for i in order] for each in (new, old, advantages))
        found = surrogates.selected(now, then, gains, [learns[i] for i in order], self.switches, draw)
        return [found[order.index(i)] for i in range(len(rows))]

    def value_loss(self, r: Rollout, rows: list[int]) -> Tensor | None:
        critic, head = self.learning_critic, self.switches.critic_head
        if critic is None:
            return None
        assert r.old_values is not None
        assert r.targets is not None
        prompts, responses = ([x[i] for i in rows] for x in (r.batch.prompts, r.batch.responses))
        if not head.is_scalar:
            return heads.loss(critic, prompts, responses, [r.targets[i] for i in rows], head)
        now, old = (
            torch.cat(nets.values(critic, prompts, responses)),
            torch.cat([r.old_values[i] for i in rows]),
        )
        target, c = torch.cat([r.targets[i] for i in rows]), self.switches.value_clip_range
        error = (now - target) ** 2
        if c is not None:
            error = torch.maximum(error, (torch.clamp(now, old - c, old + c) - target) ** 2)
        return error.mean() / 2

    def ptx_loss(self, number: int) -> Tensor:
        job = self.job
        rows = rolls.rows_of(job.inputs["ptx"], "train")
        indices = nets.batch_of(
            nets.stream(job, "ptx"), number, size=self.work.minibatch_size, count=len(rows)
        )
        prompts = [[BOS, *rolls.encode(rows[i]["prompt"])] for i in indices]
        responses = [[*rolls.encode(rows[i]["response"]), EOS] for i in indices]
        said = nets.distributions(self.policy, prompts, responses, 1.0)
        return -torch.cat(of_tokens(said, responses)).mean()

    @torch.no_grad()
    def surrogate_and_kl(self, r: Rollout, rows: list[int]) -> tuple[float, float]:
        _, new = self.said(r, rows)
        old, learns = [r.old[i] for i in rows], [r.learns[i] for i in rows]
        per_token = self.surrogate(new, old, self.minibatch_advantages(r, rows))
        ells = torch.cat([n - o for n, o, keeps in zip(new, old, learns, strict=True) if keeps])
        return self.mean_over(per_token, learns).item(), (ells.exp() - 1 - ells).mean().item()

    def policy_step(
        self, r: Rollout, rows: list[int], gradients: list[Tensor], rate: float, surrogate: float
    ) -> tuple[float, float, int, bool]:
        """Take a step, and return norm, learning rate, steps undone, and whether one was kept."""
        optimizer, most = self.optimizers["policy"], self.switches.trust_region_kl
        if most is None:
            return optimizer.step(gradients, rate), rate, 0, True
        before = optimizer.snapshot()
        for halvings in range(self.switches.trust_region_halvings + 1):
            norm = optimizer.step(gradients, rate / 2**halvings)
            now, kl = self.surrogate_and_kl(r, rows)
            is_worse = now > surrogate + SURROGATE_ROUNDING * abs(surrogate)
            if kl <= most and not is_worse:
                return norm, rate / 2**halvings, halvings, True
            self.undone_because.add("worse" if kl <= most else "too far")
            optimizer.go_back(before)
        self.undone_because.add("given up")
        return norm, rate / 2**halvings, halvings + 1, False

    def update(self, r: Rollout, iteration: int) -> dict[str, float]:
        work, steps, undone = self.work, [], 0
        per_iteration = work.epochs * (work.batch_size // work.minibatch_size)
        total = work.iterations * per_iteration
        cuts = rolls.minibatches(self.job, iteration, len(r.batch))
        waits, critic_first = iteration < self.switches.policy_starts_at, self.switches.critic_first
        if waits or critic_first:
            for epoch, cut in enumerate(cuts):
                for place, rows in enumerate(cut):
                    number = iteration * per_iteration + epoch * len(cut) + place
                    for _ in range(self.switches.critic_steps):
                        steps.append(self.critic_step(r, rows, number, total))
        if waits:
            return means(steps)
        if critic_first:
            self.look_again(r)
        for epoch, cut in enumerate(cuts):
            for place, rows in enumerate(cut):
                number = iteration * per_iteration + epoch * len(cut) + place
                metrics, loss, value_loss = self.losses(r, rows, number)
                if critic_first:
                    value_loss = None
                    del metrics["value_loss"]
                if self.switches.ptx_coef:
                    ptx = self.ptx_loss(number)
                    metrics["ptx_nll"] = ptx.item()
                    loss = loss + self.switches.ptx_coef * ptx
                loss.backward()
                if value_loss is not None:
                    value_loss.backward()
                gradients = {name: o.gradients() for name, o in self.optimizers.items()}
                rate = nets.learning_rate(work, number, total)
                norm, rate, back, kept = self.policy_step(
                    r, rows, gradients["policy"], rate, metrics["surrogate_loss"]
                )
                metrics |= {"grad_norm_policy": norm, "learning_rate_policy": rate}
                undone += back
                if "critic" in self.optimizers and not critic_first:
                    metrics |= self.step_critic(gradients["critic"], number, total)
                steps.append(metrics)
                for _ in range(0 if critic_first else self.switches.critic_steps - 1):
                    steps.append(self.critic_step(r, rows, number, total))
                target = self.switches.epoch_kl_target
                if target is not None and metrics.get("approx_kl", 0.0) > 1.5 * target:
                    self.epochs_ended += 1
                    break
                if not kept:
                    break
        found = means(steps)
        return found | ({"trust_region_undone": undone} if self.switches.trust_region_kl is not None else {})

    @torch.no_grad()
    def look_again(self, r: Rollout) -> None:
        """Compute advantages from the critic's values after it has learned; how far it counts was settled before."""
        assert self.critic is not None
        values = nets.values(self.critic, r.batch.prompts, r.batch.responses)
        found = self.advantages(r.batch, r.scaled, [], r.rewards, values, r.critic_weight)
        r.advantages = self.whitened(found, r.learns)

    def critic_step(self, r: Rollout, rows: list[int], number: int, total: int) -> dict[str, float]:
        """Take the critic's step of an iteration in which the policy waits."""
        loss = self.value_loss(r, rows)
        assert loss is not None
        loss.backward()
        gradients = self.optimizers["critic"].gradients()
        return {"value_loss": loss.item()} | self.step_critic(gradients, number, total)

    def step_critic(self, gradients: list[Tensor], number: int, total: int) -> dict[str, float]:
        rate = nets.learning_rate(self.work, number, total, peak=self.work.critic_learning_rate)
        norm = self.optimizers["critic"].step(gradients, rate)
        return {"grad_norm_critic": norm, "learning_rate_critic": rate}

    # -- coefficients that are adapted, and the policy that is kept

    def steer(self, r: Rollout, iteration: int, entropy: float | None) -> None:
        a = self.switches
        if iteration < a.policy_starts_at:
            return
        if a.entropy_target is not None:
            assert entropy is not None
            is_low = entropy < a.entropy_target
            moved = self.entropy_c + (a.entropy_step if is_low else -a.entropy_step)
            self.entropy_c = min(max(moved, 0.0), a.entropy_coef_max)
            self.entropy_coef = self.entropy_c if is_low else 0.0
        if a.kl_target is not None:
            kl = mean([delta.sum().item() for delta in r.deltas])
            error = min(max(kl / a.kl_target - 1, -0.2), 0.2)
            self.kl_coef *= 1 + error * len(r.batch) / a.kl_horizon
        if a.kl_penalty_target is not None:
            _, kl = self.surrogate_and_kl(r, list(range(len(r.batch))))
            if kl > 1.5 * a.kl_penalty_target:
                self.kl_penalty_coef *= 2
            elif kl < a.kl_penalty_target / 1.5:
                self.kl_penalty_coef /= 2

    def describe(self, r: Rollout, share: float, rounds: int, kl_coef: float) -> dict[str, float]:
        batch = r.batch
        advantages = torch.cat([x for x, keeps in zip(r.advantages, r.learns, strict=True) if keeps])
        metrics = {
            "score_mean": mean(batch.scores),
            **{f"score_mean_{name}": mean(scores) for name, scores in batch.by_term.items()},
            "scaled_score_mean": mean(r.scaled),
            "reward_mean": mean([x.sum().item() for x in r.rewards]),
            "kl_to_reference": mean([x.sum().item() for x in r.deltas]),
            "kl_coef": kl_coef,
            "advantage_mean": advantages.mean().item(),
            "advantage_std": advantages.std(correction=0).item(),
            "positive_share": mean(r.positive),
            "response_length_mean": mean(list(map(len, batch.responses))),
            "truncated_share": 1 - mean(batch.ended),
            "uniform_group_share": share,
            "sampling_rounds": rounds,
        }
        if r.old_values is not None:
            returns = [rolls.discounted(x, self.switches.gamma) for x in r.rewards]
            metrics["explained_variance"] = rolls.explained(r.old_values, returns)
        if r.spread is not None:
            metrics["critic_disagreement"] = torch.cat(r.spread).mean().item()
        if self.collected:
            metrics["baseline_mean"] = mean([self.baseline(tuple(prompt)) for prompt in batch.prompts])
        if self.switches.critic_ev_threshold is not None or self.switches.critic_blend:
            metrics["critic_weight"] = r.critic_weight
        return metrics

    def measure(self, asked: rolls.Questions, seed: int, count: int) -> dict[str, float]:
        indices = rolls.asked_again(asked, count)
        batch = rolls.sample_and_score(self.job, self.policy, asked, indices, seed=seed)
        said, ref = (rolls.logprobs_of(m, batch, self.temperature) for m in (self.policy, self.reference))
        return {
            "test_score": mean(batch.scores),
            "kl_to_reference": mean([(p - q).sum().item() for p, q in zip(said, ref, strict=True)]),
            "mean_response_length": mean(list(map(len, batch.responses))),
            "truncated_share": 1 - mean(batch.ended),
        }


def run(job: StageJob[ResolvedPolicyOptimization]) -> Outcome:
    """Run the whole stage."""
    stage, work = PolicyStage(job), job.work
    first = {name: nets.state_of(module) for name, module in stage.modules().items()}

    def score() -> float:
        seed = nets.stream(job, "validation sampling")
        return stage.measure(stage.validation, seed, work.validation_samples)["test_score"]

    best, best_iteration, weights = score(), 0, nets.state_of(stage.policy)
    journal = []
    for iteration in range(work.iterations):
        before = stage.batches
        rollout, share = stage.rollout()
        kl_coef, kl_penalty_coef = stage.kl_coef, stage.kl_penalty_coef
        metrics = stage.update(rollout, iteration) | stage.describe(
            rollout, share, stage.batches - before, kl_coef
        )
        if kl_penalty_coef:
            metrics["kl_penalty_coef"] = kl_penalty_coef
        if work.algorithm.entropy_target is not None:
            metrics["entropy_coef"] = stage.entropy_coef
        stage.steer(rollout, iteration, metrics.get("entropy"))
        if work.algorithm.advantage == "tracked_mean":
            stage.track(rollout)
        if (iteration + 1) % work.validate_every == 0 or iteration + 1 == work.iterations:
            metrics["validation_score"] = score()
            if metrics["validation_score"] > best:
                best, best_iteration = metrics["validation_score"], iteration + 1
                weights = nets.state_of(stage.policy)
        journal.append(metrics)
    last = {name: nets.state_of(module) for name, module in stage.modules().items()}
    stage.policy.load_state_dict(weights)
    count = work.test_samples or work.validation_samples
    measured = stage.measure(stage.test, nets.stream(job, "test sampling"), count) | {
        "validation_score": best
    }
    steered = {"kl_coef": stage.kl_coef, "kl_penalty_coef": stage.kl_penalty_coef}
    if work.algorithm.entropy_target is not None:
        steered["entropy_coef"] = stage.entropy_c
    return Outcome(
        weights,
        last,
        first,
        journal,
        best_iteration,
        stage.undone_because,
        stage.epochs_ended,
        measured,
        steered,
        stage.tracked,
        stage.memories,
    )
