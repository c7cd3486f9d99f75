"""A process that begins with many imports does not search them for garbage when it ends."""

import subprocess
import sys

PROGRAM = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count() > 1000))  # registered first, so it is the last to be called
from vantage.attempts.garbage import collect_rarely
collect_rarely()
assert gc.get_freeze_count() == 0, "until its end it collects"
"""


def test_nothing_is_looked_through_when_the_process_ends() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert ended.stdout == "True\n", ended.stderr
