"""A run that trains adapters stores them apart from their base; what is published can be loaded, and garbage collection keeps the base."""

import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.support.small_chat_run import LORA, make_small_chat_run
from vantage.flows.garbage_collection import collect
from vantage.models.adapters import base_of
from vantage.models.stored_models import load_stored_policy
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.schemas.records.model_files import ModelFiles

IDS = torch.tensor([[3, 9, 20, 33]])


def objects(workspace: Workspace) -> dict[str, Path]:
    [record] = read_runs(workspace)
    return {step: workspace.store / "objects" / str(each.digest) for step, each in record.stages.items()}


def test_the_run_has_adapters_their_base_and_what_both_are_together(small_lora_run: Workspace) -> None:
    [record] = read_runs(small_lora_run)
    folders = objects(small_lora_run)
    assert base_of(folders["sft"]) == base_of(folders["reward"]) == record.stages["model"].digest
    for step in ("sft", "reward"):
        stage = small_lora_run.storage.find(str(record.stages[step].stage_key))
        assert stage is not None and stage.artifact.parents[
            "init" if step == "sft" else "init.base"
        ] == base_of(folders[step])
        assert getattr(stage.artifact, "base") == base_of(folders[step])  # noqa: B009
    merged = small_lora_run.storage.find(str(record.stages["merged.sft"].stage_key))
    assert merged is not None
    assert merged.artifact.parents == {
        "adapters": record.stages["sft"].digest,
        "adapters.base": record.stages["model"].digest,
    }


def test_what_is_published_is_merged_and_any_library_loads_it(small_lora_run: Workspace) -> None:
    [record] = read_runs(small_lora_run)
    folders = objects(small_lora_run)
    published = {name: copy.digest for name, copy in record.copies.items()}
    assert published.pop("small-adapters") == record.stages["sft"].digest
    assert published == {
        "small-chat": record.stages["merged.sft"].digest,
        "small-reward": record.stages["merged.reward"].digest,
    }
    with torch.no_grad():
        expected = load_stored_policy(ModelFiles(folders["sft"], folders["model"]), training="nothing")(
            IDS
        ).logits
        policy = AutoModelForCausalLM.from_pretrained(folders["merged.sft"])
        torch.testing.assert_close(policy(IDS).logits, expected, atol=1e-5, rtol=1e-5)
    reward = AutoModelForSequenceClassification.from_pretrained(folders["merged.reward"])
    assert torch.equal(reward.score.weight, load_file(folders["reward"] / "head.safetensors")["weight"])


def test_adapters_that_are_published_as_they_are_say_what_they_stand_on(small_lora_run: Workspace) -> None:
    """A registered version holds the adapters' own files, byte by byte; peft loads them on the base that they name."""
    [record] = read_runs(small_lora_run)
    folders = objects(small_lora_run)
    copy = Path(record.copies["small-adapters"].location.removeprefix("file://")) / "model"
    files = {str(path.relative_to(folders["sft"])) for path in folders["sft"].rglob("*") if path.is_file()}
    assert {"adapter_config.json", "adapter_model.safetensors", "base.json"} <= files
    for file in files:
        assert (copy / file).read_bytes() == (folders["sft"] / file).read_bytes(), file
    assert base_of(copy) == record.stages["model"].digest
    with torch.no_grad():
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folders["model"]), copy)
        merged = AutoModelForCausalLM.from_pretrained(folders["merged.sft"])
        torch.testing.assert_close(loaded(IDS).logits, merged(IDS).logits, atol=1e-5, rtol=1e-5)


def test_nothing_that_adapters_need_is_collected(small_lora_run: Workspace, tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "copy")
    shutil.copytree(small_lora_run.root, workspace.root, symlinks=True)
    before = set(objects(workspace).values())
    collect(workspace)
    assert all(folder.is_dir() for folder in before)


@pytest.mark.slow
def test_two_machines_with_a_bucket_make_the_same(
    small_lora_run: Workspace,
    bucket: str,
    tmp_path: Path,
    ledger_database: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second machine has neither the adapters nor their base until its stage reads them."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ledger_database)
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "one"))
    make_small_chat_run(tmp_path, Workspace.at(bucket), *LORA, until="reward")
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "another"))
    make_small_chat_run(tmp_path, Workspace.at(bucket), *LORA)
    [expected], [found] = read_runs(small_lora_run), read_runs(Workspace.at(bucket))
    assert {step: stage.digest for step, stage in found.stages.items()} == {
        step: stage.digest for step, stage in expected.stages.items()
    }
    assert {name: copy.digest for name, copy in found.copies.items()} == {
        name: copy.digest for name, copy in expected.copies.items()
    }
