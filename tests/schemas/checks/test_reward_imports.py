"""Reward models of another family: stages may start from them, terms may name them, and the right keys depend on them."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.every import every
from tests.support.small_chat_run import save_chat_model
from vantage.attempts.jobs import key_parts_of, work_of
from vantage.estimates.recipe_estimate import estimate_recipe
from vantage.runs.resolving import resolve_rates
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.work import ImportModel, ImportRewardModel
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.steps import checked_datasets, dependencies, ordered_steps


def loaded(plain: dict[str, Any]) -> Recipe:
    return parse_recipe(yaml.safe_dump(plain, sort_keys=False), name="x.yaml")


def problems_of(plain: dict[str, Any]) -> str:
    with pytest.raises(RecipeError) as refused:
        loaded(plain)
    return str(refused.value)


@pytest.fixture
def trained_apart(plain: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Return a recipe whose ``reward`` starts from a narrow model of another family; the critic starts from the policy."""
    save_chat_model(tmp_path / "other")
    plain["models"] = {"other": {"source": str(tmp_path / "other")}}
    plain["stages"]["reward"] |= {"init": "other", "learning_rate": None}
    plain["stages"]["value"]["init"] = "sft"
    return plain


@pytest.fixture
def imported(plain: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Return a recipe whose reward's term names a reward model that was trained elsewhere."""
    save_chat_model(tmp_path / "other")
    plain["models"] = {"other": {"source": str(tmp_path / "other")}}
    plain["rewards"]["main"]["terms"] = [{"model": "other"}]
    return plain


def test_a_reward_model_may_start_from_another_model(trained_apart: dict[str, Any]) -> None:
    recipe, chosen = resolve_rates(loaded(trained_apart))
    assert dependencies(recipe)["reward"]["init"] == "models.other"
    assert isinstance(work_of(recipe, "models.other"), ImportModel)
    assert chosen["reward"]["learning_rate"] == 1.3e-3, "1e-5 · 4096 / 32, the width of the other model"
    read = trained_apart["stages"]["reward"]["data"]
    others = {stage.get("data") for name, stage in trained_apart["stages"].items() if name != "reward"}
    assert read in others or read not in checked_datasets(recipe), "its rows are none of the recipe's model"


def test_the_bytes_of_its_template_are_in_the_keys_of_what_reads_it(trained_apart: dict[str, Any]) -> None:
    """The step that imports it has the source's digest in its key; what reads the model has the model's digest."""
    recipe, _ = resolve_rates(loaded(trained_apart))

    def key(step: str, **inputs: str) -> str:
        return stage_key(key_parts_of(recipe, step, inputs))

    before = key("models.other")
    folder = Path(recipe.models["other"].source)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant", "helper"))
    assert key("models.other") != before
    assert dependencies(recipe)["policy"]["reward.main.0"] == "reward"


def test_an_imported_reward_model_is_a_step_of_its_own_kind(imported: dict[str, Any]) -> None:
    recipe, _ = resolve_rates(loaded(imported))
    assert dependencies(recipe)["policy"]["reward.main.0"] == "models.other"
    work = work_of(recipe, "models.other")
    assert isinstance(work, ImportRewardModel) and work.model.source == imported["models"]["other"]["source"]
    order = ordered_steps(recipe)
    assert order.index("models.other") < order.index("policy")
    policy = stage_key(key_parts_of(recipe, "models.other", {}))
    assert policy != stage_key(key_parts_of(recipe, "model", {}))


# two layers of width 32 (4 · 32² of attention, 3 · 32 · 64 of feed-forward), norms, 260 tokens, and the head
WEIGHTS = 2 * (4 * 32**2 + 3 * 32 * 64 + 2 * 32) + 32 + 260 * 32 + 32


def weights_in(plain: dict[str, Any], name: str, role: str) -> int:
    [stage] = [each for each in estimate_recipe(loaded(plain), gpu="h100").stages if each.name == name]
    return stage.workload.network(role).weights


def test_an_estimate_counts_an_imported_reward_model_with_its_own_size(imported: dict[str, Any]) -> None:
    assert weights_in(imported, "policy", "other") == WEIGHTS


def test_an_estimate_counts_one_trained_from_another_model(trained_apart: dict[str, Any]) -> None:
    assert (
        weights_in(trained_apart, "reward", "reward")
        == weights_in(trained_apart, "policy", "reward")
        == WEIGHTS
    )


@every(
    ("model", "message"),
    [
        ({"source": "builtin:tiny"}, "models.other.source: 'builtin:tiny' is read as a reward model"),
        ({"source": "models:/x@champion", "otherwise": "sft"}, "models.other.otherwise: 'sft' replaces a missing policy"),
    ],
)  # fmt: skip
def test_other_sources_are_refused(model: dict[str, Any], message: str, imported: dict[str, Any]) -> None:
    imported["models"]["other"] = model
    assert message in problems_of(imported)


def test_one_name_is_no_policy_and_reward_model_at_once(imported: dict[str, Any]) -> None:
    imported["stages"]["evaluation"]["baseline"] = "other"
    said = problems_of(imported)
    assert (
        "models.other: stages.evaluation.baseline reads it as a policy, and a reward reads it as a reward model"
        in said
    )
    assert "give the policy another name under models" in said
