"""Compute whole stages beside policy optimisation in float64, written from the formulas alone: see ``oracle_policy``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import LlamaForCausalLM

from tests.tasks import oracle_critic_heads as heads
from tests.tasks import oracle_networks as nets
from tests.tasks import oracle_rollouts as rolls
from tests.tasks.oracle_networks import Optimizer, of_tokens
from tests.tasks.oracle_rollouts import Batch, Moments, mean
from tests.tasks.unequal_inputs import BOS, EOS
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.resolved import (
    ResolvedBestOfN,
    ResolvedDirectPreferenceOptimization,
    ResolvedKahnemanTverskyOptimization,
    ResolvedPreferenceCollection,
    ResolvedRewardModelling,
    ResolvedRolloutCollection,
    ResolvedSupervisedFineTuning,
    ResolvedTraining,
    ResolvedValuePretraining,
)
from vantage.schemas.recipe.rewards import Judge
from vantage.schemas.records.job import StageJob

Metrics = dict[str, float]
LearnsRows = (
    ResolvedSupervisedFineTuning
    | ResolvedRewardModelling
    | ResolvedDirectPreferenceOptimization
    | ResolvedKahnemanTverskyOptimization
)
Judged = PolicyEvaluation | ResolvedPreferenceCollection


@dataclass
class Outcome:
    """What a stage should end with."""

    weights: dict[str, Tensor]
    """Weights of what the stage hands on."""
    before: dict[str, Tensor]
    journal: list[Metrics]
    metrics: Metrics
    last: dict[str, Tensor] = field(default_factory=dict)
    """Weights after the last step, where the best ones are handed on."""
    moments: Moments = field(default_factory=Moments)


def _optimizer(job: StageJob[ResolvedTraining], module: nn.Module) -> Optimizer:
    return Optimizer(module, job.work.weight_decay, job.work.max_grad_norm)


def _step(optimizer: Optimizer, work: ResolvedTraining, loss: Tensor, number: int, total: int) -> Metrics:
    loss.backward()
    rate = nets.learning_rate(work, number, total)
    return {"grad_norm": optimizer.step(optimizer.gradients(), rate), "learning_rate": rate}


# -- value pretraining


@dataclass
class Returned:
    """Sampled responses and their Monte-Carlo returns."""

    batch: Batch
    rewards: list[Tensor]
    returns: list[Tensor]


class ValueStage:
    def __init__(self, job: StageJob[ResolvedValuePretraining]) -> None:
        self.job, self.work, self.temperature = job, job.work, job.generation.temperature
        self.policy = nets.language_model(job.inputs["policy"])
        self.reference = nets.language_model(job.inputs["reference"])
        seed = nets.stream(job, "init")
        self.critic = heads.with_head(
            nets.critic_model(job.inputs["init"], head_seed=seed), job.work.critic_head, seed
        )
        self.train = rolls.questions(job, "train")
        self.moments = Moments()
        if self.work.returns.reward_scaling != "none":
            count = len(self.train.ids) if self.work.rollouts is None else len(self.collected("train"))
            indices = nets.batch_of(nets.stream(job, "moments"), 0, size=self.work.batch_size, count=count)
            if self.work.rollouts is None:
                seed = nets.stream(job, "moments sampling")
                batch = rolls.sample_and_score(job, self.policy, self.train, indices, seed=seed)
            else:
                batch = rolls.joined([(self.collected("train"), indices)])
            self.moments.add(batch.scores)

    def collected(self, split: str) -> Batch:
        """Return all collected responses, those of a prompt in a row."""
        prompts = rolls.collected(self.job.inputs["rollouts"], split)
        return rolls.joined([(each, range(len(each))) for each in prompts])

    def of_iteration(self, iteration: int) -> Returned:
        work, job = self.work, self.job
        fresh = work.batch_size if work.rollouts is None else round(work.fresh_share * work.batch_size)
        parts: list[tuple[Batch, Sequence[int]]] = []
        if fresh < work.batch_size:
            everything, size = self.collected("train"), work.batch_size - fresh
            order = nets.batch_of(nets.stream(job, "collected"), iteration, size=size, count=len(everything))
            parts.append((everything, order))
        if fresh:
            group = work.samples_per_prompt
            prompts = nets.batch_of(
                nets.own_seed(job), iteration, size=fresh // group, count=len(self.train.ids)
            )
            indices = [index for index in prompts for _ in range(group)]
            seed = nets.stream(job, "sampling", iteration)
            batch = rolls.sample_and_score(job, self.policy, self.train, indices, seed=seed)
            parts.append((batch, range(len(batch))))
        return self.returned(rolls.joined(parts))

    @torch.no_grad()
    def returned(self, batch: Batch) -> Returned:
        returns, job = self.work.returns, self.job
        said, of_reference = (
            nets.distributions(model, batch.prompts, batch.responses, self.temperature)
            for model in (self.policy, self.reference)
        )
        kl = rolls.kl_per_token(returns.kl_kind, said, of_reference, batch)
        scaled = rolls.scaled(job, returns, self.moments, batch)
        rewards = rolls.token_rewards(scaled, kl, returns.kl_coef)
        return Returned(batch, rewards, [rolls.discounted(r, returns.gamma) for r in rewards])

    def held_out(self, split: str, stream: str) -> Returned:
        asked = rolls.questions(self.job, split)
        count = self.work.validation_samples
        if split == "test" and self.work.test_samples is not None:
            count = self.work.test_samples
        if self.work.rollouts is not None:
            prompts = rolls.collected(self.job.inputs["rollouts"], split)
            rows = [(each, [sample]) for sample in range(len(prompts[0])) for each in prompts]
            return self.returned(rolls.joined(rows[:count]))
        indices, seed = rolls.asked_again(asked, count), nets.stream(self.job, stream)
        return self.returned(rolls.sample_and_score(self.job, self.policy, asked, indices, seed=seed))

    def values(self, r: Returned, rows: Sequence[int]) -> list[Tensor]:
        return nets.values(
            self.critic, [r.batch.prompts[i] for i in rows], [r.batch.responses[i] for i in rows]
        )

    @torch.no_grad()
    def explained(self, r: Returned) -> float:
        return rolls.explained(self.values(r, range(len(r.batch))), r.returns)

    @torch.no_grad()
    def diagnose(self, r: Returned) -> Metrics:
        values = self.values(r, range(len(r.batch)))
        v, g = torch.cat(values), torch.cat(r.returns)
        found = {
            "explained_variance": rolls.explained(values, r.returns),
            "return_variance": g.var(correction=0).item(),
            "value_bias": (v - g).mean().item(),
            "value_mse": ((v - g) ** 2).mean().item(),
            "constant_mse": ((g - g.mean()) ** 2).mean().item(),
        }
        quarters: list[list[tuple[Tensor, Tensor]]] = [[], [], [], []]
        for value, gained in zip(values, r.returns, strict=True):
            for k in range(len(value)):
                quarters[4 * k // len(value)].append((value[k], gained[k]))
        for number, pairs in enumerate(quarters, start=1):
            part = [torch.stack([pair[side] for pair in pairs]) for side in (0, 1)]
            found[f"explained_variance_position_{number}"] = rolls.explained([part[0]], [part[1]])
        return found


def pretrain_value(job: StageJob[ResolvedValuePretraining]) -> Outcome:
    stage, work = ValueStage(job), job.work
    optimizer, before = _optimizer(job, stage.critic), nets.state_of(stage.critic)
    held_out = stage.held_out("validation", "validation sampling")
    best, best_iteration, weights = stage.explained(held_out), 0, before
    journal: list[Metrics] = []
    without_gain = 0
    for iteration in range(work.iterations):
        r = stage.of_iteration(iteration)
        cut = [rows for epoch in rolls.minibatches(job, iteration, len(r.batch)) for rows in epoch]
        for number, rows in enumerate(cut):
            error = torch.cat(stage.values(r, rows)) - torch.cat([r.returns[i] for i in rows])
            loss = (error**2).mean() / 2
            if not work.critic_head.is_scalar:
                prompts, responses = ([x[i] for i in rows] for x in (r.batch.prompts, r.batch.responses))
                targets = [r.returns[i] for i in rows]
                loss = heads.loss(stage.critic, prompts, responses, targets, work.critic_head)
            metrics = {"value_loss": loss.item(), "value_bias": error.mean().item()}
            step = iteration * len(cut) + number
            metrics |= _step(optimizer, work, loss, step, work.iterations * len(cut))
        metrics |= {"score_mean": mean(r.batch.scores), "return_mean": torch.cat(r.returns).mean().item()}
        metrics |= {f"score_mean_{name}": mean(scores) for name, scores in r.batch.by_term.items()}
        if (iteration + 1) % work.validate_every == 0 or iteration + 1 == work.iterations:
            metrics["validation_explained_variance"] = stage.explained(held_out)
            without_gain += 1
            if metrics["validation_explained_variance"] > best:
                best, best_iteration, without_gain = (
                    metrics["validation_explained_variance"],
                    iteration + 1,
                    0,
                )
                weights = nets.state_of(stage.critic)
        journal.append(metrics)
        if without_gain >= work.patience:
            break
    last = nets.state_of(stage.critic)
    stage.critic.load_state_dict(weights)
    measured = {
        **stage.diagnose(stage.held_out("test", "test sampling")),
        "validation_explained_variance": best,
        "best_iteration": best_iteration,
    }
    return Outcome(weights, before, journal, measured, last, stage.moments)


# -- stages that learn rows


@dataclass
class Rows:
    """Prompts, with one list of responses for each column."""

    prompts: list[list[int]]
    responses: dict[str, list[list[int]]]
    margins: list[float]


def completions(job: StageJob, role: str, split: str, columns: Sequence[str]) -> Rows:
    rows = rolls.rows_of(job.inputs[role], split)
    return Rows(
        [[BOS, *rolls.encode(row["prompt"])] for row in rows],
        {c: [[*rolls.encode(row[c]), EOS] for row in rows] for c in columns},
        [row.get("margin") or 0.0 for row in rows],
    )


def fit(
    job: StageJob[LearnsRows],
    module: nn.Module,
    count: int,
    loss_of: Callable[[list[int]], tuple[Tensor, Metrics]],
) -> list[Metrics]:
    """Do every optimiser step of a stage over ``count`` rows; return its journal."""
    work, optimizer, journal = job.work, _optimizer(job, module), []
    total = max(1, -(-round(work.epochs * count) // work.batch_size))
    for number in range(total):
        loss, metrics = loss_of(nets.batch_of(nets.own_seed(job), number, size=work.batch_size, count=count))
        journal.append({"loss": loss.item(), **metrics, **_step(optimizer, work, loss, number, total)})
    return journal


def nll_of(
    model: LlamaForCausalLM, rows: Rows, column: str, indices: Sequence[int], temperature: float
) -> Tensor:
    """Return the negated log-probabilities of all tokens."""
    responses = [rows.responses[column][i] for i in indices]
    said = nets.distributions(model, [rows.prompts[i] for i in indices], responses, temperature)
    return -torch.cat(of_tokens(said, responses))


def fine_tune(job: StageJob[ResolvedSupervisedFineTuning]) -> Outcome:
    policy = nets.language_model(job.inputs["init"])
    splits = {s: completions(job, "data", s, ["response"]) for s in ("train", "validation", "test")}
    before, train = nets.state_of(policy), splits["train"]
    journal = fit(
        job, policy, len(train.prompts), lambda i: (nll_of(policy, train, "response", i, 1.0).mean(), {})
    )
    with torch.no_grad():
        measured = {
            f"{name}_nll": nll_of(policy, rows, "response", range(len(rows.prompts)), 1.0).mean().item()
            for name, rows in splits.items()
            if name != "train"
        }
    return Outcome(nets.state_of(policy), before, journal, measured)


class RewardStage:
    def __init__(self, job: StageJob[ResolvedRewardModelling]) -> None:
        self.job, self.work = job, job.work
        self.language = nets.language_model(job.inputs["init"])
        weight, _ = nets.fresh_head(self.language.config.hidden_size, nets.stream(job, "init"))
        self.reward = nets.Scalar(self.language.model, weight, None)
        self.before = nets.state_of(self.reward)

    def scores(self, rows: Rows, side: str, indices: Sequence[int]) -> Tensor:
        responses = [rows.responses[side][i] for i in indices]
        return torch.stack(nets.scores(self.reward, [rows.prompts[i] for i in indices], responses))

    def pairs(self, rows: Rows, indices: Sequence[int]) -> tuple[Tensor, Metrics]:
        """Compute the reward model's loss on pairs, with margins, centring, and the chosen responses' likelihood."""
        work = self.work
        chosen, rejected = (self.scores(rows, side, indices) for side in ("chosen", "rejected"))
        margins = torch.tensor([rows.margins[i] for i in indices], dtype=torch.float64)
        nll = nll_of(self.language, rows, "chosen", indices, 1.0).mean()
        loss = -logsigmoid(chosen - rejected - margins).mean() + work.lm_coef * nll
        loss = loss + work.centre_coef * ((chosen + rejected) ** 2).mean()
        return loss, {
            "train_pair_accuracy": (chosen > rejected).double().mean().item(),
            "score_gap": (chosen - rejected).mean().item(),
            "score_mean": ((chosen + rejected) / 2).mean().item(),
            "chosen_nll": nll.item(),
        }

    @torch.no_grad()
    def measure(self, rows: Rows) -> Metrics:
        everything = range(len(rows.prompts))
        gaps = self.scores(rows, "chosen", everything) - self.scores(rows, "rejected", everything)
        return {
            "pair_accuracy": (gaps > 0).double().mean().item(),
            "score_gap": gaps.mean().item(),
            "preference_loss": -logsigmoid(gaps).mean().item(),
        }

    def rankings(self, rows: Sequence[dict[str, Any]], indices: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Return the mean over prompts of the mean loss of their untied pairs, and the score gaps of these pairs."""
        losses, gaps = [], []
        for i in indices:
            prompt = [BOS, *rolls.encode(rows[i]["prompt"])]
            responses = [[*rolls.encode(text), EOS] for text in rows[i]["responses"]]
            scores = nets.scores(self.reward, [prompt] * len(responses), responses)
            ranks = rows[i]["ranks"]
            found = [
                scores[a] - scores[b]
                for a in range(len(ranks))
                for b in range(len(ranks))
                if ranks[a] < ranks[b]
            ]
            losses.append(-logsigmoid(torch.stack(found)).mean())
            gaps += found
        return torch.stack(losses).mean(), gaps


def reward_modelling(job: StageJob[ResolvedRewardModelling]) -> Outcome:
    stage = RewardStage(job)
    splits = ("train", "validation", "test")
    measured: Metrics = {}
    if "rankings" in job.inputs:
        ranked = {split: rolls.rows_of(job.inputs["rankings"], split) for split in splits}
        journal = fit(
            job, stage.reward, len(ranked["train"]), lambda i: (stage.rankings(ranked["train"], i)[0], {})
        )
        with torch.no_grad():
            for prefix, split in (("", "test"), ("validation_", "validation")):
                loss, gaps = stage.rankings(ranked[split], range(len(ranked[split])))
                accuracy = mean([float(gap > 0) for gap in gaps])
                measured |= {f"{prefix}pair_accuracy": accuracy, f"{prefix}preference_loss": loss.item()}
    else:
        pairs = {split: completions(job, "data", split, ["chosen", "rejected"]) for split in splits}
        journal = fit(
            job, stage.reward, len(pairs["train"].prompts), lambda i: stage.pairs(pairs["train"], i)
        )
        measured |= stage.measure(pairs["test"])
        measured |= {f"validation_{n}": value for n, value in stage.measure(pairs["validation"]).items()}
    if "centre_on" in job.inputs:
        demonstrations = completions(job, "centre_on", "train", ["response"])
        with torch.no_grad():
            everything = range(len(demonstrations.prompts))
            measured["score_shift"] = stage.scores(demonstrations, "response", everything).mean().item()
    return Outcome(nets.state_of(stage.reward), stage.before, journal, measured)


# -- best of n


def best_of_n(job: StageJob[ResolvedBestOfN]) -> Outcome:
    work, policy = job.work, nets.language_model(job.inputs["init"])
    optimizer, before = _optimizer(job, policy), nets.state_of(policy)
    train, validation, test = (rolls.questions(job, split) for split in ("train", "validation", "test"))
    temperature, group = job.generation.temperature, work.samples_per_prompt

    def validated() -> Batch:
        indices = rolls.asked_again(validation, work.validation_samples)
        seed = nets.stream(job, "validation sampling")
        return rolls.sample_and_score(job, policy, validation, indices, seed=seed)

    best, best_iteration, weights = mean(validated().scores), 0, before
    journal: list[Metrics] = []
    for iteration in range(work.iterations):
        indices = rolls.prompts_of_iteration(job, iteration, group=group, count=len(train.ids))
        seed = nets.stream(job, "sampling", iteration)
        if work.rollouts is None:
            batch = rolls.sample_and_score(job, policy, train, indices, seed=seed)
        else:
            of_prompts = rolls.collected(job.inputs["rollouts"], "train")
            batch = rolls.joined([(of_prompts[index], range(group)) for index in indices[::group]])
        starts = range(0, len(batch), group)
        kept = [max(range(start, start + group), key=lambda i: (batch.scores[i], -i)) for start in starts]
        cut = [rows for epoch in rolls.minibatches(job, iteration, len(kept)) for rows in epoch]
        steps = []
        for number, rows in enumerate(cut):
            responses = [batch.responses[kept[i]] for i in rows]
            said = nets.distributions(policy, [batch.prompts[kept[i]] for i in rows], responses, temperature)
            loss = -torch.cat(of_tokens(said, responses)).mean()
            step, total = iteration * len(cut) + number, work.iterations * len(cut)
            steps.append({"nll": loss.item(), **_step(optimizer, work, loss, step, total)})
        metrics = {name: mean([step[name] for step in steps]) for name in steps[0]}
        metrics |= {
            "learning_rate": steps[-1]["learning_rate"],
            "score_mean": mean(batch.scores),
            "best_score_mean": mean([batch.scores[i] for i in kept]),
        }
        if (iteration + 1) % work.validate_every == 0 or iteration + 1 == work.iterations:
            metrics["validation_score"] = mean(validated().scores)
            if metrics["validation_score"] > best:
                best, best_iteration = metrics["validation_score"], iteration + 1
                weights = nets.state_of(policy)
        journal.append(metrics)
    last = nets.state_of(policy)
    policy.load_state_dict(weights)
    indices = rolls.asked_again(test, work.test_samples or work.validation_samples)
    batch = rolls.sample_and_score(job, policy, test, indices, seed=nets.stream(job, "test sampling"))
    measured = {
        "validation_score": best,
        "test_score": mean(batch.scores),
        "mean_response_length": mean(list(map(len, batch.responses))),
        "truncated_share": 1 - mean(batch.ended),
        "best_iteration": best_iteration,
    }
    return Outcome(weights, before, journal, measured, last)


# -- evaluation and preferences


def judged(
    job: StageJob[Judged],
    asked: rolls.Questions,
    indices: Sequence[int],
    responses: list[list[int]],
    judge: Judge | None = None,
) -> list[float]:
    """Return the verifier's verdicts (1 or 0) or the reward's scores, by the stage's judge or another one."""
    prompts, answers = [asked.ids[i] for i in indices], [asked.answers[i] for i in indices]
    judge = judge or job.work.judge
    assert judge is not None
    if judge.verifier is not None:
        return [float(rolls.is_right(r, a)) for r, a in zip(responses, answers, strict=True)]
    return rolls.scored(job, prompts, answers, responses).scores


def answers_of(
    job: StageJob,
    role: str,
    asked: rolls.Questions,
    indices: Sequence[int],
    *,
    seed: int,
    greedy: bool = False,
) -> list[list[int]]:
    """Return the responses of the model in ``role``."""
    responses = nets.sample(
        nets.language_model(job.inputs[role]),
        [asked.ids[i] for i in indices],
        temperature=job.generation.temperature,
        max_tokens=job.generation.max_response_tokens,
        seed=seed,
        greedy=greedy,
    )
    return rolls.stopped(responses)


@torch.no_grad()
def evaluation(job: StageJob[PolicyEvaluation]) -> Metrics:
    """Evaluate both models on every test prompt, both from the same seed of sampling."""
    asked, copies = rolls.questions(job, "test"), job.work.samples_per_prompt
    name = "accuracy" if job.work.judge.verifier is not None else "score"
    found: dict[str, list[float]] = {}
    answered: dict[str, list[list[int]]] = {}
    metrics: Metrics = {}
    for role, prefix in (("candidate", ""), ("baseline", "baseline_")):
        for times, is_greedy in ((copies, False), (1, True)):
            indices = [index for index in range(len(asked.ids)) for _ in range(times)]
            seed = nets.stream(job, "sampling")
            responses = answers_of(job, role, asked, indices, seed=seed, greedy=is_greedy)
            verdicts = judged(job, asked, indices, responses)
            if is_greedy:
                metrics[f"{prefix}greedy_{name}"] = mean(verdicts)
            else:
                found[role], answered[role] = verdicts, responses
                metrics[f"{prefix}{name}"] = mean(verdicts)
                metrics |= of_both_judges(job, asked, indices, responses, prefix)
                metrics |= of_texts(responses, copies, prefix)
                metrics[f"{prefix}mean_response_length"] = mean(list(map(len, responses)))
    gains = [c - b for c, b in zip(found["candidate"], found["baseline"], strict=True)]
    by_prompt = torch.tensor(gains, dtype=torch.float64).view(-1, copies).mean(dim=1)
    return metrics | {
        f"{name}_gain": mean(gains),
        f"{name}_gain_standard_error": (by_prompt.std() / len(by_prompt) ** 0.5).item(),
        "win_rate": mean([float(g > 0) + 0.5 * float(g == 0) for g in gains]),
        "tied_pairs": mean([float(g == 0) for g in gains]),
        **of_likelihoods(job),
        **of_divergence(job, asked, copies, answered["candidate"]),
    }


def of_both_judges(
    job: StageJob[PolicyEvaluation],
    asked: rolls.Questions,
    indices: Sequence[int],
    responses: list[list[int]],
    prefix: str,
) -> Metrics:
    """Return pass@2 and pass@4 by trying every choice of responses; the mean judgement of the second judge."""
    metrics: Metrics = {}
    for judge in (job.work.judge, job.work.also):
        assert judge is not None
        verdicts = judged(job, asked, indices, responses, judge)
        if judge is job.work.also:
            metrics[f"{prefix}{'accuracy' if judge.verifier else 'score'}"] = mean(verdicts)
        if judge.verifier is not None:
            copies = job.work.samples_per_prompt
            of_prompts = [verdicts[start : start + copies] for start in range(0, len(verdicts), copies)]
            for k in (2, 4):
                chances = [mean([max(each) for each in combinations(row, k)]) for row in of_prompts]
                metrics[f"{prefix}pass_at_{k}"] = mean(chances)
    return metrics


def of_texts(responses: list[list[int]], copies: int, prefix: str) -> Metrics:
    """Return distinct-1 to distinct-3 of each prompt's responses, without the token that ended a response."""
    metrics: Metrics = {}
    for n in (1, 2, 3):
        shares = []
        for start in range(0, len(responses), copies):
            grams: list[str] = []
            for response in responses[start : start + copies]:
                text = list(map(str, response[:-1] if rolls.has_ended(response) else response))
                grams += ["-".join(text[i : i + n]) for i in range(len(text)) if i + n <= len(text)]
            shares += [len(set(grams)) / len(grams)] if grams else []
        metrics[f"{prefix}distinct_{n}"] = mean(shares)
    return metrics


def of_likelihoods(job: StageJob[PolicyEvaluation]) -> Metrics:
    """Return perplexity per token and NLL per response of both models, at temperature 1."""
    rows = completions(job, "demonstrations", "test", ["response"])
    metrics: Metrics = {}
    for role, prefix in (("candidate", ""), ("baseline", "baseline_")):
        nll = nll_of(nets.language_model(job.inputs[role]), rows, "response", range(len(rows.prompts)), 1.0)
        metrics[f"{prefix}perplexity"] = nll.mean().exp().item()
        metrics[f"{prefix}response_nll"] = nll.sum().item() / len(rows.prompts)
    ratio = metrics["perplexity"] / metrics["baseline_perplexity"]
    return metrics | {"perplexity_ratio": ratio}


def of_divergence(
    job: StageJob[PolicyEvaluation], asked: rolls.Questions, copies: int, responses: list[list[int]]
) -> Metrics:
    """Return k3 of the candidate's own responses."""
    prompts = [ids for ids in asked.ids for _ in range(copies)]
    said = [
        nets.of_tokens(
            nets.distributions(
                nets.language_model(job.inputs[role]), prompts, responses, job.generation.temperature
            ),
            responses,
        )
        for role in ("candidate", "baseline")
    ]
    k3 = [((b - a).exp() - 1 + a - b).sum().item() for a, b in zip(*said, strict=True)]
    return {
        "kl_to_baseline": mean(k3),
        "kl_to_baseline_per_token": sum(k3) / sum(map(len, responses)),
    }


def rollouts(job: StageJob[ResolvedRolloutCollection]) -> dict[str, list[Batch]]:
    """Return split → the scored responses to each of its prompts."""
    work, number, policy = job.work, 0, nets.language_model(job.inputs["policy"])
    found: dict[str, list[Batch]] = {}
    for split in ("test", "validation", "train"):
        group = work.samples_per_prompt if split == "train" else work.held_out_samples_per_prompt
        asked, found[split] = rolls.questions(job, split), []
        size = max(1, work.batch_size // group)
        for start in range(0, len(asked.ids), size):
            of_batch = range(start, min(start + size, len(asked.ids)))
            indices = [index for index in of_batch for _ in range(group)]
            batch = rolls.sample_and_score(
                job, policy, asked, indices, seed=nets.stream(job, "sampling", number)
            )
            number += 1
            rows = [range(place * group, (place + 1) * group) for place in range(len(of_batch))]
            found[split] += [rolls.joined([(batch, of_prompt)]) for of_prompt in rows]
    return found


def preferences(job: StageJob[ResolvedPreferenceCollection]) -> dict[str, list[tuple[str, str, str]]]:
    """Return split → (prompt, best response, worst response), where the two differ in score and text."""
    work, number = job.work, 0
    size = max(1, work.batch_size // work.samples_per_prompt)
    pairs: dict[str, list[tuple[str, str, str]]] = {}
    for split in ("test", "validation", "train"):
        asked, pairs[split] = rolls.questions(job, split), []
        texts = [row["prompt"] for row in rolls.rows_of(job.inputs["prompts"], split)]
        for start in range(0, len(texts), size):
            of_batch = range(start, min(start + size, len(texts)))
            indices = [index for index in of_batch for _ in range(work.samples_per_prompt)]
            seed = nets.stream(job, "sampling", number)
            responses = answers_of(job, "policy", asked, indices, seed=seed)
            scores, said = judged(job, asked, indices, responses), list(map(rolls.decode, responses))
            number += 1
            for index in of_batch:
                rows = [i for i, of in enumerate(indices) if of == index and said[i].strip()]
                if len(rows) < 2:
                    continue
                best, worst = (pick(rows, key=scores.__getitem__) for pick in (max, min))
                if scores[best] != scores[worst] and said[best] != said[worst]:
                    pairs[split].append((texts[index], said[best], said[worst]))
    return pairs
