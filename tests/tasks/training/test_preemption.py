import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

PROGRAM = """
import os, signal
from tasks.training import preemption
preemption.listen()
print(preemption.requested())
os.kill(os.getpid(), signal.SIGTERM)
print(preemption.requested())
os.kill(os.getpid(), signal.SIGTERM)
print(preemption.requested())
"""


def test_sigterm_becomes_a_request_and_a_second_one_changes_nothing() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["False", "True", "True"]


def test_a_process_that_does_not_listen_ends_as_ever() -> None:
    program = "import os, signal; from tasks.training import preemption; os.kill(os.getpid(), signal.SIGTERM)"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert ran.returncode == -signal.SIGTERM
