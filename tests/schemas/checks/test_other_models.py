"""Models beside the recipe's own have steps that import them, may be named in the right places, and are refused elsewhere."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.every import every
from vantage.attempts.jobs import key_parts_of, work_of
from vantage.estimates.recipe_estimate import estimate_recipe
from vantage.schemas.loading.recipe_file import load_recipe, parse_recipe
from vantage.schemas.loading.validation import problems_of_names
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.learning_rates import with_learning_rates
from vantage.schemas.recipe.recipe import Recipe, ResolvedRecipe
from vantage.schemas.recipe.work import ImportModel
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.steps import dependencies, ordered_steps

DIGEST = "ab" * 32


@pytest.fixture
def with_other(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a recipe whose ``evaluation`` compares with another model, and whose pairs are made of its answers."""
    plain["models"] = {"other": {"source": "builtin:tiny"}}
    plain["stages"]["evaluation"]["baseline"] = "other"
    plain["stages"]["collected"] = {
        "kind": "preference_collection", "policy": "other", "demonstrations": plain["stages"]["sft"]["data"],
    }  # fmt: skip
    return plain


def loaded(plain: dict[str, Any]) -> Recipe:
    return parse_recipe(yaml.safe_dump(plain, sort_keys=False), name="x.yaml")


def problems_of(plain: dict[str, Any]) -> str:
    with pytest.raises(RecipeError) as refused:
        loaded(plain)
    return str(refused.value)


def test_another_model_is_a_step_that_imports_it(with_other: dict[str, Any]) -> None:
    recipe = loaded(with_other)
    assert problems_of_names(with_other) == []
    inputs = dependencies(recipe)
    assert inputs["models.other"] == {}
    assert inputs["evaluation"]["baseline"] == inputs["collected"]["policy"] == "models.other"
    order = ordered_steps(recipe)
    assert order.index("models.other") < order.index("collected")
    resolved = ResolvedRecipe.of(with_learning_rates(recipe, width=64))
    work = work_of(resolved, "models.other")
    assert isinstance(work, ImportModel) and work.model.source == "builtin:tiny"


def test_adapters_and_4_bits_of_the_recipes_model_are_not_the_other_ones(with_other: dict[str, Any]) -> None:
    with_other["model"] |= {"lora": {"rank": 4}, "quantization": "nf4"}
    resolved = ResolvedRecipe.of(with_learning_rates(loaded(with_other), width=64))
    own, other = (work_of(resolved, step) for step in ("model", "models.other"))
    assert isinstance(own, ImportModel) and isinstance(other, ImportModel)
    assert (own.model.quantization, other.model.quantization) == ("nf4", None)
    assert own.model.lora is other.model.lora is None, "adapters are the stages' business"
    assert ImportModel.model_validate_json(own.model_dump_json()) == own, "as it goes to the stage's process"
    keys = {stage_key(key_parts_of(resolved, step, {})) for step in ("model", "models.other")}
    assert len(keys) == 2


def test_the_same_model_under_another_name_is_imported_once(with_other: dict[str, Any]) -> None:
    resolved = ResolvedRecipe.of(with_learning_rates(loaded(with_other), width=64))
    keys = {stage_key(key_parts_of(resolved, step, {})) for step in ("model", "models.other")}
    assert len(keys) == 1


@pytest.mark.parametrize(("stage", "field"), [("sft", "init"), ("policy", "init"), ("policy", "reference")])
def test_no_stage_trains_it(stage: str, field: str, with_other: dict[str, Any]) -> None:
    """A stage that would train another model is refused."""
    with_other["stages"][stage][field] = "other"
    said = problems_of(with_other)
    assert f"stages.{stage}.{field}" in said
    assert "'other' is another model, which stages sample from and compare with" in said


@pytest.mark.parametrize(
    ("name", "message"),
    [("model", "'model' is the recipe's model already"), ("sft", "'sft' is a stage already")],
)
def test_a_name_means_one_model(name: str, message: str, with_other: dict[str, Any]) -> None:
    with_other["models"][name] = {"source": "builtin:tiny"}
    assert message in problems_of(with_other)


def test_one_that_nobody_reads_is_refused(with_other: dict[str, Any]) -> None:
    with_other["models"]["more"] = {"source": "builtin:tiny"}
    assert "models.more: no stage reads it; name it in one, or remove it" in problems_of(with_other)


def test_a_wrong_name_is_told_with_the_ones_that_there_are(with_other: dict[str, Any]) -> None:
    with_other["stages"]["evaluation"]["baseline"] = "othr"
    assert "no stage is called 'othr'" in problems_of(with_other)


@every(
    ("model", "message"),
    [
        ({"source": "builtin:huge"}, "there is no built-in model 'builtin:huge'"),
        ({"source": "hub:org/name"}, "names no revision"),
        ({"source": "nowhere"}, "there is no folder"),
        ({"source": "models:/x"}, "names no version of a registered model; write models:/NAME@ALIAS or models:/NAME/VERSION"),
        ({"source": "builtin:tiny", "otherwise": "sft"}, "otherwise=sft stands in for a registered model"),
        ({"source": "models:/x@y", "otherwise": "nobody"}, "no stage is called 'nobody'"),
        ({"source": "models:/x@y", "otherwise": "reward"}, "'reward' is a reward_model stage"),
        ({"source": "models:/x@y", "otherwise": "other"}, "'other' is another model"),
        ({"source": "builtin:tiny", "base": "builtin:tiny"}, "is the model beneath an adapter, and models.other.source names no adapter"),
        ({"source": "builtin:tiny", "lora": {}}, "lora"),
    ],
)  # fmt: skip
def test_its_source_is_checked_as_the_models_own(
    model: dict[str, Any], message: str, with_other: dict[str, Any]
) -> None:
    """The source of another model is checked like that of the recipe's own."""
    with_other["models"]["other"] = model
    said = problems_of(with_other)
    assert "models.other" in said and message in said


def test_its_path_starts_at_the_recipes_folder(with_other: dict[str, Any], tmp_path: Path) -> None:
    """A relative path of another model starts at the recipe's folder."""
    (tmp_path / "near").mkdir()
    (tmp_path / "near" / "config.json").write_text("{}")
    with_other["models"]["other"]["source"] = "near"
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(with_other, sort_keys=False))
    assert load_recipe(str(file)).models["other"].source == str((tmp_path / "near").resolve())


@pytest.mark.parametrize(
    "source, why",
    [
        ("models:/chat@champion", "MLflow is not asked for an estimate"),
        ("hub:some/model@" + "0" * 40, "not in the local cache"),
        ("builtin:tiny", None),
    ],
)
def test_an_estimate_says_whose_shape_it_counts(
    with_other: dict[str, Any], source: str, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with_other["models"]["other"] = {"source": source}
    found = estimate_recipe(loaded(with_other), gpu="h100")
    if why is None:
        assert "models.other" not in found.shape.note
    else:
        assert "models.other is counted as if it were the recipe's model: " in found.shape.note
        assert why in found.shape.note


def test_4_bits_without_adapters_are_refused(plain: dict[str, Any]) -> None:
    plain["model"]["quantization"] = "nf4"
    assert "model.quantization: nf4 without lora rounds the weights" in problems_of(plain)


def test_a_registered_model_is_no_source_of_the_recipes_own(plain: dict[str, Any]) -> None:
    plain["model"] = {"source": "models:/x@champion"}
    said = problems_of(plain)
    assert (
        "model.source: 'models:/x@champion' is a registered model, which stages sample from and compare with"
        in said
    )
    assert "name it under models" in said


def test_a_stage_that_waits_for_its_own_stand_in_is_refused(with_other: dict[str, Any]) -> None:
    with_other["models"]["other"] = {"source": "models:/x@y", "otherwise": "dpo"}
    with_other["stages"]["dpo"] = {"kind": "dpo", "init": "sft", "data": "collected"}
    said = problems_of(with_other)
    assert "collected reads dpo (models.other.otherwise)" in said and "stages wait for one another" in said


def test_a_stand_in_takes_the_place_of_a_model_that_is_pinned_as_missing(with_other: dict[str, Any]) -> None:
    with_other["models"]["other"] = {"source": "models:/x@y", "otherwise": "sft"}
    recipe = loaded(with_other)
    assert dependencies(recipe)["evaluation"]["baseline"] == "models.other"
    other = recipe.models["other"].model_copy(update={"source": "models:/x@y#none"})
    inputs = dependencies(recipe.model_copy(update={"models": {"other": other}}))
    assert inputs["evaluation"]["baseline"] == inputs["collected"]["policy"] == "sft"
    assert "models.other" not in inputs


def test_one_that_is_not_pinned_yet_has_no_key(with_other: dict[str, Any]) -> None:
    with_other["models"]["other"] = {"source": "models:/x/7"}
    recipe = loaded(with_other)
    resolved = ResolvedRecipe.of(with_learning_rates(recipe, width=64))
    with pytest.raises(ValueError, match="'models:/x/7' is no model of known content yet"):
        key_parts_of(resolved, "models.other", {})
    with_other["models"]["other"] = {"source": f"models:/x/7#{DIGEST}"}
    resolved = ResolvedRecipe.of(with_learning_rates(loaded(with_other), width=64))
    assert key_parts_of(resolved, "models.other", {})["inputs"] == {"source": DIGEST}


# A model that judges


@pytest.fixture
def with_judge(plain: dict[str, Any]) -> dict[str, Any]:
    plain["models"] = {"grader": {"source": "builtin:tiny"}}
    plain["stages"]["evaluation"]["judge"] = {"model": "grader"}
    plain["stages"]["evaluation"]["gate"] = {"metric": "win_rate", "at_least": 0.5}
    return plain


def test_a_model_that_judges_is_read_like_any_other(with_judge: dict[str, Any]) -> None:
    recipe = loaded(with_judge)
    assert dependencies(recipe)["evaluation"]["judge"] == "models.grader"
    resolved = ResolvedRecipe.of(with_learning_rates(recipe, width=64))
    inputs = dict.fromkeys(dependencies(recipe)["evaluation"], DIGEST)
    keys = {
        stage_key(key_parts_of(resolved, "evaluation", inputs | {"judge": judge}))
        for judge in (DIGEST, "cd" * 32)
    }
    assert len(keys) == 2, "of other weights, another verdict"
    assert key_parts_of(resolved, "evaluation", inputs)["configuration"]["judge"]["model"] == DIGEST


def test_a_judge_may_be_the_recipes_model_or_a_policy_beside_a_verifier(with_judge: dict[str, Any]) -> None:
    del with_judge["models"]
    for named in ("model", "sft"):
        with_judge["stages"]["evaluation"] |= {"judge": {"verifier": "arithmetic"}, "also": {"model": named}}
        with_judge["stages"]["evaluation"]["gate"] = {"metric": "preference_win_rate", "at_least": 0.5}
        assert dependencies(loaded(with_judge))["evaluation"]["also"] == named


@every(
    ("changes", "message"),
    [
        ({"judge": {"model": "nobody"}}, "stages.evaluation.judge.model: no stage is called 'nobody'"),
        ({"judge": {"model": "reward"}}, "stages.evaluation.judge.model: 'reward' is a reward_model stage"),
        ({"judge": {"model": "evaluation"}}, "stages.evaluation.judge.model: 'evaluation' is this stage itself"),
        ({"judge": {"model": "grader", "verifier": "arithmetic"}}, "a judge is a verifier, a reward or a model"),
        ({"judge": {"verifier": "arithmetic", "template": "{prompt}"}}, "template and answers are of a judge that is a model"),
        ({"judge": {"model": "grader", "template": "{prompt} {first}"}}, "template has no {second}; write each field where its text belongs"),
        ({"judge": {"model": "grader", "answers": ["A", "A"]}}, "answers are 'A' twice"),
        ({"judge": {"model": "grader", "answers": ["A", ""]}}, "answers"),
        ({"also": {"model": "model"}}, "judge and also are both models, whose metrics would have the same names"),
        ({"gate": {"metric": "accuracy_gain", "at_least": 0.0}}, "an evaluation stage with a model as judge does not measure 'accuracy_gain'"),
        ({"judge": {"verifier": "arithmetic"}, "gate": {"metric": "order_disagreement", "at_most": 0.2}}, "name a model as judge or also"),
    ],
)  # fmt: skip
def test_what_a_judge_cannot_be(changes: dict[str, Any], message: str, with_judge: dict[str, Any]) -> None:
    with_judge["stages"]["evaluation"] |= changes
    assert message in problems_of(with_judge)


def test_a_model_judges_pairs_that_are_collected(with_judge: dict[str, Any]) -> None:
    prompts = with_judge["stages"]["evaluation"]["prompts"]
    with_judge["stages"]["collected"] = {
        "kind": "preference_collection", "policy": "sft", "prompts": prompts, "judge": {"model": "grader"},
    }  # fmt: skip
    recipe = ResolvedRecipe.of(with_learning_rates(loaded(with_judge), width=64))
    assert dependencies(recipe)["collected"]["judge"] == "models.grader"
    assert recipe.stages["collected"].samples_per_prompt == 2  # type: ignore[attr-defined]
    digests = {"policy": DIGEST, "prompts": DIGEST, "judge": DIGEST}
    keys = {
        judged: stage_key(key_parts_of(recipe, "collected", {**digests, "judge": judged}))
        for judged in (DIGEST, "cd" * 32)
    }
    assert len(set(keys.values())) == 2
    found = estimate_recipe(loaded(with_judge), gpu="h100")
    [stage] = [each for each in found.stages if each.name == "collected"]
    assert [each.role for each in stage.workload.networks] == ["policy", "judge"]
    with_judge["stages"]["collected"]["samples_per_prompt"] = 4
    assert "samples_per_prompt=4, but a model as judge compares two responses; use 2" in problems_of(
        with_judge
    )


def test_a_judge_that_waits_for_its_own_evaluation_is_a_ring(with_judge: dict[str, Any]) -> None:
    with_judge["models"]["grader"] = {"source": "models:/x@y", "otherwise": "policy"}
    with_judge["stages"]["policy"] |= {"init": "sft"}
    loaded(with_judge)
    estimated = estimate_recipe(loaded(with_judge), gpu="h100")
    assert any(stage.name == "evaluation" for stage in estimated.stages)
