import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
)

from vantage.models import folders
from vantage.models.folders import (
    UnsafeModel,
    check_folder,
    load_policy,
    load_tokenizer,
    save_policy,
    tokenizer_digest,
)

ran: list[str] = []


class Canary:
    """Whoever unpickles it runs code."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return ran.append, ("unpickled",)


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "model"
    shutil.copytree(tiny, copy)
    return copy


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(folder: Path, message: str) -> None:
    with pytest.raises(UnsafeModel, match=message):
        check_folder(folder)
    with pytest.raises(UnsafeModel, match=message):
        load_policy(folder)
    assert ran == []


def test_a_plain_folder_passes(folder: Path) -> None:
    check_folder(folder)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "optimizer.pt", "a.PTH", "b.pkl", "deep/c.pickle", "d.ckpt", "e.joblib"]
)
def test_a_pickle_is_refused_by_its_suffix(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_bytes(pickle.dumps(Canary()))
    refused(folder, "is a pickle by its suffix")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("name", ["notes.txt", "extra.json", ".metadata"])
def test_a_pickle_is_refused_by_its_first_bytes(folder: Path, name: str, protocol: int) -> None:
    (folder / name).write_bytes(pickle.dumps(Canary(), protocol=protocol))
    refused(folder, "by its first bytes")


def test_what_torch_save_writes_is_refused_under_any_name(folder: Path) -> None:
    torch.save({"canary": Canary()}, folder / "weights")
    refused(folder, "by its first bytes")


def test_a_pickle_called_safetensors_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(pickle.dumps(Canary()))
    refused(folder, "no valid safetensors")


def test_a_safetensors_header_that_looks_like_a_pickle_is_none(folder: Path) -> None:
    # the file begins with its header's length; 0x0280 bytes is what a pickle of protocol 2 begins with
    for length in range(1, 700):
        save_file({"x" * length: torch.zeros(1)}, folder / "head.safetensors")
        if (folder / "head.safetensors").read_bytes()[:2] == b"\x80\x02":
            break
    else:
        pytest.fail("no header of that length")
    check_folder(folder)


def test_truncated_weights_are_refused(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1000])
    refused(folder, "no valid safetensors")


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
@pytest.mark.parametrize(
    "changes", [{"auto_map": {"AutoModel": "evil.Model"}}, {"text": [{"auto_map": {"AutoConfig": "evil.C"}}]}]
)
def test_remote_code_is_refused(folder: Path, file: str, changes: dict[str, object]) -> None:
    edit(folder / file, **changes)
    refused(folder, f"{file} asks for code of its own")
    with pytest.raises(UnsafeModel, match="asks for code of its own"):
        load_tokenizer(folder)


@pytest.mark.parametrize("model_type", ["evil", "clip", None, ["llama"]])
def test_an_unknown_model_type_is_refused(folder: Path, model_type: object) -> None:
    edit(folder / "config.json", model_type=model_type)
    refused(folder, "is no causal language model")


def test_quantised_weights_and_adapters_are_refused(folder: Path) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": "bitsandbytes"})
    refused(folder, "quantised")
    (folder / "adapter_config.json").write_text("{}")
    refused(folder, "holds an adapter")


def test_missing_or_broken_files_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, r"has neither model.safetensors nor")
    (folder / "config.json").write_text("{not json")
    refused(folder, "is no JSON")
    (folder / "config.json").write_text("[1]")
    refused(folder, "holds no JSON object")
    (folder / "config.json").unlink()
    refused(folder, r"config.json is missing")
    refused(folder / "nowhere", "is no folder")


def test_deep_json_is_refused(folder: Path) -> None:
    (folder / "extra.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    refused(folder, "is no JSON")


def test_a_symlink_may_not_lead_outside(folder: Path, tiny: Path) -> None:
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    os.symlink("weights.safetensors", folder / "model.safetensors")
    check_folder(folder)
    (folder / "model.safetensors").unlink()
    os.symlink(tiny / "model.safetensors", folder / "model.safetensors")
    refused(folder, "symlink that leads outside")


def test_a_symlinked_folder_may_not_lead_outside(folder: Path, tmp_path: Path) -> None:
    os.symlink(tmp_path, folder / "more", target_is_directory=True)
    refused(folder, "symlink that leads outside")


@pytest.mark.parametrize(
    "weight_map, message",
    [
        ({"a": "missing.safetensors"}, "lists 'missing.safetensors'"),
        ({"a": "../model/shard.safetensors"}, r"lists '\.\./model/shard"),
        ({"b": "shard.safetensors"}, "lacks 'b'"),
        ({}, "lists no weights"),
    ],
)
def test_the_index_of_shards_must_name_what_is_there(
    folder: Path, weight_map: dict[str, str], message: str
) -> None:
    (folder / "model.safetensors").unlink()
    save_file({"a": torch.zeros(1)}, folder / "shard.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(folder, message)


def test_a_missing_parameter_is_refused_instead_of_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsafeModel, match=r"1 parameters are missing.*layers.3.mlp.up_proj"):
        load_policy(folder)


def test_loading_and_saving_keeps_every_weight_and_every_byte(
    tiny: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    model = load_policy(tiny)
    assert not model.training
    assert model.config._attn_implementation == "sdpa"
    save_policy(model, tiny_tokenizer, tmp_path / "first")
    save_policy(model, tiny_tokenizer, tmp_path / "second")
    save_policy(load_policy(tmp_path / "first"), load_tokenizer(tmp_path / "first"), tmp_path / "third")
    assert contents(tmp_path / "first") == contents(tmp_path / "second") == contents(tmp_path / "third")
    original, saved = (
        load_file(tiny / "model.safetensors"),
        load_file(tmp_path / "first" / "model.safetensors"),
    )
    assert original.keys() == saved.keys()
    assert all(torch.equal(original[name], saved[name]) for name in original)
    assert tokenizer_digest(tmp_path / "first") == tokenizer_digest(tiny)
    check_folder(tmp_path / "first")


def test_no_file_says_where_it_was_made(
    tiny: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    save_policy(load_policy(tiny), tiny_tokenizer, tmp_path / "out")
    for name, content in contents(tmp_path / "out").items():
        assert str(tmp_path).encode() not in content, name
        assert str(tiny).encode() not in content, name
        assert b"is_local" not in content, name


def test_a_large_model_is_sharded(
    tiny: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "MAX_SHARD_SIZE", "1MB")
    model = load_policy(tiny)
    save_policy(model, tiny_tokenizer, tmp_path / "first")
    save_policy(model, tiny_tokenizer, tmp_path / "second")
    assert len(list((tmp_path / "first").glob("model-*.safetensors"))) > 2
    assert contents(tmp_path / "first") == contents(tmp_path / "second")
    loaded = load_policy(tmp_path / "first").state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


def test_half_precision_weights_stay_half_precision(
    tiny: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    save_policy(load_policy(tiny, dtype=torch.bfloat16), tiny_tokenizer, tmp_path)
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_sampling_defaults_are_not_carried_along(
    folder: Path, tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    edit(
        folder / "generation_config.json",
        do_sample=True,
        top_k=50,
        top_p=0.9,
        temperature=0.6,
        eos_token_id=[7, 8],
    )
    model = load_policy(folder)
    save_policy(model, tiny_tokenizer, tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert not {"do_sample", "top_k", "top_p", "temperature"} & saved.keys()
    assert saved["eos_token_id"] == [tiny_tokenizer.eos_token_id, 7, 8]
    assert saved["pad_token_id"] == tiny_tokenizer.pad_token_id


def test_every_dropout_is_off_even_in_training_mode(
    tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    config = GPT2Config(
        vocab_size=100, n_positions=32, n_embd=16, n_layer=2, n_head=2,
        resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    save_policy(GPT2LMHeadModel(config), tiny_tokenizer, tmp_path)
    edit(tmp_path / "config.json", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    model = load_policy(tmp_path).train()
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.0}
    input_ids = torch.arange(20)[None]
    assert torch.equal(model(input_ids).logits, model(input_ids).logits)


def test_attention_dropout_that_is_a_number_and_no_module_is_off_too(folder: Path) -> None:
    edit(folder / "config.json", attention_dropout=0.5)
    model = load_policy(folder).train()
    input_ids = torch.arange(20)[None]
    assert torch.equal(model(input_ids).logits, model(input_ids).logits)


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(
    tiny_tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    config = LlamaConfig(
        vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with pytest.raises(ValueError, match="the tokenizer has 100 tokens, the model only 50 embeddings"):
        save_policy(LlamaForCausalLM(config), tiny_tokenizer, tmp_path)


def without(path: Path, *names: str) -> None:
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in settings.items() if name not in names}))


def test_padding_becomes_the_unknown_token_and_failing_that_eos(folder: Path) -> None:
    without(folder / "tokenizer_config.json", "pad_token")
    before = contents(folder)
    assert load_tokenizer(folder).pad_token == "<unk>"
    assert contents(folder) == before
    without(folder / "tokenizer_config.json", "unk_token")
    assert load_tokenizer(folder).pad_token == "</s>"


def test_a_tokenizer_without_eos_is_refused(folder: Path) -> None:
    without(folder / "tokenizer_config.json", "eos_token")
    with pytest.raises(ValueError, match="names no eos_token"):
        load_tokenizer(folder)
