"""Whatever a server answers is an answer, or a failed request that is repeated; it never ends the stage by another error."""

import asyncio
import gzip
import json
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

from vantage.schemas.recipe.served_scores import RewardServer
from vantage.schemas.records.stored_answers import StoredAnswer, question_digest
from vantage.tasks.rewards.asking import MAX_BYTES, Asking, CallFailed, Form, Question, Reply
from vantage.tasks.rewards.http_scores import Items
from vantage.tasks.rewards.judge_scores import ChatCompletions
from vantage.tasks.rollout.vllm_server import ServerFailed, VllmServer
from vantage.tasks.updates.teacher_server import LogProbs, Tokenized

ASKED = {"prompt_ids": [1], "response_ids": [2], "model": "m", "text": "t", "item": {}}
DIGITS = "1" + "0" * 400
VALUES = [
    "null",
    "true",
    "3",
    "-3",
    "1e999",
    DIGITS,
    "9" * 5000,
    '"x"',
    '"\\ud800"',
    "[]",
    "[[]]",
    "{}",
    "NaN",
    "Infinity",
]
USAGE = [
    "null",
    "3",
    "[]",
    '{"prompt_tokens": null, "completion_tokens": -1}',
    f'{{"prompt_tokens": {DIGITS}, "completion_tokens": 1.5}}',
]


def judge(value: str, usage: str) -> str:
    return f'{{"choices": [{{"message": {{"content": {value}}}}}], "usage": {usage}}}'


def teacher(value: str, usage: str) -> str:
    return (
        f'{{"choices": [{{"prompt_logprobs": [null, {{"2": {{"logprob": {value}}}}}]}}], "usage": {usage}}}'
    )


FORMS: dict[str, tuple[Form, Callable[[str, str], str]]] = {
    "judge": (ChatCompletions(), judge),
    "teacher": (LogProbs(), teacher),
    "tokenizer": (Tokenized(), lambda value, _: f'{{"tokens": [{value}]}}'),
    "scores": (
        Items(RewardServer(url="http://127.0.0.1:1", version="1")),
        lambda value, _: f'{{"scores": [{value}]}}',
    ),
}


def answered(form: Form, content: str | bytes, headers: dict[str, str] | None = None) -> list[Reply] | str:
    """Return the replies, or the message of the failed request."""
    asking = SimpleNamespace(_server=SimpleNamespace(request_seconds=5.0), _url="http://server/", _form=form)
    question = Question(asked=ASKED, digest=question_digest(ASKED), time=0)

    async def call() -> list[Reply]:
        body = content.encode() if isinstance(content, str) else content
        stream = httpx.ByteStream(body)  # packed as it is sent, and not unpacked by the stand-in
        transport = httpx.MockTransport(lambda _: httpx.Response(200, headers=headers, stream=stream))
        async with httpx.AsyncClient(transport=transport) as client:
            return await Asking._call(cast(Asking, asking), client, [question])

    try:
        return asyncio.run(call())
    except CallFailed as failed:
        return str(failed)


@pytest.mark.parametrize("kind", FORMS)
def test_an_odd_answer_is_one_or_a_failed_request(kind: str) -> None:
    form, body = FORMS[kind]
    bodies = [body(value, usage) for value in (*VALUES, "-0.5") for usage in ("{}", *USAGE)]
    for content in [
        *bodies,
        *VALUES,
        "[" * 100_000,
        "",
        "{",
        '{"choices": []}',
        '{"choices": {}}',
        '{"scores": {}}',
    ]:
        found = answered(form, content)
        if isinstance(found, str):
            assert found.startswith("its answer is not what was asked for")
            continue
        for reply in found:
            kept: dict[str, Any] = {"question": question_digest(ASKED), "time": 0, "asked": ASKED}
            tokens = {"question_tokens": reply.question_tokens, "answer_tokens": reply.answer_tokens}
            line = StoredAnswer(
                **kept, **tokens, answer=reply.text.encode("utf-8", "replace").decode()
            ).line()
            assert json.loads(line)["answer_tokens"] == 0


def _packed(content: bytes, times: int = 1) -> bytes:
    for _ in range(times):
        content = gzip.compress(content)
    return content


RIGHT = b'{"choices": [{"message": {"content": "x"}}]}'


def test_a_packed_answer_is_read() -> None:
    form = FORMS["judge"][0]
    assert answered(form, _packed(RIGHT), {"Content-Encoding": "gzip"}) == [Reply("x")]
    assert answered(form, RIGHT, {"Content-Encoding": "identity"}) == [Reply("x")]


@pytest.mark.parametrize(
    ("content", "packing", "fault"),
    [
        (lambda: _packed(RIGHT)[:-9], "gzip", "ends within its packing"),
        (lambda: RIGHT, "gzip", "cannot be unpacked"),
        (lambda: _packed(RIGHT, 2), "gzip, gzip", "packed as 'gzip, gzip'"),
        (lambda: RIGHT, "br", "packed as 'br'"),
        (lambda: _packed(b"[" + b" " * 2**27), "gzip", "more than 64 MiB"),
    ],
    ids=["cut", "unpacked", "twice", "another", "large"],
)
def test_a_packing_that_was_not_asked_for_is_a_failed_request(
    content: Callable[[], bytes], packing: str, fault: str
) -> None:
    found = answered(FORMS["judge"][0], content(), {"Content-Encoding": packing})
    assert isinstance(found, str)
    assert fault in found


@pytest.mark.slow
def test_a_packed_answer_takes_no_more_memory_than_an_answer_may_have() -> None:
    """A few kilobytes, packed twice, would become gigabytes before their size is known."""
    once = _packed(b"[" + b" " * 2**28)
    twice = _packed(once)
    tracemalloc.start()
    try:
        for content, packing in ((once, "gzip"), (twice, "gzip"), (twice, "gzip, gzip")):
            assert isinstance(answered(FORMS["judge"][0], content, {"Content-Encoding": packing}), str)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 3 * MAX_BYTES


def test_tokens_that_a_server_counts_are_kept() -> None:
    usage = '{"prompt_tokens": 7, "completion_tokens": 1}'
    assert answered(ChatCompletions(), judge('"x"', usage)) == [Reply("x", 7, 1)]
    assert answered(LogProbs(), teacher("-0.5", usage)) == [Reply("[-0.5]", 7, 1)]
    assert answered(LogProbs(), teacher("-0.5", '{"prompt_tokens": null}')) == [Reply("[-0.5]", 0, 0)]


@pytest.mark.parametrize("content", ["[" * 100_000, "{", DIGITS, "[1e999]", "null"])
def test_an_odd_answer_of_a_server_that_samples_is_its_failure(content: str) -> None:
    server = cast(VllmServer, SimpleNamespace(url="http://server"))
    with (
        pytest.raises(ServerFailed, match="http://server answered /x with something else than was asked for"),
        VllmServer._reading(server, "/x"),
    ):
        int(float(json.loads(content)[0]))
