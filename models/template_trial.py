"""Try a chat template in a process that can be killed, since a template is a program by the model's author.

Jinja's sandbox keeps a template from files and code, but not from using time and memory: ``{{ 10 ** (10 ** 9) }}`` computes
for hours, even while it is compiled.
"""

import json
import multiprocessing
import resource
from multiprocessing.connection import Connection
from pathlib import Path

import jinja2
from transformers import PreTrainedTokenizerBase

from vantage.models.chat_template import TextOutOfProportion, render_turns
from vantage.models.turn_end import end_token_id
from vantage.schemas.conversations import Message

SECONDS = 20.0
"""Time limit of all trials together; an ordinary template takes milliseconds."""
_CPU_SECONDS = 2 * int(SECONDS)
"""Seconds of a core after which the kernel ends the trial whose parent was killed meanwhile."""
EXTRA_BYTES = 512 * 2**20
"""Memory that rendering may take in addition to the process's present memory."""
RENDERINGS = 12
"""Number of renderings of one prompt, which must all be equal."""

PROMPTS = ("?", "Say hello.\n", "1 2 3 4 5 6 7 8 9 " * 1000, "中文 🙂 <b>{{ x }}</b>")
"""Short, long, with several lines, and with the characters of templates."""

_CALL = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 1}}}
_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "One."}}},
    },
}


def _turn(role: str, content: str, **extra: object) -> Message:
    return Message(role=role, content=content, extra=json.dumps(extra) if extra else None)


CONVERSATIONS = (
    [_turn("system", "Be brief."), _turn("user", "?")],
    [_turn("user", "?"), _turn("assistant", "words"), _turn("user", "?")],
    [_turn("system", "Be brief.", tools=[_TOOL]), _turn("user", "?")],
    [_turn("user", "?", tools=[_TOOL]), _turn("assistant", "", tool_calls=[_CALL]), _turn("tool", "1", name="add")],
    [_turn("user", "?"), _turn("assistant", "words", reasoning_content="Because."), _turn("user", "?")],
)  # fmt: skip
"""A system prompt, several turns, tools, calls and reasoning: a template may refuse them; otherwise it is bounded."""

_REMEDY = "set model.chat: false, or correct the tokenizer's chat_template"


class BrokenTemplate(ValueError):
    """A chat template that cannot be rendered within bounds."""


def try_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Render the tokenizer's chat template for some prompts and answers; does nothing without a template.

    Raises:
        BrokenTemplate: the template raises, takes more than ``SECONDS`` or ``EXTRA_BYTES``, writes a text out of
            proportion, or different texts for the same turns.
    """
    if not tokenizer.chat_template:
        return
    context = multiprocessing.get_context("fork")  # the tokenizer need not be loaded again
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_render_all, args=(tokenizer, send), daemon=True)
    process.start()
    send.close()
    try:
        fault = _answer(receive)
    finally:
        process.kill()
        process.join()
        receive.close()
    if fault:
        raise BrokenTemplate(f"the model's chat template {fault}; {_REMEDY}")


def _answer(receive: Connection) -> str:
    """Return the child's problem in words; empty: none."""
    if not receive.poll(SECONDS):
        return f"is not rendered within {SECONDS:g} seconds"
    try:
        return receive.recv_bytes().decode()
    except EOFError:
        return "ends the process that renders it"


def _render_all(tokenizer: PreTrainedTokenizerBase, send: Connection) -> None:
    _limit_resources()
    try:
        for prompt in PROMPTS:
            for response in (None, "words", prompt):
                render_turns(tokenizer, prompt, response)
        if len({render_turns(tokenizer, PROMPTS[0], "words") for _ in range(RENDERINGS)}) > 1:
            send.send_bytes(b"is rendered differently each time, as by the filter random or lipsum()")
            return
        for conversation in CONVERSATIONS:
            for answer in (None, "words", _turn("assistant", "words", reasoning_content="Because.")):
                _try_conversation(tokenizer, conversation, answer)
        end_token_id(tokenizer, chat=None)
    except TextOutOfProportion as error:
        send.send_bytes(str(error).encode())
    except MemoryError:
        send.send_bytes(f"takes more than {EXTRA_BYTES // 2**20} MiB of memory".encode())
    except Exception as error:  # a template may raise anything
        reason = " ".join(str(error).split())[:300]
        send.send_bytes(f"cannot be rendered ({type(error).__name__}: {reason})".encode(errors="replace"))
    else:
        send.send_bytes(b"")


def _try_conversation(
    tokenizer: PreTrainedTokenizerBase, conversation: list[Message], answer: str | Message | None
) -> None:
    """Render a conversation, which the template may refuse; raises ``TextOutOfProportion``."""
    try:
        render_turns(tokenizer, conversation, answer)
    except TextOutOfProportion:
        raise
    except jinja2.TemplateError:
        return


def _limit_resources() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
