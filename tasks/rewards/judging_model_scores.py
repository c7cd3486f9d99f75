"""Score responses by a language model of the run: by the probabilities that it gives the numbers of a scale.

A stage asks each question once. The answer, the log-probability of each number, is kept in the stage's file of answers,
like the answers of servers.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from vantage.algorithms.label_scores import expected_scores, total_probability
from vantage.models.folders import load_tokenizer
from vantage.models.pinned_date import pin_date
from vantage.models.policy import PolicyModel
from vantage.models.prompts import encode_prompts
from vantage.schemas.recipe.judging_models import JudgingModel
from vantage.schemas.recipe.served_scores import STOP
from vantage.schemas.recipe.terms import JudgingModelTerm
from vantage.schemas.records.stored_answers import Asked, StoredAnswer, question_digest
from vantage.tasks.data.rows import row_batches
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.rewards.answer_file import answer_file
from vantage.tasks.rewards.answered_scores import Case, UnreadableAnswer
from vantage.tasks.rewards.judge_questions import filled
from vantage.tasks.rewards.judge_scores import PROMPTS, refuse_missing_answers
from vantage.tasks.rewards.label_logprobs import (
    LabelReader,
    UnusableJudge,
    label_ids,
    label_logprobs,
    label_passes,
)
from vantage.tasks.rewards.term_scores import NamedScores, Responses, Source, TermScores
from vantage.tasks.training import answer_record, progress, ranks
from vantage.tasks.training.networks import fixed_policy
from vantage.tasks.training.offloading import on_device

_ROWS_AT_ONCE = 1024


def load(term: JudgingModelTerm, source: Source) -> TermScores | NamedScores:
    """Load the model.

    Raises:
        MissingAnswers: the question shows the row's answer, and prompts have none.
        UnusableJudge: the tokenizer cannot distinguish the numbers, or a question would be longer than the model reads.
    """
    judge, job = term.judge, source.job
    if judge.against is not None or "{answer}" in judge.template:
        refuse_missing_answers(source)
    tokenizer = pin_date(load_tokenizer(job.inputs[source.role]), job.date)
    remedy = "give a scale whose numbers begin differently, such as [1, 9]"
    scores = JudgedByModel(
        judge=judge,
        source=source,
        policy=fixed_policy(job, source.role, source.device, kept_as="reward"),
        tokenizer=tokenizer,
        labels=label_ids(tokenizer, judge.labels, field=f"{source.path}.judge.scale", remedy=remedy),
    )
    scores.check_prompts()
    return NamedScores(judge.score_names, scores) if judge.score_names else scores


@dataclass(frozen=True)
class JudgedByModel:
    """The scores of one model; all ranks ask it, and the first one keeps the answers."""

    judge: JudgingModel
    source: Source
    policy: PolicyModel
    tokenizer: PreTrainedTokenizerBase
    labels: tuple[list[int], ...]
    """Ids of each answer that the model may give."""

    is_graded = True
    """The percentiles of these scores have curves."""

    def __call__(self, given: Responses) -> Tensor:
        """Return scores (B,N), in the order of the criteria; (B,) for one score without a name.

        Raises:
            UnusableJudge: a question is longer than the model reads.
            UnreadableAnswer: the model would answer something else, and the recipe has no number for that.
        """
        cases = list(zip(given.prompts, given.responses, given.answers, strict=True))
        asked = {case: list(asked_about(self.judge, self._digest, case)) for case in dict.fromkeys(cases)}
        questions = list({question_digest(each): each for case in asked.values() for each in case}.values())
        place = {question_digest(each): number for number, each in enumerate(questions)}
        read = self._read(questions, self._logprobs(questions, given))
        scores = {
            case: _by_criterion([float(read[place[question_digest(each)]]) for each in about], self.judge)
            for case, about in asked.items()
        }
        table = torch.tensor([scores[case] for case in cases], dtype=torch.float64)
        table = table.view(len(cases), len(self.judge.questions)).float().to(given.device)
        return table if self.judge.score_names else table.squeeze(1)

    def check_prompts(self) -> None:
        """Try the question about each prompt of the stage with a response of the longest length.

        Raises:
            UnusableJudge: a question is longer than the model reads.
        """
        limit = self._window
        if limit is None:
            return
        job = self.source.job
        for folder in (job.inputs[role] for role in PROMPTS if role in job.inputs):
            for split in SPLITS:
                for rows in row_batches(folder, split, _ROWS_AT_ONCE):
                    cases = [(row["prompt"], "", row.get("answer") or "") for row in rows]
                    texts = [each["question"] for case in cases for each in asked_about(self.judge, "", case)]
                    found = encode_prompts(self.tokenizer, texts, chat=None)
                    longest = max(map(len, found), default=0) + job.generation.max_response_tokens
                    if longest + max(map(len, self.labels)) > limit:
                        raise self._too_long(
                            f"a question about a response of generation.max_response_tokens={job.generation.max_response_tokens} can "
                            f"have {longest}"
                        )

    @property
    def _digest(self) -> str:
        """Return the content digest of the model."""
        return self.source.job.digests[self.source.role]

    @property
    def _window(self) -> int | None:
        """Return the tokens that the model reads at most; None: it has no such limit."""
        config = self.policy.causal_lm.config.get_text_config()
        return getattr(config, "max_position_embeddings", None)

    def _too_long(self, found: str) -> UnusableJudge:
        return UnusableJudge(
            f"{self.source.path}.judge.model={self.judge.model!r} reads {self._window} tokens, and {found}; shorten the "
            "question, lower generation.max_response_tokens or max_prompt_tokens, or name a model that reads more"
        )

    def _logprobs(self, questions: Sequence[Mapping[str, str]], given: Responses) -> Tensor:
        """Return (Q,K), float64: the log-probability of each answer to each question, kept or new.

        The rounding of a question's result depends on the other questions in its pass. So all questions are divided
        into the same passes, whichever have kept answers: a resumed attempt gets the same bits as an uninterrupted one.
        """
        encoded = encode_prompts(self.tokenizer, [each["question"] for each in questions], chat=None)
        reader = LabelReader(self.policy, int(self.tokenizer.pad_token_id or 0), self.labels, given.limits)
        longest = max(map(len, encoded), default=0)
        if self._window is not None and longest + reader.longest > self._window:
            raise self._too_long(f"its longest question has {longest}")
        is_kept, found = self._kept(questions)
        if bool(is_kept.all()):
            return found
        new = torch.zeros_like(found)
        with on_device(self.policy):
            for part in label_passes(reader, encoded):
                progress.phase("asking the judge", part.done, len(questions))
                if bool(is_kept[part.rows].all()) and ranks.world_size() == 1:
                    continue
                part.put(label_logprobs(reader, encoded, part), into=new)
                if part.weight:
                    self._keep(questions, encoded, new, [row for row in part.rows if not is_kept[row]])
        new = ranks.total(new)
        missing = [row for row in range(len(questions)) if not is_kept[row]]
        self._keep(questions, encoded, new, missing)
        if ranks.rank() == 0:
            answer_file(self.source.job.scratch).sync()
            answer_record.note_asked(len(missing), failed_calls=0)
        return torch.where(is_kept[:, None], found, new)

    def _kept(self, questions: Sequence[Mapping[str, str]]) -> tuple[Tensor, Tensor]:
        """Return which questions (Q,) have a kept answer, and these answers (Q,K); equal on all ranks."""
        found = torch.zeros(len(questions), 1 + len(self.labels), dtype=torch.float64)
        if ranks.rank() == 0:
            answers = answer_file(self.source.job.scratch)
            for row, each in enumerate(questions):
                if kept := answers.answer(Asked(question_digest(each), 0)):
                    by_label = json.loads(kept[0])
                    values = [1.0, *(by_label[label] for label in self.judge.labels)]
                    found[row] = torch.tensor(values, dtype=torch.float64)
        found = ranks.total(found)
        return found[:, 0] > 0, found[:, 1:]

    def _keep(
        self,
        questions: Sequence[Mapping[str, str]],
        encoded: Sequence[Sequence[int]],
        logprobs: Tensor,
        rows: Sequence[int],
    ) -> None:
        """Keep the answers in these rows; the first rank alone has the file."""
        if ranks.rank() != 0:
            return
        answers = answer_file(self.source.job.scratch)
        for row in rows:
            by_label = dict(zip(self.judge.labels, logprobs[row].tolist(), strict=True))
            answers.add(
                StoredAnswer(
                    question=question_digest(questions[row]),
                    time=0,
                    asked=dict(questions[row]),
                    answer=json.dumps(by_label),
                    question_tokens=len(encoded[row]),
                    answer_tokens=max(map(len, self.labels)),
                )
            )

    def _read(self, questions: Sequence[Mapping[str, str]], logprobs: Tensor) -> Tensor:
        """Return the score in each answer (Q,), NaN in one that cannot be read.

        Raises:
            UnreadableAnswer: see ``__call__``.
        """
        scores = expected_scores(logprobs, torch.tensor(self.judge.label_scores, dtype=torch.float64))
        probabilities = total_probability(logprobs)
        unreadable = probabilities < self.judge.least_probability
        if ranks.rank() == 0:
            self._count(questions, probabilities, unreadable)
        if not bool(unreadable.any()):
            return scores
        if self.judge.unreadable == STOP:
            row = int(unreadable.nonzero()[0])
            raise UnreadableAnswer(
                f"{self.source.path}.judge: the answers {', '.join(self.judge.labels)} to the question "
                f"{question_digest(questions[row])[:12]} have the probability {float(probabilities[row]):.3g} together, and "
                f"least_probability is {self.judge.least_probability:g}; correct the question, lower least_probability, or set "
                f"{self.source.path}.judge.unreadable to a number"
            )
        return scores.masked_fill(unreadable, math.nan)

    def _count(
        self, questions: Sequence[Mapping[str, str]], probabilities: Tensor, unreadable: Tensor
    ) -> None:
        answers = answer_file(self.source.job.scratch)
        for each, probability, is_unreadable in zip(
            questions, probabilities.tolist(), unreadable.tolist(), strict=True
        ):
            kept = answers.answer(Asked(question_digest(each), 0))
            assert kept is not None, "all answers are kept by now"
            answer_record.note_answer(kept[1:], cost=0.0, probability=probability)
            if is_unreadable:
                answer_record.note_unreadable()


def asked_about(judge: JudgingModel, digest: str, case: Case) -> Iterator[dict[str, str]]:
    """Yield the questions about a response: one for each criterion, or with ``against`` one for each order of both responses.

    Args:
        digest: content digest of the model.
    """
    prompt, response, answer = case
    low, high = map(str, judge.bounds)
    whole = {"prompt": prompt, "answer": answer or "", "low": low, "high": high}
    shown = [{"response": response}]
    if judge.against is not None:
        assert answer is not None  # prompts without an answer were refused
        shown = [{"first": response, "second": answer}, {"first": answer, "second": response}]
    for criterion in judge.questions.values():
        for each in shown:
            question = filled(judge.template, {**whole, **each, "criterion": criterion})
            yield {"model": digest, "question": question, "labels": " ".join(judge.labels)}


def _by_criterion(scores: Sequence[float], judge: JudgingModel) -> list[float]:
    """Return the score of each criterion from the scores of its questions; with ``against`` the mean of both orders.

    If the answer to a question cannot be read (NaN), its criterion gets the recipe's number, in either order.
    """
    found = list(scores)
    if judge.against is not None:
        found = [
            (first + 1.0 - second) / 2.0 for first, second in zip(scores[::2], scores[1::2], strict=True)
        ]
    if judge.unreadable == STOP:
        return found
    return [float(judge.unreadable) if math.isnan(score) else score for score in found]
