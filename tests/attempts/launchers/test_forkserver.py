"""The fork server preloads all modules but those that no stage uses, and torch's waiting threads leave their CPU to others."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import gc, sys
import vantage.attempts.launchers.forkserver as forkserver
from vantage.attempts.launchers.quick_imports import LEFT_OUT

missing = [name for name in forkserver.PRELOADED if name not in sys.modules]
assert not missing, missing
loaded = {name for name in sys.modules if name.partition(".")[0] in LEFT_OUT}
assert not loaded, loaded
from scipy.optimize import linear_sum_assignment
from sklearn.metrics import roc_curve
from boto3 import client
assert client
assert linear_sum_assignment and roc_curve
assert gc.isenabled(), "stages collect as ever"
assert gc.get_freeze_count() > 100_000, gc.get_freeze_count()
sys.stdout.flush()
import os
os._exit(0)  # not through the fork server's own exit, which ends its process group's descendants
"""


@pytest.mark.slow
def test_everything_is_preloaded_but_what_no_stage_uses_and_that_can_still_be_imported() -> None:
    probed = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=120)
    assert probed.returncode == 0, probed.stderr


LOAD = """
from vantage.attempts.launchers.quick_imports import quick_imports
with quick_imports():
    {load}
"""


def own_libgomp() -> str:
    """Return the file of torch's libgomp, which reads its variables when it is loaded; torch takes a second longer."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    packages = Path(torch.origin).parents[1]
    return str(
        next(file for place in ("torch/lib", "torch.libs") for file in packages.glob(f"{place}/libgomp*"))
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "load", "spins"),
    [
        ({}, "import torch", "2000"),
        ({"GOMP_SPINCOUNT": "7"}, "", "7"),
        ({"OMP_WAIT_POLICY": "active"}, "", "30000000000"),
        ({"OMP_WAIT_POLICY": "passive"}, "", "0"),
    ],
)
def test_threads_leave_their_cpu_to_others_unless_the_user_wants_it_otherwise(
    own: dict[str, str], load: str, spins: str
) -> None:
    """The settings are those that libgomp itself reports to have read."""
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    probed = subprocess.run(
        [
            sys.executable,
            "-c",
            LOAD.format(load=load or f"import ctypes; ctypes.CDLL({own_libgomp()!r})"),
        ],
        env={**inherited, "OMP_DISPLAY_ENV": "verbose", "OMP_NUM_THREADS": "2", **own},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert probed.returncode == 0, probed.stderr
    assert set(re.findall(r"GOMP_SPINCOUNT = '(\d+)'", probed.stderr)) == {spins}
