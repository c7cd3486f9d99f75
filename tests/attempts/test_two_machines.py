"""One attempt runs on two machines that share nothing but a bucket; only what is computed is made up."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import obstore
import pytest
from obstore.store import ObjectStore

from tests.support.fake_work import CHECKPOINT_EVERY, STEPS
from tests.support.orchestrated import events, pace
from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.jobs import request_for, steps_of
from vantage.attempts.run_attempt import run_attempt
from vantage.attempts.segments import read_segments
from vantage.ledger.journal import read
from vantage.runs.resolving import load_resolved
from vantage.runs.workspace import Workspace
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.attempt import AttemptRequest
from vantage.schemas.steps import dependencies
from vantage.storage.bucket import open_bucket
from vantage.storage.object_storage import ObjectStorage
from vantage.tasks.training.scratch import JOURNAL

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAM = """
import runpy, sys
import vantage.storage.leases, vantage.storage.scratch_copy
vantage.storage.leases.LEASE_SECONDS = 2.0  # for so long the other machine waits for one that was killed
vantage.storage.scratch_copy.COPY_SECONDS = 0.1
sys.argv[0] = "vantage.attempts"
runpy.run_module("vantage.attempts", run_name="__main__")
"""


def request(
    storage: str, recipe_file: Path, step: str, artifacts: dict[str, Artifact], log: Path
) -> AttemptRequest:
    recipe, _ = load_resolved(str(recipe_file), [])
    return request_for(
        steps_of(recipe)[step],
        {role: artifacts[read] for role, read in dependencies(recipe)[step].items()},
        run_id="r",
        storage=storage,
        log=log,
        function="tests.support.fake_work.run_stage",
    )


def make(storage: str, recipe_file: Path, steps: tuple[str, ...], log: Path) -> dict[str, Artifact]:
    artifacts: dict[str, Artifact] = {}
    for step in steps:
        artifact = run_attempt(request(storage, recipe_file, step, artifacts, log)).artifact
        assert artifact is not None
        artifacts[step] = artifact
    return artifacts


def test_killed_on_one_machine_another_goes_on_from_its_checkpoint(
    bucket: str, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "stage.log"
    before = ("model", "data.demonstrations")
    expected = make(str(tmp_path / "folder" / "store"), recipe_file, (*before, "sft"), log)

    here, there = Workspace(tmp_path / "here"), Workspace(tmp_path / "there")
    monkeypatch.setenv("VANTAGE_CACHE", str(here.root))
    artifacts = make(bucket, recipe_file, before, log)
    assert artifacts == {step: expected[step] for step in before}
    asked = request(bucket, recipe_file, "sft", artifacts, log)
    (tmp_path / "request.json").write_text(asked.model_dump_json())
    pace(here, 0.3)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, tmp_path / "request.json", tmp_path / "outcome.json"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    remote = open_bucket(bucket)
    deadline = time.monotonic() + 120
    # The files of a fake stage are sent in the order of their names: the segments come last.
    while "segments.json" not in "".join(names(remote, f"scratch/{asked.stage_key}")) or not any(
        name.endswith("checkpoint.json") for name in names(remote, f"scratch/{asked.stage_key}")
    ):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    storage = ObjectStorage(remote, there.root / "cache", lease_seconds=1.0)
    began = time.time()
    outcome = run_attempt(asked, storage=storage)
    assert (outcome.status, outcome.attempt, outcome.artifact) == ("made", 2, expected["sft"])
    assert events(there) == ["sft started 2", "sft finished 2"]
    steps = list(read(storage.scratch_folder(asked.stage_key) / JOURNAL))
    assert len(steps) == STEPS
    assert sum(entry.time < began for entry in steps) >= CHECKPOINT_EVERY, "computed on the first machine"
    segments = read_segments(storage.scratch_folder(asked.stage_key))
    assert [each.attempt for each in segments] == [1, 2], "how many ranks computed what goes along"
    assert segments[1].from_step >= CHECKPOINT_EVERY
    reused = run_attempt(asked, storage=ObjectStorage(remote, tmp_path / "third"))
    assert (reused.status, reused.artifact) == ("reused", expected["sft"])


def names(remote: ObjectStore, prefix: str) -> list[str]:
    return [str(each["path"]) for batch in obstore.list(remote, prefix) for each in batch]


def test_a_bucket_that_is_not_there_or_does_not_answer_is_an_outcome(
    bucket: str, recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path))
    for address, endpoint in (
        ("s3://not-there/x", os.environ["AWS_ENDPOINT_URL"]),
        (bucket, "http://127.0.0.1:9"),
    ):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        storage = ObjectStorage(open_bucket(address, retry_seconds=1.0), tmp_path / "cache")
        outcome = run_attempt(request(address, recipe_file, "model", {}, tmp_path / "log"), storage=storage)
        assert outcome.failure is not None
        assert (outcome.status, outcome.failure.exit_code) == ("failed", ExitCode.STORAGE)
        assert "bucket's address" in outcome.failure.remedy
