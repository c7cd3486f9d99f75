"""Run a command that ends with the process that needs it, however that process ends:

    python -m vantage.tasks.rollout.guarded_process DESCRIPTOR COMMAND …

DESCRIPTOR is the reading end of a pipe whose other end only the needing process holds. This process leads a process
group. When the pipe is closed, or the command has ended, everything in the group is killed. That also happens if this
process is killed itself, as Ray kills the children of a worker that ends: a fork of it waits for that.
"""

import os
import select
import signal
import subprocess
import sys

_LOOK_SECONDS = 0.2


def main(descriptor: int, command: list[str]) -> None:
    """Run the command, and end the group."""
    _end_group_with_this_process()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    while process.poll() is None:
        if select.select([descriptor], [], [], _LOOK_SECONDS)[0] and not os.read(descriptor, 1):
            break
    os.killpg(0, signal.SIGKILL)


def _end_group_with_this_process() -> None:
    """Have a fork kill the group when this process has ended."""
    ended, held = os.pipe()
    if os.fork() == 0:
        os.close(held)
        os.read(ended, 1)  # returns when nobody holds the other end any longer
        os.killpg(0, signal.SIGKILL)
    os.close(ended)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
