"""Run a command that ends with the process that wants it, however that one ends:

    python -m vantage.tasks.rollout.guarded_process DESCRIPTOR COMMAND …

DESCRIPTOR is the reading end of a pipe whose other end the wanting process alone holds. This process leads a process group; when
the pipe is closed, or the command has ended, everything in the group is killed.
"""

import os
import select
import signal
import subprocess
import sys

_LOOK_SECONDS = 0.2


def main(descriptor: int, command: list[str]) -> None:
    """Run the command, and end the group."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while process.poll() is None:
        if select.select([descriptor], [], [], _LOOK_SECONDS)[0] and not os.read(descriptor, 1):
            break
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
