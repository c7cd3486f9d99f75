"""The process that a recipe's own verifier runs in: batches of cases in, a line for each verdict out.

``python -m vantage.tasks.rewards.verifier_worker`` is started by ``vantage.tasks.rewards.verifier_process`` alone. What a user's code
prints, and where it stood when it crashed, goes to standard error and output; requests and verdicts have pipes of their own.
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
from vantage.tasks.rewards.verifier_file import BrokenVerifier, VerifierFunction, load_function

READY, RIGHT, WRONG = b"ready\n", b"1\n", b"0\n"
PR_SET_PDEATHSIG = 1
"""From ``linux/prctl.h``."""


def main() -> None:
    """Take the pipes' descriptors, the verifier's name and what it is (JSON) from the command line; serve until the end."""
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
                    os.write(int(replies), RIGHT if verdict else WRONG)
            sys.stdout.flush()
            sys.stderr.flush()


def _leave_to_the_stage(number: int, frame: object) -> None:
    """Ignore a request to stop that reaches all processes: the stage saves, and ends this one then."""


def _load(configuration: dict[str, Any], name: str) -> VerifierFunction:
    if "extract" in configuration:
        return partial(_compare, extract=configuration["extract"])
    return load_function(Path(configuration["file"]), configuration["function"], name=name)


def _compare(prompt: str, response: str, answer: str | None, *, extract: str | None) -> bool:
    assert answer is not None  # or the stage would have been refused
    return exact_match(response, answer, extract=extract)


def _answered(replies: int, work: Any) -> Any:
    """Return what the work returns; None where the verifier is broken, which is then the reply."""
    try:
        return work()
    except BrokenVerifier as error:
        os.write(replies, json.dumps(str(error)).encode() + b"\n")
        return None


if __name__ == "__main__":
    main()
