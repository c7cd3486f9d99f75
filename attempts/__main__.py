"""Run one attempt as a program, for another process or machine with access to the same storage.

    python -m vantage.attempts REQUEST.json OUTCOME.json

On SIGTERM or SIGHUP (and Ctrl-C) the computation saves its state and ends. The exit code is 0 if there is an artifact,
else that of the failure; 75 if the attempt was stopped, or had ``only_reuse`` and found no artifact.
"""

import signal
import sys
import threading
from pathlib import Path

from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.run_attempt import run_attempt
from vantage.attempts.stopping import stop_signals
from vantage.schemas.records.attempt import AttemptOutcome, AttemptRequest
from vantage.storage.durable_files import replace_file


def main(request_file: Path, outcome_file: Path) -> int:
    """Run the attempt of the request file, and write the outcome file atomically."""
    stop = threading.Event()
    for number in stop_signals():
        signal.signal(number, lambda *_: stop.set())
    request = AttemptRequest.model_validate_json(request_file.read_bytes())
    outcome = run_attempt(request, stop=stop)
    replace_file(outcome_file, outcome.model_dump_json(indent=2).encode())
    return _exit_code(outcome)


def _exit_code(outcome: AttemptOutcome) -> int:
    if outcome.artifact is not None:
        return ExitCode.OK
    return outcome.failure.exit_code if outcome.failure else ExitCode.RESUME


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
