"""The file that keeps each answer of a stage's judges and reward servers, so that no question is asked twice.

It is in the stage's scratch folder, one line for each answer, and only grows. A kill may leave a part of the last line,
which the next attempt removes. Every line carries its own sha256, so a damaged one is found, and left out.

Questions may be asked ahead, before their scores are wanted. Their answers are in a second file until they are read: a
stage that ends early never reads some of them, and chance decides how many have arrived by then.
"""

import logging
import os
import threading
from collections.abc import Callable, Iterator
from functools import cache
from io import FileIO
from pathlib import Path

from vantage.ledger.journal import end_of_last_line
from vantage.schemas.records.stored_answers import AnsweredBy, Asked, StoredAnswer, read_answer
from vantage.storage.durable_files import make_folder, sync_folder
from vantage.tasks.training.scratch import ANSWERS, BEGUN_ANSWERS

log = logging.getLogger(__name__)


class AnswerFile:
    """The answers of a stage; one process at a time writes them."""

    def __init__(self, path: Path) -> None:
        """Read the answers that are there, and remove an incomplete last line."""
        self.path = path
        self._lines = _Lines(path)
        # Servers that are asked while responses are sampled answer in threads of their own.
        self._lock = threading.Lock()
        self.scoring = threading.RLock()
        """Held while scores are read, and while questions are begun, which another thread may do."""
        self.begun: dict[str, Callable[[AnswerFile], None]] = {}
        """Digest of a question that is asked ahead → function that waits for its answer; no other term asks it too."""
        self._unread: dict[Asked, StoredAnswer] = {}
        """Answers to questions that were asked ahead, and that nobody has read yet."""
        self._answers: dict[Asked, tuple[str, int, int]] = {}
        self._cut_off: set[Asked] = set()
        self._refused: set[Asked] = set()
        self._answering: set[AnsweredBy] = set()
        self._uncounted: set[AnsweredBy] = set()
        self._number_of: dict[str, int] = {}
        self._tokens_of: dict[AnsweredBy, tuple[int, int]] = {}
        for answer in _replies_in(path):
            self._keep(answer)
        self._begun_lines: _Lines | None = None
        if self._begun_path.exists():
            for answer in _replies_in(self._begun_path):
                self._keep(answer, is_read=False)

    @property
    def _begun_path(self) -> Path:
        return self.path.with_name(BEGUN_ANSWERS)

    def __len__(self) -> int:
        return len(self._answers)

    def answer(self, asked: Asked) -> tuple[str, int, int] | None:
        """Return an answer with the tokens of question and answer; None: the question was not answered so often."""
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
        """Return how many answers to a question were read."""
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
                self._lines.write(answer)
                self._keep(answer)

    def add_begun(self, answer: StoredAnswer) -> None:
        """Add the answer to a question that was asked ahead; it joins the stage's answers when it is read."""
        if answer.is_broken:
            self.add(answer)
            return
        with self._lock:
            if answer.asked_as not in self._answers:
                if self._begun_lines is None:
                    self._begun_lines = _Lines(self._begun_path)
                self._begun_lines.write(answer)
                self._keep(answer, is_read=False)

    def note_read(self, asked: Asked) -> None:
        """Add an answer that was asked ahead to the stage's answers, since its scores are read."""
        with self._lock:
            answer = self._unread.get(asked)
            if answer is not None:
                self._lines.write(answer)
                del self._unread[asked]
                self._number_of[answer.question] = self.number_of(answer.question) + 1

    def sync(self) -> None:
        """Wait until all answers are on the disk."""
        self._lines.sync()
        with self._lock:
            if self._begun_lines is not None and self._unread:
                self._begun_lines.sync()
            elif self._begun_lines is not None:
                self._begun_lines.clear()

    def close(self) -> None:
        """Close the files."""
        self._lines.close()
        if self._begun_lines is not None:
            self._begun_lines.close()

    def _keep(self, answer: StoredAnswer, *, is_read: bool = True) -> None:
        if answer.is_broken:
            self._count(answer)
        elif answer.asked_as not in self._answers:
            self._keep_new(answer)
            if is_read:
                self._number_of[answer.question] = self.number_of(answer.question) + 1
            else:
                self._unread[answer.asked_as] = answer

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
        self._count(answer)

    def _count(self, answer: StoredAnswer) -> None:
        """Count the tokens of a reply."""
        questions, answers = self.tokens_of(answer.answered_by)
        self._tokens_of[answer.answered_by] = (
            questions + answer.question_tokens,
            answers + answer.answer_tokens,
        )


class _Lines:
    """A file that gets one line for each answer."""

    def __init__(self, path: Path) -> None:
        """Open the file, and remove an incomplete last line."""
        self._path = path
        is_new = not path.exists()
        self._file: FileIO = open(path, "a+b", buffering=0)  # noqa: SIM115 - open as long as the stage works
        if is_new:
            sync_folder(path.parent)
        self._end = end_of_last_line(self._file.fileno())
        os.ftruncate(self._file.fileno(), self._end)

    def write(self, answer: StoredAnswer) -> None:
        """Add a line; if it does not fit on the disk, nothing is left of it."""
        data = answer.sealed_line().encode() + b"\n"
        written = self._file.write(data)
        if written != len(data):
            os.ftruncate(self._file.fileno(), self._end)
            raise OSError(f"{self._path}: only {written} of {len(data)} bytes of an answer could be written")
        self._end += len(data)

    def clear(self) -> None:
        """Remove all lines."""
        os.ftruncate(self._file.fileno(), 0)
        self._end = 0

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


_opening = threading.Lock()


def answer_file(scratch: Path) -> AnswerFile:
    """Return the answers of the stage that works in this folder; all of its terms and threads share them."""
    # Of two threads that come first, each would get a file with a lock of its own from `cache` alone.
    with _opening:
        return _opened(scratch)


@cache
def _opened(scratch: Path) -> AnswerFile:
    make_folder(scratch)
    return AnswerFile(scratch / ANSWERS)


def answers_in(path: Path) -> Iterator[StoredAnswer]:
    """Yield the complete and undamaged answers of a file; none if it does not exist."""
    return (reply for reply in _replies_in(path) if not reply.is_broken)


def _replies_in(path: Path) -> Iterator[StoredAnswer]:
    """Yield the answers of a file, and also the replies without an answer, whose tokens count."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # a kill has cut the last line off
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
