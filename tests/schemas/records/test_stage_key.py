"""The stage key changes with what makes results, with nothing else, and a change of it is explained."""

import hashlib
import types
from typing import (
    Annotated,
    Any,
    Union,
    get_args,
    get_origin,
)

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.every import every
from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.fields import Name
from vantage.schemas.recipe.inputs import Data, Generation, Load, Model
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.rollout import Ahead
from vantage.schemas.recipe.stages import PolicyOptimization, ValuePretraining
from vantage.schemas.recipe.stages_on_data import RewardModelling, SupervisedFineTuning
from vantage.schemas.recipe.terms import ModelTerm, VerifierTerm
from vantage.schemas.recipe.work import ImportModel, PrepareData
from vantage.schemas.records.stage_key import (
    NOT_IN_KEY,
    differences,
    key_parts,
    stage_key,
)
from vantage.schemas.steps import WATCH_PROMPTS


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)

POLICY: dict[str, Any] = {
    "kind": "policy_optimization",
    "algorithm": "vapo",
    "init": "sft",
    "reference": "sft",
    "critic": "value",
    "reward": "main",
    "prompts": "prompts",
}
POLICY_INPUTS = {
    "init": digest("sft"),
    "reference": digest("sft"),
    "critic": digest("value"),
    "prompts": digest("prompts"),
    "reward.main.0": digest("reward"),
}
MAIN = Reward(terms=(ModelTerm(model="reward"), VerifierTerm(verifier="arithmetic", weight=0.5)))


def policy_parts(
    *,
    inputs: dict[str, str] | None = None,
    rewards: dict[str, Reward] | None = None,
    generation: Generation | None = None,
    seed: int = 17,
    extra: dict[str, Any] | None = None,
    **changed: Any,
) -> dict[str, Any]:
    return key_parts(
        PolicyOptimization.model_validate({**POLICY, **changed}),
        generation=generation or Generation(),
        rewards={"main": MAIN} if rewards is None else rewards,
        seed=seed,
        inputs=POLICY_INPUTS if inputs is None else inputs,
        extra=extra or {},
    )


# what is in the key


def test_the_key_is_the_sha256_of_the_canonical_parts() -> None:
    assert stage_key({"seed": 1, "kind": "sft"}) == hashlib.sha256(b'{"kind":"sft","seed":1}').hexdigest()


def test_every_kind_of_work_has_a_revision() -> None:
    assert all(type(kind.revision) is int and kind.revision >= 1 for kind in KINDS.values())


def test_every_field_that_names_a_stage_or_a_dataset_is_a_role() -> None:
    for name, kind in KINDS.items():
        naming = {
            field_name
            for field_name, field in kind.work.model_fields.items()
            if _is_a_name(
                Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
            )
        }
        # these are named inside `watch`
        assert naming - {"reward"} == set(kind.roles) - {WATCH_PROMPTS}, name


def test_defaults_count_whether_written_or_not() -> None:
    written = policy_parts(iterations=50, algorithm={"preset": "vapo", "clip_range_high": 0.28})
    assert stage_key(written) == stage_key(policy_parts())


@every(
    "changed",
    [
        {"iterations": 51},
        {"learning_rate": 2e-6},
        {"algorithm": {"preset": "vapo", "clip_range_high": 0.2}},
        {"precision": "bfloat16"},
        {"seed": 18},
        {"generation": Generation(temperature=0.9)},
        {"extra": {"chat": True}},
        {"inputs": {**POLICY_INPUTS, "critic": digest("another")}},
        {"inputs": {**POLICY_INPUTS, "reward.main.0": digest("another")}},
        {"rewards": {"main": Reward(terms=(ModelTerm(model="reward"), VerifierTerm(verifier="arithmetic")))}},
    ],
)
def test_what_changes_numbers_changes_the_key(changed: dict[str, Any]) -> None:
    assert stage_key(policy_parts(**changed)) != stage_key(policy_parts())


@every(
    "changed",
    [
        {"gate": {"metric": "score_gain", "at_least": 0.5}},
        {"resources": {"cpus": 1}},
        {"checkpoint_every": 3},
        {"microbatch_size": 8},
        {"microbatch_tokens": 512},
        {"init": "renamed", "reference": "renamed", "critic": "renamed_too", "prompts": "renamed_prompts"},
        {"reference": None},
        # the same switches under another preset's name
        {"algorithm": {**PolicyOptimization.model_validate(POLICY).algorithm.model_dump(), "preset": "ppo"}},
    ],
)
def test_what_changes_no_number_changes_no_key(changed: dict[str, Any]) -> None:
    assert policy_parts(**changed) == policy_parts()


@pytest.mark.parametrize(
    "changed",
    [
        {"packing": True},
        {"gradient_checkpointing": True},
        {"compile": True},
        {"microbatch_size": 2},
        {"microbatch_tokens": 512},
    ],
)
def test_how_a_batch_is_computed_changes_no_key(changed: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"kind": "sft", "data": "d", "learning_rate": 1e-3}
    plain, other = (SupervisedFineTuning.model_validate({**settings, **more}) for more in ({}, changed))
    arguments: dict[str, Any] = {
        "generation": Generation(), "rewards": {}, "inputs": {"init": digest("a"), "data": digest("b")}, "seed": 3, "extra": {},
    }  # fmt: skip
    assert key_parts(other, **arguments) == key_parts(plain, **arguments)


def test_moments_in_8_bits_change_the_key_and_their_default_does_not() -> None:
    assert policy_parts(optimizer_states="float32") == policy_parts()
    changed = differences(policy_parts(), policy_parts(optimizer_states="8bit"))
    assert changed == ["configuration.optimizer_states: absent → 8bit"]


def test_a_stages_own_seed_counts_only_as_the_resolved_seed() -> None:
    work = PolicyOptimization.model_validate({**POLICY, "seed": 3})
    arguments: dict[str, Any] = {
        "generation": Generation(),
        "rewards": {"main": MAIN},
        "inputs": POLICY_INPUTS,
        "extra": {},
    }
    assert key_parts(work, seed=17, **arguments) == policy_parts()


def test_renaming_a_reward_and_its_model_changes_no_key() -> None:
    renamed = Reward(terms=(ModelTerm(model="scorer"), VerifierTerm(verifier="arithmetic", weight=0.5)))
    inputs = {role.replace("reward.main.", "reward.taste."): value for role, value in POLICY_INPUTS.items()}
    assert policy_parts(reward="taste", rewards={"taste": renamed}, inputs=inputs) == policy_parts()


def test_a_reference_that_is_not_given_is_the_policy_or_the_initial_one() -> None:
    without = {role: value for role, value in POLICY_INPUTS.items() if role != "reference"}
    assert policy_parts(reference=None, inputs=without) == policy_parts()
    work = ValuePretraining(
        kind="value_pretraining", policy="sft", init="reward", reward="main", prompts="prompts"
    )
    inputs = {"policy": digest("sft"), "init": digest("reward"), "prompts": digest("prompts")}
    parts = key_parts(
        work,
        generation=Generation(),
        rewards={"main": MAIN},
        seed=1,
        inputs={**inputs, "reward.main.0": digest("reward")},
        extra={},
    )
    assert parts["inputs"] == {**inputs, "reference": digest("sft")}


def test_the_judge_of_an_evaluation_is_known_by_content() -> None:
    def parts(reward: str) -> dict[str, Any]:
        judge = {"reward": reward}
        work = PolicyEvaluation.model_validate(
            {
                "kind": "evaluation",
                "candidate": "policy",
                "baseline": "sft",
                "judge": judge,
                "prompts": "prompts",
            }
        )
        inputs = {role: digest(role) for role in ("candidate", "baseline", "prompts")}
        return key_parts(
            work,
            generation=Generation(),
            rewards={reward: Reward(terms=(ModelTerm(model="scorer"),))},
            seed=1,
            inputs={**inputs, f"reward.{reward}.0": digest("scorer")},
            extra={},
        )

    assert parts("main") == parts("renamed")
    assert parts("main")["rewards"]["judge"]["terms"][0]["model"] == digest("scorer")


def test_an_optional_dataset_counts_where_it_is_named() -> None:
    inputs = {"init": digest("sft"), "data": digest("preferences")}

    def parts(centre_on: str | None, inputs: dict[str, str]) -> dict[str, Any]:
        work = RewardModelling(kind="reward_model", init="sft", data="preferences", centre_on=centre_on)
        return key_parts(work, generation=Generation(), rewards={}, seed=1, inputs=inputs, extra={})

    centred = parts("demonstrations", {**inputs, "centre_on": digest("demonstrations")})
    assert parts(None, inputs)["inputs"] == inputs
    assert centred["inputs"] == {**inputs, "centre_on": digest("demonstrations")}


# the implicit steps


def prepared(source: str, content: str | None = None) -> dict[str, Any]:
    inputs = {} if content is None else {"source": digest(content)}
    work = PrepareData(content="preferences", data=Data(source=source, columns={"prompt": "question"}))
    return key_parts(work, generation=Generation(), rewards={}, seed=None, inputs=inputs, extra={})


def test_a_file_is_known_by_its_content_and_how_it_is_read_not_by_its_path() -> None:
    here = prepared("/here/pairs.jsonl", content="rows")
    assert prepared("elsewhere/other.jsonl", content="rows") == here
    assert stage_key(prepared("/here/pairs.csv", content="rows")) != stage_key(here)
    assert stage_key(prepared("/here/pairs.jsonl", content="other rows")) != stage_key(here)


def test_a_builtin_source_is_known_by_its_name() -> None:
    assert prepared("builtin:arithmetic/preferences")["configuration"]["data"]["source"].endswith(
        "preferences"
    )
    assert prepared("builtin:arithmetic/preferences") != prepared("builtin:arithmetic/prompts")


def test_files_of_the_hub_are_known_by_their_commit() -> None:
    source = f"hub:org/name@{'0' * 40}/data/train-*.parquet"
    parts = prepared(source)
    assert (parts["configuration"]["data"]["source"], parts["inputs"]) == (source, {})


def of_the_hub(commit: str = "0", name: str = "name", **load: Any) -> dict[str, Any]:
    data = Data(source=f"hub:org/{name}@{commit * 40}", load=Load(**{"split": "train", **load}))
    work = PrepareData(content="preferences", data=data)
    return key_parts(work, generation=Generation(), rewards={}, seed=None, inputs={}, extra={})


def test_a_dataset_of_the_hub_is_known_by_its_commit_and_what_is_loaded() -> None:
    plain = of_the_hub()
    assert plain["configuration"]["data"]["source"] == f"hub:org/name@{'0' * 40}"
    assert plain["configuration"]["data"]["load"] == {"split": "train"}
    assert of_the_hub(streaming=True) == plain, "the rows are the same"
    others = [
        of_the_hub(commit="1"),
        of_the_hub(name="other"),
        of_the_hub(split="test"),
        of_the_hub(config="main"),
        of_the_hub(max_rows=10),
        of_the_hub(max_rows=11),
    ]
    assert len({stage_key(parts) for parts in (plain, *others)}) == 1 + len(others)


def test_a_recipe_that_loads_nothing_has_the_key_of_before() -> None:
    assert "load" not in prepared("/here/pairs.jsonl", content="rows")["configuration"]["data"]


def test_a_file_without_its_sha256_is_refused() -> None:
    with pytest.raises(ValueError, match="prepare_data stage: the content digest of 'source' is missing"):
        prepared("/here/pairs.jsonl")


@pytest.mark.parametrize(
    "one, other", [("/a/llama-3.1", "b/llama"), ("gguf:a.gguf", "gguf:b.gguf"), ("package:x", "package:y")]
)
def test_a_model_is_known_by_its_content(one: str, other: str) -> None:
    def imported(source: str, **model: Any) -> str:
        work = ImportModel(model=Model(source=source, **model))
        inputs = {"source": digest("weights")}
        return stage_key(
            key_parts(work, generation=Generation(), rewards={}, seed=None, inputs=inputs, extra={})
        )

    assert imported(one) == imported(other)
    assert imported(one, chat=True) != imported(one)


def test_the_temperature_is_read_by_stages_and_not_by_the_implicit_steps() -> None:
    hot = Generation(temperature=2.0)
    work = PrepareData(content="prompts", data=Data(source="builtin:arithmetic/prompts"))
    cold_parts, hot_parts = (
        key_parts(work, generation=generation, rewards={}, seed=1, inputs={}, extra={})
        for generation in (Generation(), hot)
    )
    assert cold_parts == hot_parts
    sft = SupervisedFineTuning(kind="sft", data="demonstrations")
    inputs = {"init": digest("model"), "data": digest("demonstrations")}
    parts = key_parts(sft, generation=hot, rewards={}, seed=1, inputs=inputs, extra={})
    assert parts["generation"] == {
        "max_prompt_tokens": 512,
        "max_response_tokens": 512,
        "temperature": 2.0,
    }


# refusals


def test_a_missing_input_is_refused_by_its_role() -> None:
    inputs = {role: value for role, value in POLICY_INPUTS.items() if role != "critic"}
    with pytest.raises(
        ValueError, match="policy_optimization stage: the content digest of 'critic' is missing"
    ):
        policy_parts(inputs=inputs)


def test_a_missing_reward_model_is_refused_by_its_role() -> None:
    inputs = {role: value for role, value in POLICY_INPUTS.items() if role != "reward.main.0"}
    with pytest.raises(ValueError, match=r"the content digest of 'reward\.main\.0' is missing"):
        policy_parts(inputs=inputs)


def test_a_missing_reward_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="rewards of a policy_optimization stage: 'main' is missing"):
        policy_parts(rewards={})


@pytest.mark.parametrize(
    "surplus",
    [{"inputs": {**POLICY_INPUTS, "baseline": digest("x")}}, {"rewards": {"main": MAIN, "baseline": MAIN}}],
)
def test_an_input_that_nothing_reads_is_refused(surplus: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a policy_optimization stage does not read 'baseline'"):
        policy_parts(**surplus)


def test_the_fields_left_out_are_fields() -> None:
    fields = {name for kind in KINDS.values() for name in kind.work.model_fields}
    fields |= {f"rollout.{name}" for name in Ahead.model_fields}
    assert fields >= NOT_IN_KEY


# differences


def test_differences_are_told_by_path_old_and_new() -> None:
    new = policy_parts(
        algorithm={"preset": "vapo", "clip_range_high": 0.2},
        seed=18,
        extra={"chat": True},
        rewards={"main": Reward(terms=(ModelTerm(model="reward"),))},
        inputs={**POLICY_INPUTS, "critic": "0" * 64},
    )
    assert differences(policy_parts(), new) == [
        "configuration.algorithm.clip_range_high: 0.28 → 0.2",
        "extra.chat: absent → true",
        f"inputs.critic: {digest('value')[:12]} → 000000000000",
        "rewards.reward.terms.1.model: null → absent",
        "rewards.reward.terms.1.verifier: arithmetic → absent",
        "rewards.reward.terms.1.weight: 0.5 → absent",
        "rewards.reward.terms.1.wrong: 0.0 → absent",
        "seed: 17 → 18",
    ]


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=2), JSON), st.dictionaries(st.text(max_size=2), JSON))
def test_there_is_a_difference_exactly_where_the_keys_differ(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    assert bool(differences(old, new)) == (stage_key(old) != stage_key(new))
    assert differences(old, old) == []


@pytest.mark.parametrize(
    "old, new", [({}, {"a": {}}), ({"a": 1}, {"a": 1.0}), ({"a": {}}, {"a": []}), ({"a": None}, {})]
)
def test_small_differences_are_told_too(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert len(differences(old, new)) == 1


def _is_a_name(annotation: Any) -> bool:
    """Return whether a field's type is ``Name``, or ``Name`` or None."""
    if annotation == Name:
        return True
    return get_origin(annotation) in (Union, types.UnionType) and any(map(_is_a_name, get_args(annotation)))
