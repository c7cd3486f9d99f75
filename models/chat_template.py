"""Apply chat templates, which turn messages into text."""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from vantage.models.call_form import form_of_calls, with_reasoning
from vantage.models.pinned_date import template_arguments
from vantage.schemas.conversations import Message, Prompt, extras_of

LONGEST_PREAMBLE = 2**20
"""Characters that a template may put around the turns."""


class TextOutOfProportion(jinja2.TemplateError):
    """A template's text is far longer than its turns."""


def uses_chat(tokenizer: PreTrainedTokenizerBase, chat: bool | None) -> bool:
    """Return whether prompts go through the chat template; ``chat`` None: if the tokenizer has one.

    Raises:
        ValueError: `chat` is True and the tokenizer has no chat template.
    """
    if chat and not tokenizer.chat_template:
        raise ValueError("model.chat=true, but the tokenizer has no chat template; set model.chat: false")
    return bool(tokenizer.chat_template) if chat is None else chat


def around_words(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return the chat template's text around the assistant's words: white space before them, and everything after."""
    prompt, words = "?", "words"
    opening, _, closing = render_turns(tokenizer, prompt, words).rpartition(words)
    space = opening.removeprefix(render_turns(tokenizer, prompt))
    return space if space.isspace() else "", closing


def render_turns(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, response: str | Message | None = None
) -> str:
    """Return the chat template's text of a prompt and the assistant's response; without a response, up to its opening.

    Raises:
        jinja2.TemplateError: the template refuses the turns.
        TextOutOfProportion: the template's text is far longer than the turns; it must not be tokenised.
    """
    turns, tools = _turns(prompt)
    if response is not None:
        turns.append(
            {"role": "assistant", "content": response} if isinstance(response, str) else _fields(response)
        )
    turns = [with_reasoning(tokenizer, turn) for turn in turns]
    if any(turn.get("tool_calls") for turn in turns):
        form = form_of_calls(tokenizer, _render)
        turns = [form.of(turn) for turn in turns]
    return _render(tokenizer, turns, tools=tools, add_generation_prompt=response is None)


def _render(
    tokenizer: PreTrainedTokenizerBase,
    turns: list[dict[str, Any]],
    *,
    tools: list[Any] | None = None,
    add_generation_prompt: bool = False,
) -> str:
    try:
        text = tokenizer.apply_chat_template(
            turns,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **template_arguments(tokenizer),
        )
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # A template is a program: if it adds a text and an object, it fails as in Python
        raise jinja2.TemplateError(f"{type(error).__name__}: {error}") from error
    return _in_proportion(str(text), turns, tools)


def _in_proportion(text: str, turns: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> str:
    """Return the template's text; raises ``TextOutOfProportion``."""
    if len(text) > LONGEST_PREAMBLE:
        given = [value for turn in turns for name, value in turn.items() if name != "role"]
        length = sum(len(str(value)) for value in (*given, *(tools or ())))
        if len(text) > LONGEST_PREAMBLE + 4 * length:
            raise TextOutOfProportion(f"makes {len(text)} characters of {length}")
    return text


def render_plain(conversation: Sequence[Message]) -> str:
    """Return the text for a model without a chat template: each role on its own line, then its words."""
    turns = [f"{turn['role'].capitalize()}:\n{turn['content']}\n\n" for turn in conversation]
    return "".join([*turns, "Assistant:\n"])


def _turns(prompt: Prompt) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Return messages in the form that templates read, and the available tools."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}], None
    turns = [_fields(message) for message in prompt]
    return turns, turns[0].pop("tools", None)


def _fields(message: Message) -> dict[str, Any]:
    return {**extras_of(message), "role": message["role"], "content": message["content"]}
