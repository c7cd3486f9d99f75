"""Find parts of the turns before a response that the model does not read, since its chat template does not write them.

Training and serving read the same text, so such a row is no error. But a tool's result without its call teaches little,
and a file with tools is usually meant for a model whose template writes them.
"""

import json
from collections.abc import Callable, Sequence

import jinja2
from transformers import PreTrainedTokenizerBase

from vantage.models.chat_template import render_turns, uses_chat
from vantage.models.response_parts import altered_calls
from vantage.schemas.conversations import Message, extras_of

TOOLS, CALLS = "descriptions of tools", "calls of tools"


def unwritten_parts(
    tokenizer: PreTrainedTokenizerBase, turns: Sequence[Message], *, chat: bool | None
) -> tuple[str, ...]:
    """Return which of ``TOOLS`` and ``CALLS`` these turns have although the model does not read them.

    One unwritten call suffices for ``CALLS``. If the template refuses the turns, the result is empty: that is another
    error.
    """
    has_tools = bool(turns) and bool(extras_of(turns[0]).get("tools"))
    calling = [place for place, turn in enumerate(turns) if extras_of(turn).get("tool_calls")]
    if not has_tools and not calling:
        return ()
    if not uses_chat(tokenizer, chat):
        return (*([TOOLS] if has_tools else []), *([CALLS] if calling else []))

    def is_written(changed: Sequence[Message]) -> bool:
        try:
            return render_turns(tokenizer, list(changed)) != text
        except jinja2.TemplateError:
            return True  # a template that refuses the value has read it

    try:
        text = render_turns(tokenizer, list(turns))
    except jinja2.TemplateError:
        return ()
    found = []
    if has_tools and not is_written([_without_tools(turns[0]), *turns[1:]]):
        found.append(TOOLS)
    if any(_has_unwritten_call(turns, place, is_written) for place in calling):
        found.append(CALLS)
    return tuple(found)


def _has_unwritten_call(
    turns: Sequence[Message], place: int, is_written: Callable[[Sequence[Message]], bool]
) -> bool:
    """Return whether the template ignores a name or an argument of a call in this turn."""
    return any(
        not is_written([*turns[:place], changed, *turns[place + 1 :]])
        for _, changed in altered_calls(turns[place])
    )


def _without_tools(turn: Message) -> Message:
    extras = {name: value for name, value in extras_of(turn).items() if name != "tools"}
    return Message(role=turn["role"], content=turn["content"], extra=json.dumps(extras) if extras else None)
