"""Run a module as the main program for as long as standard input stays open.

``python -m vantage.flows.prefect_server.tied_process prefect server start`` is a server that ends when the process at the other
end of its standard input closes it or dies, even by ``kill -9``: the kernel closes a dead process's pipes. (A
parent-death signal would come when the *thread* that started the server ends.)
"""

import os
import runpy
import signal
import sys
import threading
import time

from vantage.attempts.garbage import collect_rarely

SECONDS_TO_END = 5.0


def main() -> None:
    """Take the module and its arguments from the command line."""
    collect_rarely()
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def _end_with_standard_input() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_END)
    os._exit(1)


if __name__ == "__main__":
    main()
