"""GGUF files are read within bounds: whatever a file holds, it is refused by name or gives the model that it describes."""

import random
import sys
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file

from tests.models.gguf_files import DAMAGED, NUMBERS, shapes, tokens, write_gguf
from tests.tasks.data.damaged_files import damaged
from vantage.models.folder_check import UnsafeModel
from vantage.models.gguf_header import check_gguf_agreement, read_gguf_header
from vantage.models.model_config import UnreadableConfig, read_config
from vantage.models.model_width import UnknownWidth, hidden_size
from vantage.models.source_folders import import_model

RANDOM = 150
"""Files damaged at random, of which only the header is read; ten times as many take some seconds."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf")


def test_a_header_is_read_as_the_library_reads_it(whole: Path) -> None:
    header, library = read_gguf_header(whole), GGUFReader(whole)
    entries = {
        name: field.contents() for name, field in library.fields.items() if not name.startswith("GGUF.")
    }
    assert header.metadata == entries
    assert header.metadata["tokenizer.ggml.tokens"] == tokens()
    assert header.shapes == {each.name: tuple(map(int, each.shape)) for each in library.tensors}
    assert header.shapes == {name: tuple(reversed(shape)) for name, shape in shapes().items()}
    assert header.of_architecture("block_count") == NUMBERS["llama.block_count"]
    assert header.num_weights == sum(each.n_elements for each in library.tensors)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_header_is_refused_by_all_that_read_it(case: str, tmp_path: Path) -> None:
    content, said = DAMAGED[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(content())
    with pytest.raises(UnsafeModel) as refused:
        read_gguf_header(path)
    message = str(refused.value)
    assert message.startswith(f"{path} is no readable GGUF file (")
    assert said in message
    assert message.endswith("; fetch it again")
    for read, error in ((hidden_size, UnknownWidth), (read_config, UnreadableConfig)):
        with pytest.raises(error) as refused_too:
            read(f"gguf:{path}")
        assert str(refused_too.value) == message


def test_a_missing_package_is_named_by_all_that_read_a_header(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf.constants", None)
    for read in (
        read_gguf_header,
        lambda path: hidden_size(f"gguf:{path}"),
        lambda path: read_config(f"gguf:{path}"),
    ):
        with pytest.raises(ValueError) as refused:
            read(whole)
        assert (
            str(refused.value)
            == "reading GGUF files needs the package gguf; pip install vantage-rlhf[smollm2]"
        )


@pytest.mark.timeout(60)
def test_a_header_damaged_at_random_is_refused_or_read(whole: Path, tmp_path: Path) -> None:
    content, path = whole.read_bytes(), tmp_path / "model.gguf"
    end = content.index(b"blk.1.ffn_down.weight") + 100  # of the header; what is behind it is weights
    refused: list[str] = []
    for number in range(RANDOM):
        path.write_bytes(damaged(content[:end], random.Random(number)) + content[end:])
        try:
            check_gguf_agreement(path, read_gguf_header(path))
        except UnsafeModel as error:
            refused.append(str(error))
    assert all(str(path) in said for said in refused)
    assert RANDOM / 3 < len(refused) < RANDOM


def test_a_file_becomes_a_folder_with_its_weights(whole: Path, tmp_path: Path) -> None:
    import_model(f"gguf:{whole}", tmp_path / "out", seed=0)
    imported = load_file(tmp_path / "out" / "model.safetensors")
    stored = {each.name: torch.tensor(each.data) for each in GGUFReader(whole).tensors}
    assert torch.equal(imported["model.embed_tokens.weight"], stored["token_embd.weight"])
    assert torch.equal(imported["model.layers.1.mlp.down_proj.weight"], stored["blk.1.ffn_down.weight"])
    assert len(imported) == len(stored)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"block_count": 100_000}, "block_count=100000, but the tensors have 2 layers"),
        ({"block_count": 1}, "block_count=1, but the tensors have 2 layers"),
        ({"block_count": 0}, "block_count=0 is no whole number from 1"),
        ({"embedding_length": 2**20}, "embedding_length=1048576, but token_embd.weight has the width 32"),
        ({"feed_forward_length": 2**30}, "describes a model of"),
        ({"head_count": 0}, "is no GGUF file that transformers reads"),
    ],
)
def test_metadata_of_another_model_are_refused_before_memory_is_taken(
    changed: dict[str, int], said: str, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "model.gguf", **changed)
    with pytest.raises(UnsafeModel) as refused:
        import_model(f"gguf:{path}", tmp_path / "out", seed=0)
    assert said in str(refused.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "blk.0.attn_norm.weight"])
def test_a_weight_that_a_file_lacks_is_not_made_up(name: str, tmp_path: Path) -> None:
    """transformers fills it at random and only warns, so every import would be another model."""
    path = write_gguf(tmp_path / "model.gguf", without=name)
    with pytest.raises(UnsafeModel, match=r"model.gguf describes a model of .* and its tensors have"):
        import_model(f"gguf:{path}", tmp_path / "out", seed=0)
    path = write_gguf(tmp_path / "other.gguf", without=name, in_its_place="blk.1.unknown.weight")
    with pytest.raises(
        UnsafeModel, match=r"other.gguf lacks 1 parameters of its model, first \['model.layers"
    ):
        import_model(f"gguf:{path}", tmp_path / "out", seed=0)
    assert not (tmp_path / "out").exists()
