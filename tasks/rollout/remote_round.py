"""One round of a rollout by servers: ask for each missing response once, and leave those that do not come for another
round."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from vantage.models.partial_responses import Response
from vantage.tasks.rollout.engine import Listener
from vantage.tasks.rollout.sampled_policy import BadResponse, SampledPolicy
from vantage.tasks.rollout.vllm_server import ServerFailed, ServerTimedOut, VllmServer
from vantage.tasks.training import engine_record
from vantage.tasks.training.seeds import derive_seed

log = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 0.2
"""Seconds between two checks whether a round is still wanted."""
FAILED_REQUESTS = 3
"""Failed requests after which a server gets no more of the round."""


@dataclass(frozen=True)
class Rollout:
    """The responses that one rank asks for."""

    prompts: Sequence[list[int]]
    """The prompt of each response of all ranks."""
    rows: Sequence[int]
    """Rows of this rank among them."""
    seed: int
    greedy: bool
    version: str
    """Version of the weights from which the responses are sampled."""
    adapter: str | None
    """Name of the adapter that is applied; None: the policy has none."""
    at_once: int
    """Most responses that one server draws at once for this rank."""

    def missing(self, found: dict[int, Response]) -> list[int]:
        """Return the rows without a response."""
        return [row for row in self.rows if row not in found]


@dataclass(frozen=True)
class _Asked:
    """A server that draws responses."""

    server: VllmServer
    client: httpx.AsyncClient
    turn: asyncio.Semaphore
    """Held while a response is drawn."""
    unconfirmed: dict[int, Response] = field(default_factory=dict)
    """Responses that were cut at a stop string before the server reported the version of its weights."""
    confirming: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the server is asked for its version."""


class Round:
    """Asks servers for the missing responses, and puts each into ``found`` when it has come."""

    def __init__(
        self,
        sampled: SampledPolicy,
        rollout: Rollout,
        found: dict[int, Response],
        listener: Listener | None,
        *,
        show: Callable[[int], None],
    ) -> None:
        """Prepare to draw the responses that are missing in ``found``.

        Args:
            show: called several times a second with the number of finished responses; an error that it raises ends the
                round.
        """
        self._sampled, self._rollout, self._found, self._listener = sampled, rollout, found, listener
        self._show = show
        self.faults: list[tuple[VllmServer, ServerFailed]] = []
        """Servers that failed, and how."""

    def draw(self, servers: Sequence[VllmServer]) -> None:
        """Draw the missing responses.

        Raises:
            ServerRefused: a server refuses a request.
        """
        asyncio.run(self._watched(servers))

    async def _watched(self, servers: Sequence[VllmServer]) -> None:
        drawing = asyncio.create_task(self._draw(servers))
        try:
            while not drawing.done():
                self._show(len(self._found))
                await asyncio.wait({drawing}, timeout=SECONDS_BETWEEN_LOOKS)
        finally:
            await _cancelled([drawing])
        drawing.result()

    async def _draw(self, servers: Sequence[VllmServer]) -> None:
        shares: dict[VllmServer, list[int]] = {server: [] for server in servers}
        places: dict[tuple[int, ...], int] = {}
        for row in self._rollout.missing(self._found):  # a prompt's rows are adjacent: it is read once
            place = places.setdefault(tuple(self._rollout.prompts[row]), len(places))
            shares[servers[place % len(servers)]].append(row)
        await _all_or_none([self._draw_on(server, rows) for server, rows in shares.items() if rows])

    async def _draw_on(self, server: VllmServer, rows: Sequence[int]) -> None:
        """Draw these responses; after a time-out or some failed requests, the server gets no more requests."""
        num_failed = 0
        turn = asyncio.Semaphore(self._rollout.at_once)
        async with server.asynchronous(at_once=self._rollout.at_once) as client:
            asked = _Asked(server, client, turn)
            tasks = [asyncio.create_task(self._draw_row(asked, row)) for row in rows]
            try:
                for ended in asyncio.as_completed(tasks):
                    try:
                        await ended
                    except (ServerFailed, BadResponse) as error:
                        self._note(server, error)
                        num_failed += 1
                        if num_failed == FAILED_REQUESTS or isinstance(error, ServerTimedOut):
                            break
            finally:
                await _cancelled(tasks)

    async def _draw_row(self, asked: _Asked, row: int) -> None:
        strings = self._sampled.codec.stop_strings
        async with asked.turn:
            drawn = await asked.server.draw(
                asked.client,
                self._rollout.prompts[row],
                self._sampling(row),
                is_complete=None if strings is None else strings.complete,
                adapter=self._rollout.adapter,
            )
        response = self._sampled.response(drawn.ids, drawn.logprobs)
        if drawn.versions is None:
            asked.unconfirmed[row] = response
            await self._confirm(asked, row)
        elif drawn.versions == {self._rollout.version}:
            self._keep({row: response})
        else:
            self._drop(asked.server, 1, sorted(drawn.versions))

    async def _confirm(self, asked: _Asked, row: int) -> None:
        """Keep a response that was cut at a stop string, and others that wait with it, if the server still has the same
        weights.

        Raises:
            ServerFailed: the server does not answer; the responses wait for a later confirmation.
        """
        async with asked.confirming:
            responses = dict(asked.unconfirmed)
            if row not in responses:  # it was confirmed together with another response
                return
            version = await asked.server.version_now(asked.client)
            for each in responses:
                del asked.unconfirmed[each]
        if version == self._rollout.version:
            self._keep(responses)
        else:
            self._drop(asked.server, len(responses), [version])

    def _keep(self, responses: dict[int, Response]) -> None:
        self._found |= responses
        self._show(len(self._found))
        if self._listener is not None:
            self._listener.keep_up()
            if len(self._found) < len(self._rollout.rows):
                self._listener.sampled(list(responses), [ids for ids, _, _ in responses.values()])

    def _drop(self, server: VllmServer, count: int, versions: Sequence[str]) -> None:
        engine_record.note_stale(count)
        fault = ServerFailed(
            f"{server.url} sampled with weights {', '.join(versions)} in place of {self._rollout.version}"
        )
        self.faults.append((server, fault))
        log.warning("%s; %d response(s) dropped", fault, count)

    def _note(self, server: VllmServer, error: ServerFailed | BadResponse) -> None:
        engine_record.note_failure()
        fault = error if isinstance(error, ServerFailed) else ServerFailed(f"{server.url}: {error}")
        self.faults.append((server, fault))
        log.warning("%s", fault)

    def _sampling(self, row: int) -> dict[str, Any]:
        codec = self._sampled.codec
        return {
            "temperature": 0.0 if self._rollout.greedy else codec.generation.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "seed": derive_seed(self._rollout.seed, "response", row),
            "max_tokens": codec.generation.max_response_tokens,
            "stop_token_ids": list(codec.stop_token_ids),
            "ignore_eos": True,  # only the recipe's tokens end a response
            "logprobs": 0,
            "detokenize": False,
        }


async def _all_or_none(coroutines: Sequence[Any]) -> None:
    """Wait for all; the first error cancels the others and is raised, also one that is no ``Exception``."""
    tasks = [asyncio.create_task(each) for each in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        await _cancelled(tasks)


async def _cancelled(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    """Cancel the tasks that have not ended, and wait until all have."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
