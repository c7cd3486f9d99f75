"""The process in which a recipe's own verifier runs: it reads batches of cases and writes one line per verdict.

Only ``vantage.tasks.rewards.verifier_process`` starts ``python -m vantage.tasks.rewards.verifier_worker``. Prints and
stack traces of the user's code go to standard output and error; requests and verdicts have their own pipes.
"""

import ctypes
import faulthandler
import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

from vantage.tasks.rewards.exact_match import exact_match
from vantage.tasks.rewards.verdicts import line_of
from vantage.tasks.rewards.verifier_file import BrokenVerifier, VerifierFunction, load_function

READY = b"ready\n"
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
    verify = _answered(int(replies), lambda: _load(json.loads(configuration), name))
    if verify is None:
        return
    os.write(int(replies), READY)
    with open(int(requests), "rb") as batches:
        for batch in batches:
            for case in json.loads(batch):
                verdict = _answered(int(replies), partial(verify, *case))
                if verdict is not None:
                    os.write(int(replies), line_of(verdict))
            sys.stdout.flush()
            sys.stderr.flush()


def _leave_to_the_stage(number: int, frame: object) -> None:
    """Ignore a request to stop that all processes receive: the stage saves its state, and ends this process then."""


def _load(configuration: dict[str, Any], name: str) -> VerifierFunction:
    if "extract" in configuration:
        return partial(_compare, extract=configuration["extract"])
    return load_function(Path(configuration["file"]), configuration["function"], name=name)


def _compare(prompt: str, response: str, answer: str | None, *, extract: str | None) -> bool:
    assert answer is not None  # a stage without answers was refused before
    return exact_match(response, answer, extract=extract)


def _answered(replies: int, work: Any) -> Any:
    """Return the result of the work; if the verifier is broken, reply that and return None."""
    try:
        return work()
    except BrokenVerifier as error:
        os.write(replies, json.dumps(str(error)).encode() + b"\n")
        return None


if __name__ == "__main__":
    main()
