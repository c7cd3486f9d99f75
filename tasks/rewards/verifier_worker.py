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
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vantage.schemas.recipe.builtin_verifiers import AnyVerifier, BuiltinVerifier
from vantage.tasks.rewards.builtin.judge import load_builtin
from vantage.tasks.rewards.exact_match import exact_match
from vantage.tasks.rewards.verdicts import Verdict, line_of
from vantage.tasks.rewards.verifier_calls import Calls, calls_of, one_by_one
from vantage.tasks.rewards.verifier_file import BrokenVerifier, VerifierFunction, load_user_function

READY, READY_FOR_BATCHES = b"ready\n", b"ready for batches\n"
"""Replies once the file has been run; the second, if its function takes a whole batch at once."""
BUILTIN_BYTES = 2**33
"""Most bytes of address space of a built-in verifier; a response that would take more is wrong."""
PR_SET_PDEATHSIG = 1
"""Value of the constant in ``linux/prctl.h``."""


def main() -> None:
    """Read the pipes' descriptors, the verifier's name and its configuration (JSON) from the command line; serve until
    the end."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it may be busy for ever when its parent ends
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave_to_the_stage)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    requests, replies, name, configuration = sys.argv[1:]
    try:
        judge, is_ready = _load(json.loads(configuration), name)
    except BrokenVerifier as fault:
        os.write(int(replies), _line(fault))
        return
    os.write(int(replies), is_ready)
    with open(int(requests), "rb") as batches:
        for batch in batches:
            for answered in judge(
                [(prompt, response, answer) for prompt, response, answer in json.loads(batch)]
            ):
                os.write(int(replies), _line(answered))
            sys.stdout.flush()
            sys.stderr.flush()


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
