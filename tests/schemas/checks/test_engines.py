"""``rollout.engine``: what vLLM cannot sample is refused by name, and the loop changes no key."""

import importlib.util
from typing import Any

import pytest

from vantage.attempts.jobs import key_parts_of
from vantage.attempts.machine import check_extras, num_ranks
from vantage.runs.resolving import resolve_rates
from vantage.schemas.checks.warnings import warnings
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.records.stage_key import stage_key
from vantage.schemas.steps import dependencies

TEXT = """
recipe: sampled
model: {{source: "builtin:tiny"{model}}}
data:
  demonstrations: {{source: "builtin:arithmetic/demonstrations"}}
  prompts: {{source: "builtin:arithmetic/prompts"}}
rewards: {{right: {{terms: [{{verifier: arithmetic}}]}}}}
stages:
  sft: {{kind: sft, data: demonstrations{sft}}}
  scored: {{kind: rollout_collection, policy: sft, reward: right, prompts: prompts{scored}}}
  pairs: {{kind: preference_collection, policy: sft, prompts: prompts, judge: {{verifier: arithmetic}}{pairs}}}
  value: {{kind: value_pretraining, policy: sft, init: sft, reward: right, prompts: prompts{value}}}
  best: {{kind: best_of_n, init: sft, reward: right, prompts: prompts{best}}}
  policy: {{kind: policy_optimization, algorithm: vapo, init: sft, critic: value, reward: right, prompts: prompts{policy}}}
  evaluation: {{kind: evaluation, candidate: policy, baseline: sft, judge: {{verifier: arithmetic}}, prompts: prompts{evaluation}}}
"""
SAMPLING = ("scored", "pairs", "value", "best", "policy", "evaluation")
NAMES = ("model", "sft", *SAMPLING)
VLLM = ", rollout: {engine: vllm}"


def recipe(**parts: str) -> Recipe:
    return parse_recipe(TEXT.format(**{name: parts.get(name, "") for name in NAMES}))


def refused(**parts: str) -> str:
    with pytest.raises(RecipeError) as error:
        recipe(**parts)
    return str(error.value)


@pytest.mark.parametrize("name", SAMPLING)
def test_the_engine_enters_the_key_and_the_default_changes_nothing(name: str) -> None:
    def key(**parts: str) -> tuple[str, Any]:
        resolved = resolve_rates(recipe(**parts))[0]
        read = dependencies(resolved)
        digests = {role: f"{len(role):064x}" for role in read[name]}
        found = key_parts_of(resolved, name, digests)
        return stage_key(found), resolved.stages[name].model_dump(mode="json")

    default, loop, vllm = key(), key(**{name: ", rollout: {engine: loop}"}), key(**{name: VLLM})
    assert default == loop
    assert "engine" not in default[1].get("rollout", {})
    assert vllm[0] != default[0] and vllm[1]["rollout"]["engine"] == "vllm"


@pytest.mark.parametrize("temperature", [0.009, 2.1])
def test_temperatures_that_vllm_changes_or_refuses_are_refused(temperature: float) -> None:
    def refusal(**parts: str) -> str:
        with pytest.raises(RecipeError) as error:
            parsed(**parts)
        return str(error.value)

    def parsed(**parts: str) -> Recipe:
        text = TEXT.format(**{name: parts.get(name, "") for name in NAMES})
        return parse_recipe(f"{text}generation: {{temperature: {temperature}}}\n")

    message = refusal(evaluation=VLLM)
    assert (
        f"stages.evaluation.rollout.engine: vllm samples at temperatures from 0.01 to 2, and generation.temperature={temperature}; "
        "use a temperature in that range, or engine: loop" in message
    )
    assert parsed().generation.temperature == temperature


@pytest.mark.parametrize("name", SAMPLING)
def test_several_processes_of_one_machine_have_a_vllm_each(name: str) -> None:
    for resources in (
        "{gpus: 1}",
        "{distributed: {ranks: 2}}",
        "{gpus: 2}",
        "{gpus: 2, distributed: {strategy: fsdp2}}",
    ):
        recipe(**{name: f"{VLLM}, resources: {resources}"})


@pytest.mark.parametrize("name", SAMPLING)
def test_several_machines_are_refused(name: str) -> None:
    message = refused(**{name: f"{VLLM}, resources: {{nodes: 2}}"})
    assert f"stages.{name}" in message
    assert "rollout.engine=vllm samples in the stage's processes, on one machine" in message
    assert "leave resources.nodes out, or use engine: loop, or servers" in message


@pytest.mark.parametrize("name", ["value", "policy"])
def test_sampling_ahead_is_refused(name: str) -> None:
    message = refused(**{name: ", rollout: {engine: vllm, ahead: 1}"})
    assert (
        f"stages.{name}.rollout: ahead=1 samples beside the training, and engine=vllm in the stage's process"
        in message
    )
    assert "add servers (rollout.servers or rollout.url), or use ahead: 0, or engine: loop" in message


@pytest.mark.parametrize("name", ["value", "policy"])
def test_servers_sample_ahead_for_one_process_and_for_several(name: str) -> None:
    ahead = "{engine: vllm, %s, ahead: 1}"
    for where in ("url: http://sampler-1:8000", "servers: 2"):
        recipe(**{name: f", rollout: {ahead % where}"})
        for resources in ("{gpus: 3}", "{gpus: 8}", "{gpus: 8, distributed: {strategy: fsdp2}}"):
            recipe(**{name: f", rollout: {ahead % where}, resources: {resources}"})
    message = refused(**{name: ", rollout: {ahead: 1}, resources: {gpus: 8, distributed: {strategy: fsdp2}}"})
    assert "use servers (engine: vllm, and servers or url), strategy: ddp, or ahead: 0" in message


@pytest.mark.parametrize(
    "name, field", [("scored", "policy"), ("value", "policy"), ("evaluation", "baseline"), ("policy", "init")]
)
def test_adapters_are_sampled_from_up_to_the_largest_rank_of_vllm(name: str, field: str) -> None:
    def with_rank(rank: int) -> dict[str, str]:
        lora = {"policy" if name == "policy" else "sft": f", lora: {{rank: {rank}, alpha: 16}}"}
        return {**lora, name: VLLM + lora.get(name, "")}

    recipe(**with_rank(512))
    message = refused(**with_rank(513))
    assert (
        f"stages.{name}.rollout.engine: vllm applies adapters of rank 512 at most, and the policy of {field} has rank=513"
        in message
    )
    assert "use a smaller rank, engine: loop, or lora: false in the stage that trains it" in message


def test_adapters_that_are_merged_first_and_those_of_a_critic_have_any_rank() -> None:
    large = ", lora: {rank: 600, alpha: 16}"
    recipe(sft=large, best=VLLM + ", lora: false")
    recipe(value=VLLM + large, sft="")


SERVED = ", rollout: {engine: vllm, url: %s}"
ONE, TWO = "http://sampler-1:8000", "https://sampler-2/vllm"


@pytest.mark.parametrize("name", SAMPLING)
def test_where_servers_are_and_how_they_are_reached_is_in_no_key(name: str) -> None:
    def key(rollout: str) -> str:
        resolved = resolve_rates(recipe(**{name: rollout}))[0]
        digests = {role: f"{len(role):064x}" for role in dependencies(resolved)[name]}
        return stage_key(key_parts_of(resolved, name, digests))

    more = "{engine: vllm, url: [%s, %s], api_key_variable: KEY, weights_folder: /shared, request_seconds: 30.0, checksums: true, max_rows: 8}"
    keys = {
        key(each)
        for each in (
            VLLM,
            ", rollout: {engine: vllm, servers: 2}",
            SERVED % ONE,
            SERVED % f"[{TWO}]",
            f", rollout: {more % (ONE, TWO)}",
        )
    }
    assert len(keys) == 1


def test_a_recipes_file_keeps_the_servers() -> None:
    stage: Any = recipe(best=SERVED % ONE).stages["best"]
    assert stage.rollout.url == (ONE,)
    assert stage.rollout.model_dump(mode="json") == {"engine": "vllm", "url": [ONE]}


@pytest.mark.parametrize(
    "rollout, message",
    [
        (
            f"{{url: {ONE}}}",
            "url names servers of vllm, and engine=loop samples in the stage's process; add engine: vllm",
        ),
        ("{engine: vllm, api_key_variable: KEY}", "api_key_variable is read only with url or servers"),
        ("{servers: 1}", "servers=1 run vllm and are started for this stage; add engine: vllm"),
        (f"{{engine: vllm, servers: 1, url: {ONE}}}", "servers=1 run vllm and are started for this stage"),
        ("{engine: vllm, servers: 1, api_key_variable: KEY}", "api_key_variable is read only with url"),
        ("{engine: vllm, tensor_parallel: 2}", "tensor_parallel=2 is of servers that the stage starts; add"),
        (f"{{engine: vllm, url: {ONE}, tensor_parallel: 2}}", "servers of url have --tensor-parallel-size"),
        ("{engine: vllm, servers: 1, tensor_parallel: 0}", "rollout.tensor_parallel"),
        ("{engine: vllm, request_seconds: 5.0}", "request_seconds is read only with url or servers; add one"),
        (
            "{checksums: true}",
            "checksums compare vllm's weights, and engine=loop samples from the policy itself; leave",
        ),
        (f"{{engine: vllm, url: [{ONE}, {ONE}]}}", "url names a server twice; name each once"),
        ("{engine: vllm, url: 'http://me:secret@host:1'}", "rollout.url"),
        ("{engine: vllm, url: []}", "rollout.url"),
        (f"{{engine: vllm, url: {ONE}, weights_folder: here}}", "rollout.weights_folder"),
    ],
)
def test_servers_that_cannot_be_are_refused(rollout: str, message: str) -> None:
    assert message in refused(best=f", rollout: {rollout}")


def test_servers_of_the_stage_take_some_of_its_gpus() -> None:
    own = ", rollout: {engine: vllm, servers: 2}"
    recipe(policy=f"{own}, resources: {{gpus: 8}}")
    recipe(policy=own)
    message = refused(policy=f"{own}, resources: {{gpus: 2}}")
    assert "rollout.servers=2 take as many of resources.gpus=2, and none is left to train" in message
    assert "set resources.gpus: 3 or more" in message
    in_parts = ", rollout: {engine: vllm, servers: 2, tensor_parallel: 4}"
    recipe(policy=f"{in_parts}, resources: {{gpus: 9}}")
    message = refused(policy=f"{in_parts}, resources: {{gpus: 8}}")
    assert "rollout.servers=2 with rollout.tensor_parallel=4 take 8 of resources.gpus=8, and none" in message
    assert "set resources.gpus: 9 or more" in message
    message = refused(policy=f"{own}, resources: {{gpus: 8, distributed: {{ranks: 8}}}}")
    assert (
        "rollout.servers=2 take GPUs of resources.gpus=8, and resources.distributed.ranks=8 would train"
        in message
    )
    assert "leave resources.distributed.ranks out" in message
    recipe(policy=f"{own}, resources: {{gpus: 4, distributed: {{strategy: fsdp2}}}}")


def test_each_node_adds_its_servers_and_ray_places_them() -> None:
    own = ", rollout: {engine: vllm, servers: 2}"
    for resources in ("{nodes: 2}", "{nodes: 2, gpus: 8}", "{nodes: {least: 1, most: 4}, gpus: 8}"):
        found = recipe(policy=f"{own}, resources: {resources}")
        [warning] = [
            each for each in warnings(found, dependencies(found)) if "is not bitwise reproducible" in each
        ]
        assert warning.endswith(
            "on servers that the stage starts: 2 for each of its nodes, where Ray places them"
        )
    ranks = num_ranks(recipe(policy=f"{own}, resources: {{nodes: 4, gpus: 8}}").stages["policy"], None)
    assert ranks == 4 * (8 - 2)
    assert "none is left to train" in refused(policy=f"{own}, resources: {{nodes: 2, gpus: 2}}")


def test_servers_sample_for_several_processes_also_where_these_cut_the_weights() -> None:
    recipe(policy=f"{SERVED % ONE}, resources: {{distributed: {{ranks: 2}}}}")
    recipe(policy=f"{SERVED % ONE}, resources: {{gpus: 2, distributed: {{strategy: fsdp2}}}}")


def test_rounded_weights_are_refused() -> None:
    message = refused(model=", lora: {}, quantization: nf4", pairs=VLLM)
    assert "model.quantization=nf4 rounds them; use engine: loop, or leave quantization out" in message


def test_the_author_is_warned_that_responses_may_differ() -> None:
    def said(**parts: str) -> list[str]:
        found = recipe(**parts)
        return [each for each in warnings(found, dependencies(found)) if "vllm" in each]

    assert said() == []
    (warning,) = said(best=VLLM)
    assert warning.startswith("stages.best.rollout.engine: vllm is not bitwise reproducible")
    assert warning.endswith("It samples in the stage's process")
    (warning,) = said(best=SERVED % f"[{ONE}, {TWO}]")
    assert warning.endswith(f"It samples on {ONE}, {TWO}")
    (warning,) = said(best=", rollout: {engine: vllm, servers: 2}")
    assert warning.endswith("It samples on servers that the stage starts: 2")


def test_a_missing_package_is_refused_before_any_stage_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolved(**parts: str) -> Any:
        return resolve_rates(recipe(**parts))[0]

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else found(name))
    check_extras(resolved())
    with pytest.raises(
        ValueError,
        match=r"stages\.best\.rollout\.engine=vllm needs the package vllm.*docs/rollouts.md.*or use engine: loop",
    ):
        check_extras(resolved(best=VLLM))
    check_extras(resolved(best=VLLM + ", resources: {pool: gpus}"))
    check_extras(resolved(best=SERVED % ONE))
    with pytest.raises(ValueError, match="needs the package vllm"):
        check_extras(resolved(best=", rollout: {engine: vllm, servers: 1}"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: "there")
    check_extras(resolved(best=VLLM))
