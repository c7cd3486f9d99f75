"""Score responses by a language model behind an OpenAI-compatible endpoint."""

from collections.abc import Mapping, Sequence
from typing import Any

from vantage.schemas.recipe.served_scores import SCORE
from vantage.schemas.recipe.terms import JudgeTerm
from vantage.tasks.rewards.answered_scores import AnsweredScores, Case, Named, named
from vantage.tasks.rewards.asking import Question, Reply, counted_tokens
from vantage.tasks.rewards.judge_questions import questions, read_number, read_preference
from vantage.tasks.rewards.term_scores import NamedScores, Source, TermScores
from vantage.tasks.rewards.verifiers import MissingAnswers, lack_of_answers

PROMPTS = ("prompts", "watch_prompts")
"""Roles of the datasets to whose prompts a stage samples responses."""
_CUT_OFF = ("length", "max_tokens", "model_length", "content_filter")
"""Reasons that endpoints give if the model did not end the answer itself."""
_ENDED = (
    None,
    *("stop", "stop_sequence", "end_turn", "eos", "eos_token"),
    *("tool_calls", "function_call"),
)
"""Reasons that endpoints give if the model ended the answer itself; None: the endpoint gives no reason."""


def load(term: JudgeTerm, source: Source) -> TermScores | NamedScores:
    """Return the judge's scores; no server is called yet.

    Raises:
        ValueError: the variable of the server's key is not set.
        MissingAnswers: the judge's question shows the row's answer, and prompts have none.
    """
    judge = term.judge
    if judge.against is not None or "{answer}" in judge.template:
        refuse_missing_answers(source)

    def read(answer: str) -> Named:
        names = judge.score_names or (SCORE,)
        if judge.against is not None:
            return {name: read_preference(answer, name, names=names) for name in names}
        return {name: read_number(answer, name, judge.bounds, names=names) for name in names}

    def asked(case: Case) -> list[dict[str, Any]]:
        return list(questions(judge, *case))

    scores = AnsweredScores(
        source, judge, ChatCompletions(), questions=asked, read=read, joined=of_both_orders
    )
    return named(scores, judge)


def of_both_orders(read: Sequence[Named]) -> Named:
    """Return the scores of a response; if it was compared in both orders, the mean of both."""
    if len(read) == 1:
        return read[0]
    first, second = read
    return {name: (first[name] + 1.0 - second[name]) / 2.0 for name in first}


class ChatCompletions:
    """The endpoint ``/chat/completions`` of OpenAI and of the servers that follow it."""

    path = "/chat/completions"
    batch = 1

    def body(self, questions: Sequence[Question]) -> Mapping[str, Any]:
        """Return the request of one question."""
        return questions[0].asked

    def replies(self, body: Any, *, questions: Sequence[Question]) -> list[Reply]:
        """Return the answer, with the tokens that the server counted.

        Raises:
            ValueError, KeyError, TypeError, IndexError, AttributeError: the body is not an answer.
        """
        choices = body["choices"]
        if len(choices) != len(questions):
            raise ValueError(f"{len(choices)} answers to {len(questions)} question")
        message, reason = choices[0]["message"], choices[0].get("finish_reason")
        # The content is missing if the model only thought, or refused. If the reason is missing too, this is no answer.
        text = message["content"] if reason is None else message.get("content")
        if text is None:
            text = ""
        if not isinstance(text, str):
            raise TypeError(f"content is a {type(text).__name__}")
        is_cut_off = _is_cut_off(reason)
        tokens = (counted_tokens(body, "prompt_tokens"), counted_tokens(body, "completion_tokens"))
        model = body.get("model")
        return [Reply(text, *tokens, is_cut_off=is_cut_off, model=model if isinstance(model, str) else "")]


def _is_cut_off(reason: object) -> bool:
    """Return whether an answer ended before its model did.

    Raises:
        ValueError: the server broke off (``error``, ``abort``), or gives an unknown reason: the answer may be a part.
    """
    found = reason.casefold() if isinstance(reason, str) else reason
    if found in _CUT_OFF:
        return True
    if found not in _ENDED:
        raise ValueError(f"finish_reason={reason!r:.80}: the answer may be a part of one")
    return False


def refuse_missing_answers(source: Source) -> None:
    """Raise MissingAnswers if prompts of the stage have no answer, which the question shows."""
    for role in PROMPTS:
        if role in source.job.inputs and (lack := lack_of_answers(source.job.inputs[role])):
            raise MissingAnswers(
                f"{source.path}.judge shows the row's answer, and {lack} prompts that {source.job.name} samples responses to have none; map "
                "them with columns.answer of their data, or leave those rows out"
            )
