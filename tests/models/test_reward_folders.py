"""A classifier of transformers that was trained elsewhere becomes a reward model of Vantage with the same scores."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from tests.support.every import every
from tests.support.small_chat_run import chat_tokenizer, save_chat_model
from vantage.models import reward_folders
from vantage.models.folder_check import UnsafeModel
from vantage.models.heads import load_scalar, scores
from vantage.models.reward_folders import import_reward_model
from vantage.models.sequences import collate
from vantage.models.source_digest import copy_source


def save_classifier(folder: Path, *, num_labels: int = 1) -> None:
    """Save a classifier of random weights, as transformers saves it."""
    tokenizer = chat_tokenizer()
    torch.manual_seed(4)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None, num_labels=num_labels, initializer_range=0.2,
    )  # fmt: skip
    LlamaForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_the_scores_are_those_of_transformers(tmp_path: Path) -> None:
    save_classifier(tmp_path / "theirs")
    import_reward_model(str(tmp_path / "theirs"), tmp_path / "ours", scratch=tmp_path)
    rows = [[7, 8, 9, 10], [11, 12, 13, 14]]
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "theirs").eval()
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        expected = torch.tensor([classifier(torch.tensor([row])).logits[0, 0] for row in rows])
        loaded = scores(
            load_scalar(tmp_path / "ours"),
            collate([row[:2] for row in rows], [row[2:] for row in rows], pad_token_id=3),
        )
        served = torch.tensor([again(torch.tensor([row])).logits[0, 0] for row in rows])
    assert expected[0] != expected[1]
    torch.testing.assert_close(loaded, expected)
    torch.testing.assert_close(served, expected)
    assert json.loads((tmp_path / "ours" / "scalar.json").read_text()) == {
        "role": "reward",
        "score_shift": 0.0,
    }


def test_files_are_copied_to_the_scratch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's temporary folder may be too small for a model."""
    save_classifier(tmp_path / "theirs")
    (tmp_path / "scratch").mkdir()
    copied_to: list[Path] = []

    def copy(source: str, folder: Path, *, planned: str | None) -> Any:
        copied_to.append(folder.parent)
        return copy_source(source, folder, planned=planned)

    monkeypatch.setattr(reward_folders, "copy_source", copy)
    import_reward_model(str(tmp_path / "theirs"), tmp_path / "ours", scratch=tmp_path / "scratch")
    assert copied_to == [tmp_path / "scratch"]


def test_a_reward_model_of_vantage_keeps_its_shift_and_its_bytes(tmp_path: Path) -> None:
    save_classifier(tmp_path / "theirs")
    (tmp_path / "theirs" / "scalar.json").write_text('{"role": "reward", "score_shift": 1.5}')
    import_reward_model(str(tmp_path / "theirs"), tmp_path / "once", scratch=tmp_path)
    import_reward_model(str(tmp_path / "once"), tmp_path / "twice", scratch=tmp_path)
    assert load_scalar(tmp_path / "once").score_shift == 1.5
    for path in (tmp_path / "once").iterdir():
        assert path.read_bytes() == (tmp_path / "twice" / path.name).read_bytes(), path.name


@every(
    ("kind", "message"),
    [
        ("policy", "a reward model is a sequence classifier"),
        ("labels", "a reward model has one label; save it with num_labels=1"),
        ("value", "is a value model; name a reward model"),
        ("headless", "missing or misshapen in the safetensors, first ['score.weight']"),
    ],
)  # fmt: skip
def test_what_is_no_reward_model_is_refused(kind: str, message: str, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    if kind in ("policy", "headless"):
        save_chat_model(folder)
    else:
        save_classifier(folder, num_labels=3 if kind == "labels" else 1)
    if kind == "value":
        (folder / "scalar.json").write_text('{"role": "value", "score_shift": 0.0}')
    if kind == "headless":
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsafeModel) as refused:
        import_reward_model(str(folder), tmp_path / "out", scratch=tmp_path)
    assert message in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_other_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'builtin:tiny' is no reward model"):
        import_reward_model("builtin:tiny", tmp_path / "out")
