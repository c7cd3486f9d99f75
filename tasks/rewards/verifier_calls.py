"""Call a verifier's function about a batch of responses: one after the other, many at once, or with the whole batch.

Verdicts are yielded in the order of the cases, whatever the order in which the calls end.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vantage.tasks.rewards.verdicts import Verdict, is_numpy
from vantage.tasks.rewards.verifier_file import (
    BrokenVerifier,
    UserFunction,
    VerifierFunction,
    shown_case,
)

MAX_CALLS_AT_ONCE = 64
"""Most calls of an ``async`` function that wait at the same time."""

Case = tuple[str, str, str | None]
"""(prompt, response, the row's answer or None)"""
Calls = Callable[[Sequence[Case]], Iterator[Verdict | BrokenVerifier]]
"""Cases → the verdict on each, or its fault, in order."""


def calls_of(function: UserFunction) -> Calls:
    """Return how a user's function is called about many responses."""
    if function.takes_batch:
        return _WithBatch(function)
    return _Together(function) if function.is_async else one_by_one(function.judge)


def one_by_one(verify: VerifierFunction) -> Calls:
    """Return calls of a function that judges one response."""

    def judge(cases: Sequence[Case]) -> Iterator[Verdict | BrokenVerifier]:
        for case in cases:
            try:
                yield verify(*case)
            except BrokenVerifier as fault:
                yield fault

    return judge


class _Together:
    """Calls of an ``async`` function, many at once in one event loop, which lives as long as the process."""

    def __init__(self, function: UserFunction) -> None:
        self._function = function
        self._runner = asyncio.Runner()

    def __call__(self, cases: Sequence[Case]) -> Iterator[Verdict | BrokenVerifier]:
        loop = self._runner.get_loop()
        # Slots are given in order: an earlier case never waits for a later one
        slots = asyncio.Semaphore(MAX_CALLS_AT_ONCE)
        tasks = [loop.create_task(self._verdict(slots, *case)) for case in cases]
        for task in tasks:
            yield loop.run_until_complete(task)

    async def _verdict(
        self, slots: asyncio.Semaphore, prompt: str, response: str, answer: str | None
    ) -> Verdict | BrokenVerifier:
        about = f"for {shown_case(prompt, response, answer)}"
        async with slots:
            try:
                returned = await self._function.call(prompt=prompt, response=response, answer=answer)
            except BaseException as error:  # a user's code may raise anything
                return self._function.raised(error, about)
        try:
            return self._function.checked(returned, about)
        except BrokenVerifier as fault:
            return fault


class _WithBatch:
    """Calls of a function that takes a whole batch."""

    def __init__(self, function: UserFunction) -> None:
        self._function = function
        self._runner = asyncio.Runner()

    def __call__(self, cases: Sequence[Case]) -> Iterator[Verdict | BrokenVerifier]:
        try:
            found = self._returned(cases)
        except BrokenVerifier as fault:
            yield fault
            return
        for number, (case, returned) in enumerate(zip(cases, found, strict=True), 1):
            about = f"for response {number} of {len(cases)}: {shown_case(*case)}"
            try:
                yield self._function.checked(returned, about)
            except BrokenVerifier as fault:
                yield fault

    def _returned(self, cases: Sequence[Case]) -> Sequence[object]:
        """Return the function's results, one for each case."""
        about = f"for {len(cases)} responses, the first with {shown_case(*cases[0])}"
        prompts, responses, answers = (list(column) for column in zip(*cases, strict=True))
        try:
            found = self._function.call(prompts=prompts, responses=responses, answers=answers)
            if inspect.isawaitable(found):
                found = self._runner.run(_awaited(found))
            if is_numpy(found, "ndarray") or isinstance(found, list | tuple):
                found = list(found)  # a user's class may do anything when its items are counted
        except BaseException as error:  # a user's code may raise anything
            raise self._function.raised(error, about) from error
        if not isinstance(found, list | tuple):
            raise self._function.broken(
                f"returned a {type(found).__name__} {about}; return a list with a verdict for each response"
            )
        if len(found) != len(cases):
            raise self._function.broken(
                f"returned {len(found)} verdicts {about}; return one for each response, in their order"
            )
        return found


async def _awaited(found: Any) -> Any:
    return await found
