"""Alter one part of a response at a time: a template that writes the same text as before does not write that part."""

import json
from collections.abc import Iterator
from typing import Any

from vantage.schemas.conversations import Message, extras_of

_OTHER = "Q0other"  # no row's text contains it


def altered(response: Message) -> Iterator[tuple[str, Message]]:
    """Yield the name of each part of a response, and the response with another value there.

    The parts are the text, the reasoning, and the name and every argument of each call of a tool. Of two calls of one
    tool, each is altered alone, to find a template that writes only the first call.
    """
    extras = extras_of(response)
    if response["content"].strip():
        yield response["content"], Message(role="assistant", content=_OTHER, extra=response["extra"])
    if extras.get("reasoning_content"):
        yield str(extras["reasoning_content"]), _with(response, reasoning_content=_OTHER)
    yield from altered_calls(response)


def altered_calls(turn: Message) -> Iterator[tuple[str, Message]]:
    """Yield each name and argument of the turn's calls of tools, and the turn with another value there."""
    calls: list[Any] = list(extras_of(turn).get("tool_calls") or [])
    for place, call in enumerate(calls):
        for name, other in _altered_calls(call):
            yield name, _with(turn, tool_calls=[*calls[:place], other, *calls[place + 1 :]])


def _altered_calls(call: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    if "function" in call:
        for name, function in _altered_calls(call["function"]):
            yield name, {**call, "function": function}
        return
    yield str(call.get("name", "")), {**call, "name": _OTHER}
    arguments = call.get("arguments")
    if isinstance(arguments, dict):
        for key, value in arguments.items():
            other = {**call, "arguments": {**arguments, key: _OTHER}}
            yield f"{key}={json.dumps(value, ensure_ascii=False)}", other


def _with(response: Message, **fields: Any) -> Message:
    extra = json.dumps({**extras_of(response), **fields}, ensure_ascii=False)
    return Message(role=response["role"], content=response["content"], extra=extra)
