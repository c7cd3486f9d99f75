"""Find the form in which a chat template reads calls of tools and reasoning; rows hold one form, and templates differ.

Rows have empty text beside calls, and arguments as objects. Some templates write calls only if `content` is null, as
OpenAI's interface gives it; some join arguments to text, and read them as JSON in a text. Some read the reasoning as
`thinking` or `reasoning`.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

REASONING = "reasoning_content"
"""The name of the reasoning in rows."""

_NAMES = (REASONING, "thinking", "reasoning")
_NAME, _KEY, _VALUE = "Q0name", "Q0key", "Q0value"  # no template contains these texts


@dataclass(frozen=True)
class CallForm:
    """The form of a turn that calls tools."""

    is_null: bool = False
    """Whether `content` is null if the turn has no words."""
    is_text: bool = False
    """Whether arguments are JSON in a text."""

    def of(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        """Return the turn in this form; a turn without calls is unchanged."""
        found = dict(turn)
        if not found.get("tool_calls"):
            return found
        if self.is_null and not found["content"]:
            found["content"] = None
        if self.is_text:
            found["tool_calls"] = [_with_text(call) for call in found["tool_calls"]]
        return found


def form_of_calls(tokenizer: PreTrainedTokenizerBase, render: Callable[..., str]) -> CallForm:
    """Return the first form in which the template writes a call's name and arguments; if there is none, the form of the
    rows.

    ``render`` returns the text that a tokenizer's template writes for a list of turns.
    """
    known = getattr(tokenizer, "call_form", None)
    if known is None or known[0] != tokenizer.chat_template:
        forms = [CallForm(is_null=null, is_text=text) for text, null in product((False, True), repeat=2)]
        found = next((form for form in forms if _is_written(tokenizer, form, render)), CallForm())
        known = tokenizer.call_form = (tokenizer.chat_template, found)
    form: CallForm = known[1]
    return form


def _is_written(tokenizer: PreTrainedTokenizerBase, form: CallForm, render: Callable[..., str]) -> bool:
    call = {
        "type": "function",
        "id": "call00001",  # nine characters, as Mistral's templates demand
        "function": {"name": _NAME, "arguments": {_KEY: _VALUE}},
    }
    asked = {"role": "user", "content": "?"}
    try:
        before = render(tokenizer, [asked])
        text = render(tokenizer, [asked, form.of({"role": "assistant", "content": "", "tool_calls": [call]})])
    except jinja2.TemplateError:
        return False
    shows_null = text.count("None") > before.count("None")
    return _NAME in text and _VALUE in text and not shows_null


def _with_text(call: Any) -> Any:
    if "function" in call:
        return {**call, "function": _with_text(call["function"])}
    if isinstance(call.get("arguments"), dict):
        return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    return call


def with_reasoning(tokenizer: PreTrainedTokenizerBase, turn: dict[str, Any]) -> dict[str, Any]:
    """Return the turn with its reasoning under the first name that the chat template reads."""
    if REASONING not in turn:
        return turn
    template = str(tokenizer.chat_template or "")
    name = next((each for each in _NAMES if re.search(rf"""[.'"]{each}\b""", template)), REASONING)
    return {(name if key == REASONING else key): value for key, value in turn.items()}
