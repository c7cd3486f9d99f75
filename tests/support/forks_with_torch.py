"""The process that forks programs; ``forked_with_torch`` starts it, and asks it for each."""

import importlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

from tests.support.forked_with_torch import address
from vantage.attempts.launchers.quick_imports import quick_imports

LOADED = (
    "tests.support.fake_vllm_server",
    *("torch.distributed", "vantage.tasks.stages", "vantage.tasks.training.attempt"),
    *("pyarrow.dataset", "pandas", "google.protobuf.message", "jsonschema", "requests"),
)
"""Modules that the process loads: those of the server, of stages, and what Ray imports. Ray itself reads the environment, which each of
its workers has of its own, as soon as it is loaded."""
SECONDS_BETWEEN_LOOKS = 1.0


def main() -> None:
    """Fork a program for each connection, until the run of the tests has ended."""
    run = Path("/proc") / address().name.rpartition("-")[2]
    with quick_imports():
        for name in LOADED:
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a fork
    with socket.socket(socket.AF_UNIX) as listening:
        new = address().with_suffix(".new")
        listening.bind(str(new))
        listening.listen(64)
        listening.settimeout(SECONDS_BETWEEN_LOOKS)
        new.rename(address())  # only now does anybody connect
        while address().exists() and run.exists():
            try:
                connection, _ = listening.accept()
            except TimeoutError:
                continue
            with connection:
                if os.fork() == 0:
                    listening.close()
                    _work(connection)


def _work(connection: socket.socket) -> NoReturn:
    """Be the program that was asked for."""
    try:
        os.setpgid(0, 0)  # a node of Ray kills the groups of its workers
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection.settimeout(None)
        length, outputs, _, _ = socket.recv_fds(connection, 4, 2)
        with connection.makefile("rb") as file:
            asked = json.loads(file.read(int.from_bytes(length, "big")))
        for descriptor, output in zip((1, 2), outputs, strict=True):
            os.dup2(output, descriptor)
            os.close(output)
        os.chdir(asked["folder"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        sys.argv = [asked["module"], *asked["arguments"]]
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        importlib.import_module(asked["module"]).main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


def _end_with(connection: socket.socket) -> None:
    """End this process when its program ends."""
    connection.recv(1)
    os._exit(1)


if __name__ == "__main__":
    main()
