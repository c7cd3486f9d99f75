"""Only the row of an embedding whose token is in no text may stay as it is."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from vantage.models.folders import load_policy
from vantage.models.padding_token import token_of_padding_alone

NO_ROLE = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}


@pytest.fixture
def folder(byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Path:
    byte_tokenizer.save_pretrained(tmp_path)
    return tmp_path


def _edit(folder: Path, roles: Mapping[str, str | None]) -> None:
    path = folder / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), **roles}
    path.write_text(json.dumps({name: value for name, value in settings.items() if value is not None}))


@pytest.mark.parametrize(
    ("roles", "template", "alone"),
    [
        (NO_ROLE, None, 0),
        (NO_ROLE, "{{ messages[0].content }}<|im_end|>", 0),
        ({"pad_token": "<|im_end|>", "eos_token": "<|im_end|>"}, None, None),  # EOS
        # no padding token is named, so EOS will be used
        ({"pad_token": None, "eos_token": "<|im_end|>"}, None, None),
        ({**NO_ROLE, "unk_token": "<|endoftext|>"}, None, None),  # unknown characters
        ({**NO_ROLE, "bos_token": "<|endoftext|>"}, None, None),
        # what closes a turn, while EOS is another token
        ({"pad_token": "<|im_end|>", "eos_token": "<|endoftext|>"}, "{{ messages[0].content }}<|im_end|>", None),
        ({"pad_token": "hello", "eos_token": "<|im_end|>"}, None, None),  # a word
    ],
)  # fmt: skip
def test_the_token_of_padding_alone(
    folder: Path, roles: Mapping[str, str | None], template: str | None, alone: int | None
) -> None:
    _edit(folder, roles)
    (folder / "chat_template.jinja").write_text(template or "")
    assert token_of_padding_alone(folder) == alone


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert token_of_padding_alone(tmp_path) is None


def test_an_added_word_that_is_no_special_token_occurs_in_text(
    byte_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    byte_tokenizer.add_tokens(["filler"])
    byte_tokenizer.save_pretrained(tmp_path)
    _edit(tmp_path, {**NO_ROLE, "pad_token": "filler"})
    assert token_of_padding_alone(tmp_path) is None


@pytest.mark.parametrize(
    ("pad_token", "pad", "learns"),
    [("<pad>", 0, False), ("</s>", 2, True), ("<pad>", 2, True)],
    ids=["padding alone", "EOS", "the model names another token"],
)
def test_the_row_of_the_padding_token_learns_where_text_holds_it(
    tiny: Path, tmp_path: Path, pad_token: str, pad: int, learns: bool
) -> None:
    """The row has a gradient after a pass over the token itself.

    Args:
        pad_token: the tokenizer's padding token.
        pad: the id that the model's configuration names.
    """
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    _edit(folder, {"pad_token": pad_token})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "pad_token_id": pad}))
    model = load_policy(folder)
    table = model.get_input_embeddings()
    assert isinstance(table, torch.nn.Embedding)
    assert (table.padding_idx is None) == learns
    untied = table(torch.tensor([[pad, 5]]))
    [gradient] = torch.autograd.grad(untied.square().sum(), table.weight)
    assert bool(gradient[pad].any()) == learns
    assert gradient[5].any()
