"""Compute what is sampled, its scores, and which policy is kept, for the oracles of several stages."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.tasks import oracle_networks as nets
from tests.tasks.oracle_networks import of_tokens
from tests.tasks.unequal_inputs import (
    BOS,
    CHARACTERS,
    EOS,
    EXTRACT,
    SPECIAL,
)
from vantage.schemas.recipe.algorithm import Returns
from vantage.schemas.recipe.resolved import ResolvedRollouts
from vantage.schemas.recipe.terms import ModelTerm, VerifierTerm
from vantage.schemas.records.job import StageJob


def encode(text: str) -> list[int]:
    return [len(SPECIAL) + CHARACTERS.index(character) for character in text]


STOP: list[str] = []
"""Stop strings, of the test that puts them here."""


def decode(ids: Sequence[int]) -> str:
    """Return the text before the first stop string."""
    text = _whole_text(ids)
    return text[: min([text.index(string) for string in STOP if string in text], default=len(text))]


def stopped(responses: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return each response up to the token that completes the first stop string."""
    found = []
    for ids in responses:
        ends = [n for n in range(1, len(ids)) if any(string in _whole_text(ids[:n]) for string in STOP)]
        found.append(list(ids[: min(ends, default=len(ids))]))
    return found


def has_ended(ids: Sequence[int]) -> bool:
    return ids[-1] == EOS or any(string in _whole_text(ids) for string in STOP)


def _whole_text(ids: Sequence[int]) -> str:
    return "".join(CHARACTERS[token - len(SPECIAL)] for token in ids if token >= len(SPECIAL))


def rows_of(folder: Path, split: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(folder / f"{split}.parquet").to_pylist()
    return rows


@dataclass
class Questions:
    """The prompts of one split."""

    ids: list[list[int]]
    answers: list[str]


def questions(job: StageJob, split: str) -> Questions:
    rows = rows_of(job.inputs["prompts"], split)
    return Questions([[BOS, *encode(row["prompt"])] for row in rows], [row["answer"] for row in rows])


@dataclass
class Batch:
    """Sampled responses, with their scores before any scaling."""

    prompts: list[list[int]]
    answers: list[str]
    responses: list[list[int]]
    ended: list[bool]
    by_term: dict[str, list[float]]
    weighted_sums: list[float]
    scores: list[float]

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def right(self) -> list[bool]:
        return [is_right(r, a) for r, a in zip(self.responses, self.answers, strict=True)]


def is_right(response: Sequence[int], answer: str) -> bool:
    found = re.findall(EXTRACT, decode(response))
    return bool(found) and found[-1] == answer


def collected(folder: Path, split: str) -> list[Batch]:
    """Return what a rollout_collection stage wrote of one split, a batch for each prompt."""
    rows = pa.ipc.open_file(pa.memory_map(str(folder / f"{split}.arrow"))).read_all().to_pylist()
    told = json.loads((folder / "rollouts.json").read_text())
    group = told["samples_per_prompt" if split == "train" else "held_out_samples_per_prompt"]
    return [_batch_of(rows[start : start + group]) for start in range(0, len(rows), group)]


def _batch_of(rows: list[dict[str, Any]]) -> Batch:
    terms = [name for name in rows[0] if name.startswith("score.")]
    return Batch(
        [row["prompt_ids"] for row in rows],
        [row["answer"] for row in rows],
        [row["response_ids"] for row in rows],
        [row["ended"] for row in rows],
        {name.removeprefix("score."): [row[name] for row in rows] for name in terms},
        [row["weighted_sum"] for row in rows],
        [row["score"] for row in rows],
    )


frozen_reward = cache(nets.reward_model)


@torch.no_grad()
def sample_and_score(
    job: StageJob,
    policy: LlamaForCausalLM,
    asked: Questions,
    indices: Sequence[int],
    *,
    seed: int,
    greedy: bool = False,
) -> Batch:
    prompts, answers = [asked.ids[i] for i in indices], [asked.answers[i] for i in indices]
    responses = nets.sample(
        policy,
        prompts,
        seed=seed,
        temperature=job.generation.temperature,
        max_tokens=job.generation.max_response_tokens,
        greedy=greedy,
    )
    return scored(job, prompts, answers, stopped(responses))


@torch.no_grad()
def scored(job: StageJob, prompts: list[list[int]], answers: list[str], responses: list[list[int]]) -> Batch:
    """Return what the responses are worth under the job's reward."""
    ended = list(map(has_ended, responses))
    [reward] = job.rewards.values()
    by_term: dict[str, list[float]] = {}
    for number, term in enumerate(reward.terms):
        if isinstance(term, ModelTerm):
            model = frozen_reward(job.inputs[f"reward.main.{number}"])
            by_term[term.model] = [score.item() for score in nets.scores(model, prompts, responses)]
        else:
            assert isinstance(term, VerifierTerm)
            right = [is_right(r, a) for r, a in zip(responses, answers, strict=True)]
            by_term[term.verifier] = [1.0 if each else term.wrong for each in right]
    sums = [
        sum(t.weight * values[i] for t, values in zip(reward.terms, by_term.values(), strict=True))
        for i in range(len(prompts))
    ]
    assert reward.missing_eos is not None
    penalty = reward.missing_eos.subtract
    assert penalty is not None
    scores = [total if end else total - penalty for total, end in zip(sums, ended, strict=True)]
    return Batch(prompts, answers, responses, ended, by_term, sums, scores)


T = TypeVar("T")


def joined(parts: Sequence[tuple[Batch, Sequence[int]]]) -> Batch:
    """Return some rows of several batches, in order."""

    def taken(read: Callable[[Batch], Sequence[T]]) -> list[T]:
        return [read(batch)[row] for batch, rows in parts for row in rows]

    return Batch(
        taken(lambda b: b.prompts),
        taken(lambda b: b.answers),
        taken(lambda b: b.responses),
        taken(lambda b: b.ended),
        {
            name: [batch.by_term[name][row] for batch, rows in parts for row in rows]
            for name in parts[0][0].by_term
        },
        taken(lambda b: b.weighted_sums),
        taken(lambda b: b.scores),
    )


@torch.no_grad()
def logprobs_of(model: LlamaForCausalLM, batch: Batch, temperature: float) -> list[Tensor]:
    said = nets.distributions(model, batch.prompts, batch.responses, temperature)
    return of_tokens(said, batch.responses)


def scaled(job: StageJob, returns: Returns, moments: "Moments", batch: Batch) -> list[float]:
    """Return R/σ or (R − μ)/σ, clipped on both sides, less what DAPO's eq. 13 takes from long responses."""
    found = []
    limit = job.generation.max_response_tokens
    for score, response in zip(batch.scores, batch.responses, strict=True):
        if returns.reward_scaling != "none":
            score = (score - (moments.mean if returns.reward_scaling == "normalise" else 0.0)) / moments.std
        if returns.reward_clip is not None:
            score = min(max(score, -returns.reward_clip), returns.reward_clip)
        if returns.overlong_buffer is not None:
            buffer = max(1, round(returns.overlong_buffer * limit))
            score += min(0.0, max(-1.0, (limit - buffer - len(response)) / buffer))
        found.append(score)
    return found


@dataclass
class Moments:
    """Moments of every score seen so far, by sums."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, folder: Path) -> "Moments":
        """Return the moments that a critic's folder hands over."""
        if not (folder / "reward_moments.json").is_file():
            return cls()
        told = json.loads((folder / "reward_moments.json").read_text())
        count, mean = told["count"], told["mean"]
        return cls(count, count * mean, told["m2"] + count * mean**2)

    def add(self, scores: Sequence[float]) -> None:
        self.count += len(scores)
        self.total += sum(scores)
        self.squares += sum(score**2 for score in scores)

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def std(self) -> float:
        return math.sqrt(self.squares / self.count - self.mean**2)


def kl_per_token(kind: str, said: list[Tensor], of_reference: list[Tensor], batch: Batch) -> list[Tensor]:
    """Return KL(π‖ref) at each token, from log-distributions (length, V) of both."""
    logprobs, ref_logprobs = of_tokens(said, batch.responses), of_tokens(of_reference, batch.responses)
    deltas = [a - b for a, b in zip(logprobs, ref_logprobs, strict=True)]
    formulas: dict[str, Callable[[Tensor], Tensor]] = {
        "k1": lambda d: d,
        "abs": lambda d: d.abs(),
        "k2": lambda d: d**2 / 2,
        "k3": lambda d: (-d).exp() - 1 + d,
    }
    if kind == "full":
        return [(p.exp() * (p - q)).sum(-1) for p, q in zip(said, of_reference, strict=True)]
    return [formulas[kind](d) for d in deltas]


def token_rewards(scores: Sequence[float], kl: Sequence[Tensor], kl_coef: float) -> list[Tensor]:
    """Return −β·KL on each token, and the score on the last."""
    rewards = [-kl_coef * each for each in kl]
    for reward, score in zip(rewards, scores, strict=True):
        reward[-1] += score
    return rewards


def discounted(rewards: Tensor, gamma: float) -> Tensor:
    """Return Σ_k γ^k r_{t+k}."""
    length = len(rewards)
    sums = [sum(gamma**k * rewards[t + k] for k in range(length - t)) for t in range(length)]
    return torch.stack([torch.as_tensor(each, dtype=torch.float64) for each in sums])


def explained(values: Sequence[Tensor], returns: Sequence[Tensor]) -> float:
    """Return 1 − Var(G − V)/Var(G) over all tokens."""
    v, g = torch.cat(list(values)), torch.cat(list(returns))
    unexplained: Tensor = (g - v).var(correction=0) / g.var(correction=0)
    return 1 - unexplained.item()


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def asked_again(asked: Questions, count: int) -> list[int]:
    """Return the prompts' indices of ``count`` samples, which go through all prompts again and again."""
    return [index % len(asked.ids) for index in range(count)]


def prompts_of_iteration(
    job: StageJob[ResolvedRollouts], number: int, *, group: int, count: int
) -> list[int]:
    indices = nets.batch_of(nets.own_seed(job), number, size=job.work.batch_size // group, count=count)
    return [index for index in indices for _ in range(group)]


def minibatches(job: StageJob[ResolvedRollouts], iteration: int, count: int) -> list[list[list[int]]]:
    """Return rows of each optimiser step, by epoch."""
    size = job.work.minibatch_size
    orders = [
        nets.shuffled(nets.own_seed(job), count, "minibatches", iteration, epoch)
        for epoch in range(job.work.epochs)
    ]
    return [[order[start : start + size] for start in range(0, count, size)] for order in orders]
