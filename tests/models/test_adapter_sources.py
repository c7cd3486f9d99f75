"""A recipe whose model is somebody's adapter is named with its base and merged when it is imported; others are refused."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from vantage.attempts.jobs import key_parts_of
from vantage.models.builtin import build_builtin
from vantage.models.folder_check import UnsafeModel
from vantage.models.folders import load_policy
from vantage.models.source_digest import import_digest
from vantage.models.source_folders import import_with_adapter
from vantage.runs.resolving import resolve_rates
from vantage.schemas.loading.recipe_file import load_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.inputs import Model
from vantage.schemas.source_files import SourceChanged

RECIPE = """
recipe: adapted
model: {{source: {source}{base}}}
data: {{demonstrations: {{source: "builtin:arithmetic/demonstrations"}}}}
stages: {{sft: {{kind: sft, data: demonstrations}}}}
"""


@pytest.fixture
def adapter(tiny: Path, tmp_path: Path) -> Path:
    """Return an adapter as peft itself saves it: no tokenizer, a card, and a name of its base that leads nowhere."""
    torch.manual_seed(0)
    model = get_peft_model(
        load_policy(tiny), LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"])
    )  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_()
    model.peft_config["default"].base_model_name_or_path = "/nowhere/at/all"
    model.save_pretrained(str(tmp_path / "adapter"))
    return tmp_path / "adapter"


def recipe(folder: Path, source: object, base: object = None) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(source=source, base="" if base is None else f", base: {base}"))
    return path


def test_it_is_merged_into_the_base_that_the_recipe_names(adapter: Path, tiny: Path, tmp_path: Path) -> None:
    model = Model(source=str(adapter), base=str(tiny))
    import_with_adapter(model, tmp_path / "out", seed=1, planned=import_digest(model))
    base, merged = (load_file(folder / "model.safetensors") for folder in (tiny, tmp_path / "out"))
    parts = load_file(adapter / "adapter_model.safetensors")
    for name, weight in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in parts:
            weight = weight + 2 * parts[f"{stem}.lora_B.weight"] @ parts[f"{stem}.lora_A.weight"]
        torch.testing.assert_close(merged[name], weight)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()


def test_the_key_is_that_of_both_contents_and_of_no_path(adapter: Path, tiny: Path, tmp_path: Path) -> None:
    def key(source: Path, base: Path) -> object:
        resolved, _ = resolve_rates(load_recipe(recipe(tmp_path, source, base)))
        return key_parts_of(resolved, "model", {})

    first = key(adapter, tiny)
    adapter.rename(tmp_path / "elsewhere")
    assert key(tmp_path / "elsewhere", tiny) == first
    build_builtin("tiny", tmp_path / "other", seed=2)
    assert key(tmp_path / "elsewhere", tmp_path / "other") != first
    config = tmp_path / "elsewhere" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 4}))
    assert key(tmp_path / "elsewhere", tiny) != first


def test_an_adapter_that_changes_after_the_plan_is_refused(adapter: Path, tiny: Path, tmp_path: Path) -> None:
    model = Model(source=str(adapter), base=str(tiny))
    planned = import_digest(model)
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text() + "\n")
    with pytest.raises(SourceChanged):
        import_with_adapter(model, tmp_path / "out", seed=1, planned=planned)
    (adapter / "training_args.bin").write_bytes(b"\x80\x04")
    with pytest.raises(UnsafeModel, match="is a pickle by its suffix"):
        import_with_adapter(model, tmp_path / "out", seed=1)


def test_a_recipe_that_names_one_without_the_other_is_refused(
    adapter: Path, tiny: Path, tmp_path: Path
) -> None:
    for source, base, message in (
        (
            adapter,
            None,
            "model.source: is an adapter, which alone is no model; name the model that it was trained on",
        ),
        (tiny, tiny, "model.base: is the model beneath an adapter, and model.source names no adapter"),
        (adapter, adapter, "model.base: .* is an adapter itself"),
        (adapter, tmp_path / "missing", "model.base: there is no folder"),
    ):
        with pytest.raises(RecipeError, match=message):
            load_recipe(recipe(tmp_path, source, base))
    assert load_recipe(recipe(tmp_path, "adapter", tiny)).model.adapter == adapter


@pytest.mark.parametrize("model", ["5", "[a]", "{source: 5}", "{source: 5, base: b}"])
def test_a_model_that_names_no_source_is_a_problem_of_the_recipe(model: str, tmp_path: Path) -> None:
    path = recipe(tmp_path, "builtin:tiny")
    lines = path.read_text().splitlines()
    [number] = [number for number, line in enumerate(lines) if line.startswith("model:")]
    path.write_text("\n".join([*lines[:number], f"model: {model}", *lines[number + 1 :]]))
    with pytest.raises(RecipeError, match=r"model(\.source)?: "):
        load_recipe(path)
