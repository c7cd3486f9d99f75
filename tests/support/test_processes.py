"""A process that ends while it is read is left out; those that live are read."""

import subprocess
import sys

import psutil

from tests.support.processes import read_living, with_word

WAITS = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]


def test_those_that_end_before_or_while_they_are_read_are_left_out() -> None:
    started = [
        subprocess.Popen([*WAITS, word], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for word in ("lives", "a zombie", "ends meanwhile", "has ended")
    ]
    lives, zombie, meanwhile, ended = [psutil.Process(each.pid) for each in started]
    try:
        for each in started:
            assert each.stdout is not None and each.stdout.readline() == b"\n"
        started[1].kill()
        started[3].kill()
        started[3].wait()
        while zombie.status() != psutil.STATUS_ZOMBIE:
            pass

        def read(process: psutil.Process) -> dict[str, str]:
            if process == meanwhile:
                started[2].kill()
                started[2].wait()
            found: dict[str, str] = process.environ()
            return found

        found = read_living([lives, zombie, meanwhile, ended], read)
        assert set(found) == {lives} and "PATH" in found[lives]
        assert with_word([lives, zombie, meanwhile, ended], "lives") == [lives]
        assert with_word([lives], "live") == []
    finally:
        for popen in started:
            popen.kill()
            popen.communicate()
