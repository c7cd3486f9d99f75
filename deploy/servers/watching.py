"""Watch the servers from a process in the foreground, which systemd starts at boot."""

import signal
import threading
from pathlib import Path

from deploy.servers.lifecycle import all_run, alone, say, start_all, stop_all, write_environments

SECONDS_BETWEEN_LOOKS = 10.0


def watch(folder: Path) -> None:
    """Start the servers, restart those that end, and stop all when this process gets SIGTERM or SIGINT.

    Raises:
        ServersFailure: a server does not start. The others are stopped, and the service that starts this process tries again.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        while not stop.is_set():
            with alone(folder):
                if not all_run(folder):
                    write_environments(start_all(folder), folder)
                    say("all servers run")
            stop.wait(SECONDS_BETWEEN_LOOKS)
    finally:
        with alone(folder):
            stop_all(folder, delete=False)
