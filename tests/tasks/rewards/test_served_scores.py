"""Whatever fails between a stage and judges or reward servers, the scores are those of a server that never fails, or there are none."""

import itertools
import json
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from aiolimiter import AsyncLimiter

from tests.support.fake_judge_server import FakeJudge, Faults, points
from vantage.schemas.recipe.pass_limits import PassLimits
from vantage.schemas.recipe.served_scores import JudgeServer, RewardServer
from vantage.schemas.recipe.terms import HttpTerm, JudgeTerm
from vantage.schemas.records.stored_answers import AnsweredBy, StoredAnswer, question_digest, read_answer
from vantage.tasks.data.rows import write_rows
from vantage.tasks.rewards import answer_file, asking, http_scores, judge_scores
from vantage.tasks.rewards.answer_file import answers_in
from vantage.tasks.rewards.answered_scores import BudgetSpent, UnreadableAnswer
from vantage.tasks.rewards.asking import JudgeRefused, JudgeUnavailable
from vantage.tasks.rewards.scoring import Term
from vantage.tasks.rewards.term_scores import NamedScores, Responses, Source, TermScores
from vantage.tasks.rewards.verifiers import MissingAnswers
from vantage.tasks.training.answer_record import answer_metrics
from vantage.tasks.training.scratch import ANSWERS as KEPT

PROMPTS = [f"What is {number} + {number}?" for number in range(24)]
RESPONSES = [f"It is {number * 2}. 数{number % 3}" for number in range(24)]
ANSWERS = [str(number * 2) for number in range(24)]
PROMPT = "Judge.\n[Prompt]\n{prompt}\n[Response]\n{response}\n{criteria}"


@pytest.fixture
def server() -> Iterator[FakeJudge]:
    with FakeJudge() as served:
        yield served


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Forget all open files of answers: what a new process would not know."""

    def forget() -> None:
        answer_file._opened.cache_clear()
        answer_metrics()

    forget()
    monkeypatch.setattr(asking, "LONGEST_PAUSE", 0.1)
    return forget


class Job:
    """The part of a job that a term reads."""

    def __init__(self, scratch: Path) -> None:
        self.scratch, self.inputs, self.name = scratch, {}, "policy"


def judge(server: FakeJudge, **fields: Any) -> JudgeServer:
    fast = {"request_seconds": 2.0, "patience_seconds": 5.0, "prompt": PROMPT, **fields}
    return JudgeServer(url=f"{server.url}/v1", model="critic", **fast)


def load(scratch: Path, server: JudgeServer | RewardServer) -> TermScores | NamedScores:
    source = Source(
        Job(scratch), "reward.main.0", "rewards.main.terms.0", (), torch.device("cpu"), torch.float32
    )  # type: ignore[arg-type]
    if isinstance(server, JudgeServer):
        return judge_scores.load(JudgeTerm(judge=server), source)
    return http_scores.load(HttpTerm(http=server), source)


def scored(scores: TermScores | NamedScores, rows: slice = slice(None)) -> dict[str, list[float]]:
    given = Responses(
        None,  # type: ignore[arg-type]
        PROMPTS[rows],
        RESPONSES[rows],
        ANSWERS[rows],
        torch.device("cpu"),
        PassLimits(2),
    )
    return {name: each.tolist() for name, each in Term("judge", 1.0, scores).score(given).items()}


def question(row: int, criteria: str = "- score (1 to 10): how good the response is\n") -> str:
    return f"Judge.\n[Prompt]\n{PROMPTS[row]}\n[Response]\n{RESPONSES[row]}\n{criteria}"


def test_a_judge_scores_each_response_by_its_own_text(server: FakeJudge, tmp_path: Path, fresh: Any) -> None:
    found = scored(load(tmp_path, judge(server)))
    assert found == {"judge": [float(points(question(row))) for row in range(24)]}
    body = server.seen.bodies[0]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("critic", 0.0, 512)


def test_criteria_are_scores_of_their_own(server: FakeJudge, tmp_path: Path, fresh: Any) -> None:
    server.names = ("right", "kind_words")
    criteria = {"right": "Is it right?", "kind_words": "Is it kind?"}
    found = scored(load(tmp_path, judge(server, criteria=criteria)))
    asked = "- right (1 to 10): Is it right?\n- kind_words (1 to 10): Is it kind?\n"
    assert found == {
        f"judge.{name}": [float(points(question(row, asked), name)) for row in range(24)]
        for name in server.names
    }


def test_a_comparison_asks_in_both_orders_and_takes_their_mean(
    server: FakeJudge, tmp_path: Path, fresh: Any
) -> None:
    found = scored(load(tmp_path, judge(server, against="answer", prompt=None)))["judge"]
    for row, score in enumerate(found):
        ours, theirs = points(RESPONSES[row]), points(ANSWERS[row])
        assert score == (1.0 if ours > theirs else 0.5 if ours == theirs else 0.0)
    assert {0.0, 1.0} <= set(found)
    assert server.seen.num_requests == 48
    firsts = sum(
        f"[Response A]\n{RESPONSES[3]}\n" in body["messages"][0]["content"] for body in server.seen.bodies
    )
    assert firsts == 1


def test_a_judge_that_always_prefers_the_first_makes_ties(
    server: FakeJudge, tmp_path: Path, fresh: Any
) -> None:
    server.faults.unreadable = lambda text, time: "score: A"
    assert scored(load(tmp_path, judge(server, against="answer", prompt=None)))["judge"] == [0.5] * 24


@pytest.mark.parametrize("kind", ["judge", "http"])
def test_failing_calls_change_no_score_and_nothing_is_asked_twice(
    server: FakeJudge, tmp_path: Path, fresh: Any, kind: str
) -> None:
    """30 % of the requests fail in seven ways: refusals, and missing, cut, wrong, double and late answers."""
    asked = (
        judge(server, request_seconds=3.0, patience_seconds=30.0)
        if kind == "judge"
        else RewardServer(url=server.url, version="1", batch=1, request_seconds=3.0, patience_seconds=30.0)
    )
    whole = scored(load(tmp_path / "whole", asked))
    server.seen.questions.clear()
    server.faults.share, server.faults.late_seconds = 0.3, 4.0
    fresh()
    assert scored(load(tmp_path / "failing", asked)) == whole
    assert set(server.seen.questions.values()) == {1}
    assert answer_metrics()["judge_failed_calls"] >= 7


def test_each_failed_call_is_counted_once(server: FakeJudge, tmp_path: Path, fresh: Any) -> None:
    """One term scores three times, with failed requests. The third time has no new question."""
    server.faults.share = 0.4
    scores = load(tmp_path, judge(server))
    counts = []
    for rows in (slice(0, 12), slice(12, 24), slice(0, 24)):
        before = server.seen.num_requests
        scored(scores, rows)
        counts.append((server.seen.num_requests - before, answer_metrics()))
    asked = [metrics["judge_asked"] for _, metrics in counts]
    assert asked == [12, 12, 0]
    failed = [metrics["judge_failed_calls"] for _, metrics in counts]
    assert failed == [number - new for (number, _), new in zip(counts, asked, strict=True)]
    assert min(failed[:2]) > 0 == failed[2]


def test_stored_answers_are_read_again_without_any_server(
    server: FakeJudge, tmp_path: Path, fresh: Any
) -> None:
    asked = judge(server)
    first = scored(load(tmp_path, asked), slice(0, 10))
    assert answer_metrics()["judge_asked"] == 10
    fresh()
    server.stop()
    assert scored(load(tmp_path, asked), slice(0, 10)) == first
    metrics = answer_metrics()
    assert (metrics["judge_asked"], metrics["judge_answers"]) == (0, 10)


def test_equal_responses_are_asked_about_once(server: FakeJudge, tmp_path: Path, fresh: Any) -> None:
    scores = load(tmp_path, judge(server))
    given = Responses(
        None,  # type: ignore[arg-type]
        ["a?"] * 5,
        ["b"] * 5,
        [None] * 5,
        torch.device("cpu"),
        PassLimits(2),
    )
    assert len(set(scores(given).tolist())) == 1
    assert server.seen.num_requests == 1


@pytest.mark.slow
def test_a_dead_server_gives_no_score(server: FakeJudge, tmp_path: Path, fresh: Any) -> None:
    server.faults.dies_at = 9
    asked = judge(server, patience_seconds=1.0, at_once=1)
    with pytest.raises(JudgeUnavailable, match=r"rewards\.main\.terms\.0\.judge\.url=http.* does not answer"):
        scored(load(tmp_path, asked))
    kept = list(answers_in(tmp_path / KEPT))
    assert len(kept) == 9
    # The server comes back: only the other questions are asked.
    server.faults.dies_at = None
    server.start()
    fresh()
    assert scored(load(tmp_path, asked)) == {"judge": [float(points(question(row))) for row in range(24)]}
    assert set(server.seen.questions.values()) == {1}


def test_an_answer_that_never_ends_is_late(server: FakeJudge, tmp_path: Path, fresh: Any) -> None:
    server.faults.drips = {0, 1}
    found = scored(load(tmp_path, judge(server, request_seconds=0.4, at_once=1)), slice(0, 2))
    assert found == {"judge": [float(points(question(row))) for row in range(2)]}
    assert server.seen.num_requests == 4
    assert answer_metrics()["judge_failed_calls"] == 2


def test_patience_ends_whatever_the_number_of_requests(
    server: FakeJudge, tmp_path: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "MAX_TRIES", 120)
    server.faults.share, server.faults.late_seconds = 1.0, 1.0
    began = time.monotonic()
    with pytest.raises(JudgeUnavailable, match="does not answer"):
        scored(load(tmp_path, judge(server, patience_seconds=0.5, request_seconds=0.5)), slice(0, 1))
    assert time.monotonic() - began < 4.0
    assert server.seen.num_requests < 100


@pytest.mark.parametrize("status", [400, 404, 422])
def test_a_refusal_is_not_repeated(server: FakeJudge, tmp_path: Path, fresh: Any, status: int) -> None:
    server.faults.refused = status
    with pytest.raises(JudgeRefused, match=f"answered {status}: .*no such model"):
        scored(load(tmp_path, judge(server, at_once=2)))
    assert server.seen.num_requests <= 4


REFUSED = "5 + 5?"
"""A part of the one prompt whose question is refused."""


def refusing(status: int) -> Any:
    """Return a function that refuses the question about one prompt, as a server whose model it is too long for."""
    return lambda text: status if f" {REFUSED}" in text else None


def all_but_one(number: float) -> list[float]:
    return [number if row == 5 else float(points(question(row))) for row in range(24)]


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_refused_question_is_an_unreadable_answer_where_the_recipe_has_a_number_for_it(
    server: FakeJudge, tmp_path: Path, fresh: Any, status: int
) -> None:
    """The question is refused sooner than others are answered, is asked once in the life of the stage, and costs
    nothing.
    """
    server.faults.refuses, server.delay = refusing(status), 0.05
    asked = judge(server, unreadable=-3.0, budget={"tokens": 10**6})
    scores = load(tmp_path, asked)
    scored(scores, slice(0, 12))
    answer_metrics()
    assert scored(scores)["judge"] == all_but_one(-3.0)
    assert server.seen.num_requests == 24
    (refused,) = [answer for answer in answers_in(tmp_path / KEPT) if answer.refusal]
    assert PROMPTS[5] in refused.asked["messages"][0]["content"]
    assert refused.refusal == f'{status}: {{"error": "this question is not allowed"}}'
    metrics = answer_metrics()
    assert (metrics["judge_unreadable"], metrics["judge_answers"], metrics["judge_failed_calls"]) == (
        1,
        24,
        0,
    )
    fresh()
    server.stop()
    assert scored(load(tmp_path, asked))["judge"] == all_but_one(-3.0)
    server.start()


def test_a_question_that_is_refused_first_is_kept_when_others_are_answered(
    server: FakeJudge, tmp_path: Path, fresh: Any
) -> None:
    """Questions are asked one at a time; after a restart, no other question may be left to ask."""
    server.faults.refuses = lambda text: 400 if PROMPTS[0] in text else None
    asked = judge(server, unreadable=0.0, at_once=1)
    right = [0.0, *(float(points(question(row))) for row in range(1, 4))]
    assert scored(load(tmp_path / "one", asked), slice(0, 4))["judge"] == right
    assert scored(load(tmp_path / "two", asked), slice(1, 4))["judge"] == right[1:]
    fresh()
    assert scored(load(tmp_path / "two", asked), slice(0, 1))["judge"] == right[:1]


def test_a_server_that_has_answered_nothing_ends_the_stage_by_its_refusal(
    server: FakeJudge, tmp_path: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request itself may be wrong. No answer is kept, so a refusal does not count when the server is set right."""
    monkeypatch.setattr(asking, "MOST_REFUSED", 3)
    server.faults.refused = 400
    asked = judge(server, unreadable=0.0, at_once=1)
    with pytest.raises(
        JudgeRefused, match=r"answered 400: .*; it has answered no other question of this stage"
    ):
        scored(load(tmp_path, asked), slice(0, 2))
    assert server.seen.num_requests == 2
    with pytest.raises(JudgeRefused, match="answered 400: .*no such model"):
        scored(load(tmp_path, asked))
    assert server.seen.num_requests == 2 + 4, "three are refused, and the next one ends the stage"
    assert not list(answers_in(tmp_path / KEPT))
    server.faults.refused = None
    fresh()
    assert scored(load(tmp_path, asked))["judge"] == [float(points(question(row))) for row in range(24)]


def test_a_server_that_begins_to_refuse_everything_ends_the_stage(
    server: FakeJudge, tmp_path: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "MOST_REFUSED", 3)
    scores = load(tmp_path, judge(server, unreadable=0.0, at_once=1))
    scored(scores, slice(0, 4))
    server.faults.refused = 400
    with pytest.raises(JudgeRefused, match="answered 400"):
        scored(scores, slice(4, 24))
    assert server.seen.num_requests == 4 + 4 + 3 + 1


@pytest.mark.parametrize(("status", "unreadable"), [(400, "stop"), (404, 0.0), (401, 0.0), (403, 0.0)])
def test_another_refusal_or_no_number_for_it_ends_the_stage(
    server: FakeJudge, tmp_path: Path, fresh: Any, status: int, unreadable: Any
) -> None:
    server.faults.refuses = refusing(status)
    remedy = (
        "if it refuses single questions alone, set .*judge.unreadable to a number" if status == 400 else ""
    )
    with pytest.raises(JudgeRefused, match=f"answered {status}: .*{remedy}"):
        scored(load(tmp_path, judge(server, at_once=1, unreadable=unreadable)))
    assert not [answer for answer in answers_in(tmp_path / KEPT) if answer.refusal]


def test_the_items_of_a_refused_batch_are_asked_about_alone(
    server: FakeJudge, tmp_path: Path, fresh: Any
) -> None:
    server.faults.refuses = refusing(413)
    asked = RewardServer(url=server.url, version="2", batch=8, unreadable=-1.0, patience_seconds=5.0)
    right = [points(PROMPTS[row] + RESPONSES[row]) / 4 for row in range(24)]
    assert scored(load(tmp_path, asked))["judge"] == [*right[:5], -1.0, *right[6:]]
    assert sorted(len(body["items"]) for body in server.seen.bodies) == [1] * 8 + [8] * 3


def test_a_question_that_is_refused_after_an_unreadable_answer_is_unreadable(
    server: FakeJudge, tmp_path: Path, fresh: Any
) -> None:
    server.faults.unreadable = lambda text, time: "Seven." if f" {REFUSED}" in text else None
    server.faults.refuses = lambda text: (
        400 if f" {REFUSED}" in text and any(REFUSED in each for each in server.seen.questions) else None
    )
    assert scored(load(tmp_path, judge(server, unreadable=2.0, at_once=1)))["judge"] == all_but_one(2.0)
    assert server.seen.num_requests == 25


def test_the_key_comes_from_its_variable(
    server: FakeJudge, tmp_path: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = "canary-of-the-judge"
    with pytest.raises(
        JudgeRefused,
        match=r"name the variable of its API key in rewards\.main\.terms\.0\.judge\.api_key_variable",
    ):
        scored(load(tmp_path, judge(server)))
    asked = judge(server, api_key_variable="CRITIC_API_KEY")
    with pytest.raises(ValueError, match="CRITIC_API_KEY names a variable that is not set"):
        load(tmp_path, asked)
    monkeypatch.setenv("CRITIC_API_KEY", f"{server.key} ")
    with pytest.raises(
        ValueError, match="CRITIC_API_KEY names a variable whose value begins or ends with white"
    ):
        load(tmp_path, asked)
    monkeypatch.setenv("CRITIC_API_KEY", server.key)
    server.faults.unreadable = lambda text, time: f"score: 7 ({server.key})"
    scored(load(tmp_path, asked))
    assert b"canary" not in (tmp_path / KEPT).read_bytes()


def test_a_header_of_the_recipes_choice_holds_the_key(
    server: FakeJudge, tmp_path: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CRITIC_API_KEY", "canary-of-the-judge")
    for folder, fields in (("bearer", {}), ("own", {"key_header": "api-key"})):
        asked = judge(server, api_key_variable="CRITIC_API_KEY", **fields)
        scored(load(tmp_path / folder, asked), slice(0, 1))
    bearer, own = server.seen.headers
    assert bearer["Authorization"] == "Bearer canary-of-the-judge" and "api-key" not in bearer
    assert own["api-key"] == "canary-of-the-judge" and "Authorization" not in own


def test_nested_settings_a_query_and_another_limit_of_tokens_reach_the_server(
    server: FakeJudge, tmp_path: Path, fresh: Any
) -> None:
    """OpenAI's reasoning models refuse ``max_tokens``, and a temperature too."""
    form = {"type": "json_schema", "json_schema": {"schema": {"properties": {"reason": {}, "a_score": {}}}}}
    thinking = {"enable_thinking": False, "stops": [1, 2.5, None, "x"]}
    request = {
        "max_completion_tokens": 99,
        "chat_template_kwargs": thinking,
        "response_format": form,
        "stop": ["#"],
    }
    asked = judge(server, request=request, temperature=None)
    asked = asked.model_copy(update={"url": f"{server.url}/v1/?api-version=2026-01-01&x=%20"})
    assert scored(load(tmp_path, asked), slice(0, 1)) == {"judge": [float(points(question(0)))]}
    (body,) = server.seen.bodies
    messages = [{"role": "user", "content": question(0)}]
    assert body == {**request, "model": "critic", "messages": messages}
    assert list(body["response_format"]["json_schema"]["schema"]["properties"]) == ["reason", "a_score"]
    assert server.seen.paths == ["/v1/chat/completions?api-version=2026-01-01&x=%20"]
    assert asked.most_answer_tokens == 99


def test_a_proxy_of_the_environment_is_not_asked_for_a_server_on_this_machine(
    server: FakeJudge, tmp_path: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", "ftp://nowhere")
    assert scored(load(tmp_path, judge(server)), slice(0, 1)) == {"judge": [float(points(question(0)))]}
    elsewhere = judge(server).model_copy(update={"url": "http://critic.example.org/v1"})
    with pytest.raises(JudgeRefused, match="the proxy that the environment names cannot be used: .*ftp"):
        scored(load(tmp_path, elsewhere), slice(1, 2))


def test_an_unreadable_answer_is_asked_for_again(server: FakeJudge, tmp_path: Path, fresh: Any) -> None:
    server.faults.unreadable = lambda text, time: "I would rather not." if time < 2 else None
    found = scored(load(tmp_path, judge(server)))
    assert found["judge"] == [float(points(question(row))) for row in range(24)]
    metrics = answer_metrics()
    assert metrics["judge_unreadable"] == 48 and metrics["judge_unreadable_share"] == 48 / 72
    assert len(list(answers_in(tmp_path / KEPT))) == 72


def test_unreadable_answers_stop_the_stage(server: FakeJudge, tmp_path: Path, fresh: Any) -> None:
    server.faults.unreadable = lambda text, time: "Seven." if "5 + 5" in text and "15" not in text else None
    with pytest.raises(
        UnreadableAnswer,
        match=r"3 answers to the question .* it gives no readable score; the last one begins 'Seven\.'",
    ):
        scored(load(tmp_path, judge(server)))
    # A resumed stage asks this question again, and no other.
    fresh()
    server.faults.unreadable = lambda text, time: None
    before = server.seen.num_requests
    assert scored(load(tmp_path, judge(server)))["judge"][5] == points(question(5))
    assert server.seen.num_requests == before + 1


@pytest.mark.parametrize("reason", ["length", "content_filter", "max_tokens"])
def test_a_cut_off_answer_is_unreadable(server: FakeJudge, tmp_path: Path, fresh: Any, reason: str) -> None:
    """``score: 1`` may be the beginning of ``score: 10``; a kept answer is read in the same way when the stage goes on."""
    server.faults.unreadable = lambda text, time: "score: 1" if time == 0 else None
    server.faults.ends = lambda text, time: reason if time == 0 else "stop"
    right = {"judge": [float(points(question(row))) for row in range(3)]}
    assert scored(load(tmp_path, judge(server)), slice(0, 3)) == right
    assert [answer.is_cut_off for answer in answers_in(tmp_path / KEPT)] == [True] * 3 + [False] * 3
    fresh()
    server.stop()
    assert scored(load(tmp_path, judge(server)), slice(0, 3)) == right
    server.start()


@pytest.mark.parametrize("reason", ["error", "abort", "insufficient_system_resource", {"reason": "stop"}, []])
def test_an_answer_that_the_server_broke_off_is_a_failed_request(
    server: FakeJudge, tmp_path: Path, fresh: Any, reason: Any
) -> None:
    """A part of an answer may read like a whole one; the request is repeated, and the part is not kept."""
    number = iter(range(99))
    server.faults.unreadable = lambda text, time: "score: 1" if next(number) < 3 else None
    ends = iter([reason] * 3)
    server.faults.ends = lambda text, time: next(ends, "stop")
    found = scored(load(tmp_path, judge(server, ask_again=0, at_once=1)), slice(0, 2))
    assert found == {"judge": [float(points(question(row))) for row in range(2)]}
    assert len(list(answers_in(tmp_path / KEPT))) == 2
    assert answer_metrics()["judge_failed_calls"] == 3


@pytest.mark.parametrize("reason", [None, "stop", "STOP", "eos_token", "end_turn"])
def test_an_answer_that_its_model_ended_is_read(
    server: FakeJudge, tmp_path: Path, fresh: Any, reason: Any
) -> None:
    server.faults.ends = lambda text, time: reason
    assert scored(load(tmp_path, judge(server)), slice(0, 1)) == {"judge": [float(points(question(0)))]}
    assert answer_metrics()["judge_failed_calls"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "message", ['{"content": []}', '{"content": 0}', '{"content": false}', '{"content": {}}', "{}"]
)
def test_a_message_of_another_form_costs_no_answer(
    server: FakeJudge, tmp_path: Path, fresh: Any, message: str
) -> None:
    """A body without a text is a failed request; as an empty answer, it would use up ``ask_again``."""
    server.faults.raw = lambda number: (
        f'{{"choices": [{{"message": {message}}}]}}'.encode() if number < 3 else None
    )
    found = scored(load(tmp_path, judge(server, unreadable=0.0, ask_again=1)), slice(0, 1))
    assert found == {"judge": [float(points(question(0)))]}
    assert len(list(answers_in(tmp_path / KEPT))) == 1


@pytest.mark.parametrize("reason", ["length", "stop", "tool_calls", "content_filter"])
@pytest.mark.parametrize("message", ["{}", '{"content": null}', '{"reasoning_content": "Well, score: 9"}'])
def test_a_message_without_content_is_an_unreadable_answer(
    server: FakeJudge, tmp_path: Path, fresh: Any, message: str, reason: str
) -> None:
    """Thinking may use up all tokens. The server has answered, and is paid for it: no request has failed."""
    choice = f'{{"message": {message}, "finish_reason": "{reason}"}}'
    usage = '{"prompt_tokens": 7, "completion_tokens": 512}'
    server.faults.raw = lambda number: f'{{"choices": [{choice}], "usage": {usage}}}'.encode()
    asked = judge(server, unreadable=-1.0, ask_again=1, budget={"tokens": 10**6})
    assert scored(load(tmp_path, asked), slice(0, 1)) == {"judge": [-1.0]}
    assert server.seen.num_requests == 2
    assert [(each.answer, each.answer_tokens) for each in answers_in(tmp_path / KEPT)] == [("", 512)] * 2
    metrics = answer_metrics()
    assert (metrics["judge_failed_calls"], metrics["judge_unreadable"]) == (0, 2)


def test_a_server_that_answers_as_another_model_is_warned_of_once(
    server: FakeJudge, tmp_path: Path, fresh: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """An alias is answered under one name; a server that falls back to another model changes it."""

    def body(number: int) -> bytes:
        model = json.dumps({3: "small-2", 4: "small-2", 5: 7, 6: None}.get(number, "critic-2026"))
        return f'{{"model": {model}, "choices": [{{"message": {{"content": "score: 3"}}}}]}}'.encode()

    server.faults.raw = body
    found = scored(load(tmp_path, judge(server, at_once=1)), slice(0, 9))
    assert found == {"judge": [3.0] * 9}
    (message,) = caplog.messages
    assert "terms.0.judge.url=" in message
    assert "answers as the model 'small-2' now, and has answered as 'critic-2026'" in message


def test_a_budget_needs_counted_tokens(server: FakeJudge, tmp_path: Path, fresh: Any) -> None:
    server.faults.counts = False
    capped = judge(server, at_once=1, budget={"tokens": 10**6})
    with pytest.raises(
        JudgeRefused, match=r"terms\.0\.judge\.budget cannot be kept: the server answers without the tokens"
    ):
        scored(load(tmp_path, capped))
    assert server.seen.num_requests == 1
    fresh()
    assert len(scored(load(tmp_path, judge(server)))["judge"]) == 24


def test_a_recipe_can_give_unreadable_answers_a_score(server: FakeJudge, tmp_path: Path, fresh: Any) -> None:
    server.faults.unreadable = lambda text, time: (
        "score: 11" if "5 + 5?" in text and "15" not in text else None
    )
    found = scored(load(tmp_path, judge(server, unreadable=-3.0, ask_again=0)))["judge"]
    assert found == [-3.0 if row == 5 else float(points(question(row))) for row in range(24)]
    assert answer_metrics()["judge_unreadable"] == 1
    before = server.seen.num_requests
    fresh()
    assert scored(load(tmp_path, judge(server, unreadable=-3.0, ask_again=0)))["judge"] == found
    assert server.seen.num_requests == before


@pytest.mark.slow
@pytest.mark.parametrize("unreadable_order", ["first", "second", "both"])
@pytest.mark.parametrize("number", [0.0, -3.0, 0.25])
def test_a_comparison_that_cannot_be_read_in_one_order_has_the_recipes_number(
    server: FakeJudge, tmp_path: Path, fresh: Any, unreadable_order: str, number: float
) -> None:
    def unreadable(text: str, time: int) -> str | None:
        if RESPONSES[5] not in text or RESPONSES[15] in text:
            return None
        order = "first" if f"[Response A]\n{RESPONSES[5]}\n" in text else "second"
        return "score: neither" if unreadable_order in (order, "both") else None

    whole = scored(load(tmp_path / "whole", judge(server, against="answer", prompt=None)))["judge"]
    server.faults.unreadable = unreadable
    fields: dict[str, Any] = {"against": "answer", "prompt": None, "unreadable": number, "ask_again": 0}
    found = scored(load(tmp_path / "again", judge(server, **fields)))["judge"]
    assert found == [*whole[:5], number, *whole[6:]]


def test_one_missing_criterion_gives_each_score_the_recipes_number(
    server: FakeJudge, tmp_path: Path, fresh: Any
) -> None:
    server.names = ("right", "kind")
    server.faults.unreadable = lambda text, time: "right: 9" if RESPONSES[2] in text else None
    criteria = {"right": "Is it right?", "kind": "Is it kind?"}
    found = scored(load(tmp_path, judge(server, criteria=criteria, unreadable=-2.0)), slice(0, 4))
    assert [found[name][2] for name in ("judge.right", "judge.kind")] == [-2.0, -2.0]
    assert answer_metrics()["judge_unreadable"] == 3


def test_a_budget_ends_the_stage_and_a_larger_one_goes_on(
    server: FakeJudge, tmp_path: Path, fresh: Any
) -> None:
    price = {"question": 1e6, "answer": 0.0}
    tokens = len(question(0).split())
    small = judge(server, at_once=1, price=price, budget={"cost": 5.0 * tokens})
    with pytest.raises(
        BudgetSpent, match=r"terms\.0\.judge\.budget\.cost=\d+ is spent \(\d+ for critic so far\)"
    ):
        scored(load(tmp_path, small))
    assert server.seen.num_requests == 5
    metrics = answer_metrics()
    fresh()
    large = judge(server, at_once=1, price=price, budget={"tokens": 10**6})
    assert scored(load(tmp_path, large))["judge"] == [float(points(question(row))) for row in range(24)]
    assert set(server.seen.questions.values()) == {1}
    metrics = answer_metrics()
    asked = [body["messages"][0]["content"] for body in server.seen.bodies]
    assert metrics["judge_cost"] == pytest.approx(sum(len(text.split()) for text in asked))
    assert metrics["judge_tokens"] == sum(len(text.split()) + 2 for text in asked)


@pytest.mark.parametrize("end", ["budget", "refusal"])
def test_what_is_under_way_when_a_stage_ends_is_answered_and_kept(
    server: FakeJudge, tmp_path: Path, fresh: Any, end: str
) -> None:
    """Six requests are under way, and are answered one after the other; the first ends the stage."""
    all_came, numbers = threading.Barrier(6), itertools.count(1)

    def refused(text: str) -> int | None:
        all_came.wait(60.0)
        is_first = PROMPTS[0] in text
        time.sleep(0.0 if is_first else 0.9 + 0.1 * next(numbers))
        return 400 if is_first and end == "refusal" else None

    server.faults.refuses = refused
    spent = {"budget": {"tokens": 1}} if end == "budget" else {}
    began = time.monotonic()
    with pytest.raises((BudgetSpent, JudgeRefused), match="is spent|not allowed"):
        scored(load(tmp_path, judge(server, at_once=6, **spent)))
    assert time.monotonic() - began > 0.9
    assert server.seen.num_requests == 6, "nothing else was asked"
    answered = set(server.seen.questions)
    kept = {each.asked["messages"][0]["content"] for each in answers_in(tmp_path / KEPT)}
    assert kept == answered and len(kept) == (6 if end == "budget" else 5)
    server.faults = Faults()
    fresh()
    found = scored(load(tmp_path, judge(server, at_once=6)))["judge"]
    assert found == [float(points(question(row))) for row in range(24)]
    assert set(server.seen.questions.values()) == {1}, "nothing was asked twice"


def test_a_late_request_under_way_does_not_hold_up_the_end(
    server: FakeJudge, tmp_path: Path, fresh: Any
) -> None:
    """Such a request has its own time, and is not repeated after that. One that waits for its repetition is given up at
    once.
    """
    all_came, ended = threading.Barrier(3), threading.Event()

    def refused(text: str) -> int | None:
        all_came.wait(60.0)
        if PROMPTS[1] in text:
            ended.wait(60.0)
        return 400 if PROMPTS[2] in text else None

    server.faults.refuses = refused
    began = time.monotonic()
    with pytest.raises(JudgeRefused, match="not allowed"):
        scored(load(tmp_path, judge(server, at_once=3, request_seconds=2.0)), slice(0, 3))
    took = time.monotonic() - began
    ended.set()
    assert 1.9 < took < 30.0, "the request has its two seconds, and the judge holds it up for a minute"
    assert server.seen.num_requests == 3


def test_requests_are_under_way_at_once_and_no_more_than_allowed(
    server: FakeJudge, tmp_path: Path, fresh: Any
) -> None:
    server.delay = 0.05
    scored(load(tmp_path, judge(server, at_once=6)))
    assert server.seen.most_at_once == 6


@pytest.fixture
def let_through(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the times at which the limit of the rate let requests through, in seconds; a busy machine brings them to
    the server later.
    """
    times: list[float] = []

    class Recorded(AsyncLimiter):
        def has_capacity(self, amount: float = 1) -> bool:
            fits = super().has_capacity(amount)
            if fits:
                times.append(self._last_check)
            return fits

    monkeypatch.setattr(asking, "AsyncLimiter", Recorded)
    return times


def test_requests_are_spread_over_a_minute(
    server: FakeJudge, tmp_path: Path, fresh: Any, let_through: list[float]
) -> None:
    scored(load(tmp_path, judge(server, at_once=4, requests_per_minute=600.0)), slice(0, 12))
    assert server.seen.num_requests == len(let_through) == 12
    assert all(later - before >= 0.1 - 1e-6 for before, later in pairwise(let_through))


def test_a_batch_waits_for_the_rate_of_the_one_before_it(
    server: FakeJudge, tmp_path: Path, fresh: Any, let_through: list[float]
) -> None:
    scores = load(tmp_path, judge(server, requests_per_minute=100.0))
    for row in range(3):
        scored(scores, slice(row, row + 1))
    assert server.seen.num_requests == len(let_through) == 3
    assert all(later - before >= 0.6 - 1e-6 for before, later in pairwise(let_through))


@pytest.mark.parametrize(
    ("wish", "seconds"), [("1", 1.0), ("0", 0.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("-5", 0.0)]
)
def test_a_server_s_wish_is_waited_for(
    server: FakeJudge,
    tmp_path: Path,
    fresh: Any,
    monkeypatch: pytest.MonkeyPatch,
    wish: str,
    seconds: float,
) -> None:
    pauses: list[float] = []
    pause = asking._pause
    monkeypatch.setattr(asking, "_pause", lambda state: pauses.append(pause(state)) or pauses[-1])
    server.faults.wishes = {0: wish}
    assert scored(load(tmp_path, judge(server)), slice(0, 1))["judge"] == [float(points(question(0)))]
    [waited] = pauses
    assert seconds <= waited <= seconds + 0.5, "what the server asks for, and up to half a second"
    first, second = server.seen.times
    assert second - first >= seconds


@pytest.mark.parametrize(
    ("wish", "seconds"),
    [("7", 7.0), ("299", 299.0), ("301", 300.0), ("9" * 400, 300.0), ("1.5", 0.0), ("1e2", 0.0), ("٣", 0.0)]
    + [(odd, 0.0) for odd in ("", "inf", "nan", "-1", "+1", "0x10", "1, 2", "soon")],
)
def test_an_odd_wish_is_none(wish: str, seconds: float) -> None:
    response = httpx.Response(429, headers=[(b"Retry-After", wish.encode())])
    assert asking._retry_after(response) == seconds


def test_a_wish_may_be_a_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.0)
    for later, seconds in ((7, 7.0), (301, 300.0), (-7, 0.0)):
        date = formatdate(1_800_000_000 + later, usegmt=True)
        assert asking._retry_after(httpx.Response(429, headers={"Retry-After": date})) == seconds


def test_one_question_that_always_fails_ends_the_stage_though_others_are_answered(
    server: FakeJudge, tmp_path: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "MAX_TRIES", 4)
    server.faults.refuses = lambda text: 503 if PROMPTS[1] in text else None
    with pytest.raises(JudgeUnavailable, match="4 requests with one question failed"):
        scored(load(tmp_path, judge(server, at_once=2, patience_seconds=20.0)), slice(0, 6))
    assert server.seen.num_requests == 5 + 4


def test_patience_is_with_a_server_that_answers(server: FakeJudge, tmp_path: Path, fresh: Any) -> None:
    """All answers together take twice the patience; a request that fails near the end is repeated all the same."""
    server.delay, server.faults.wishes = 0.6, {5: "0"}
    found = scored(load(tmp_path, judge(server, at_once=1, patience_seconds=2.1)), slice(0, 7))["judge"]
    assert found == [float(points(question(row))) for row in range(7)]
    assert server.seen.num_requests == 8


def test_a_rate_slower_than_patience_uses_up_none_of_it(
    server: FakeJudge, tmp_path: Path, fresh: Any, let_through: list[float]
) -> None:
    """One request a second is let through, and patience lasts 0.9 s. The first request of each batch fails, and so does
    one repeated request."""
    server.faults.wishes = {0: "0", 2: "0", 3: "0"}
    scores = load(tmp_path, judge(server, at_once=4, requests_per_minute=60.0, patience_seconds=0.9))
    for rows in (slice(0, 1), slice(1, 2)):
        right = [float(points(question(row))) for row in range(rows.start, rows.stop)]
        assert scored(scores, rows)["judge"] == right
    assert server.seen.num_requests == len(let_through) == 5
    assert all(later - before >= 1 - 1e-6 for before, later in pairwise(let_through))


def test_patience_with_a_dead_server_ends_also_at_a_rate(
    server: FakeJudge, tmp_path: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All requests wait for their turn at the rate, and each fails at once, so patience with the server still ends."""
    monkeypatch.setattr(asking, "LONGEST_PAUSE", 20.0)
    monkeypatch.setattr(asking, "wait_random_exponential", lambda **_: lambda state: 0.0)
    server.faults.share, server.faults.late_seconds = 1.0, 1.0
    server.faults.refuses = lambda text: 503
    began = time.monotonic()
    with pytest.raises(JudgeUnavailable, match="does not answer"):
        scored(load(tmp_path, judge(server, requests_per_minute=600.0, patience_seconds=1.0)))
    assert 0.9 < time.monotonic() - began < 15.0
    assert server.seen.num_requests < 40


def test_a_budget_of_tokens_counts_questions_and_answers(
    server: FakeJudge, tmp_path: Path, fresh: Any
) -> None:
    """All questions have as many words as the first one, and an answer has two."""
    tokens = len(question(0).split()) + 2
    with pytest.raises(BudgetSpent, match=rf"budget\.tokens={5 * tokens} is spent \({5 * tokens} for critic"):
        scored(load(tmp_path, judge(server, at_once=1, budget={"tokens": 5 * tokens})))
    assert server.seen.num_requests == 5


@pytest.mark.parametrize(
    "fault",
    [
        '{"message": {"content": "score: 1"}, "finish_reason": "error"}',
        '{"message": {"content": 7}, "finish_reason": "stop"}',
        '{"message": {"content": "score: 1"}}, {"message": {"content": "score: 2"}}',
        "",
    ],
)
def test_replies_that_are_no_answers_spend_the_budget_too(
    server: FakeJudge, tmp_path: Path, fresh: Any, fault: str
) -> None:
    """The server counts 100 tokens for each, and they are paid for, also those before a kill."""

    def broken(number: int) -> bytes:
        usage = '{"prompt_tokens": 60, "completion_tokens": 40}'
        return f'{{"choices": [{fault}], "usage": {usage}}}'.encode()

    server.faults.raw = broken
    capped = judge(server, at_once=1, budget={"tokens": 250})
    with pytest.raises(BudgetSpent, match=r"budget\.tokens=250 is spent \(300 for critic so far\)"):
        scored(load(tmp_path, capped), slice(0, 1))
    assert server.seen.num_requests == 3
    fresh()
    with pytest.raises(BudgetSpent, match=r"\(300 for critic so far\)"):
        scored(load(tmp_path, capped), slice(0, 1))
    assert server.seen.num_requests == 3
    fresh()
    server.faults = Faults()
    right = {"judge": [float(points(question(row))) for row in range(3)]}
    larger = judge(server, budget={"tokens": 10**6})
    assert scored(load(tmp_path, larger), slice(0, 3)) == right
    assert scored(load(tmp_path / "whole", larger), slice(0, 3)) == right
    for folder in (tmp_path, tmp_path / "whole"):
        answer_file.write_sorted(folder / KEPT, folder / "sorted")
    assert (tmp_path / "sorted").read_bytes() == (tmp_path / "whole" / "sorted").read_bytes()


def test_a_budget_is_spent_by_its_judge_alone(server: FakeJudge, tmp_path: Path, fresh: Any) -> None:
    """A teacher, a model of the run and a reward server may have its name; a teacher's ids have no tokens, or many."""
    others = [
        ({"model": "critic", "text": "a"}, 0, 0),
        ({"model": "critic", "prompt_ids": [1], "response_ids": [2]}, 10**6, 1),
        ({"model": "critic", "question": "?"}, 10**6, 1),
        ({"version": "critic", "names": [], "item": {}}, 0, 0),
    ]
    file = answer_file.answer_file(tmp_path)
    for asked, question_tokens, answer_tokens in others:
        tokens = {"question_tokens": question_tokens, "answer_tokens": answer_tokens}
        file.add(StoredAnswer(question=question_digest(asked), time=0, asked=asked, answer="[1]", **tokens))
    tokens_of_one = len(question(0).split()) + 2
    enough = judge(server, at_once=1, budget={"tokens": 24 * tokens_of_one})
    assert scored(load(tmp_path, enough))["judge"] == [float(points(question(row))) for row in range(24)]


def test_a_reward_server_gets_batches_and_gives_named_scores(
    server: FakeJudge, tmp_path: Path, fresh: Any
) -> None:
    server.names = ("clear", "short")
    asked = RewardServer(
        url=server.url, version="2", batch=10, names=("clear", "short"), patience_seconds=5.0
    )
    found = scored(load(tmp_path, asked))
    texts = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]
    assert found == {f"judge.{name}": [points(text, name) / 4 for text in texts] for name in server.names}
    assert sorted(len(body["items"]) for body in server.seen.bodies) == [4, 10, 10]
    assert server.seen.bodies[0]["items"][0].keys() == {"prompt", "response", "answer"}


@pytest.mark.parametrize(
    ("kind", "path", "called"),
    [
        ("http", "", "/"),
        ("http", "/", "/"),
        ("http", "/score", "/score"),
        ("http", "/score/", "/score/"),
        ("judge", "/v1", "/v1/chat/completions"),
        ("judge", "/v1/", "/v1/chat/completions"),
    ],
)
def test_a_reward_server_is_called_at_its_own_address_and_a_judge_below_it(
    server: FakeJudge, tmp_path: Path, fresh: Any, kind: str, path: str, called: str
) -> None:
    """Servers tell ``/score/`` from ``/score``: one of them answers 404, or 307, which is not followed."""
    fields: dict[str, Any] = {"url": f"{server.url}{path}", "patience_seconds": 5.0}
    asked = (
        RewardServer(version="1", **fields)
        if kind == "http"
        else JudgeServer(model="critic", prompt=PROMPT, **fields)
    )
    scored(load(tmp_path, asked), slice(0, 1))
    assert server.seen.paths == [called]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (float("nan"), "score is NaN, which is no finite number"),
        (True, "score is True"),
        ("7", "score is 7, which"),
        ({"score": 1.0}, "score is {'score': 1.0}"),
        (10**400, "score is 1000"),
    ],
)
def test_one_bad_score_of_a_batch_is_asked_for_again_alone(
    server: FakeJudge, tmp_path: Path, fresh: Any, bad: Any, reason: str
) -> None:
    asked = RewardServer(url=server.url, version="2", batch=8, ask_again=1, patience_seconds=5.0)
    server.faults.bad_scores = lambda item, time: bad if item["prompt"] == PROMPTS[7] else None
    with pytest.raises(UnreadableAnswer, match=reason.replace("{", r"\{")):
        scored(load(tmp_path, asked))
    assert [len(body["items"]) for body in server.seen.bodies][3:] == [1]


@pytest.mark.parametrize("kind", ["judge", "http"])
def test_an_answer_that_comes_twice_is_no_answer_to_the_next_question(
    server: FakeJudge, tmp_path: Path, fresh: Any, kind: str
) -> None:
    server.faults.doubled = True
    if kind == "judge":
        asked: JudgeServer | RewardServer = judge(server, at_once=1)
        right = [float(points(question(row))) for row in range(24)]
    else:
        asked = RewardServer(url=server.url, version="1", batch=1, at_once=1)
        right = [points(PROMPTS[row] + RESPONSES[row]) / 4 for row in range(24)]
    assert scored(load(tmp_path, asked))["judge"] == right
    assert server.seen.num_requests == 24


def test_a_body_with_a_name_twice_is_no_answer(server: FakeJudge, tmp_path: Path, fresh: Any) -> None:
    asked = RewardServer(url=server.url, version="1", request_seconds=2.0, patience_seconds=5.0)
    right = points(PROMPTS[0] + RESPONSES[0]) / 4
    server.faults.raw = lambda number: b'{"scores": [7.0], "scores": [8.0]}' if number == 0 else None
    assert scored(load(tmp_path, asked), slice(0, 1))["judge"] == [right]
    assert server.seen.num_requests == 2


def test_other_names_are_another_question(server: FakeJudge, tmp_path: Path, fresh: Any) -> None:
    for names in (("clear",), ("clear", "short")):
        server.names = names
        fresh()
        http = RewardServer(url=server.url, version="3", names=names, patience_seconds=5.0)
        found = scored(load(tmp_path, http), slice(0, 4))
        text = [PROMPTS[row] + RESPONSES[row] for row in range(4)]
        assert found == {f"judge.{name}": [points(each, name) / 4 for each in text] for name in names}
    assert [each.time for each in answers_in(tmp_path / KEPT)] == [0] * 8
    assert {tuple(each.asked["names"]) for each in answers_in(tmp_path / KEPT)} == {
        ("clear",),
        ("clear", "short"),
    }


@pytest.mark.parametrize("bad", [1e39, -1e39, 10**50])
def test_a_score_beyond_the_numbers_of_float32_is_unreadable(
    server: FakeJudge, tmp_path: Path, fresh: Any, bad: float
) -> None:
    server.faults.bad_scores = lambda item, time: bad if time == 0 else None
    http = RewardServer(url=server.url, version="3", patience_seconds=5.0)
    found = scored(load(tmp_path, http), slice(0, 2))["judge"]
    assert found == [points(PROMPTS[row] + RESPONSES[row]) / 4 for row in range(2)]
    assert answer_metrics()["judge_unreadable"] == 2


def test_a_name_that_is_missing_is_refused(server: FakeJudge, tmp_path: Path, fresh: Any) -> None:
    server.names = ("clear",)
    asked = RewardServer(url=server.url, version="2", ask_again=0, names=("clear", "short"))
    with pytest.raises(UnreadableAnswer, match="it scores clear, and names has clear, short"):
        scored(load(tmp_path, asked))


def test_every_prefix_of_the_file_is_a_file(server: FakeJudge, tmp_path: Path, fresh: Any) -> None:
    """A kill may cut the file at any byte: all complete answers are there, and others can be added."""
    scored(load(tmp_path, judge(server)), slice(0, 3))
    data = (tmp_path / KEPT).read_bytes()
    ends = [place + 1 for place, byte in enumerate(data) if byte == 10]
    for length in range(len(data) + 1):
        path = tmp_path / f"cut-{length}.jsonl"
        path.write_bytes(data[:length])
        file = answer_file.AnswerFile(path)
        assert len(file) == sum(end <= length for end in ends)
        for answer in answers_in(tmp_path / KEPT):
            file.add(answer)
        file.close()
        assert sorted(path.read_bytes().splitlines()) == sorted(data.splitlines())
        path.unlink()


def test_the_first_of_two_answers_to_a_question_counts(server: FakeJudge, tmp_path: Path, fresh: Any) -> None:
    """Two processes that wrote one file at a time that should not have been would leave such lines."""
    scored(load(tmp_path, judge(server)), slice(0, 2))
    fresh()
    first, second = (tmp_path / KEPT).read_bytes().splitlines(keepends=True)
    other = replace_answer(first, "score: 99")
    (tmp_path / "twice").write_bytes(first + second + other)
    read = answer_file.AnswerFile(tmp_path / "twice")
    kept = [read_answer(line) for line in (first, second)]
    assert len(read) == 2
    assert read.answer(kept[0].asked_as) == (kept[0].answer, kept[0].question_tokens, kept[0].answer_tokens)
    assert read.number_of(kept[0].question) == 1
    assert read.tokens_of(AnsweredBy("judge", "critic")) == (
        sum(each.question_tokens for each in kept),
        sum(each.answer_tokens for each in kept),
    )
    counts = answer_file.write_sorted(tmp_path / "twice", tmp_path / "sorted")
    assert sorted((tmp_path / "sorted").read_bytes().splitlines()) == sorted(
        each.line().encode() for each in kept
    )
    assert (counts["questions"], counts["answers"]) == (2.0, 2.0)


def replace_answer(line: bytes, answer: str) -> bytes:
    """Return a line of the file with another answer to its question."""
    return read_answer(line).model_copy(update={"answer": answer}).line().encode() + b"\n"


def test_nothing_is_left_of_a_line_that_did_not_fit_on_the_disk(
    server: FakeJudge, tmp_path: Path, fresh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored(load(tmp_path, judge(server)), slice(0, 3))
    fresh()
    lines = (tmp_path / KEPT).read_bytes().splitlines(keepends=True)
    file = answer_file.AnswerFile(tmp_path / "full")
    file.add(read_answer(lines[0]))
    whole = file._lines._file

    class Full:
        """A file on a disk that has room for half of what is written."""

        def write(self, data: bytes) -> int:
            return whole.write(data[: len(data) // 2])

        def fileno(self) -> int:
            return whole.fileno()

    monkeypatch.setattr(file._lines, "_file", Full())
    with pytest.raises(OSError, match="bytes of an answer could be written"):
        file.add(read_answer(lines[1]))
    monkeypatch.undo()
    assert (tmp_path / "full").read_bytes() == lines[0]
    assert file.answer(read_answer(lines[1]).asked_as) is None
    file.add(read_answer(lines[2]))
    assert (tmp_path / "full").read_bytes() == lines[0] + lines[2]


def test_a_damaged_line_is_asked_about_again(server: FakeJudge, tmp_path: Path, fresh: Any) -> None:
    first = scored(load(tmp_path, judge(server)))
    path = tmp_path / KEPT
    lines = path.read_text().splitlines(keepends=True)
    lines[4] = lines[4].replace("[Prompt]", "[prompt]")
    path.write_text("".join(lines))
    fresh()
    before = server.seen.num_requests
    assert scored(load(tmp_path, judge(server))) == first
    assert server.seen.num_requests == before + 1


def test_kept_answers_do_not_depend_on_the_order_in_which_they_came(
    server: FakeJudge, tmp_path: Path, fresh: Any
) -> None:
    for folder, rows in (("one", [slice(0, 24)]), ("other", [slice(12, 24), slice(0, 20)])):
        for part in rows:
            scored(load(tmp_path / folder, judge(server)), part)
        counts = answer_file.write_sorted(tmp_path / folder / KEPT, tmp_path / f"{folder}.jsonl")
        assert (counts["questions"], counts["answers"]) == (24, 24)
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "other.jsonl").read_bytes()
    line = json.loads((tmp_path / "one.jsonl").read_text().splitlines()[0])
    assert line.keys() == {"question", "time", "asked", "answer", "question_tokens", "answer_tokens"}
    assert server.url not in (tmp_path / "one.jsonl").read_text()


def test_a_comparison_needs_answers(server: FakeJudge, tmp_path: Path, fresh: Any) -> None:
    (tmp_path / "prompts").mkdir()
    for split, answers in (("train", ["2", None]), ("validation", ["2"]), ("test", ["2"])):
        write_rows(
            tmp_path / "prompts", split, [{"prompt": "1 + 1?", "answer": answer} for answer in answers]
        )
    job = Job(tmp_path)
    job.inputs = {"prompts": tmp_path / "prompts"}
    for fields in ({"against": "answer", "prompt": None}, {"prompt": PROMPT + "{answer}"}):
        source = Source(job, "reward.main.0", "rewards.main.terms.0", (), torch.device("cpu"), torch.float32)  # type: ignore[arg-type]
        with pytest.raises(MissingAnswers, match="1 of the 2 train prompts that policy samples"):
            judge_scores.load(JudgeTerm(judge=judge(server, **fields)), source)
