"""Whatever a model folder holds, its import ends with a model or with a refusal that names a file; nothing else is raised."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.models.damage import BY_HAND, at_random, config
from vantage.models import folders
from vantage.models.folder_check import UnsafeModel, check_agreement, read_header
from vantage.models.folders import check_folder, load_policy
from vantage.models.source_digest import source_digest
from vantage.models.source_folders import import_model

RANDOM = 80
"""Folders damaged at random; benchmarks/hostile_inputs.py tries as many as one likes."""


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("case", BY_HAND)
def test_damage_by_hand_is_refused_with_the_file_and_the_field(
    folder: Path, tmp_path: Path, case: str
) -> None:
    damage, said = BY_HAND[case]
    damage(folder)
    with pytest.raises(UnsafeModel) as refused:
        import_model(str(folder), tmp_path / "out", seed=0)
    assert said in str(refused.value)
    assert not (tmp_path / "out").exists()


SEEN_BY_A_PLAN = {
    "is no",
    "holds no",
    "but the weights",
    "ids up to",
    "no valid",
    "no vocabulary",
    "lists",
    "lacks",
}


@pytest.mark.parametrize(
    "case", [name for name, (_, said) in BY_HAND.items() if any(part in said for part in SEEN_BY_A_PLAN)]
)
def test_a_plan_refuses_without_a_tensor_library_what_files_alone_show(folder: Path, case: str) -> None:
    damage, said = BY_HAND[case]
    damage(folder)
    with pytest.raises(UnsafeModel) as refused:
        source_digest(str(folder))
    assert said in str(refused.value)


def test_that_needs_no_tensor_library(folder: Path) -> None:
    """The check of a folder loads no tensor library."""
    code = (
        "import sys; from pathlib import Path; from vantage.models.folder_check import check_agreement; "
        f"check_agreement(Path({str(folder)!r})); "
        "print(sorted({'torch', 'transformers', 'safetensors', 'numpy'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                           cwd=Path(__file__).parents[2])  # fmt: skip
    assert ended.stdout == "[]\n"


@pytest.mark.parametrize("number", range(RANDOM))
def test_damage_at_random_is_refused_or_does_no_harm(folder: Path, tmp_path: Path, number: int) -> None:
    done = at_random(folder, number)
    try:
        import_model(str(folder), tmp_path / "out", seed=0)
    except ValueError:
        assert not (tmp_path / "out").exists(), done
    else:
        load_policy(tmp_path / "out")


def test_all_that_files_alone_show_is_told_at_once(folder: Path) -> None:
    config(num_hidden_layers=9, num_attention_heads=0, num_key_value_heads="x", vocab_size=98)(folder)
    with pytest.raises(UnsafeModel) as refused:
        check_agreement(folder)
    said = str(refused.value).splitlines()
    assert [line.split(": ")[2].split("=")[0] for line in said[:4]] == [
        "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "vocab_size",
    ]  # fmt: skip
    assert "tokenizer.json has ids up to 99" in said[4]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 100_000},
        {"hidden_size": 2**20},
        {"intermediate_size": 2**30},
        {"vocab_size": 2**30},
    ],
)
def test_nothing_is_allocated_for_what_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]
) -> None:
    config(**changes)(folder)

    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights are loaded")

    monkeypatch.setattr(folders, "load_weights", load)
    built: list[torch.device] = []
    monkeypatch.setattr(torch.nn.Linear, "reset_parameters", lambda self: built.append(self.weight.device))
    with pytest.raises(UnsafeModel):
        load_policy(folder)
    assert {device.type for device in built} <= {"meta"}
    assert len(built) < 100


def test_weights_that_are_no_numbers_are_refused(folder: Path, tmp_path: Path) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-4096] + b"\xff\xff\xff\x7f" * 1024)  # NaN in float32
    with pytest.raises(UnsafeModel, match="logits that are no finite numbers"):
        import_model(str(folder), tmp_path / "out", seed=0)


def test_headers_are_read_as_the_library_reads_them(tiny: Path) -> None:
    from safetensors import safe_open

    with safe_open(tiny / "model.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert {name: tensor.shape for name, tensor in read_header(tiny / "model.safetensors").items()} == shapes
    assert {name: tensor.shape for name, tensor in check_folder(tiny).items()} == shapes


def test_a_real_model_agrees_with_itself(stories: Path) -> None:
    assert json.loads((stories / "config.json").read_text())["num_hidden_layers"] == 5
    assert (
        len(check_agreement(stories)) == 5 * 9 + 2
    )  # seven matrices and two norms a layer; embeddings, last norm
