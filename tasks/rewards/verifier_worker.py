"""The process in which a recipe's own verifier runs: it reads batches of cases and writes one line per verdict.

Only ``vantage.tasks.rewards.verifier_process`` starts ``python -m vantage.tasks.rewards.verifier_worker``. Prints and
stack traces of the user's code go to standard output and error; requests and verdicts have their own pipes.
"""

import ctypes
import faulthandler
import json
import os
import resource
import signal
import sys
import threading
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from pydantic import TypeAdapter

from vantage.schemas.recipe.builtin_verifiers import AnyVerifier, BuiltinVerifier
from vantage.tasks.rewards.builtin.judge import load_builtin
from vantage.tasks.rewards.exact_match import exact_match
from vantage.tasks.rewards.verdicts import Verdict, line_of, numbered
from vantage.tasks.rewards.verifier_calls import Calls, calls_of, one_by_one
from vantage.tasks.rewards.verifier_file import BrokenVerifier, VerifierFunction, load_user_function

READY, READY_FOR_BATCHES = b"ready\n", b"ready for batches\n"
"""Replies once the file has been run; the second, if its function takes a whole batch at once."""
BUILTIN_BYTES = 2**33
"""Most bytes of address space of a built-in verifier; a response that would take more is wrong."""
_STOPS = (signal.SIGTERM, signal.SIGINT)
"""Signals of a request to stop that all processes of a stage receive."""
PR_SET_PDEATHSIG = 1
"""Value of the constant in ``linux/prctl.h``."""


def main() -> None:
    """Read the pipes' descriptors, the verifier's name and its configuration (JSON) from the command line; serve until
    the end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # its code may be busy when the parent ends
    for number in _STOPS:
        signal.signal(number, _leave_to_the_stage)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    name, configuration = sys.argv[3:]
    requests, replies = map(int, sys.argv[1:3])
    own = os.getpid()
    _part_forks(requests, replies)
    numbers = count()

    def reply(line: bytes) -> None:
        if os.getpid() != own:
            _end_fork()
        os.write(replies, numbered(line, next(numbers)))

    try:
        judge, is_ready = _load(json.loads(configuration), name)
    except BrokenVerifier as fault:
        reply(_line(fault))
        return
    reply(is_ready)
    with open(requests, "rb") as batches:
        for batch in batches:
            for answered in judge(
                [(prompt, response, answer) for prompt, response, answer in json.loads(batch)]
            ):
                reply(_line(answered))
            _flush()


def _part_forks(*pipes: int) -> None:
    """Close the pipes in processes that the user's code forks, and restore their handling of stop signals. Pools of
    ``multiprocessing`` wait for ever for a process that ignores the signal, even if it comes at once after the fork."""
    before = threading.local()  # two threads may fork at once

    def hold() -> None:
        before.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)

    def release() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.mask)

    def part() -> None:
        nothing = os.open(os.devnull, os.O_RDWR)
        for pipe in pipes:
            os.dup2(nothing, pipe, inheritable=False)
        os.close(nothing)
        for number in _STOPS:
            signal.signal(number, signal.SIG_DFL)
        release()

    os.register_at_fork(before=hold, after_in_parent=release, after_in_child=part)


def _end_fork() -> NoReturn:
    """End a process that the user's code has forked and let return from its function; the first process goes on."""
    with suppress(OSError):
        os.write(
            2, b"vantage: a process that the verifier forked has returned from its function, and is ended\n"
        )
    os._exit(0)


def _flush() -> None:
    """Flush the output of the user's code, unless the code has replaced standard output or error."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):  # the code may have closed or replaced the stream
            stream.flush()


def _leave_to_the_stage(number: int, frame: object) -> None:
    """Ignore a request to stop that all processes receive: the stage saves its state, and ends this process then."""


def _load(configuration: dict[str, Any], name: str) -> tuple[Calls, bytes]:
    """Return how the verifier is called, and the reply that it is ready."""
    if "builtin" in configuration:
        return one_by_one(_load_builtin(configuration["builtin"], name)), READY
    if "extract" in configuration:
        return one_by_one(partial(_compare, extract=configuration["extract"])), READY
    found = load_user_function(Path(configuration["file"]), configuration["function"], name=name)
    return calls_of(found), READY_FOR_BATCHES if found.takes_batch else READY


def _load_builtin(configuration: dict[str, Any], name: str) -> VerifierFunction:
    verifier = TypeAdapter(AnyVerifier).validate_python(configuration)
    assert isinstance(verifier, BuiltinVerifier), "no other is sent under this name"
    resource.setrlimit(resource.RLIMIT_AS, (BUILTIN_BYTES, BUILTIN_BYTES))
    return load_builtin(verifier, name=name)


def _compare(prompt: str, response: str, answer: str | None, *, extract: str | None) -> bool:
    assert answer is not None  # a stage without answers was refused before
    return exact_match(response, answer, extract=extract)


def _line(answered: Verdict | BrokenVerifier) -> bytes:
    """Return a verdict as a line, or the text of a fault as a JSON string."""
    if isinstance(answered, BrokenVerifier):
        return json.dumps(str(answered)).encode() + b"\n"
    return line_of(answered)


if __name__ == "__main__":
    main()
