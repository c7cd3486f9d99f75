"""Questions that are begun before their scores are wanted are kept and counted once, and the right threads wait for them."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import obstore
import pytest
from obstore.store import MemoryStore

from tests.support.fake_judge_server import FakeJudge, points
from tests.tasks.rewards.test_served_scores import (
    ANSWERS,
    PROMPTS,
    RESPONSES,
    fresh,
    judge,
    load,
    question,
    scored,
)
from vantage.schemas.metric_names import PHASES
from vantage.schemas.records.stored_answers import (
    AnsweredBy,
    Asked,
    StoredAnswer,
    question_digest,
    read_answer,
)
from vantage.storage import scratch_copy
from vantage.storage.scratch_copy import ScratchCopy
from vantage.tasks.rewards import asking
from vantage.tasks.rewards.answer_file import AnswerFile, answer_file, answers_in, write_sorted
from vantage.tasks.rewards.answered_scores import AnsweredScores, UnreadableAnswer
from vantage.tasks.rewards.asking import JudgeRefused, JudgeUnavailable
from vantage.tasks.training.answer_record import answer_metrics
from vantage.tasks.training.phase_seconds import of_process
from vantage.tasks.training.scratch import ANSWERS as KEPT
from vantage.tasks.training.scratch import BEGUN_ANSWERS, RESUMED_FROM

__all__ = ["fresh"]
CASES = list(zip(PROMPTS, RESPONSES, ANSWERS, strict=True))
SECONDS = 60.0


@pytest.fixture
def server() -> Iterator[FakeJudge]:
    with FakeJudge() as served:
        yield served


def loaded(folder: Path, server: FakeJudge, **fields: Any) -> AnsweredScores:
    return cast(AnsweredScores, load(folder, judge(server, **fields)))


def right(rows: slice) -> dict[str, list[float]]:
    return {"judge": [float(points(question(row))) for row in range(24)[rows]]}


def asked_about(path: Path) -> set[str]:
    return {each.asked["messages"][0]["content"] for each in answers_in(path)}


def until(is_so: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert is_so()


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_short_wait_for_a_judge_is_waiting_too(
    is_begun: bool, server: FakeJudge, tmp_path: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks for answers now and then counts the time until the first look too."""
    monkeypatch.setattr(asking, "_LOOK_SECONDS", SECONDS)
    server.delay = 1.0  # most of the time, also on a busy machine
    scores = loaded(tmp_path, server)
    of_process.begin()
    if is_begun:
        scores.begin(CASES[:8])
    scored(scores, slice(0, 8))
    found = of_process.taken()
    assert found["seconds_waiting"] > 0.5 * sum(found[f"seconds_{phase}"] for phase in PHASES)


def test_only_answers_whose_scores_are_read_are_the_stages(
    server: FakeJudge, tmp_path: Path, fresh: Any
) -> None:
    """Eight questions are begun, and five of them read; after a restart, the others are there and asked no more."""
    scores = loaded(tmp_path, server)
    scores.begin(CASES[:8])
    assert scored(scores, slice(3, 8)) == right(slice(3, 8))
    expected = {question(row) for row in range(3, 8)}
    assert asked_about(tmp_path / KEPT) == expected
    assert asked_about(tmp_path / BEGUN_ANSWERS) == {question(row) for row in range(8)}
    scores.give_up()
    fresh()
    again = loaded(tmp_path, server)
    assert scored(again, slice(5, 10)) == right(slice(5, 10))
    assert server.seen.num_requests == 10
    write_sorted(tmp_path / KEPT, tmp_path / "sorted")
    assert asked_about(tmp_path / "sorted") == {question(row) for row in range(3, 10)}
    again.begin(CASES[:1])
    assert scored(again, slice(0, 3)) == right(slice(0, 3))
    assert server.seen.num_requests == 10
    assert set(server.seen.questions.values()) == {1}
    answer_file(tmp_path).sync()
    plain = loaded(tmp_path / "plain", server)
    scored(plain, slice(0, 10))
    write_sorted(tmp_path / "plain" / KEPT, tmp_path / "sorted by another")
    write_sorted(tmp_path / KEPT, tmp_path / "sorted")
    assert (tmp_path / "sorted").read_bytes() == (tmp_path / "sorted by another").read_bytes()


def test_what_was_begun_leaves_no_file_behind_when_all_is_read(
    server: FakeJudge, tmp_path: Path, fresh: Any
) -> None:
    scores = loaded(tmp_path, server)
    scores.begin(CASES[:4])
    scored(scores, slice(0, 4))
    assert (tmp_path / BEGUN_ANSWERS).stat().st_size == 0
    assert asked_about(tmp_path / KEPT) == {question(row) for row in range(4)}


def stored(text: str, answer: str = "score: 1") -> StoredAnswer:
    asked = {"model": "critic", "messages": [{"role": "user", "content": text}]}
    return StoredAnswer(
        question=question_digest(asked),
        time=0,
        asked=asked,
        answer=answer,
        question_tokens=3,
        answer_tokens=2,
    )


def test_an_answer_that_is_read_while_the_folder_is_copied_is_in_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It moves from one file to the other after the first of them was sent; then this machine is lost."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    asked = {"model": "m", "messages": [{"role": "user", "content": "How good?"}]}
    answer = StoredAnswer(question=question_digest(asked), time=0, asked=asked, answer="score: 7")
    answers = AnswerFile(here / KEPT)
    answers.add_begun(answer)
    answers.sync()
    put = obstore.put

    def read_meanwhile(*arguments: Any) -> Any:
        sent = put(*arguments)
        answers.note_read(answer.asked_as)
        answers.sync()
        return sent

    monkeypatch.setattr(scratch_copy.obstore, "put", read_meanwhile)
    remote = MemoryStore()
    ScratchCopy(remote, "scratch", here).send(RESUMED_FROM)
    ScratchCopy(remote, "scratch", there).fetch()
    assert AnswerFile(there / KEPT).answer(answer.asked_as) == ("score: 7", 0, 0)


def test_tokens_of_an_answer_count_once_whatever_file_it_is_in(tmp_path: Path) -> None:
    """They count once before the answer is read, after it, and after a restart at each moment; a broken reply counts,
    too.
    """
    critic, one = AnsweredBy("judge", "critic"), stored("one")

    def look(tokens: tuple[int, int], *, reads: int) -> AnswerFile:
        file = AnswerFile(tmp_path / KEPT)
        assert file.tokens_of(critic) == tokens
        assert file.number_of(one.question) == reads
        assert file.answer(one.asked_as) == ("score: 1", 3, 2)
        return file

    file = AnswerFile(tmp_path / KEPT)
    file.add_begun(one)
    file.add_begun(one)
    file.add_begun(stored("two").model_copy(update={"is_broken": True, "answer": ""}))
    assert file.tokens_of(critic) == (6, 4)
    assert not list(answers_in(tmp_path / KEPT))
    file = look((6, 4), reads=0)
    file.note_read(one.asked_as)
    file.note_read(one.asked_as)
    file.note_read(Asked("0" * 64, 0))
    assert [read_answer(each.line()) for each in answers_in(tmp_path / KEPT)] == [one]
    file = look((6, 4), reads=1)
    file.add(stored("one", "score: 2"))
    file.add_begun(stored("one", "score: 2"))
    assert [each.answer for each in answers_in(tmp_path / KEPT)] == ["score: 1"]
    look((6, 4), reads=1)


@pytest.mark.parametrize("name", [KEPT, BEGUN_ANSWERS])
def test_no_flipped_bit_gives_another_answer(tmp_path: Path, name: str) -> None:
    """The answers are the stage's input: one that was damaged between two attempts is asked for again."""
    written = [stored("one"), stored("two", "score: 2"), stored("三", "score: 3")]
    file = AnswerFile(tmp_path / KEPT)
    for each in written:
        (file.add if name == KEPT else file.add_begun)(each)
    file.close()
    data = (tmp_path / name).read_bytes()
    for place in range(len(data)):
        (tmp_path / name).write_bytes(
            data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]
        )
        damaged = AnswerFile(tmp_path / KEPT)
        kept = [(each, damaged.answer(each.asked_as)) for each in written]
        assert all(
            found in (None, (each.answer, each.question_tokens, each.answer_tokens)) for each, found in kept
        )
        assert sum(found is None for _, found in kept) in (1, 2), "two where their line end was hit"
        damaged.close()


def test_answers_that_an_earlier_version_kept_are_read(tmp_path: Path) -> None:
    (tmp_path / KEPT).write_text(f"{stored('one').line()}\n{stored('two').sealed_line()}\n")
    assert len(AnswerFile(tmp_path / KEPT)) == 2


def test_a_question_that_was_begun_is_asked_no_more_often_where_its_answer_cannot_be_read(
    server: FakeJudge, tmp_path: Path, fresh: Any
) -> None:
    """Each is asked twice, as it is where nothing was begun."""
    server.faults.unreadable = lambda text, time: "who knows"
    for folder in ("plain", "begun"):
        fresh()
        before = server.seen.num_requests
        scores = loaded(tmp_path / folder, server, ask_again=1, at_once=1)
        if folder == "begun":
            scores.begin(CASES[:1])
        with pytest.raises(UnreadableAnswer, match="2 answers to the question"):
            scored(scores, slice(0, 1))
        assert server.seen.num_requests == before + 2


def test_questions_count_in_the_step_that_reads_them(server: FakeJudge, tmp_path: Path, fresh: Any) -> None:
    """A validation comes between: it waits for what was asked before, and counts only its own."""
    scores = loaded(tmp_path, server)
    scores.begin(CASES[:6])
    scored(scores, slice(20, 24))
    assert answer_metrics()["judge_asked"] == 4
    scored(scores, slice(0, 6))
    assert answer_metrics()["judge_asked"] == 6
    scored(scores, slice(0, 6))
    assert answer_metrics()["judge_asked"] == 0


def test_a_server_that_was_away_before_the_scores_are_wanted_is_asked_again(
    server: FakeJudge, tmp_path: Path, fresh: Any
) -> None:
    server.stop()
    scores = loaded(tmp_path, server, patience_seconds=1.0)
    scores.begin(CASES[:3])
    scores.begin(CASES[3:6])
    until(lambda: all(each.done() for each in scores._asking._begun))
    server.start()
    assert scored(scores, slice(0, 6)) == right(slice(0, 6))
    assert answer_metrics()["judge_asked"] == 6
    server.stop()
    scores.begin(CASES[6:9])
    with pytest.raises(JudgeUnavailable, match="does not answer"):
        scored(scores, slice(6, 9))


def test_questions_that_are_refused_before_any_other_is_answered_end_no_stage(
    server: FakeJudge, tmp_path: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first batch may hold the responses to one filtered prompt alone. What is refused counts once, however often it is asked."""
    monkeypatch.setattr(asking, "MOST_REFUSED", 3)
    server.faults.refuses = lambda text: 400 if any(prompt in text for prompt in PROMPTS[:3]) else None
    scores = loaded(tmp_path, server, unreadable=-3.0, at_once=1)
    scores.begin(CASES[:3])
    until(lambda: all(each.done() for each in scores._asking._begun))
    scores.begin(CASES[3:5])
    found = scored(scores, slice(0, 6))["judge"]
    assert found == [-3.0] * 3 + right(slice(3, 6))["judge"]
    assert answer_metrics()["judge_asked"] == 6
    assert server.seen.questions == dict.fromkeys(map(question, range(3, 6)), 1)
    kept = [answer for answer in answers_in(tmp_path / KEPT) if answer.refusal]
    assert len(kept) == 3
    fresh()
    server.stop()
    assert scored(loaded(tmp_path, server, unreadable=-3.0), slice(0, 6))["judge"] == found
    server.start()


def test_a_server_that_refuses_all_that_was_begun_ends_the_stage_when_scores_are_wanted(
    server: FakeJudge, tmp_path: Path, fresh: Any
) -> None:
    server.faults.refused = 400
    scores = loaded(tmp_path, server, unreadable=0.0)
    scores.begin(CASES[:2])
    scores.begin(CASES[2:3])
    with pytest.raises(JudgeRefused, match="it has answered no other question of this stage"):
        scored(scores, slice(0, 4))
    assert not list(answers_in(tmp_path / KEPT))


def test_a_thread_may_begin_while_another_reads_scores(tmp_path: Path, fresh: Any) -> None:
    """No more than two requests are under way at any time, no question is asked twice, and each score is right."""
    with FakeJudge(delay=0.01) as server:
        scores = loaded(tmp_path, server, at_once=2, request_seconds=SECONDS)
        beginning = threading.Thread(
            target=lambda: [scores.begin(CASES[row : row + 1]) for row in range(12)], daemon=True
        )
        beginning.start()
        found = [scored(scores, slice(row, row + 3)) for row in range(12, 24, 3)]
        beginning.join()
        assert scored(scores, slice(0, 12)) == right(slice(0, 12))
    assert found == [right(slice(row, row + 3)) for row in range(12, 24, 3)]
    assert server.seen.most_at_once <= 2
    assert set(server.seen.questions.values()) == {1}


def test_a_term_waits_for_the_questions_that_another_has_begun(tmp_path: Path, fresh: Any) -> None:
    """Both terms want the same scores, and the one that asked for none of them wants them first; each counts its own."""
    with FakeJudge(delay=0.05) as server:
        first, second = (
            loaded(tmp_path, server, at_once=2, request_seconds=SECONDS, patience_seconds=SECONDS)
            for _ in range(2)
        )
        first.begin(CASES[:4])
        second.begin(CASES[:6])
        for scores in (second, first):
            assert scored(scores, slice(0, 6)) == right(slice(0, 6))
    assert server.seen.questions == dict.fromkeys(map(question, range(6)), 1)
    assert answer_metrics()["judge_asked"] == 6
    assert not answer_file(tmp_path).begun


def test_threads_that_come_first_at_once_share_one_answer_file(
    tmp_path: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each would hold a lock of its own otherwise, and ask what the other one asks."""
    opened = AnswerFile.__init__

    def slowly(self: AnswerFile, path: Path) -> None:
        time.sleep(0.05)
        opened(self, path)

    monkeypatch.setattr(AnswerFile, "__init__", slowly)
    together = threading.Barrier(4)

    def come(_: int) -> AnswerFile:
        together.wait(SECONDS)
        return answer_file(tmp_path)

    with ThreadPoolExecutor(4) as threads:
        assert len(set(map(id, threads.map(come, range(4))))) == 1
