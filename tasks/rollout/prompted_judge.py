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
from vantage.models.prompts import encode_prompts
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.rewards import PAIR_FIELDS, Judge
from vantage.schemas.records.job import StageJob
from vantage.tasks.rewards.label_logprobs import (
    LabelReader,
    UnusableJudge,
    label_ids,
    label_logprobs,
    label_passes,
)
from vantage.tasks.rollout.rollouts import Sampled
from vantage.tasks.training import progress, ranks
from vantage.tasks.training.networks import fixed_policy

_FIELD = re.compile("|".join(map(re.escape, PAIR_FIELDS)))


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
        UnusableJudge: one answer begins the other, or equals it, so that it could never be the less likely one.
    """
    first, second = label_ids(tokenizer, answers, field=field, remedy="name answers that begin differently")
    return first, second


def judge_pairs(judge: PromptedJudge, candidate: Sampled, baseline: Sampled) -> SwappedVerdicts:
    """Return the verdicts on pairs of the i-th response of the candidate and the i-th of the baseline."""
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
    reader = LabelReader(
        judge.policy,
        int(judge.tokenizer.pad_token_id),
        judge.answers,
        replace(judge.limits, share_prompts=False),
    )
    for part in label_passes(reader, rows):
        progress.phase("asking the judge", part.done, len(rows))
        part.put(label_logprobs(reader, rows, part), into=found)
    first, second = ranks.total(found).unbind(dim=1)
    return first - second


def question(template: str, prompt: str, first: str, second: str) -> str:
    """Return the template with the prompt and both responses; text in these that looks like a field is not replaced."""
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
    """Refuse a judge that cannot read a question about two responses of ``longest_response`` of its own tokens.

    Raises:
        UnusableJudge: such a question would be longer than the model reads.
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
