"""Serve small answers over HTTP for tests, as OpenAI-compatible judges and reward servers do, with faults on request.

A score is a function of the texts alone (``points``), so that a test knows each without asking.
"""

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def points(text: str, name: str = "score") -> int:
    """Return a number from 1 to 10 that a text determines."""
    return hashlib.sha256(f"{name}:{text}".encode()).digest()[0] % 10 + 1


@dataclass
class Faults:
    """Failures that the server is asked for. Requests are numbered from 0."""

    share: float = 0.0
    """Share of requests that fail, in turns: 503, 429, a closed connection, half a body, no JSON, answers twice, a late one."""
    late_seconds: float = 0.0
    """Seconds after which a late request is answered."""
    drips: set[int] = field(default_factory=set)
    """Requests that are answered a byte at a time, so that the answer never comes to its end in time."""
    doubled: bool = False
    """Whether each answer is sent twice, head and body: what a broken proxy does."""
    raw: Callable[[int], bytes | None] = lambda number: None
    """Request → a body that replaces the right one; None: the right one."""
    refused: int | None = None
    """Status with which every request is refused."""
    refuses: Callable[[str], int | None] = lambda text: None
    """Body of a request → the status with which it is refused, however often it comes; None: it is answered."""
    wishes: dict[int, str] = field(default_factory=dict)
    """Request that is answered with 429 → its ``Retry-After``."""
    dies_at: int | None = None
    """The request at which the server ends."""
    unreadable: Callable[[str, int], str | None] = lambda text, time: None
    """Question and how often it came before → an answer that replaces the right one; None: the right one."""
    ends: Callable[[str, int], str] = lambda text, time: "stop"
    """Question and how often it came before → the reason for which the answer ends."""
    counts: bool = True
    """Whether answers have the tokens of question and answer."""
    bad_scores: Callable[[dict[str, Any], int], Any] = lambda item, time: None
    """Item of a reward server and how often it came before → a score that replaces the right one; None: the right one."""


@dataclass
class Seen:
    """Requests that the server received."""

    questions: Counter[str] = field(default_factory=Counter)
    """Question → how often it was answered as it should be."""
    num_requests: int = 0
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    times: list[float] = field(default_factory=list)


class FakeJudge:
    """A server on a port of this machine; ``start`` after ``stop`` uses the same port."""

    def __init__(self, *, key: str | None = None, names: tuple[str, ...] = (), delay: float = 0.0) -> None:
        self.faults, self.seen = Faults(), Seen()
        self.key, self.names, self.delay = key, names, delay
        self.lock = threading.Lock()
        self.at_once = 0
        self._port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        served = self

        class Handler(_Handler):
            server_of = served

        self._http = _Server(("127.0.0.1", self._port), Handler)
        self._port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def __enter__(self) -> "FakeJudge":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def judged(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a chat request."""
        text = body["messages"][-1]["content"]
        before = self.seen.questions[text]
        answer = self.faults.unreadable(text, before)
        if answer is None:
            answer = self.right_answer(text)
        usage = {"prompt_tokens": len(text.split()), "completion_tokens": len(answer.split())}
        ended = {"finish_reason": self.faults.ends(text, before)}
        choices = [{"message": {"role": "assistant", "content": answer}, **ended}]
        return {"choices": choices} | ({"usage": usage} if self.faults.counts else {})

    def right_answer(self, text: str) -> str:
        """Return a rubric's answer, or with ``[Response A]`` the preferred response."""
        names = self.names or ("score",)
        if "[Response A]" not in text:
            return "\n".join(f"{name}: {points(text, name)}" for name in names)
        first, second = re.findall(r"\[Response [AB]\]\n(.*?)\n\n", text, re.DOTALL)
        preferred = {name: _preferred(points(first, name), points(second, name)) for name in names}
        return "\n".join(f"{name}: {letter}" for name, letter in preferred.items())

    def scored(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a batch of items."""
        return {"scores": [self._score(item) for item in body["items"]]}

    def _score(self, item: dict[str, Any]) -> Any:
        bad = self.faults.bad_scores(item, self.seen.questions[json.dumps(item)])
        if bad is not None:
            return bad
        text = item["prompt"] + item["response"]
        if not self.names:
            return points(text) / 4
        return {name: points(text, name) / 4 for name in self.names}


def _preferred(first: int, second: int) -> str:
    return "tie" if first == second else ("A" if first > second else "B")


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    daemon_threads, block_on_close = True, False


class _Handler(BaseHTTPRequestHandler):
    server_of: FakeJudge
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        served = self.server_of
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with served.lock:
            number = served.seen.num_requests
            served.seen.num_requests += 1
            served.seen.paths.append(self.path)
            served.seen.headers.append(dict(self.headers))
            served.seen.bodies.append(body)
            served.seen.times.append(time.monotonic())
            served.at_once += 1
            served.seen.most_at_once = max(served.seen.most_at_once, served.at_once)
        try:
            self._answer(served, body, number)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            with served.lock:
                served.at_once -= 1

    def _answer(self, served: FakeJudge, body: dict[str, Any], number: int) -> None:
        faults = served.faults
        if served.key is not None and self.headers.get("Authorization") != f"Bearer {served.key}":
            self._send(401, {"error": "who are you?"})
            return
        if faults.refused is not None:
            self._send(faults.refused, {"error": "no such model"})
            return
        if faults.dies_at is not None and number >= faults.dies_at:
            self.close_connection = True
            threading.Thread(target=served.stop, daemon=True).start()
            return
        time.sleep(served.delay)
        is_chat = "messages" in body
        if (status := faults.refuses(json.dumps(body, ensure_ascii=False))) is not None:
            self._send(status, {"error": "this question is not allowed"})
            return
        if number in faults.wishes:
            self._send(429, {"error": "slow down"}, {"Retry-After": faults.wishes[number]})
            return
        good = served.judged(body) if is_chat else served.scored(body)
        if (raw := faults.raw(number)) is not None:
            self._send(200, raw)
            return
        if number in faults.drips:
            self._drip(good)
            return
        if int((number + 1) * faults.share) > int(number * faults.share):
            self._fail(int(number * faults.share) % 7, good, faults)
            return
        with served.lock:
            asked = [body["messages"][-1]["content"]] if is_chat else map(json.dumps, body["items"])
            served.seen.questions.update(asked)
        self._send(200, good)

    def _drip(self, good: dict[str, Any]) -> None:
        data = json.dumps(good).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        for place in range(len(data)):
            self.wfile.write(data[place : place + 1])
            time.sleep(0.05)

    def _fail(self, fault: int, good: dict[str, Any], faults: Faults) -> None:
        if fault == 0:
            self._send(503, {"error": "overloaded"})
        elif fault == 1:
            self._send(429, {"error": "slow down"}, {"Retry-After": "0"})
        elif fault == 2:
            self.close_connection = True  # without an answer
        elif fault == 3:  # half of the answer
            data = json.dumps(good).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        elif fault == 4:
            self._send(200, {"detail": "not what was asked for"})
        elif fault == 5:  # every answer twice
            self._send(200, {name: value * 2 for name, value in good.items() if isinstance(value, list)})
        else:
            time.sleep(faults.late_seconds)
            self._send(200, good)

    def _send(self, code: int, body: dict[str, Any] | bytes, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        answer = f"HTTP/1.1 {code} {self.responses[code][0]}\r\n{head}\r\n".encode() + data
        self.wfile.write(answer * (2 if self.server_of.faults.doubled else 1))

    def log_message(self, *_: object) -> None:
        """Print nothing."""
