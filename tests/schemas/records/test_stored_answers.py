"""Lines of stored answers are read in both forms, and refused where they contradict themselves."""

from typing import Any

import pytest

from vantage.schemas.records.stored_answers import StoredAnswer, question_digest, read_answer

ASKED: dict[str, Any] = {"model": "judge-1", "messages": [{"role": "user", "content": "1+1? 2"}]}
ANSWER = StoredAnswer(
    question=question_digest(ASKED),
    time=1,
    asked=ASKED,
    answer="score: 7",
    question_tokens=9,
    answer_tokens=3,
)


@pytest.mark.parametrize("line", [ANSWER.line(), ANSWER.sealed_line(), ANSWER.sealed_line() + "\n"])
def test_both_forms_are_read_back(line: str) -> None:
    assert read_answer(line) == read_answer(line.encode()) == ANSWER


def test_a_sealed_line_in_which_a_letter_changed_is_refused() -> None:
    damaged = ANSWER.sealed_line().replace("score: 7", "score: 8")
    with pytest.raises(ValueError, match="the sha256 of the line is another one than it gives"):
        read_answer(damaged)


@pytest.mark.parametrize("is_sealed", [False, True])
def test_an_answer_to_another_question_than_it_names_is_refused(is_sealed: bool) -> None:
    """A new seal does not help whoever puts an answer under another question."""
    moved = ANSWER.model_copy(update={"question": question_digest({**ASKED, "model": "judge-2"})})
    line = moved.sealed_line() if is_sealed else moved.line()
    with pytest.raises(
        ValueError,
        match=f"names the question {moved.question[:12]}, and its question is {ANSWER.question[:12]}",
    ):
        read_answer(line)
