"""Read conversations in published layouts as a list of messages.

| layout | of one turn |
|---|---|
| OpenAI's, TRL's | ``{"role": "user", "content": "…"}``; ``content`` may be a list of parts with ``text`` |
| ShareGPT's | ``{"from": "human", "value": "…"}`` |
| HH transcripts | one text: ``\\n\\nHuman: …\\n\\nAssistant: …`` |
| LLaMA-Factory's ``history`` | ``["what the user said", "what the assistant said"]`` |
| a round, of which a list has several | ``{"human": "…", "assistant": "…"}``, ``{"input": "…", "output": "…"}`` |

A list may also be the value of ``messages``, ``conversation`` or ``conversations`` of an object, or a text: JSON, or Python's own form, as
in cells of CSV.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vantage.schemas.conversations import ROLES, Message

_ROLE_OF = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("human", "prompter", "instruction", "question"), "user"),
    **dict.fromkeys(("gpt", "bot", "chatgpt", "bing", "bard", "model", "ai", "answer"), "assistant"),
    **dict.fromkeys(("function", "observation", "function_response", "ipython"), "tool"),
    **dict.fromkeys(("developer",), "system"),
    "function_call": "assistant",
}
"""Name of a turn's author → our role."""
_AUTHORS = ("role", "from", "author", "speaker")
_TEXTS = ("content", "value", "text", "message")
_LISTS = ("messages", "conversation", "conversations")
_KEPT = ("tool_calls", "name", "tool_call_id", "reasoning_content")
"""Other fields of a message that chat templates read."""
_UNREAD_REASONING = ("reasoning_details", "reasoning", "thinking", "thinking_blocks", "reasoning_content")
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names of a turn's reasoning; templates use the first of these."""
_ROUNDS = (("human", "assistant"), ("user", "assistant"), ("input", "output"))
"""Keys of a round: the user's and the assistant's message; the last round may lack an answer."""
_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant|System):[ \t]?")
_LIST_BEGINS = 200
_LIST = re.compile(r"""\[\s*\{\s*["'](role|from|author|speaker|content|value|text|message)["']\s*:""")
_NUMPY_LIST = re.compile(r"\}[^\S\n]*\n\s*\{\s*'(role|from|content|value)':")


def read_conversation(value: Any) -> list[Message]:
    """Return the messages of a value in any of the layouts above.

    A transcript's last turn may be ``Assistant:`` without words: then the conversation ends before it.

    Raises:
        ValueError: the value is no conversation, or a message has no text or an unknown author.
    """
    if isinstance(value, str):
        inside = turns_in_text(value)
        return read_transcript(value) if inside is None else inside
    if isinstance(value, Mapping):
        inner = next((value[key] for key in _LISTS if isinstance(value.get(key), list)), None)
        return read_conversation([value] if inner is None else inner)
    if isinstance(value, list) and value and all(isinstance(turn, Mapping) for turn in value):
        rounds = next((keys for keys in _ROUNDS if all(set(keys) >= set(turn) for turn in value)), None)
        return [_message(turn) for turn in value] if rounds is None else _read_rounds(value, *rounds)
    raise ValueError(f"a value of type {type(value).__name__} is not a conversation: a list of messages")


def turns_in_text(text: str) -> list[Message] | None:
    """Return the messages of a list in a text; None: the text is something else.

    Raises:
        ValueError: it is such a list, but cannot be read.
    """
    begin = text.lstrip()[:_LIST_BEGINS]
    if not _LIST.match(begin):
        return None
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(text.strip())
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        is_turns = isinstance(value, list) and all(
            isinstance(turn, dict) and any(key in turn for key in _AUTHORS) for turn in value
        )
        return [_message(turn) for turn in value] if is_turns else None
    if _NUMPY_LIST.search(text):
        raise ValueError(
            "a list of messages as numpy prints it, without commas: write the file as .jsonl or .parquet"
        )
    return None


def _read_rounds(rounds: Sequence[Mapping[str, Any]], asked: str, answered: str) -> list[Message]:
    turns = [
        (role, each.get(key)) for each in rounds for role, key in (("user", asked), ("assistant", answered))
    ]
    if turns[-1][1] is None:
        turns.pop()
    if not all(isinstance(words, str) for _, words in turns):
        raise ValueError(f"a round of a conversation has texts in {asked} and {answered}")
    return [Message(role=role, content=str(words), extra=None) for role, words in turns]


def read_transcript(text: str) -> list[Message]:
    """Return the messages of an HH transcript.

    Raises:
        ValueError: it does not begin with ``Human:``, ``Assistant:`` or ``System:``.
    """
    if not is_transcript(text):
        raise ValueError("a text that does not begin with Human: or System: is not a transcript")
    _, *parts = _TURN.split(text.strip())
    turns = [
        Message(role=_ROLE_OF[author.casefold()], content=words.strip(), extra=None)
        for author, words in zip(parts[::2], parts[1::2], strict=True)
    ]
    return turns[:-1] if turns[-1]["role"] == "assistant" and not turns[-1]["content"] else turns


def is_transcript(value: Any) -> bool:
    """Return whether a value is a text that begins like an HH transcript."""
    return isinstance(value, str) and _TURN.match(value.strip()) is not None


def read_history(value: Any) -> list[Message]:
    """Return the messages of earlier rounds, each a list of the user's and the assistant's message.

    Raises:
        ValueError: the value is no list of such pairs.
    """
    is_pairs = isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in value
    )
    if not is_pairs:
        raise ValueError("history is a list of pairs: what the user said, what the assistant said")
    return [
        Message(role=role, content=text, extra=None)
        for pair in value
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


def common_beginning(one: Sequence[Message], other: Sequence[Message]) -> list[Message]:
    """Return the messages that two conversations have in common, up to the last that is not the assistant's."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    while count and one[count - 1]["role"] == "assistant":
        count -= 1
    return list(one[:count])


def joined(asked: Sequence[Message], before: Sequence[Message]) -> list[Message] | None:
    """Return a prompt, and the turns before the last one of a response that is a conversation, as one conversation.

    None: they do not belong together, for example if the prompt is the same conversation in another layout.
    """
    system = [turn for turn in asked if turn["role"] == "system"]
    begin, whole = ([_said(turn) for turn in turns if turn["role"] != "system"] for turns in (asked, before))
    if not before or before[0]["role"] in ("assistant", "tool"):
        return [*asked, *before]
    if whole[: len(begin)] == begin or (len(begin) == 1 and begin[0] in whole):
        return list(before) if before[0]["role"] == "system" else [*system, *before]
    return None


def _said(turn: Message) -> tuple[str, str]:
    return turn["role"], turn["content"].strip()


def _message(turn: Mapping[str, Any]) -> Message:
    author = next((turn[key] for key in _AUTHORS if turn.get(key) is not None), None)
    role = _ROLE_OF.get(author.casefold()) if isinstance(author, str) else None
    if role is None:
        raise ValueError(
            f"a message is by {author!r}; it is one of {', '.join(sorted(_ROLE_OF))} in role or from"
            if author is not None
            else f"a message names its author in role or from; this one has {', '.join(map(str, turn))}"
        )
    content = next((turn[key] for key in _TEXTS if turn.get(key) is not None), None)
    if "parts" in turn and content is None:
        content = turn["parts"]  # Gemini's
    extra = {key: turn[key] for key in _KEPT if turn.get(key)}
    reasoning = next((turn[key] for key in _REASONING if isinstance(turn.get(key), str) and turn[key]), None)
    if reasoning is not None and role == "assistant":
        extra["reasoning_content"] = reasoning
    if isinstance(turn.get("function_call"), Mapping):  # OpenAI's former interface
        call = {"type": "function", "function": without_nulls(turn["function_call"])}
        extra.setdefault("tool_calls", [call])
    if "tool_calls" in extra:
        extra["tool_calls"] = _calls(extra["tool_calls"])
        if not extra["tool_calls"]:
            del extra["tool_calls"]
    if role == "assistant":
        _refuse_unread(turn, extra)
    if role == "assistant" and turn.get("weight") == 0:  # OpenAI's mark of a turn that is not trained on
        extra["weight"] = 0
    if author == "function_call" and isinstance(content, str):
        extra, content = {"tool_calls": [{"type": "function", "function": _call(content)}]}, ""
    if content is None and "tool_calls" in extra:
        content = ""
    return Message(
        role=role,
        content=_text(content, turn),
        extra=json.dumps(extra, ensure_ascii=False) if extra else None,
    )


def _refuse_unread(turn: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Refuse a turn whose reasoning is in a field that is not read, since it would be learnt without it."""
    unread = [key for key in _UNREAD_REASONING if turn.get(key) and not isinstance(turn[key], bool)]
    if unread and "reasoning_content" not in extra:
        raise ValueError(
            f"a message has its reasoning in {unread[0]}, which is not read; write it as a text in reasoning_content"
        )


def _text(content: Any, turn: Mapping[str, Any]) -> str:
    if isinstance(content, list):  # a list of parts, as multimodal models have them
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if not texts or len(texts) < len(parts):
            raise ValueError("a message with parts that are no text; only text is read")
        content = "".join(texts)
    if not isinstance(content, str):
        raise ValueError(
            f"a message has its text in content, value or text; this one has {', '.join(map(str, turn))}"
        )
    return content


def _calls(value: Any) -> Any:
    """Return the calls of a turn in the form that templates read: arguments as an object, and no null fields.

    OpenAI's interface gives the arguments as JSON in a text, which a template would write as a text within JSON. Arrow
    gives each struct the fields of all others, as nulls, which are removed. Nulls in arguments that were a text stay.
    """
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        raise ValueError("tool_calls that are a text, and no JSON") from None
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ValueError("tool_calls that are no list of calls")
    return [_with_object(without_nulls(call)) for call in calls]


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    inner = call.get("function")
    if isinstance(inner, dict):
        return {**call, "function": _with_object(inner)}
    if not (isinstance(call.get("name"), str) and call["name"]):
        raise ValueError("a call of a tool that has no name")
    if not isinstance(call.get("arguments"), str):
        return call
    try:
        arguments = json.loads(call["arguments"] or "{}")
    except ValueError:
        raise ValueError("a call of a tool whose arguments are a text that is not JSON") from None
    if not isinstance(arguments, dict):
        raise ValueError("a call of a tool whose arguments are no JSON object")
    return {**call, "arguments": arguments}


def without_nulls(value: Any) -> Any:
    """Return the value without the fields of objects, at any depth, that are null; items of lists stay."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _call(text: str) -> Any:
    """Return a call of a tool, which ShareGPT's layout writes as JSON in a text."""
    try:
        call = json.loads(text)
    except ValueError:
        raise ValueError("a function_call whose text is not JSON") from None
    return _with_object(call) if isinstance(call, dict) else call
