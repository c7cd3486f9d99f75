"""Conversations: the turns before a response, as a dataset's rows hold them."""

import json
from collections.abc import Sequence
from typing import Any, Literal, TypedDict, get_args

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[str, ...] = get_args(Role)


class Message(TypedDict):
    """One turn."""

    role: str
    """One of ``ROLES``."""
    content: str
    """Its text; empty for a turn that only calls tools."""
    extra: str | None
    """JSON object of the other fields that a chat template reads (``tool_calls``, ``name`` …); in the first message
    also ``tools``, the available tools. None: there are no such fields."""


AS_SAMPLED = '{"as_sampled": true}'
"""Other fields of a response that a model wrote after its prompt, and that the chat template would render differently; the
response is read unchanged."""

Prompt = str | list[Message]
"""The turns before a response: the text of one user's turn, or several turns."""


def transcript(messages: Sequence[Message]) -> str:
    """Return the turns as one text, for people, for verifiers, and to distinguish conversations."""
    return "\n\n".join(f"{message['role'].capitalize()}: {_shown(message)}" for message in messages)


def extras_of(message: Message) -> dict[str, Any]:
    """Return the message's other fields."""
    found: dict[str, Any] = json.loads(message["extra"]) if message["extra"] else {}
    return found


def calls_tools(extra: str | None) -> bool:
    """Return whether the other fields of a turn hold calls of tools: then its text may be empty."""
    return extra is not None and bool(json.loads(extra).get("tool_calls"))


def is_one_prompt(messages: Sequence[Message]) -> bool:
    """Return whether the turns are no more than the text of one user's turn."""
    return len(messages) == 1 and messages[0]["role"] == "user" and messages[0]["extra"] is None


def first_words(messages: Sequence[Message]) -> str:
    """Return the first turn that a user wrote; without one, the whole. Conversations that begin alike are held out together."""
    return next(
        (message["content"] for message in messages if message["role"] == "user"), transcript(messages)
    )


def _shown(message: Message) -> str:
    return " ".join(part for part in (message["content"], message["extra"]) if part)
