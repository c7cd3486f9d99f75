"""The file that keeps each answer of a stage's judges and reward servers, so that no question is asked twice.

It is in the stage's scratch folder, one line for each answer, and only grows. A kill may leave a part of the last line,
which the next attempt removes. Every line carries the digest of its question, so a damaged one is found, and left out.
"""

import logging
import os
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from vantage.ledger.journal import end_of_last_line
from vantage.schemas.records.stored_answers import AnsweredBy, Asked, StoredAnswer, read_answer
from vantage.storage.durable_files import make_folder, sync_folder
from vantage.tasks.training.scratch import ANSWERS

log = logging.getLogger(__name__)


class AnswerFile:
    """The answers of a stage; one process at a time writes them."""

    def __init__(self, path: Path) -> None:
        """Read the answers that are there, and remove an incomplete last line."""
        self.path = path
        is_new = not path.exists()
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - open as long as the stage works
        if is_new:
            sync_folder(path.parent)
        self._end = end_of_last_line(self._file.fileno())
        os.ftruncate(self._file.fileno(), self._end)
        # Servers that are asked while responses are sampled answer in threads of their own.
        self._lock = threading.Lock()
        self.begun: set[str] = set()
        """Digests of questions that are under way while responses are sampled; no other term asks them too."""
        self._answers: dict[Asked, tuple[str, int, int]] = {}
        self._cut_off: set[Asked] = set()
        self._refused: set[Asked] = set()
        self._answering: set[AnsweredBy] = set()
        self._uncounted: set[AnsweredBy] = set()
        self._number_of: dict[str, int] = {}
        self._tokens_of: dict[AnsweredBy, tuple[int, int]] = {}
        for answer in _replies_in(path):
            self._keep(answer)

    def __len__(self) -> int:
        return len(self._answers)

    def answer(self, asked: Asked) -> tuple[str, int, int] | None:
        """Return an answer with the tokens of its question and its own; None: the question was not answered so often."""
        return self._answers.get(asked)

    def is_cut_off(self, asked: Asked) -> bool:
        """Return whether the server ended an answer before the model did."""
        return asked in self._cut_off

    def is_refused(self, asked: Asked) -> bool:
        """Return whether the server refused the question."""
        return asked in self._refused

    def has_answers_of(self, asked: AnsweredBy) -> bool:
        """Return whether a judge or a server has answered a question."""
        return asked in self._answering

    def is_counted(self, asked: AnsweredBy) -> bool:
        """Return whether all answers of a judge have the tokens that its server counted."""
        return asked not in self._uncounted

    def number_of(self, question: str) -> int:
        """Return how many answers to a question are there."""
        return self._number_of.get(question, 0)

    def tokens_of(self, asked: AnsweredBy) -> tuple[int, int]:
        """Return the tokens of all questions to a judge or a server, and of its answers."""
        return self._tokens_of.get(asked, (0, 0))

    def add(self, answer: StoredAnswer) -> None:
        """Write an answer to the kernel, so that a kill does not lose it; one that is there already is kept.

        Raises:
            OSError: the disk is full; nothing is left of the line.
        """
        with self._lock:
            if answer.is_broken or answer.asked_as not in self._answers:
                self._write(answer)

    def _write(self, answer: StoredAnswer) -> None:
        data = answer.line().encode() + b"\n"
        written = self._file.write(data)
        if written != len(data):
            os.ftruncate(self._file.fileno(), self._end)
            raise OSError(f"{self.path}: only {written} of {len(data)} bytes of an answer could be written")
        self._end += len(data)
        self._keep(answer)

    def sync(self) -> None:
        """Wait until all answers are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _keep(self, answer: StoredAnswer) -> None:
        if answer.is_broken:
            self._count(answer)
        elif answer.asked_as not in self._answers:
            self._keep_new(answer)

    def _keep_new(self, answer: StoredAnswer) -> None:
        self._answers[answer.asked_as] = (answer.answer, answer.question_tokens, answer.answer_tokens)
        if answer.is_cut_off:
            self._cut_off.add(answer.asked_as)
        if answer.refusal:
            self._refused.add(answer.asked_as)
        else:
            self._answering.add(answer.answered_by)
        if not answer.is_counted:
            self._uncounted.add(answer.answered_by)
        self._number_of[answer.question] = self._number_of.get(answer.question, 0) + 1
        self._count(answer)

    def _count(self, answer: StoredAnswer) -> None:
        """Count the tokens of a reply."""
        questions, answers = self.tokens_of(answer.answered_by)
        self._tokens_of[answer.answered_by] = (
            questions + answer.question_tokens,
            answers + answer.answer_tokens,
        )


@cache
def answer_file(scratch: Path) -> AnswerFile:
    """Return the answers of the stage that works in this folder; all of its terms share them."""
    make_folder(scratch)
    return AnswerFile(scratch / ANSWERS)


def answers_in(path: Path) -> Iterator[StoredAnswer]:
    """Yield the complete and undamaged answers of a file; none if it does not exist."""
    return (reply for reply in _replies_in(path) if not reply.is_broken)


def _replies_in(path: Path) -> Iterator[StoredAnswer]:
    """Yield the answers of a file, and also the replies that are none, whose tokens count."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # a kill has cut it off
            try:
                yield read_answer(line)
            except ValueError:
                log.warning("%s: line %d is damaged, and its question may be asked again", path, number)


def write_sorted(source: Path, target: Path) -> dict[str, float]:
    """Write the answers of a file in a fixed order, each once, and return their counts.

    Equal answers make equal files, in whatever order they came, and however many replies were broken off before them.
    """
    lines: dict[Asked, str] = {}
    tokens = [0, 0]
    for answer in answers_in(source):
        if answer.asked_as not in lines:
            lines[answer.asked_as] = answer.line()
            tokens = [tokens[0] + answer.question_tokens, tokens[1] + answer.answer_tokens]
    target.write_text("".join(f"{lines[asked]}\n" for asked in sorted(lines)), encoding="ascii")
    questions = len({asked.question for asked in lines})
    return {
        "questions": float(questions),
        "answers": float(len(lines)),
        "question_tokens": float(tokens[0]),
        "answer_tokens": float(tokens[1]),
    }
