"""Answers of judges, reward servers and teachers: one line of the file that keeps them, and the key of a stage's answers."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from pydantic import Field

from vantage.schemas.canonical_json import canonical_json
from vantage.schemas.frozen import Frozen
from vantage.schemas.recipe.fields import is_default
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.work import Work
from vantage.schemas.records.stage_key import stage_key as hash_key_parts

ANSWERS_KIND = "answers"
ANSWERS_PART = "answers"
"""Part of a stage's provenance: the digest of the artifact with the answers that the stage received."""


class Asked(NamedTuple):
    """Names one answer: a question may be asked several times."""

    question: str
    """Digest of the question."""
    time: int
    """Number of the answer, from 0; only after one that could not be read comes another."""


class AnsweredBy(NamedTuple):
    """Names whom a stage asks: a judge and a teacher may have models of one name."""

    kind: Literal["judge", "reward_server", "other"]
    """``other``: a teacher's server, or a model of the run."""
    name: str
    """The model, or the version of a reward server."""


class StoredAnswer(Frozen):
    """One answer of a server, and its question."""

    question: str = Field(pattern=r"^[0-9a-f]{64}$")
    """sha256 of the canonical JSON of ``asked``."""
    time: int = Field(ge=0)
    """Number of earlier answers to the question."""
    asked: dict[str, Any]
    """The question: all that the answer may depend on, without the server's address."""
    answer: str
    """The answer, as the server gave it."""
    question_tokens: int = Field(0, ge=0)
    answer_tokens: int = Field(0, ge=0)
    """Tokens that the server counted; 0: it counts none."""
    is_cut_off: bool = Field(False, exclude_if=is_default(False))
    """Whether the server ended the answer before the model did: at the token limit, or by a filter."""
    is_broken: bool = Field(False, exclude_if=is_default(False))
    """Whether the server broke the answer off, so that the question was asked again: only its tokens count. In no finished file."""
    refusal: str = Field("", exclude_if=is_default(""))
    """Code and reason with which the server refuses the question; empty: it answers."""

    @property
    def asked_as(self) -> Asked:
        """Return the question and the number of the time it was asked, which name the answer."""
        return Asked(self.question, self.time)

    @property
    def is_counted(self) -> bool:
        """Return whether the server counted the tokens of question and answer. A refused question has none, and counts
        as counted."""
        return bool(self.refusal) or (
            self.question_tokens > 0 and (self.answer_tokens > 0 or not self.answer)
        )

    @property
    def source(self) -> str:
        """Return the model, or the version of the server, that was asked."""
        return str(self.asked.get("model", self.asked.get("version")))

    @property
    def answered_by(self) -> AnsweredBy:
        """Return who answered, by the form of the question."""
        if "messages" in self.asked:
            return AnsweredBy("judge", self.source)
        return AnsweredBy("reward_server" if "item" in self.asked else "other", self.source)

    def line(self) -> str:
        """Return the line of a finished file, without its end."""
        return canonical_json(self.model_dump(mode="json"))

    def sealed_line(self) -> str:
        """Return the line with its own sha256, which shows damage: this file has no manifest yet."""
        line = self.line()
        return f'{line[:-1]},"sha256":"{hashlib.sha256(line.encode()).hexdigest()}"}}'


def question_digest(asked: Mapping[str, Any]) -> str:
    """Return the digest of a question."""
    return hashlib.sha256(canonical_json(asked).encode()).hexdigest()


_SEAL = re.compile(rb',"sha256":"([0-9a-f]{64})"}\s*')


def read_answer(line: str | bytes) -> StoredAnswer:
    """Return the answer in a line of either form; an earlier version wrote none with a sha256.

    Raises:
        ValueError: the line is damaged, or its question has another digest than the line gives.
    """
    data = line.encode() if isinstance(line, str) else line
    end = data.rfind(b',"sha256":')
    if end >= 0 and (seal := _SEAL.fullmatch(data, end)):
        data = data[:end] + b"}"
        if hashlib.sha256(data).hexdigest().encode() != seal[1]:
            raise ValueError(
                "the sha256 of the line is another one than it gives; the question is asked again"
            )
    answer = StoredAnswer.model_validate_json(data)
    if answer.question != (found := question_digest(answer.asked)):
        raise ValueError(
            f"an answer names the question {answer.question[:12]}, and its question is {found[:12]}"
        )
    return answer


def is_scored_by_servers(rewards: Mapping[str, Reward]) -> bool:
    """Return whether a term of these rewards is a server's score."""
    return any(term.server is not None for reward in rewards.values() for term in reward.terms)


def is_taught_by_a_server(work: Work) -> bool:
    """Return whether a server has the teacher of a distillation."""
    return getattr(work, "teacher_server", None) is not None


def keeps_answers(work: Work, rewards: Mapping[str, Reward]) -> bool:
    """Return whether a stage with these rewards reads stored answers, of servers or of a model of the run."""
    judged = any(term.judging_model is not None for reward in rewards.values() for term in reward.terms)
    return judged or is_taught_by_a_server(work) or is_scored_by_servers(rewards)


def answers_key_parts(stage_key: str) -> dict[str, Any]:
    """Return the parts of the key of a stage's stored answers."""
    return {"kind": ANSWERS_KIND, "revision": 1, "of": stage_key}


def answers_key(stage_key: str) -> str:
    """Return the key under which a stage's answers are stored."""
    return hash_key_parts(answers_key_parts(stage_key))
