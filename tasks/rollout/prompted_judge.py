"""A judge that is a language model: it is asked which of two responses to a prompt is better, in both orders."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vantage.algorithms.swapped_verdicts import SwappedVerdicts, swapped_verdicts
from vantage.models.folders import load_tokenizer
from vantage.models.pinned_date import pin_date
from vantage.models.policy import PolicyModel
from vantage.models.prompts import encode_prompts, encode_responses
from vantage.models.sequences import collate
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rewards import PAIR_FIELDS, Judge
from vantage.schemas.records.job import StageJob
from vantage.tasks.rollout.rollouts import Sampled, sequence_sums
from vantage.tasks.training import progress, ranks
from vantage.tasks.training.networks import fixed_policy
from vantage.tasks.training.passes import passes

READ_AT_ONCE = 64
"""Questions with an answer in one forward pass without ``microbatch_size``, which counts these; each pair has four."""
_LONGEST_ANSWER = 200
_FIELD = re.compile("|".join(map(re.escape, PAIR_FIELDS)))


class UnusableJudge(ValueError):
    """A model cannot be asked: its tokenizer cannot distinguish the answers, or a question does not fit."""


@dataclass(frozen=True)
class PromptedJudge:
    """A judge, loaded."""

    policy: PolicyModel
    tokenizer: PreTrainedTokenizerBase
    """Tokenizer of the judge's model."""
    template: str
    answers: tuple[list[int], list[int]]
    """Ids of the answers that prefer the first and the second response."""
    name: str
    limits: PassLimits


def load_prompted_judge(
    job: StageJob, judge: Judge, *, role: str, device: torch.device, limits: PassLimits
) -> PromptedJudge:
    """Return the model in ``role``, with the recipe's template and answers.

    Raises:
        UnusableJudge: its tokenizer reads one answer as the beginning of the other.
    """
    assert judge.model is not None
    tokenizer = pin_date(load_tokenizer(job.inputs[role]), job.date)
    first, second = answer_ids(tokenizer, judge.answers, field=f"{role}.answers")
    return PromptedJudge(
        policy=fixed_policy(job, role, device),
        tokenizer=tokenizer,
        template=judge.template,
        answers=(first, second),
        name=f"{role}.model={judge.model!r}",
        limits=limits,
    )


def answer_ids(
    tokenizer: PreTrainedTokenizerBase, answers: Sequence[str], *, field: str
) -> tuple[list[int], list[int]]:
    """Return ids of the answers as the beginning of the model's response, without the token that ends it.

    Raises:
        UnusableJudge: one is the beginning of the other, or equal to it: then it is never the less likely one.
    """
    encoded = encode_responses(tokenizer, answers, max_tokens=_LONGEST_ANSWER + 1, chat=None)
    first, second = (ids[:-1] if ended else ids for ids, ended in encoded)
    shorter = min(len(first), len(second))
    if first[:shorter] == second[:shorter]:
        raise UnusableJudge(
            f"{field}: the judge's tokenizer reads {answers[0]!r} as {first} and {answers[1]!r} as {second}, of which one "
            "begins like the other; name answers that begin differently"
        )
    return first, second


def judge_pairs(judge: PromptedJudge, candidate: Sampled, baseline: Sampled) -> SwappedVerdicts:
    """Return the verdicts on the i-th response of the candidate beside the i-th of the baseline."""
    return judge_texts(judge, candidate.prompts, candidate.responses, baseline.responses)


def judge_texts(
    judge: PromptedJudge, prompts: Sequence[str], ours: Sequence[str], theirs: Sequence[str]
) -> SwappedVerdicts:
    """Return the verdicts on B pairs of responses, the i-th of each to the i-th prompt; ``ours`` are the candidate's."""
    return swapped_verdicts(
        candidate_first=preferences(judge, prompts, ours, theirs),
        baseline_first=preferences(judge, prompts, theirs, ours),
    )


@torch.no_grad()
def preferences(
    judge: PromptedJudge, prompts: Sequence[str], firsts: Sequence[str], seconds: Sequence[str]
) -> Tensor:
    """Return (B,), on the CPU: log-probability of the answer for the first response less that for the second, at temperature 1.

    Raises:
        UnusableJudge: a question with its answer is longer than the model reads.
    """
    rows = encoded_questions(judge, prompts, firsts, seconds)
    found = torch.zeros(len(rows), 2, dtype=torch.float64)
    longest = max(map(len, judge.answers))
    limits = judge.limits.or_rows(READ_AT_ONCE)
    questions_at_once = replace(limits, rows=max((limits.rows or READ_AT_ONCE) // 2, 1))
    for part in passes([len(row) + longest for row in rows], questions_at_once, sequences=2):
        progress.phase("asking the judge", part.done, len(rows))
        # both answers to a question in one pass, where they have the same padding
        both = collate(
            [rows[place] for place in part.rows for _ in judge.answers],
            [ids for _ in part.rows for ids in judge.answers],
            pad_token_id=int(judge.tokenizer.pad_token_id),
        ).to(judge.policy.device)
        of_tokens: dict[str, Tensor] = judge.policy(both, temperature=1.0)
        part.put(sequence_sums(of_tokens["logprobs"].double(), both.response_mask).view(-1, 2), into=found)
    first, second = ranks.total(found).unbind(dim=1)
    return first - second


def question(template: str, prompt: str, first: str, second: str) -> str:
    """Return the template with the prompt and both responses; what looks like a field in these stays as it is."""
    texts = dict(zip(PAIR_FIELDS, (prompt, first, second), strict=True))
    return _FIELD.sub(lambda field: texts[field[0]], template)


def encoded_questions(
    judge: PromptedJudge, prompts: Sequence[str], firsts: Sequence[str], seconds: Sequence[str]
) -> list[list[int]]:
    """Return the questions about pairs of responses as ids.

    Raises:
        UnusableJudge: one of them, with its answer, is longer than the model reads.
    """
    questions = [question(judge.template, *shown) for shown in zip(prompts, firsts, seconds, strict=True)]
    rows = encode_prompts(judge.tokenizer, questions, chat=None)
    longest = max(map(len, rows), default=0) + max(map(len, judge.answers))
    _refuse_too_long(judge, longest, f"its longest question has {longest} with its answer")
    return rows


def refuse_long_responses(judge: PromptedJudge, prompts: Sequence[str], longest_response: int) -> None:
    """Refuse a judge that could not read a question about two responses of ``longest_response`` of its own tokens.

    Raises:
        UnusableJudge: it could not.
    """
    questions = [question(judge.template, prompt, "", "") for prompt in prompts]
    rows = encode_prompts(judge.tokenizer, questions, chat=None)
    longest = max(map(len, rows), default=0) + 2 * longest_response + max(map(len, judge.answers))
    _refuse_too_long(
        judge,
        longest,
        f"a question about two responses of generation.max_response_tokens={longest_response} can have {longest}",
    )


def _refuse_too_long(judge: PromptedJudge, longest: int, described: str) -> None:
    limit = getattr(judge.policy.causal_lm.config, "max_position_embeddings", None)
    if limit is not None and longest > limit:
        raise UnusableJudge(
            f"{judge.name} reads {limit} tokens, and {described}; shorten template, or "
            "lower generation.max_response_tokens or max_prompt_tokens, or name a model that reads more"
        )
