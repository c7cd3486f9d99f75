"""Ask servers that score responses, or know a teacher's log-probabilities: many requests at once, each with a time
limit, repeated until it succeeds. Answers are stored.

Another thread makes the requests, so that the stage's own thread can show progress and notice a request to stop.
"""

import asyncio
import json
import logging
import math
import ssl
import threading
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cache, cached_property, partial
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx
from aiolimiter import AsyncLimiter
from anyio.from_thread import start_blocking_portal
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from vantage.schemas.recipe.called_server import CalledServer
from vantage.schemas.recipe.fields import MAX_NAMED
from vantage.schemas.recipe.served_scores import STOP
from vantage.schemas.records.stored_answers import StoredAnswer
from vantage.schemas.safe_text import MASK
from vantage.schemas.strict_json import without_repeats
from vantage.tasks.rewards.api_keys import api_key
from vantage.tasks.training import progress

log = logging.getLogger(__name__)

MAX_TRIES = 30
"""Most requests with one question while other questions are answered."""
LONGEST_PAUSE = 20.0
"""Most seconds before a request is repeated, unless the server asks for more."""
LONGEST_WISH = 300.0
"""Most seconds to wait when a server asks for more by ``Retry-After``."""
MOST_REFUSED = 64
"""Most questions that a server may refuse beyond those that it has answered: all responses to a long prompt, for example."""
MAX_TOKENS = 2**31 - 1
"""Most tokens of one question or answer in a server's count; a larger count is not believed."""
MAX_BYTES = 64 * 2**20
"""Most bytes of an answer to one request."""
CONNECT_SECONDS = 10.0
_LOOK_SECONDS = 0.2
_HERE = ("localhost", "127.0.0.1", "::1")


class JudgeUnavailable(RuntimeError):
    """A server that is asked does not answer; the stage goes on from its last checkpoint when it does."""


class JudgeRefused(ValueError):
    """A server refuses a question, and would refuse it again."""


class QuestionRefused(JudgeRefused):
    """A server refuses one question, or all: it is too long for the model, filtered, or in an unknown form."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class CallFailed(RuntimeError):
    """A request was not answered as it should be; another may succeed."""

    def __init__(self, message: str, *, retry_after: float = 0.0, tokens: tuple[int, int] = (0, 0)) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.tokens = tokens
        """Tokens of question and answer that the server counts for a reply without an answer."""


@dataclass(frozen=True)
class Question:
    """A question, and how often it was answered before."""

    asked: Mapping[str, Any]
    digest: str
    time: int


@dataclass(frozen=True)
class Reply:
    """The answer to one question."""

    text: str
    question_tokens: int = 0
    answer_tokens: int = 0
    is_cut_off: bool = False
    model: str = ""
    """The model that answered, as the server names it; empty: it names none."""


def counted_tokens(body: Mapping[str, Any], name: str) -> int:
    """Return a number of tokens from an answer's ``usage``; 0 if the value cannot be one."""
    tokens = (body.get("usage") or {}).get(name)
    return tokens if type(tokens) is int and 0 <= tokens <= MAX_TOKENS else 0


def _tokens_of(body: Any) -> tuple[int, int]:
    """Return the tokens of question and answer in a body that is no answer; 0 for an impossible number."""
    try:
        return counted_tokens(body, "prompt_tokens"), counted_tokens(body, "completion_tokens")
    except (AttributeError, TypeError):
        return 0, 0


class Form(Protocol):
    """Form of the requests to a kind of server, and of its answers."""

    path: str
    """Path that is added to the server's address; empty: the address is called as it is."""
    batch: int
    """Most questions in one request."""

    def body(self, questions: Sequence[Question]) -> Mapping[str, Any]:
        """Return the request's body."""

    def replies(self, body: Any, *, questions: Sequence[Question]) -> list[Reply]:
        """Return the answers to these questions in a server's body, question by question.

        Raises:
            ValueError, KeyError, TypeError, IndexError, AttributeError: it is not an answer.
        """


class Asking:
    """Asks one server."""

    def __init__(
        self,
        server: CalledServer,
        form: Form,
        *,
        path: str,
        phase: str = "waiting for judges",
        has_answered: Callable[[], bool] | None = None,
    ) -> None:
        """Prepare to ask; nothing is sent.

        Args:
            path: path of the server in the recipe, for messages.
            phase: name of the phase in which the stage waits for answers.
            has_answered: returns whether the server has answered a question of the stage. If so, a question that it
                refuses is
            stored as refused, and not asked again. None: a refusal ends the stage.

        Raises:
            ValueError: the variable of the server's key is not set, or holds no key.
        """
        self._server, self._form, self._path, self._phase = server, form, path, phase
        self._has_answered = has_answered
        self._answered = self._refused = 0
        """Questions that the server has answered, and those that it has refused."""
        self._url = server.address(form.path)
        self._key = api_key(server.api_key_variable, f"{path}.api_key_variable")
        self._last_answer = 0.0
        self._last_request = -math.inf
        self._begun: list[Future[None]] = []
        self._models: list[str] = []
        """The names under which the server has answered."""
        self.failed_calls = 0
        """Requests that failed, and were repeated."""

    def ask(
        self,
        questions: Sequence[Question],
        *,
        keep: Callable[[StoredAnswer], None],
        may_go_on: Callable[[], None] = lambda: None,
    ) -> None:
        """Ask the questions, and keep each answer when it comes; errors are raised after the requests under way have
        ended.

        Args:
            keep: gets each answer, and also replies without one if the server counts their tokens (``is_broken``).
            may_go_on: called before each request; raises if no more requests may be sent.

        Raises:
            JudgeUnavailable: no question is answered for ``patience_seconds``, or one is not after many requests.
            JudgeRefused: the server refuses the requests, and not only a few questions.
        """
        if not questions:
            return
        done = 0

        def kept(answer: StoredAnswer) -> None:
            nonlocal done
            keep(answer)
            done += not answer.is_broken

        with start_blocking_portal() as portal:
            asked: Future[None] = portal.start_task_soon(self._ask_all, questions, kept, may_go_on)
            try:
                while not asked.done():
                    progress.phase(self._phase, done, len(questions))
                    wait([asked], timeout=_LOOK_SECONDS)
                asked.result()
            finally:
                asked.cancel()

    def begin(
        self,
        questions: Sequence[Question],
        *,
        keep: Callable[[StoredAnswer], None],
        may_go_on: Callable[[], None] = lambda: None,
    ) -> None:
        """Ask the questions as ``ask`` does, while the caller goes on; those of earlier calls are answered first."""
        if questions:
            before = self._begun[-1] if self._begun else None
            asked = self._ask_after(before, questions, keep, may_go_on)
            self._begun.append(asyncio.run_coroutine_threadsafe(asked, self._loop))

    def finish(self) -> None:
        """Wait for the answers to all questions of ``begin``.

        Questions to which the server did not answer stay without an answer; a later ``ask`` tries again.

        Raises:
            JudgeUnavailable, JudgeRefused: see ``ask``.
        """
        begun, self._begun = self._begun, []
        try:
            for number, asked in enumerate(begun):
                if asked.done() and isinstance(asked.exception(), JudgeUnavailable):
                    return  # the later ones have the same error
                while not asked.done():
                    progress.phase(self._phase, number, len(begun))
                    wait([asked], timeout=_LOOK_SECONDS)
                asked.result()
        finally:
            for asked in begun:
                asked.cancel()

    def give_up(self) -> None:
        """Cancel the questions of ``begin``; answers that have come are kept."""
        begun, self._begun = self._begun, []
        for asked in begun:
            asked.cancel()

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """Return an event loop in a thread that ends with the process, even during a request."""
        loop = asyncio.new_event_loop()
        threading.Thread(target=loop.run_forever, name=f"asking {self._path}", daemon=True).start()
        return loop

    async def _ask_after(
        self,
        before: Future[None] | None,
        questions: Sequence[Question],
        keep: Callable[[StoredAnswer], None],
        may_go_on: Callable[[], None],
    ) -> None:
        if before is not None:
            await asyncio.wrap_future(before)
        await self._ask_all(questions, keep, may_go_on, is_ahead=True)

    async def _ask_all(
        self,
        questions: Sequence[Question],
        keep: Callable[[StoredAnswer], None],
        may_go_on: Callable[[], None],
        *,
        is_ahead: bool = False,
    ) -> None:
        """Ask the questions; ``is_ahead``: other questions will follow before any scores are wanted."""
        server = self._server
        self._open = asyncio.Semaphore(server.at_once)
        self._rate: AbstractAsyncContextManager[None] = nullcontext()
        if server.requests_per_minute is not None:
            # One at a time: a larger bucket would be full again at the beginning of each batch of responses.
            interval = 60.0 / server.requests_per_minute
            self._rate = AsyncLimiter(1, interval)
            await asyncio.sleep(
                self._last_request + interval - time.monotonic()
            )  # a new limiter does not know when the last batch was sent
        self._last_answer = time.monotonic()
        async with self._client() as client, asyncio.TaskGroup() as tasks:
            requests = _Requests(client, keep, may_go_on)
            for start in range(0, len(questions), self._form.batch):
                some = questions[start : start + self._form.batch]
                answered = partial(self._ask_until_answered, some, requests)
                requests.add(tasks.create_task(requests.watched(answered)))
        self._keep_refused(requests, is_ahead=is_ahead)
        if requests.error is not None:
            raise requests.error

    def _keep_refused(self, requests: "_Requests", *, is_ahead: bool) -> None:
        """Keep the questions that the server refused, if it has answered others.

        This is known only after all questions were asked, since a refusal comes sooner than the first answer. If others
        will follow (``is_ahead``), it is not known yet, and the refused ones are asked again with the last questions.
        """
        if not requests.refused:
            return
        if self._has_answered is not None and self._has_answered():
            for question, refused in requests.refused:
                requests.keep(_without_text(question, refusal=self._safe(refused.reason)))
        elif is_ahead:
            self._refused -= len(requests.refused)
        elif requests.error is None:
            _, first = requests.refused[0]
            requests.error = JudgeRefused(
                f"{first}; it has answered no other question of this stage, so the request itself may be wrong"
            )

    def _client(self) -> httpx.AsyncClient:
        """Return a client; a proxy of the environment is used, though not for a server on this machine.

        Each request has a connection of its own: a second answer to an earlier request, which a server or proxy may send,
        would otherwise be read as the answer to the next question.

        Raises:
            JudgeRefused: the proxy cannot be used.
        """
        server = self._server
        at_once, seconds = server.at_once, server.request_seconds
        try:
            return httpx.AsyncClient(
                headers={
                    "Connection": "close",
                    "Accept-Encoding": "identity",
                    **_key_headers(server, self._key),
                },
                limits=httpx.Limits(max_connections=at_once, max_keepalive_connections=0),
                timeout=httpx.Timeout(seconds, connect=min(CONNECT_SECONDS, seconds), pool=None),
                verify=_certificates() if server.url.startswith("https:") else False,
                trust_env=urlsplit(server.url).hostname not in _HERE,
            )
        except (ImportError, ValueError) as error:
            raise JudgeRefused(
                f"{self._path}.url={server.url}: the proxy that the environment names cannot be used: {error}; correct it, or name the "
                "server's host in NO_PROXY"
            ) from error

    async def _ask_until_answered(self, questions: Sequence[Question], requests: "_Requests") -> None:
        """Ask in one request until it is answered; where a batch is refused, ask each of its questions alone."""
        try:
            replies = await self._replies(questions, requests)
        except QuestionRefused as refused:
            if self._has_answered is None:
                raise
            self._last_answer = time.monotonic()
            if len(questions) == 1:
                self._note_refusal(refused)
                requests.refused.append((questions[0], refused))
            else:
                for each in questions:
                    if requests.error is None:
                        await self._ask_until_answered([each], requests)
            return
        self._last_answer = time.monotonic()
        self._answered += len(questions)
        for question, reply in zip(questions, replies, strict=True):
            self._note_model(reply.model)
            requests.keep(
                StoredAnswer(
                    question=question.digest,
                    time=question.time,
                    asked=dict(question.asked),
                    answer=self._safe(reply.text),
                    question_tokens=reply.question_tokens,
                    answer_tokens=reply.answer_tokens,
                    is_cut_off=reply.is_cut_off,
                )
            )

    async def _replies(self, questions: Sequence[Question], requests: "_Requests") -> list[Reply]:
        """Repeat a request until it is answered."""

        async def once() -> list[Reply]:
            async with self._open:
                began = time.monotonic()
                async with self._rate:
                    self._leave_out_of_patience(began)
                requests.may_go_on()
                self._last_request = time.monotonic()
                with requests.under_way():
                    try:
                        return await self._call(requests.client, questions)
                    except CallFailed as failed:
                        asked, answered = failed.tokens
                        if asked or answered:
                            tokens = {"question_tokens": asked, "answer_tokens": answered}
                            requests.keep(_without_text(questions[0], is_broken=True, **tokens))
                        raise

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(CallFailed),
            wait=_pause,
            stop=lambda state: requests.error is not None or self._gives_up(state),
            before_sleep=self._note_failure,
            retry_error_callback=self._unavailable,
        )
        replies: list[Reply] = await retrying(once)
        return replies

    def _note_refusal(self, refused: QuestionRefused) -> None:
        """Count a refused question.

        Raises:
            QuestionRefused: the server refuses more questions than it answers.
        """
        self._refused += 1
        if self._refused > self._answered + MOST_REFUSED:
            raise refused
        if _is_logged(self._refused):
            log.warning(
                "%s: %d questions are refused, and count as unreadable: %s",
                self._path,
                self._refused,
                refused,
            )

    def _note_model(self, name: str) -> None:
        """Warn if the server answers as another model than before; the requested name may be an alias."""
        if not name or name in self._models:
            return
        if self._models:
            log.warning(
                "%s.url=%s answers as the model %.80r now, and has answered as %.80r: its scores may be of another kind; look at the "
                "server, or name one version as model",
                self._path,
                self._server.url,
                name,
                self._models[-1],
            )
        if len(self._models) < MAX_NAMED:
            self._models.append(name)

    def _safe(self, text: str) -> str:
        """Return an answer as it is kept: without the API key, and without lone surrogates, which JSON can contain."""
        text = text.replace(self._key, MASK) if self._key else text
        return text.encode("utf-8", "replace").decode()

    async def _call(self, client: httpx.AsyncClient, questions: Sequence[Question]) -> list[Reply]:
        """Make one request.

        Raises:
            CallFailed: the request failed; another may succeed.
            JudgeRefused: the server refuses the request.
        """
        try:
            async with asyncio.timeout(self._server.request_seconds):
                async with client.stream("POST", self._url, json=self._form.body(questions)) as response:
                    content = await _content(response)
        except TimeoutError as error:
            raise CallFailed(f"no answer within {self._server.request_seconds:g} s") from error
        except httpx.HTTPError as error:
            raise CallFailed(str(error) or type(error).__name__) from error
        if response.is_redirect or response.is_error:
            raise self._failure(response, content)
        body = None
        try:
            body = _read_body(content)
            return self._form.replies(body, questions=questions)
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise CallFailed(
                f"its answer is not what was asked for ({type(error).__name__}: {error})",
                tokens=_tokens_of(body),
            ) from error

    def _failure(self, response: httpx.Response, content: bytes) -> CallFailed | JudgeRefused:
        code = response.status_code
        reason = " ".join(content[:2000].decode(errors="replace").split())[:400]
        if response.is_server_error or code in _TEMPORARY:
            return CallFailed(f"{code}: {reason}", retry_after=_retry_after(response))
        message = f"{self._path}.url={self._server.url} answered {code}: {reason}"
        if code in _OF_A_QUESTION:
            if getattr(self._server, "unreadable", None) == STOP:
                message += f"; if it refuses single questions alone, set {self._path}.unreadable to a number"
            return QuestionRefused(message, f"{code}: {reason}")
        if code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            name = self._server.api_key_variable
            message += (
                f"; put the server's API key into {name}"
                if name
                else f"; name the variable of its API key in {self._path}.api_key_variable"
            )
        return JudgeRefused(message)

    def _leave_out_of_patience(self, began: float) -> None:
        """Leave the time that this request waited for the limit of requests per minute out of the time without an
        answer. It waited from ``began`` on, or from the request before it.

        Of the wait, ``LONGEST_PAUSE`` still counts: otherwise a dead server that is asked every few seconds would use
        up no patience.
        """
        waited = time.monotonic() - max(began, self._last_request)
        self._last_answer += max(0.0, waited - LONGEST_PAUSE)

    def _gives_up(self, state: RetryCallState) -> bool:
        return (
            state.attempt_number >= MAX_TRIES
            or time.monotonic() - self._last_answer >= self._server.patience_seconds
        )

    def _note_failure(self, state: RetryCallState) -> None:
        self.failed_calls += 1
        if _is_logged(self.failed_calls):
            error = state.outcome.exception() if state.outcome is not None else None
            log.warning(
                "%s: %d requests have failed and are repeated: %s", self._path, self.failed_calls, error
            )

    def _unavailable(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome is not None else None
        raise JudgeUnavailable(
            f"{self._path}.url={self._server.url} does not answer: {state.attempt_number} requests with one question failed, and for "
            f"{time.monotonic() - self._last_answer:.0f} s there was no answer to any; the last failure: {error}"
        ) from error


def _is_logged(count: int) -> bool:
    """Return whether a fault that has occurred ``count`` times is logged."""
    return count in (1, 10, 100) or count % 1000 == 0


def _without_text(question: Question, **fields: Any) -> StoredAnswer:
    """Return the entry that is stored for a question without an answer."""
    return StoredAnswer(
        question=question.digest, time=question.time, asked=dict(question.asked), answer="", **fields
    )


class _Requests:
    """Requests that are made at once. When an error ends one of them, those under way are still answered, and no other begins."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        keep: Callable[[StoredAnswer], None],
        may_go_on: Callable[[], None],
    ) -> None:
        self.client, self.keep, self.may_go_on = client, keep, may_go_on
        self.error: Exception | None = None
        """The first error; None: there was none."""
        self.refused: list[tuple[Question, QuestionRefused]] = []
        """Questions that the server refused, one by one."""
        self._tasks: list[asyncio.Task[None]] = []
        self._under_way: set[asyncio.Task[Any] | None] = set()

    def add(self, task: asyncio.Task[None]) -> None:
        """Add a task that makes one of the requests."""
        self._tasks.append(task)

    async def watched(self, answered: Callable[[], Awaitable[None]]) -> None:
        """Wait until a request is answered; an error ends the others."""
        try:
            await answered()
        except Exception as error:
            if self.error is None:
                self.error = error
                for task in self._tasks:
                    if task not in self._under_way and task is not asyncio.current_task():
                        task.cancel()

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Note that this task's request has been sent, inside the block."""
        task = asyncio.current_task()
        self._under_way.add(task)
        try:
            yield
        finally:
            self._under_way.discard(task)


_TEMPORARY = (
    httpx.codes.REQUEST_TIMEOUT,
    httpx.codes.CONFLICT,
    httpx.codes.TOO_EARLY,
    httpx.codes.TOO_MANY_REQUESTS,
)
"""Codes of refusals after which another request may succeed."""
_OF_A_QUESTION = (
    httpx.codes.BAD_REQUEST,
    httpx.codes.REQUEST_ENTITY_TOO_LARGE,
    httpx.codes.UNPROCESSABLE_ENTITY,
)
"""Codes of refusals that may concern one question alone, which is too long or filtered."""


@cache
def _certificates() -> ssl.SSLContext:
    """Return the trusted certificates; reading them takes longer than a request."""
    return httpx.create_ssl_context()


def _key_headers(server: CalledServer, key: str | None) -> dict[str, str]:
    """Return the header that holds an API key; none without a key."""
    if key is None:
        return {}
    return {server.key_header: key} if server.key_header else {"Authorization": f"Bearer {key}"}


def _pause(state: RetryCallState) -> float:
    """Return the seconds until a request is repeated: random, up to twice as long each time, or what the server asks for."""
    error = state.outcome.exception() if state.outcome is not None else None
    wished = error.retry_after if isinstance(error, CallFailed) else 0.0
    return wished + wait_random_exponential(multiplier=0.5, max=LONGEST_PAUSE)(state)


def _retry_after(response: httpx.Response) -> float:
    """Return the seconds of the header ``Retry-After``, which may be a date; 0 without one, or for anything else."""
    text = response.headers.get("retry-after", "").strip()
    if text.isascii() and text.isdecimal():
        return min(float(text), LONGEST_WISH)
    try:
        seconds = parsedate_to_datetime(text).timestamp() - time.time()
    except (ValueError, TypeError, OverflowError, OSError):
        return 0.0
    return min(max(seconds, 0.0), LONGEST_WISH)


def _read_body(content: bytes) -> Any:
    """Return the JSON in a body; a number that JSON does not have becomes a text.

    Raises:
        ValueError, RecursionError: it is no JSON, or gives one name two values.
    """
    return json.loads(content, parse_constant=str, object_pairs_hook=without_repeats)


async def _content(response: httpx.Response) -> bytes:
    """Return the body of a response. It is unpacked here, since httpx does not limit the size of unpacked bytes.

    Raises:
        CallFailed: the body is too large, or packed in a way that was not asked for.
    """
    packing = response.headers.get("content-encoding", "").strip().lower() or "identity"
    if packing not in ("identity", "gzip"):
        raise CallFailed(f"its answer is packed as {packing[:80]!r}, and no packing was asked for")
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16) if packing == "gzip" else None
    content = bytearray()
    async for part in response.aiter_raw():
        try:
            # One byte above the bound shows that there are more.
            content += part if unpacker is None else unpacker.decompress(part, MAX_BYTES + 1 - len(content))
        except zlib.error as error:
            raise CallFailed(f"its answer cannot be unpacked: {error}") from error
        if len(content) > MAX_BYTES:
            raise CallFailed(f"its answer has more than {MAX_BYTES // 2**20} MiB")
    if unpacker is not None and not unpacker.eof:
        raise CallFailed("its answer ends within its packing")
    return bytes(content)
