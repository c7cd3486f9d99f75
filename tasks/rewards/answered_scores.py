"""Scores from servers: a stage asks each question once, and reads it from the stored answers after that."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vantage.schemas.recipe.served_scores import SCORE, STOP, JudgeServer, RewardServer, Served
from vantage.schemas.records.stored_answers import AnsweredBy, Asked, question_digest
from vantage.tasks.rewards.answer_file import AnswerFile, answer_file
from vantage.tasks.rewards.asking import Asking, Form, JudgeRefused, Question
from vantage.tasks.rewards.judge_questions import Unreadable
from vantage.tasks.rewards.term_scores import NamedScores, Responses, Source, TermScores
from vantage.tasks.training import answer_record, ranks

Case = tuple[str, str, str | None]
"""(prompt, response, the row's answer or None)"""
Named = Mapping[str, float]
"""Name of a score → score."""

_SHOWN = 200
"""Most characters of an answer in a message."""


class UnreadableAnswer(ValueError):
    """No scores can be read from a server's answers, though the question was asked as often as the recipe allows."""


class BudgetSpent(RuntimeError):
    """A stage has spent the budget that its recipe allows for a judge."""


def named(scores: "AnsweredScores", server: Served) -> TermScores | NamedScores:
    """Return the scores of a server as those of a term."""
    return NamedScores(server.score_names, scores) if server.score_names else scores


class AnsweredScores:
    """The scores of one server; one rank asks for all."""

    is_graded = True
    """The percentiles of these scores have curves."""

    def __init__(
        self,
        source: Source,
        server: Served,
        form: Form,
        *,
        questions: Callable[[Case], Iterable[Mapping[str, Any]]],
        read: Callable[[str], Named],
        joined: Callable[[Sequence[Named]], Named],
    ) -> None:
        """Prepare to ask; no server is called yet.

        Args:
            questions: the questions about a response.
            read: returns the scores in one answer; raises Unreadable.
            joined: returns the scores of a response from the scores of its questions.

        Raises:
            ValueError: the variable of the server's key is not set.
        """
        self._server = server
        self._path = f"{source.path}.{'judge' if isinstance(server, JudgeServer) else 'http'}"
        self._questions, self._read, self._joined = questions, read, joined
        self._names = server.score_names or (SCORE,)
        self._scratch = source.job.scratch
        keeps_refusals = server.unreadable != STOP
        self._asking = Asking(
            server, form, path=self._path, has_answered=self._has_answered if keeps_refusals else None
        )
        self._begun: set[str] = set()
        """Digests of questions that were asked ahead, and for which nobody has waited."""
        self._uncounted: set[str] = set()
        """Digests of questions that were asked ahead, and whose scores nobody has read."""
        self._failed_before = 0

    def __call__(self, given: Responses) -> Tensor:
        """Return scores (B,N), in the order of the server's names; (B,) for one score without a name.

        Raises:
            JudgeUnavailable, JudgeRefused: see ``Asking.ask``.
            UnreadableAnswer: an answer cannot be read, and the recipe has no number for that.
            BudgetSpent: more questions would exceed the recipe's budget.
        """
        cases = list(zip(given.prompts, given.responses, given.answers, strict=True))
        table = torch.zeros(len(cases), len(self._names), dtype=torch.float64)
        if ranks.rank() == 0:
            answers = answer_file(self._scratch)
            with answers.scoring:
                self._finish(answers)
                scores = self._scores(list(dict.fromkeys(cases)), answers)
            rows = [[scores[case][name] for name in self._names] for case in cases]
            table = torch.tensor(rows, dtype=torch.float64).view_as(table)
        table = ranks.total(table).float().to(given.device)
        return table if self._server.score_names else table.squeeze(1)

    def begin(self, cases: Sequence[Case]) -> None:
        """Ask about responses before their scores are wanted, also from another thread. Only the first rank asks."""
        if ranks.rank() != 0:
            return
        answers = answer_file(self._scratch)
        asked = [dict(each) for case in dict.fromkeys(cases) for each in self._questions(case)]
        by_digest = {question_digest(each): each for each in asked}
        with answers.scoring:
            new = [
                Question(each, digest, 0)
                for digest, each in by_digest.items()
                if digest not in answers.begun and answers.answer(Asked(digest, 0)) is None
            ]
            digests = {question.digest for question in new}
            self._begun |= digests
            self._uncounted |= digests
            answers.begun |= dict.fromkeys(digests, self._finish)
            self._asking.begin(new, keep=answers.add_begun, may_go_on=lambda: self._require_budget(answers))

    def give_up(self) -> None:
        """Cancel the questions that were asked ahead."""
        if ranks.rank() != 0:
            return
        answers = answer_file(self._scratch)
        with answers.scoring:
            self._asking.give_up()
            self._forget_begun(answers)
            self._uncounted = set()

    def _finish(self, answers: AnswerFile) -> None:
        """Wait for the questions that were asked ahead.

        Raises:
            JudgeRefused, BudgetSpent: as asking does.
            JudgeUnavailable: as asking does, from now on; see ``Asking.finish``.
        """
        if not self._begun:
            return
        try:
            self._asking.finish()
        finally:
            self._forget_begun(answers)
            answers.sync()
            self._note_asked(0)

    def _forget_begun(self, answers: AnswerFile) -> None:
        for digest in self._begun:
            del answers.begun[digest]
        self._begun = set()

    def _note_asked(self, count: int) -> None:
        """Count questions that were asked, and the requests that have failed since the last call."""
        failed, self._failed_before = self._failed_before, self._asking.failed_calls
        answer_record.note_asked(count, failed_calls=self._failed_before - failed)

    def _scores(self, cases: Sequence[Case], answers: AnswerFile) -> dict[Case, Named]:
        asked = {case: [dict(each) for each in self._questions(case)] for case in cases}
        digests = {case: [question_digest(each) for each in questions] for case, questions in asked.items()}
        by_digest = {
            digest: each
            for case, questions in asked.items()
            for digest, each in zip(digests[case], questions, strict=True)
        }
        by_others = dict.fromkeys(answers.begun[digest] for digest in by_digest if digest in answers.begun)
        for finish in by_others:
            finish(answers)
        read = self._read_all(by_digest, answers)
        return {case: self._of_response([read[digest] for digest in digests[case]]) for case in cases}

    def _of_response(self, read: Sequence[Named | None]) -> Named:
        """Return the scores of a response from the scores of its questions. If one cannot be read, all are the recipe's
        number.

        The number is the score of the response, and not of one order of a comparison: there it would raise the score if
        the response came second.
        """
        found = [each for each in read if each is not None]
        if len(found) == len(read):
            return self._joined(found)
        return dict.fromkeys(self._names, float(self._server.unreadable))

    def _read_all(
        self, asked: Mapping[str, Mapping[str, Any]], answers: AnswerFile
    ) -> dict[str, Named | None]:
        """Return question → scores, None if no answer can be read. Questions without a readable answer are asked
        (again)."""
        most = {digest: self._most(answers.number_of(digest)) for digest in asked}
        # Questions that were asked ahead count in this step; those without an answer count when they are asked again.
        begun = {digest for digest in self._uncounted & asked.keys() if answers.answer(Asked(digest, 0))}
        self._uncounted -= asked.keys()
        self._note_asked(len(begun))
        waiting, time, read = list(asked), 0, dict[str, Named | None]()
        while waiting:
            new = [
                Question(asked[digest], digest, time)
                for digest in waiting
                if answers.answer(Asked(digest, time)) is None
            ]
            self._ask(new, answers)
            waiting = [
                digest for digest in waiting if not self._is_read(digest, time, most[digest], answers, read)
            ]
            time += 1
        if begun:
            answers.sync()
        return read

    def _ask(self, new: Sequence[Question], answers: AnswerFile) -> None:
        try:
            self._asking.ask(new, keep=answers.add, may_go_on=lambda: self._require_budget(answers))
        finally:
            if new:
                answers.sync()
            self._note_asked(len(new))

    def _is_read(
        self, digest: str, time: int, most: int, answers: AnswerFile, read: dict[str, Named | None]
    ) -> bool:
        """Return whether a question needs no other answer, and put the scores into ``read`` then."""
        found = answers.answer(Asked(digest, time))
        assert found is not None
        text, *tokens = found
        answers.note_read(Asked(digest, time))
        answer_record.note_answer(tokens, cost=self._cost(tokens))
        try:
            if answers.is_refused(Asked(digest, time)):
                raise Unreadable("the server refuses the question")
            if answers.is_cut_off(Asked(digest, time)):
                raise Unreadable("it was cut off, by a filter or at max_answer_tokens")
            read[digest] = self._read(text)
        except Unreadable as error:
            answer_record.note_unreadable()
            if time + 1 < most and not answers.is_refused(Asked(digest, time)):
                return False
            self._require_a_number(digest, time + 1, text, error)
            read[digest] = None
        return True

    def _most(self, there: int) -> int:
        """Return how many answers to a question are read at most, if ``there`` answers exist.

        If the recipe has no number for unreadable answers, a resumed stage may ask as often again.
        """
        at_most = 1 + self._server.ask_again
        return at_most if self._server.unreadable != STOP else (there // at_most + 1) * at_most

    def _require_a_number(self, digest: str, number: int, text: str, error: Unreadable) -> None:
        """Raise UnreadableAnswer unless the recipe has a number for answers that cannot be read."""
        if self._server.unreadable != STOP:
            return
        shown = " ".join(text.split())[:_SHOWN]
        raise UnreadableAnswer(
            f"{self._path}: {number} answers to the question {digest[:12]} cannot be read: {error}; the last one begins {shown!r}; "
            f"correct the question or the server, or set {self._path}.unreadable to a number (all answers are kept)"
        )

    def _has_answered(self) -> bool:
        """Return whether the server has answered a question of the stage, now or before a restart."""
        return answer_file(self._scratch).has_answers_of(_answered_by(self._server))

    def _require_budget(self, answers: AnswerFile) -> None:
        """Raise BudgetSpent if the answers so far have used up the budget, JudgeRefused if their tokens are not counted."""
        server = self._server
        if not isinstance(server, JudgeServer) or server.budget is None:
            return
        judge = _answered_by(server)
        if not answers.is_counted(judge):
            raise JudgeRefused(
                f"{self._path}.budget cannot be kept: the server answers without the tokens of question and answer in `usage`; leave "
                "budget out, or let the server count (all answers are kept)"
            )
        tokens = answers.tokens_of(judge)
        for field, spent, most in (
            ("tokens", float(sum(tokens)), server.budget.tokens),
            ("cost", self._cost(tokens), server.budget.cost),
        ):
            if most is not None and spent >= most:
                raise BudgetSpent(
                    f"{self._path}.budget.{field}={most:g} is spent ({spent:g} for {server.model} so far)"
                )

    def _cost(self, tokens: Sequence[int]) -> float:
        price = self._server.price if isinstance(self._server, JudgeServer) else None
        return 0.0 if price is None else (tokens[0] * price.question + tokens[1] * price.answer) / 1e6


def _answered_by(server: Served) -> AnsweredBy:
    """Return the name under which a server's answers are kept."""
    if isinstance(server, JudgeServer):
        return AnsweredBy("judge", server.model)
    assert isinstance(server, RewardServer)
    return AnsweredBy("reward_server", server.version)
