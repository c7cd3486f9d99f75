"""A run whose stage loses one of its two Ray nodes: what people see meanwhile, and what is recorded of it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.attempts.launchers.test_ray_train import RayCluster
from tests.support.real_runs import wait_for
from vantage.attempts.segments import read_segments

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
RECIPE = """\
recipe: spread
seed: 17
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations"}
stages:
  sft:
    kind: sft
    data: demonstrations
    epochs: 1
    batch_size: 32
    checkpoint_every: 5
    resources: {nodes: {least: 1, most: 2}, cpus: 1}
"""


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    """Two nodes of one CPU."""
    found = RayCluster()
    try:
        found.say("add")
        found.say("add")
        yield found
    finally:
        found.end()


def vantage(environment: dict[str, str], *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from vantage.cli.main import main; main()", *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_run_shows_what_it_waits_for_and_goes_on_with_the_node_that_is_left(
    cluster: RayCluster, tmp_path: Path
) -> None:
    recipe, workspace = tmp_path / "spread.yaml", tmp_path / "workspace"
    recipe.write_text(RECIPE)
    clients = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI", "PREFECT_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in clients}
    environment |= {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": cluster.address}
    place = ("--workspace", str(workspace))

    def printed(*command: str) -> str:
        process = vantage(environment, *command, *place)
        text, _ = process.communicate(timeout=200)
        assert process.returncode == 0, text
        return text

    def stage() -> dict[str, Any]:
        found: dict[str, Any] = json.loads(printed("status", "latest", "--json"))["stages"]["sft"]
        return found

    def scratch() -> Path | None:
        return next(iter(workspace.glob("store/scratch/*/committed.json")), Path()).parent or None

    run = vantage(environment, "run", str(recipe), *place)
    try:
        wait_for(lambda: any(workspace.glob("store/scratch/*/checkpoints/checkpoint*")), seconds=300)
        folder = scratch()
        assert folder is not None
        assert [each.ranks for each in read_segments(folder)] == [2]
        assert cluster.say("lose") == 1
        wait_for(lambda: "waiting" in ((stage().get("progress") or {}).get("phase", "")), seconds=200)
        progress = stage()["progress"]
        assert progress["phase"].startswith("waiting for 1 to 2 Ray nodes with 1 CPU each since ")
        assert progress["phase_note"].startswith(
            ("1 is alive, enough from ", "2 are alive")
        )  # not noticed yet
        plan = printed("plan", str(recipe))
        assert "being computed by run" in plan
        assert "waiting for 1 to 2 Ray nodes" in " ".join(plan.split())
        shown = printed("status", "latest")
        assert "waiting for 1 to 2 Ray nodes" in " ".join(shown.split())
    finally:
        output, _ = run.communicate(timeout=600)
    assert run.returncode == 0, output
    done = stage()
    assert done["status"] == "completed"
    ranks = done["provenance"]["ranks"]
    assert ranks.startswith("2 until step ")
    assert ranks.endswith(", then 1")
    assert done["provenance"]["world_size"] == "1"
    assert done["provenance"]["not_bitwise"] == "begun on 2 processes, continued on 1"
    assert done["attempt"] == 2
    assert ranks in printed("status", "latest")
    printed("audit", "latest")
