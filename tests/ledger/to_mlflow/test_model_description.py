"""A Hugging Face folder gets the files that MLflow needs beside it, and unfit folders are refused."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from vantage.ledger.to_mlflow.model_description import PublishingError, write_description


def describe(folder: Path, target: Path) -> None:
    write_description(folder, target, kind="policy", run_id="run", model_id="m-0", metadata={"digest": "d"})


def test_the_description_names_no_place_on_this_machine_and_copies_no_weights(
    tmp_path: Path, policy: Path
) -> None:
    describe(policy, tmp_path / "description")
    files = {
        str(path.relative_to(tmp_path / "description")): path.read_text()
        for path in (tmp_path / "description").rglob("*")
        if path.is_file()
    }
    assert {"MLmodel", "requirements.txt", "components/tokenizer/tokenizer.json"} <= set(files)
    assert not any(name.endswith(".safetensors") for name in files)
    assert not any(str(policy.parent) in text for text in files.values())
    description = yaml.safe_load(files["MLmodel"])
    assert (description["model_id"], description["metadata"]) == ("m-0", {"digest": "d"})
    assert all("+" not in line for line in files["requirements.txt"].splitlines())


@pytest.mark.parametrize("missing", ["config.json", "tokenizer_config.json"])
def test_a_folder_that_is_no_whole_model_is_refused(tmp_path: Path, policy: Path, missing: str) -> None:
    shutil.copytree(policy, tmp_path / "part")
    (tmp_path / "part" / missing).unlink()
    with pytest.raises(PublishingError, match=f"has no {missing}; only a whole model can be published"):
        describe(tmp_path / "part", tmp_path / "description")


def test_a_model_without_one_architecture_is_refused(tmp_path: Path, policy: Path) -> None:
    shutil.copytree(policy, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "architectures": None}))
    with pytest.raises(PublishingError, match=r"architectures=\[\]; it has to name one class"):
        describe(tmp_path / "model", tmp_path / "description")


def test_mlflow_reads_the_input_example_and_it_fits_the_signature(tmp_path: Path, policy: Path) -> None:
    from mlflow.models import Model
    from mlflow.models.utils import _enforce_schema

    target = tmp_path / "description"
    write_description(
        policy, target, kind="policy", run_id=None, model_id=None, metadata={}, example="a \u4e2d b"
    )
    model = Model.load(str(target))
    assert model.load_input_example(str(target)) == ["a \u4e2d b"]
    assert json.loads(str(model.get_serving_input(str(target)))) == {"inputs": ["a \u4e2d b"]}
    _enforce_schema(model.load_input_example(str(target)), model.signature.inputs)
