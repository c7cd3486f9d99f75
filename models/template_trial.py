"""Try a chat template in a process that can be ended, since a template is a program by the model's author.

Jinja's sandbox keeps a template from files and code, but not from using time and memory: ``{{ 10 ** (10 ** 9) }}`` computes
for hours, even while it is compiled.
"""

import multiprocessing
import resource
from multiprocessing.connection import Connection
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from vantage.models.chat_template import render_turns

SECONDS = 20.0
"""Time limit of all trials together; an honest template takes milliseconds."""
EXTRA_BYTES = 512 * 2**20
"""Memory that rendering may take in addition to what the process has already."""
LONGEST_PREAMBLE = 2**20
"""Characters that a template may put around the turns."""

RENDERINGS = 12
"""Number of renderings of one prompt, which must all be equal."""

PROMPTS = ("?", "Say hello.\n", "1 2 3 4 5 6 7 8 9 " * 1000, "中文 🙂 <b>{{ x }}</b>")
"""Short, long, with several lines, and with the characters of templates."""

_REMEDY = "set model.chat: false, or correct the tokenizer's chat_template"


class BrokenTemplate(ValueError):
    """A chat template that cannot be rendered within bounds."""


def try_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Render the tokenizer's chat template for some prompts and answers; does nothing without a template.

    Raises:
        BrokenTemplate: the template raises, takes more than ``SECONDS`` or ``EXTRA_BYTES``, gives a text out of proportion, or
            different texts for the same turns.
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
    _limit_memory()
    try:
        for prompt in PROMPTS:
            for response in (None, "words", prompt):
                rendered = render_turns(tokenizer, prompt, response)
                if len(rendered) > LONGEST_PREAMBLE + 4 * (len(prompt) + len(response or "")):
                    send.send_bytes(f"makes {len(rendered)} characters of {len(prompt)}".encode())
                    return
        if len({render_turns(tokenizer, PROMPTS[0], "words") for _ in range(RENDERINGS)}) > 1:
            send.send_bytes(b"is rendered differently each time, as by the filter random or lipsum()")
            return
    except MemoryError:
        send.send_bytes(f"takes more than {EXTRA_BYTES // 2**20} MiB of memory".encode())
    except Exception as error:  # a template may raise anything
        reason = " ".join(str(error).split())[:300]
        send.send_bytes(f"cannot be rendered ({type(error).__name__}: {reason})".encode(errors="replace"))
    else:
        send.send_bytes(b"")


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
