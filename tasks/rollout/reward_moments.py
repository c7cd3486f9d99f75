"""Keep the running moments of a reward beside the critic that was pretrained with them."""

import json
from dataclasses import asdict
from pathlib import Path

from vantage.algorithms.rewards import RunningMoments

_FILE = "reward_moments.json"


def write_moments(folder: Path, moments: RunningMoments) -> None:
    """Write the moments into a critic's folder."""
    (folder / _FILE).write_text(json.dumps(asdict(moments), indent=2) + "\n", encoding="utf-8")


def read_moments(folder: Path | None) -> RunningMoments:
    """Return the moments in a critic's folder; empty moments if there are none."""
    if folder is None or not (folder / _FILE).is_file():
        return RunningMoments()
    return RunningMoments(**json.loads((folder / _FILE).read_text(encoding="utf-8")))
