"""A folder that is given to a command as a model is read, and refused by name where one of its settings cannot be used."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from vantage.runs.meanings import Command, FolderNamed
from vantage.runs.named_models import open_named_model
from vantage.runs.workspace import RunError, Workspace

CONFIG = {"architectures": ["LlamaForCausalLM"]}
COMMAND = Command("sample", (FolderNamed,))


def opened(tmp_path: Path, config: object, **settings: Any) -> Any:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": True, **settings}))
    with open_named_model(
        Workspace(tmp_path / "workspace"), str(folder), COMMAND, kinds=("policy", "reward_model")
    ) as model:
        return model


@pytest.mark.parametrize("architectures", [5, True, {"a": 1}, "LlamaForCausalLM", [5], [None], [["a"]]])
def test_names_of_architectures_are_a_list_of_names(tmp_path: Path, architectures: object) -> None:
    with pytest.raises(
        RunError, match=r"config\.json: architectures=.* must be a list of names; give a Hugging"
    ):
        opened(tmp_path, {"architectures": architectures})


@pytest.mark.parametrize("architectures", [None, []])
def test_a_model_without_a_named_architecture_is_a_policy(tmp_path: Path, architectures: object) -> None:
    assert opened(tmp_path, {"architectures": architectures}).kind == "policy"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": {}}, "temperature"),
        ({"max_new_tokens": []}, "max_response_tokens"),
        ({"stop_strings": {}}, "stop"),
    ],
)
def test_a_setting_that_is_no_number_is_refused_by_its_name(tmp_path: Path, settings: Any, said: str) -> None:
    with pytest.raises(RunError, match=f"{said} of vantage.json or generation_config.json: .*; correct it"):
        opened(tmp_path, CONFIG, **settings)


@pytest.mark.parametrize("temperature", [None, 0, 0.0])
def test_a_temperature_that_is_left_out_or_off_is_one(tmp_path: Path, temperature: object) -> None:
    assert opened(tmp_path, CONFIG, temperature=temperature).generation.temperature == 1.0


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    """Reading one would wait for ever."""
    folder = tmp_path / "model"
    folder.mkdir()
    os.mkfifo(folder / "config.json")
    with (
        pytest.raises(RunError, match=r"no config\.json that can be read"),
        open_named_model(
            Workspace(tmp_path / "workspace"), str(folder), COMMAND, kinds=("policy", "reward_model")
        ),
    ):
        pass
