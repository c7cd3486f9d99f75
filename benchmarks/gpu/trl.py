"""TRL's PPO beside ours: the same shape, rollout and number of steps, in its own interpreter."""

import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.sizes import Rollout, Size

WARMUP, MEASURED = 1, 2
"""Iterations; a median of two is their mean, which is enough beside a ratio of several."""
END = 12
"""Lines that are shown of a side that failed."""


class SideFailed(RuntimeError):
    """TRL's side ended before it had said what it took."""


def seconds_of_trl(python: Path, size: Size, rollout: Rollout, *, device: str, at_once: int) -> float:
    """Return the seconds of one iteration.

    Args:
        at_once: responses in each of its passes, which it does not find by itself.

    Raises:
        SideFailed: with the end of what it said.
    """
    settings = {
        "size": asdict(size),
        "rollout": asdict(rollout),
        "device": device,
        "at_once": at_once,
        "warmup": WARMUP,
        "measured": MEASURED,
    }
    try:
        done = subprocess.run(
            [str(python), "-m", "benchmarks.gpu.trl_side", json.dumps(settings)],
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
    except OSError as error:
        raise SideFailed(f"--peers-python={python} could not be started ({error.strerror})") from error
    if done.returncode:
        end = "\n".join(done.stderr.splitlines()[-END:])
        raise SideFailed(f"{python} ended with {done.returncode}\n{end}")
    return float(json.loads(done.stdout.splitlines()[-1])["seconds"])
