"""An error of one request ends the requests that wait to be sent again. Requests under way are still answered."""

import asyncio
from typing import Any, cast

from vantage.tasks.rewards.asking import _Requests


def test_an_error_ends_what_waits_and_lets_what_is_under_way_be_answered() -> None:
    ended: list[str] = []

    async def ask() -> Exception | None:
        requests = _Requests(cast(Any, None), lambda answer: None, lambda: None)
        waits, is_sent, may_answer = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def waits_to_be_sent_again() -> None:
            with requests.under_way():
                await asyncio.sleep(0)
            waits.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.append("waiting")

        async def under_way() -> None:
            with requests.under_way():
                is_sent.set()
                await may_answer.wait()
            ended.append("answered")

        async def refused() -> None:
            await waits.wait()
            await is_sent.wait()
            raise ValueError("the server refused it")

        async def the_server() -> None:
            while "waiting" not in ended:
                await asyncio.sleep(0)
            may_answer.set()

        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            for answered in (waits_to_be_sent_again, under_way, refused):
                requests.add(tasks.create_task(requests.watched(answered)))
            tasks.create_task(the_server())
        return requests.error

    error = asyncio.run(ask())
    assert isinstance(error, ValueError) and str(error) == "the server refused it"
    assert ended == ["waiting", "answered"]
