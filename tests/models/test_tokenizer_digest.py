import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from vantage.models.folders import load_tokenizer, save_tokenizer
from vantage.models.tokenizer_digest import tokenizer_digest


@pytest.fixture
def folder(tmp_path: Path, byte_tokenizer: PreTrainedTokenizerFast) -> Path:
    save_tokenizer(byte_tokenizer, tmp_path / "original")
    return tmp_path / "original"


def changed(folder: Path, file: str, change: Callable[[dict[str, Any]], object]) -> Path:
    copy = folder.with_name("changed")
    shutil.copytree(folder, copy)
    content = json.loads((copy / file).read_text())
    change(content)
    (copy / file).write_text(json.dumps(content))
    return copy


def test_loading_and_saving_changes_nothing(folder: Path, tmp_path: Path) -> None:
    save_tokenizer(load_tokenizer(folder), tmp_path / "again")
    assert tokenizer_digest(tmp_path / "again") == tokenizer_digest(folder)


def test_loading_and_saving_a_real_tokenizer_changes_nothing(stories: Path, tmp_path: Path) -> None:
    save_tokenizer(load_tokenizer(stories), tmp_path)
    assert tokenizer_digest(tmp_path) == tokenizer_digest(stories)


def test_the_way_a_merge_is_written_changes_nothing(folder: Path) -> None:
    def write_merges_as_text(tokenizer: dict[str, Any]) -> None:
        tokenizer["model"]["merges"] = [" ".join(merge) for merge in tokenizer["model"]["merges"]]

    assert tokenizer_digest(changed(folder, "tokenizer.json", write_merges_as_text)) == tokenizer_digest(
        folder
    )


def test_settings_that_change_no_token_change_nothing(folder: Path) -> None:
    other = changed(
        folder, "tokenizer_config.json", lambda c: c.update(padding_side="left", model_max_length=7)
    )
    assert tokenizer_digest(other) == tokenizer_digest(folder)


def swap_two_ids(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


@pytest.mark.parametrize(
    "file, change",
    [
        ("tokenizer.json", swap_two_ids),
        ("tokenizer.json", lambda t: t["model"]["merges"].reverse()),
        ("tokenizer.json", lambda t: t["added_tokens"][0].update(special=False)),
        (
            "tokenizer.json",
            lambda t: t["added_tokens"].append({"id": 999, "content": "<x>", "special": True}),
        ),
        ("tokenizer_config.json", lambda c: c.update(eos_token="<|endoftext|>")),
    ],
)
def test_what_changes_a_token_changes_it(folder: Path, file: str, change: Callable[..., object]) -> None:
    assert tokenizer_digest(changed(folder, file, change)) != tokenizer_digest(folder)


def test_the_chat_template_is_part_of_it_wherever_it_is_kept(folder: Path, tmp_path: Path) -> None:
    before = tokenizer_digest(folder)
    template = (folder / "chat_template.jinja").read_text()
    inside = changed(folder, "tokenizer_config.json", lambda c: c.update(chat_template=template))
    (inside / "chat_template.jinja").unlink()
    assert tokenizer_digest(inside) == before
    (folder / "chat_template.jinja").write_text(template + " ")
    assert tokenizer_digest(folder) != before


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer.json"):
        tokenizer_digest(tmp_path)


@pytest.mark.parametrize("module", ["vantage.models.tokenizer_digest", "vantage.models.source_digest"])
def test_no_tensor_library_is_loaded(module: str) -> None:
    probe = (
        f"import sys, {module}; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run(
        [sys.executable, "-c", probe], cwd=root, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
