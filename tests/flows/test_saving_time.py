"""A run warns of a checkpoint that takes longer to write than the grace period."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from vantage.cli.main import app
from vantage.flows import saving_time, shown_plan
from vantage.flows.saving_time import saving_warnings, write_rate
from vantage.runs.planning import PlannedStep
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.recipe.learning_rates import with_learning_rates
from vantage.schemas.recipe.recipe import ResolvedRecipe

RECIPE = """\
recipe: large
model: {source: "MODEL"}
data: {demonstrations: {source: "builtin:arithmetic/demonstrations", rows: 200}}
stages:
  sft: {kind: sft, data: demonstrations, resources: {grace_seconds: GRACE}}
"""
LLAMA_7B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "tie_word_embeddings": False,
}
GIGABYTES = 12 * 6.738  # 6,738,415,616 weights


def recipe(folder: Path, *, grace: float) -> ResolvedRecipe:
    (folder / "config.json").write_text(json.dumps(LLAMA_7B))
    text = RECIPE.replace("MODEL", str(folder)).replace("GRACE", str(grace))
    return ResolvedRecipe.of(with_learning_rates(parse_recipe(text), width=4096))


def warned(
    folder: Path, *, grace: float, rate: Callable[[Path], float | None], action: str = "run", **step: str
) -> list[str]:
    steps = [PlannedStep("sft", "sft", action, **step)]  # type: ignore[arg-type]
    return saving_warnings(recipe(folder, grace=grace), steps, folder=folder, rate=rate)


def test_a_checkpoint_that_takes_longer_is_named_with_its_size_time_and_remedy(tmp_path: Path) -> None:
    [warning] = warned(tmp_path, grace=20, rate=lambda _: 0.5e9)
    seconds = GIGABYTES / 0.5
    assert f"stages.sft: a checkpoint has about {GIGABYTES:.0f} GB, which takes {seconds:.0f} s" in warning
    assert "at the 0.50 GB/s measured on this workspace's disk, and a stop leaves 20 s" in warning
    assert f"set stages.sft.resources.grace_seconds above {seconds:.0f}" in warning


@pytest.mark.parametrize(("grace", "count"), [(GIGABYTES / 0.5 - 1, 1), (GIGABYTES / 0.5 + 1, 0)])
def test_the_grace_period_that_it_names_is_enough(tmp_path: Path, grace: float, count: int) -> None:
    assert len(warned(tmp_path, grace=grace, rate=lambda _: 0.5e9)) == count


def test_a_pools_stage_is_warned_that_another_disk_was_measured(tmp_path: Path) -> None:
    [warning] = warned(tmp_path, grace=20, rate=lambda _: 1e9, pool="gpu", action="wait")
    assert "measured on this machine's disk, not on pool gpu" in warning


def test_nothing_is_measured_for_what_is_reused_or_small(tmp_path: Path) -> None:
    def never(_: Path) -> float:
        raise AssertionError("measured")

    assert warned(tmp_path, grace=20, rate=never, action="reuse") == []
    assert warned(tmp_path, grace=1.01 * GIGABYTES * 1e9 / saving_time.SLOW_DISK, rate=never) == []


def test_a_disk_that_takes_nothing_warns_of_nothing(tmp_path: Path) -> None:
    assert warned(tmp_path, grace=20, rate=lambda _: None) == []


def test_the_measurement_leaves_nothing_and_makes_no_folder(tmp_path: Path) -> None:
    rate = write_rate(tmp_path / "not" / "there")
    assert rate is not None and rate > 1e6
    assert list(tmp_path.iterdir()) == []


def test_plan_shows_the_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving_time, "SLOW_DISK", 1.0)
    monkeypatch.setattr(shown_plan, "write_rate", lambda _: 1000.0)
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.replace("MODEL", "builtin:tiny").replace("GRACE", "20"))
    done = CliRunner().invoke(app, ["plan", str(file), "--workspace", str(tmp_path / "w"), "--json"])
    assert done.exit_code == 0, done.output
    assert [each for each in json.loads(done.stdout)["warnings"] if "grace_seconds above" in each]


def test_the_disk_is_measured_once_for_all_stages(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_7B))
    text = RECIPE.replace("MODEL", str(tmp_path)).replace("GRACE", "20")
    text += "  again: {kind: sft, data: demonstrations, resources: {grace_seconds: 20}}\n"
    two = ResolvedRecipe.of(with_learning_rates(parse_recipe(text), width=4096))
    steps = [PlannedStep(name, "sft", "run") for name in ("sft", "again")]
    measured: list[Path] = []

    def rate(folder: Path) -> float:
        measured.append(folder)
        return 0.5e9

    found = saving_warnings(two, steps, folder=tmp_path, rate=rate)
    assert [each.partition(":")[0] for each in found] == ["stages.sft", "stages.again"]
    assert measured == [tmp_path]


def test_what_is_measured_is_the_disk_and_not_the_memory_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(saving_time, "_MEASURED", 1)
    monkeypatch.setattr(saving_time.os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    assert write_rate(tmp_path / "not" / "there" / "yet")
    assert synced == [saving_time._PIECE]
