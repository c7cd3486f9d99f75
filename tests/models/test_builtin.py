import hashlib
import string
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)

from vantage.models.builtin import INITIALIZER_RANGE, VOCABULARY, build_builtin


@pytest.fixture(scope="module", params=["tiny", "nano"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("builtin") / "made" / name
    build_builtin(name, folder, seed=3)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(folder)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_folder_is_in_hugging_face_layout(folder: Path) -> None:
    assert set(digests(folder)) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(
    name: str, folder: Path, tmp_path: Path
) -> None:
    build_builtin(name, tmp_path / "same", seed=3)
    build_builtin(name, tmp_path / "other", seed=4)
    assert digests(tmp_path / "same") == digests(folder)
    differing = {
        name for name, digest in digests(tmp_path / "other").items() if digest != digests(folder)[name]
    }
    assert differing == {"model.safetensors"}


def test_the_global_random_state_is_left_alone(tmp_path: Path) -> None:
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    build_builtin("tiny", tmp_path, seed=5)
    assert torch.equal(torch.rand(3), expected)


def test_as_many_parameters_as_the_shape_has_with_the_stated_spread(name: str, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    # by hand: 100 × 128 embeddings, the last norm, and for each layer attention, MLP and two norms
    counted = {
        "tiny": 12_800 + 128 + 4 * (4 * 128 * 128 + 3 * 128 * 256 + 2 * 128),
        "nano": 12_800 + 128 + 4 * (4 * 128 * 128 + 3 * 128 * 128 + 2 * 128),
    }
    assert sum(weight.numel() for weight in weights.values()) == counted[name]
    projection = weights["model.layers.0.mlp.up_proj.weight"]
    # 16,384 entries or more: the standard error of their standard deviation is at most 0.6 %
    assert projection.std().item() == pytest.approx(INITIALIZER_RANGE, rel=0.03)


def test_it_loads_and_answers_any_text(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    inputs = tokenizer(["3 a+2 b-3?", "Hi"], padding=True, return_tensors="pt")
    logits = model(**inputs).logits
    assert logits.shape == (2, 11, len(VOCABULARY))
    assert torch.isfinite(logits).all()


def test_every_printable_character_and_newline_is_one_token(tokenizer: PreTrainedTokenizerFast) -> None:
    text = string.digits + string.ascii_letters + string.punctuation + " \n"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(set(ids)) == len(text) == 96
    assert tokenizer.unk_token_id not in ids


@pytest.mark.parametrize(
    "text", ["3 a+2 b-3?", "  two  spaces ", "line\n\nline", "Hello , world !", "don 't"]
)
def test_text_comes_back_as_it_was(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert len(ids) == len(text) + 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_foreign_character_is_unknown_and_only_it(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("aéb", add_special_tokens=False)["input_ids"]
    assert [token == tokenizer.unk_token_id for token in ids] == [False, True, False]


def test_special_tokens_differ_and_agree_with_the_configurations(
    folder: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    special = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id)
    assert len(set(special)) == 4
    config = AutoModelForCausalLM.from_pretrained(folder).config
    generation = GenerationConfig.from_pretrained(folder)
    for settings in (config, generation):
        assert (settings.pad_token_id, settings.bos_token_id, settings.eos_token_id) == special[:3]
    assert tokenizer("a</s>", add_special_tokens=False)["input_ids"][-1] == tokenizer.eos_token_id


def test_prompts_are_padded_on_the_left(tokenizer: PreTrainedTokenizerFast) -> None:
    batch = tokenizer(["abc", "a"], padding=True)
    assert batch["input_ids"][1][:2] == [tokenizer.pad_token_id] * 2
    assert batch["attention_mask"][1] == [0, 0, 1, 1]
