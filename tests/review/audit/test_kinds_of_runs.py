"""Untouched runs of real stages with adapters, and runs in a bucket, agree; what is changed in them is found."""

from pathlib import Path

import obstore
import pytest

from tests.review.audit.conftest import run_once, write_recipe
from tests.review.audit.tampering import found
from vantage.review.audit.evidence import Evidence
from vantage.review.audit.target import audit
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.storage.bucket import open_bucket

pytestmark = pytest.mark.slow


def test_adapters_their_base_and_what_both_are_together_agree(
    small_lora_run: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    workspace = small_lora_run
    for target in ("latest", "small-chat@champion", "small-adapters", "small-reward"):
        with Evidence(workspace) as evidence:
            report = audit(evidence, target)
        assert (found(report), found(report, "unchecked"), report.exit_code) == ([], [], 0), target
    with Evidence(workspace) as evidence:
        report = audit(evidence, "small-chat")
    [merged] = [each for each in report.artifacts if each.step == "merged.sft"]
    assert [edge.role for edge in merged.parents] == ["adapters", "adapters.base"]
    assert {each.step for each in report.artifacts} == {"merged.sft", "sft", "model", "data.demonstrations"}
    notes = found(report, "note")
    assert notes == [], "its files are where they were"


def test_what_a_bucket_holds_is_hashed_and_not_the_cache(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "cache"))
    run_once(Workspace.at(bucket), write_recipe(tmp_path))
    workspace = Workspace.at(bucket)
    [record] = read_runs(workspace)
    with Evidence(workspace) as evidence:
        report = audit(evidence, "latest")
    assert (found(report), found(report, "unchecked"), report.exit_code) == ([], [], 0)

    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "another-machine"))
    with Evidence(Workspace.at(bucket)) as evidence:
        assert audit(evidence, "fake@champion").exit_code == 0
    assert not (tmp_path / "another-machine").exists(), "nothing is fetched to keep it"

    path = f"store/objects/{record.stages['sft'].digest}/model.safetensors"
    remote = open_bucket(bucket)
    data = bytearray(obstore.get(remote, path).bytes())
    data[7] ^= 1
    obstore.put(remote, path, bytes(data))
    with Evidence(workspace) as evidence:
        report = audit(evidence, "latest")
    assert report.exit_code == 1
    assert any("sft: files: model.safetensors: sha256 is" in each for each in found(report)), found(report)
