import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

PROGRAM = """
import os, signal
from vantage.tasks.training import preemption
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


AT_ONCE = """
import os, signal
from vantage.tasks.training import preemption
preemption.listen()
for _ in range(2):
    try:
        with preemption.at_once():
            os.kill(os.getpid(), signal.SIGTERM)
            while True:
                pass
    except preemption.Requested:
        print(preemption.requested())
os.kill(os.getpid(), signal.SIGTERM)
print("alive")
"""


def test_where_nothing_has_moved_it_is_heard_at_once_and_at_the_door_ever_after() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", AT_ONCE], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    assert ran.stdout.split() == ["True", "True", "alive"]


def test_a_process_that_does_not_listen_ends_as_ever() -> None:
    program = "import os, signal; from vantage.tasks.training import preemption; os.kill(os.getpid(), signal.SIGTERM)"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert ran.returncode == -signal.SIGTERM
