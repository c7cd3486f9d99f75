"""Benchmarks in a recipe have a step that imports them, with a key; wrong ones are refused when the recipe is loaded."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from vantage.attempts import machine
from vantage.attempts.jobs import key_parts_of
from vantage.attempts.machine import check_extras
from vantage.estimates.recipe_estimate import estimate_recipe
from vantage.schemas.checks.few_prompts import few_prompts
from vantage.schemas.checks.warnings import warnings
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.learning_rates import with_learning_rates
from vantage.schemas.recipe.recipe import Recipe, ResolvedRecipe
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.steps import dependencies, ordered_steps


@pytest.fixture
def measured(plain: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Return a stage that measures ``policy`` on a task of a folder."""
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/sums.yaml").write_text("task: sums\n")
    plain["benchmarks"] = {"local": {"source": "tasks"}}
    plain["stages"]["checked"] = {
        "kind": "benchmark_evaluation",
        "policy": "policy",
        "benchmark": "local",
        "task": "sums",
        "gate": {"metric": "benchmark_score", "at_least": 0.5, "confidence": 0.95},
    }
    return plain


def loaded(plain: dict[str, Any], folder: Path) -> Recipe:
    return parse_recipe(yaml.safe_dump(plain, sort_keys=False), name="x.yaml", folder=folder)


def resolved(plain: dict[str, Any], folder: Path) -> ResolvedRecipe:
    return ResolvedRecipe.of(with_learning_rates(loaded(plain, folder), width=64))


def key(recipe: ResolvedRecipe, step: str, **inputs: str) -> str:
    return stage_key(key_parts_of(recipe, step, inputs))


def test_a_benchmark_is_a_step_and_its_files_are_its_key(measured: dict[str, Any], tmp_path: Path) -> None:
    recipe = resolved(measured, tmp_path)
    assert dependencies(recipe)["checked"] == {"policy": "policy", "benchmark": "benchmarks.local"}
    order = ordered_steps(recipe)
    assert order.index("benchmarks.local") < order.index("checked")
    assert warnings(recipe, dependencies(recipe)) == []
    assert list(few_prompts(recipe, dependencies(recipe), {})) == []

    before = key(recipe, "benchmarks.local")
    (tmp_path / "tasks/.hidden").write_text("no content")
    (tmp_path / "tasks").rename(tmp_path / "moved")
    measured["benchmarks"]["local"]["source"] = "moved"
    recipe = resolved(measured, tmp_path)
    # neither the folder's path nor hidden files change the digest
    assert key(recipe, "benchmarks.local") == before
    (tmp_path / "moved/utils.py").write_text("def text(doc): return doc['q']\n")
    other = key(recipe, "benchmarks.local")
    assert other != before
    (tmp_path / "moved/utils.py").rename(tmp_path / "moved/other.py")
    assert key(recipe, "benchmarks.local") not in (before, other)  # names of files change it


@pytest.mark.parametrize("field, value", [("task", "more"), ("metric", "acc_norm"), ("chat_template", True)])
def test_what_a_stage_asks_is_in_its_key(
    measured: dict[str, Any], tmp_path: Path, field: str, value: Any
) -> None:
    digests = {"policy": "a" * 64, "benchmark": "b" * 64}
    before = key(resolved(measured, tmp_path), "checked", **digests)
    assert key(resolved(measured, tmp_path), "checked", **{**digests, "benchmark": "c" * 64}) != before
    measured["stages"]["checked"] |= {"microbatch_size": 3, "microbatch_tokens": 96}
    assert key(resolved(measured, tmp_path), "checked", **digests) == before
    measured["stages"]["checked"][field] = value
    assert key(resolved(measured, tmp_path), "checked", **digests) != before


@pytest.mark.parametrize(
    "place, value, told",
    [
        (("benchmark",), "locla", r"stages\.checked\.benchmark: no benchmark is called 'locla'"),
        (("policy",), "reward", r"stages\.checked\.policy: 'reward' is a reward_model stage"),
        (("metric",), "acc,a,b", r"stages\.checked\.metric"),
        (("resources",), {"gpus": 2}, r"runs in one process, on one device"),
        (("gate", "metric"), "accuracy", r"a benchmark_evaluation stage does not measure 'accuracy'"),
    ],
)  # fmt: skip
def test_what_is_refused(
    measured: dict[str, Any], tmp_path: Path, place: tuple[str, ...], value: Any, told: str
) -> None:
    """A wrong benchmark stage is refused by its field."""
    stage = measured["stages"]["checked"]
    for name in place[:-1]:
        stage = stage[name]
    stage[place[-1]] = value
    with pytest.raises(RecipeError, match=told):
        loaded(measured, tmp_path)


def test_a_folder_that_is_not_there_is_refused(measured: dict[str, Any], tmp_path: Path) -> None:
    measured["benchmarks"]["local"]["source"] = "elsewhere"
    with pytest.raises(RecipeError, match=r"benchmarks\.local\.source: there is no folder .*/elsewhere"):
        loaded(measured, tmp_path)


def test_a_benchmark_that_nothing_reads_is_told(measured: dict[str, Any], tmp_path: Path) -> None:
    del measured["stages"]["checked"]
    recipe = resolved(measured, tmp_path)
    assert "benchmarks.local: no stage reads it" in warnings(recipe, dependencies(recipe))
    assert "benchmarks.local" not in dependencies(recipe)


def test_an_estimate_says_that_it_does_not_count_it(measured: dict[str, Any], tmp_path: Path) -> None:
    found = estimate_recipe(loaded(measured, tmp_path), gpu="h200")
    assert "checked" not in [stage.name for stage in found.stages]
    assert "checked is not counted" in found.shape.note


def test_a_missing_package_is_told_before_anything_runs(
    measured: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    told = r"stages\.checked: benchmark_evaluation needs the package lm_eval; .*pip install 'vantage-rlhf\[lm-eval\]'"
    with pytest.raises(ValueError, match=told):
        check_extras(resolved(measured, tmp_path))
    measured["stages"]["checked"]["resources"] = {"pool": "gpus"}  # the workers of the pool have the package
    check_extras(resolved(measured, tmp_path))
    trained = next(stage for stage in measured["stages"].values() if stage["kind"] == "sft")
    trained["optimizer_states"] = "8bit"
    told = r"optimizer_states=8bit needs the package bitsandbytes; install it: pip install 'vantage-rlhf\[qlora\]'"
    with pytest.raises(ValueError, match=told):
        check_extras(resolved(measured, tmp_path))
    del trained["optimizer_states"]
    measured["model"] |= {"quantization": "nf4", "lora": {"rank": 2}}
    told = r"model\.quantization=nf4 needs the package bitsandbytes; install it: pip install 'vantage-rlhf\[qlora\]'"
    with pytest.raises(ValueError, match=told):
        check_extras(resolved(measured, tmp_path))
