"""The job of an attempt follows from the step of its recipe."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from vantage.attempts.jobs import (
    key_parts_of,
    request_for,
    resources_of,
    seed_of,
    steps_of,
    threads_of,
    with_bases,
    work_of,
)
from vantage.runs.resolving import load_resolved
from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.records.artifacts import PolicyCheckpoint
from vantage.schemas.records.attempt import AttemptRequest, Share
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.source_files import SourceTooLarge
from vantage.schemas.steps import dependencies


@pytest.fixture
def recipe(recipe_file: Path) -> ResolvedRecipe:
    return load_resolved(recipe_file)[0]


def test_every_step_has_its_work(recipe: ResolvedRecipe) -> None:
    kinds = {
        step: work_of(recipe, step).kind for step in ("model", "data.prompts", "sft", "value", "evaluation")
    }
    assert kinds == {
        "model": "import_model",
        "data.prompts": "prepare_data",
        "sft": "sft",
        "value": "value_pretraining",
        "evaluation": "evaluation",
    }
    assert set(kinds.values()) <= set(KINDS)


def policy(stage_key: str = "0" * 64) -> PolicyCheckpoint:
    digest = "a" * 64
    return PolicyCheckpoint(
        uri=f"objects/{digest}", digest=digest, stage_key=stage_key, parents={}, tokenizer_digest=digest
    )


def request(recipe: ResolvedRecipe, step: str, folder: Path, **options: Any) -> AttemptRequest:
    inputs = dict.fromkeys(dependencies(recipe)[step], policy())
    return request_for(
        steps_of(recipe)[step], inputs, run_id="r", storage=str(folder), log=folder / "log.txt", **options
    )


def test_a_request_carries_what_its_stage_reads_and_no_more(recipe: ResolvedRecipe, tmp_path: Path) -> None:
    bounds = {"microbatch_tokens": 2, "microbatch_size": 3}
    asked = request(recipe, "value", tmp_path, share=Share(cpus=1, gpus=("3",)), only_reuse=True, **bounds)
    assert set(asked.rewards) == {"main"}
    assert (asked.seed, asked.share, asked.only_reuse) == (17, Share(cpus=1, gpus=("3",)), True)
    assert (asked.microbatch_tokens, asked.microbatch_size) == (2, 3)
    assert asked.inputs == dict.fromkeys(
        ["policy", "init", "reference", "prompts", "reward.main.0"], policy()
    )
    assert asked.stage_key == stage_key(asked.key_parts)
    assert request(recipe, "sft", tmp_path).rewards == {}


@pytest.mark.parametrize("step", ["model", "data.prompts", "sft", "reward", "value", "policy", "evaluation"])
def test_a_request_is_the_same_after_a_journey_as_json(
    recipe: ResolvedRecipe, step: str, tmp_path: Path
) -> None:
    asked = request(recipe, step, tmp_path)
    assert AttemptRequest.model_validate_json(asked.model_dump_json()) == asked


def test_a_request_has_the_recipes_rules_of_text(recipe_file: Path, tmp_path: Path) -> None:
    """Chat template and lengths decide how text becomes ids, and every stage samples at the temperature."""
    changes = ["model.chat=false", "generation.temperature=0.7", "generation.max_prompt_tokens=33"]
    recipe = load_resolved(recipe_file, changes)[0]
    asked = request(recipe, "sft", tmp_path)
    assert asked.chat is False
    assert asked.generation == recipe.generation
    assert (asked.generation.temperature, asked.generation.max_prompt_tokens) == (0.7, 33)


def test_a_stages_own_seed_wins(recipe_file: Path) -> None:
    recipe = load_resolved(recipe_file, ["stages.sft.seed=5"])[0]
    assert (seed_of(recipe, "sft"), seed_of(recipe, "reward"), seed_of(recipe, "model")) == (5, 17, 17)
    assert key_parts_of(recipe, "sft", {"init": "a", "data": "b"})["seed"] == 5


def test_the_seed_is_in_a_built_in_models_key_and_in_no_datas(recipe: ResolvedRecipe) -> None:
    assert key_parts_of(recipe, "model", {})["seed"] == 17
    assert key_parts_of(recipe, "data.prompts", {})["seed"] is None


def test_a_files_content_is_in_its_key(recipe_file: Path) -> None:
    rows = recipe_file.with_name("rows.jsonl")
    rows.write_bytes(b'{"prompt": "1+1?"}\n')
    recipe = load_resolved(recipe_file, [f"data.prompts.source={rows}"])[0]
    parts = key_parts_of(recipe, "data.prompts", {})
    assert parts["inputs"] == {"source": hashlib.sha256(b'{"prompt": "1+1?"}\n').hexdigest()}
    rows.write_bytes(b'{"prompt": "1+2?"}\n')
    assert stage_key(key_parts_of(recipe, "data.prompts", {})) != stage_key(parts)


def test_a_verifiers_file_and_words_are_in_its_key_and_nothing_else(recipe_file: Path) -> None:
    file = recipe_file.with_name("mine.py")
    file.write_text("def verify(prompt, response, answer): ...\n")
    recipe = load_resolved(recipe_file, [f"verifiers={{mine: {{source: {file}}}}}", "seed=3"])[0]
    assert work_of(recipe, "verifiers.mine").kind == "import_verifier"
    assert resources_of(recipe, "verifiers.mine").cpus == 1
    parts = key_parts_of(recipe, "verifiers.mine", {})
    assert parts["inputs"] == {"source": hashlib.sha256(file.read_bytes()).hexdigest()}
    assert parts["configuration"] == {"verifier": {"source": ".py", "function": "verify", "extract": None}}
    assert (parts["seed"], parts["extra"], parts["rewards"]) == (None, {}, {})
    builtin = load_resolved(recipe_file, ["verifiers={mine: {source: 'builtin:exact_match'}}"])[0]
    assert key_parts_of(builtin, "verifiers.mine", {})["inputs"] == {}


def test_how_prompts_are_wrapped_is_in_the_key_of_who_reads_them(recipe_file: Path) -> None:
    inputs = {"init": "a", "data": "b"}
    as_told = key_parts_of(load_resolved(recipe_file, ["model.chat=false"])[0], "sft", inputs)
    by_itself = key_parts_of(load_resolved(recipe_file)[0], "sft", inputs)
    assert as_told["extra"] == {"chat": False}
    assert stage_key(as_told) != stage_key(by_itself)


def test_threads_are_the_stages_cpus_or_fewer(recipe_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stages = load_resolved(recipe_file)[0].stages
    sft, policy = stages["sft"], stages["policy"]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_of(Share(cpus=6), sft) == 6
    assert threads_of(Share(cpus=6), policy) == 6
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_of(Share(cpus=6), sft) == 2
    assert threads_of(Share(cpus=1), sft) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert threads_of(Share(cpus=6), sft) == 6


@pytest.mark.parametrize("stage", ["value", "policy"])
def test_what_is_sampled_ahead_has_half_of_the_threads(
    stage: str, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads compute at the same time, each with as many as torch is set to."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    ahead = load_resolved(recipe_file, [f"stages.{stage}.rollout.ahead=1"])[0].stages[stage]
    assert [threads_of(Share(cpus=cpus), ahead) for cpus in (1, 2, 3, 6)] == [1, 1, 1, 3]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert threads_of(Share(cpus=6), ahead) == 2


def test_an_implicit_step_takes_one_cpu(recipe: ResolvedRecipe) -> None:
    assert (resources_of(recipe, "data.prompts").cpus, resources_of(recipe, "data.prompts").gpus) == (1, 0)
    assert resources_of(recipe, "sft").cpus is None


def test_a_terabyte_is_refused_while_a_key_is_made(recipe_file: Path) -> None:
    rows = recipe_file.with_name("rows.jsonl")
    with rows.open("wb") as file:
        file.truncate(10**12)
    recipe = load_resolved(recipe_file, [f"data.prompts.source={rows}"])[0]
    with pytest.raises(SourceTooLarge, match="rows.jsonl has 931.3 GiB, and at most 16 GiB are read"):
        key_parts_of(recipe, "data.prompts", {})


def test_a_job_knows_what_share_of_its_rows_may_be_unusable(recipe_file: Path) -> None:
    recipe = load_resolved(
        recipe_file, ["data.preferences.max_dropped=0.07", "data.prompts.max_dropped=0.2"]
    )[0]
    assert steps_of(recipe)["reward"].max_dropped == {"data": 0.07}
    assert steps_of(recipe)["value"].max_dropped == {"prompts": 0.2}
    assert steps_of(recipe)["model"].max_dropped == {}


def test_adapters_bring_their_base_which_is_in_no_key(recipe: ResolvedRecipe, tmp_path: Path) -> None:
    """The digest of the adapters names their base."""
    base = policy().model_copy(update={"digest": "b" * 64})
    adapters = policy().model_copy(update={"base": base.digest})
    inputs = with_bases({"init": adapters, "data": policy()}, [policy(), base])
    assert inputs == {"init": adapters, "init.base": base, "data": policy()}

    def asked(read: dict[str, Any]) -> AttemptRequest:
        return request_for(
            steps_of(recipe)["sft"], read, run_id="r", storage=str(tmp_path), log=tmp_path / "log.txt"
        )

    assert asked(inputs).inputs == inputs
    assert asked(inputs).stage_key == asked({"init": adapters, "data": policy()}).stage_key
    with pytest.raises(
        ValueError, match=f"init: no step of this run made {base.digest}, which is the base of"
    ):
        with_bases({"init": adapters}, [policy()])


def test_neither_adapters_nor_a_date_change_the_import_of_their_base(recipe_file: Path) -> None:
    plain = load_resolved(recipe_file)[0]
    other = load_resolved(recipe_file, ["model.lora={rank: 2}", "model.date=2031-02-01"])[0]
    assert work_of(other, "model") == work_of(plain, "model")
    assert key_parts_of(other, "model", {}) == key_parts_of(plain, "model", {})


def test_answers_are_in_the_key_of_prompts_where_a_verifier_reads_them(recipe_file: Path) -> None:
    verifier = "verifiers={exact: {source: 'builtin:exact_match'}}"
    recipe = load_resolved(recipe_file, [verifier])[0]
    assert key_parts_of(recipe, "data.prompts", {})["extra"] == {"answers": True}
    assert key_parts_of(recipe, "data.demonstrations", {})["extra"] == {}
    assert key_parts_of(load_resolved(recipe_file)[0], "data.prompts", {})["extra"] == {}
