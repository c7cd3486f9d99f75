"""A recipe's fields accept, refuse and default to what they document."""

import copy
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.every import every
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.inputs import Data, Generation, Split
from vantage.schemas.recipe.pass_limits import UNLIMITED, PassLimits
from vantage.schemas.recipe.recipe import Publication, Recipe
from vantage.schemas.recipe.rewards import (
    Judge,
    MissingEos,
    Reward,
)
from vantage.schemas.recipe.stage import Gate
from vantage.schemas.recipe.stages import BestOfN, PolicyOptimization, ValuePretraining
from vantage.schemas.recipe.stages_on_data import (
    DirectPreferenceOptimization,
    RewardModelling,
    SupervisedFineTuning,
)
from vantage.schemas.recipe.stages_that_collect import PreferenceCollection
from vantage.schemas.recipe.terms import ModelTerm, VerifierTerm


def policy_stage(**fields: Any) -> PolicyOptimization:
    names = {"init": "sft", "critic": "value", "reward": "main", "prompts": "tasks", "algorithm": "vapo"}
    return PolicyOptimization.model_validate({"kind": "policy_optimization", **names, **fields})


def value_stage(**fields: Any) -> ValuePretraining:
    names = {"policy": "sft", "init": "reward", "reward": "main", "prompts": "tasks"}
    return ValuePretraining.model_validate({"kind": "value_pretraining", **names, **fields})


def best_of_n(**fields: Any) -> BestOfN:
    return BestOfN.model_validate(
        {"kind": "best_of_n", "init": "sft", "reward": "main", "prompts": "tasks", **fields}
    )


def reward_model(**fields: Any) -> RewardModelling:
    return RewardModelling.model_validate({"kind": "reward_model", "init": "sft", **fields})


def collection(**fields: Any) -> PreferenceCollection:
    return PreferenceCollection.model_validate({"kind": "preference_collection", "policy": "sft", **fields})


def test_a_recipe_survives_json(plain: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(plain)
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_a_recipe_cannot_be_changed(plain: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(plain)
    with pytest.raises(ValidationError, match="frozen"):
        recipe.seed = 3


def test_one_gate_is_a_list_of_one() -> None:
    gate = {"metric": "test_nll", "at_most": 1.0}
    one = SupervisedFineTuning.model_validate({"kind": "sft", "data": "demos", "gate": gate})
    several = SupervisedFineTuning.model_validate({"kind": "sft", "data": "demos", "gate": [gate, gate]})
    assert one.gate == (Gate(metric="test_nll", at_most=1.0),)
    assert len(several.gate) == 2


@every("field", ["microbatch_size", "microbatch_tokens"])
@every("value", [0, -8, 1.5, True])
def test_the_bounds_of_a_pass_are_counts(plain: dict[str, Any], field: str, value: Any) -> None:
    for name in plain["stages"]:
        given = copy.deepcopy(plain)
        given["stages"][name][field] = value
        with pytest.raises(ValidationError, match=rf"stages\.{name}\..*{field}"):
            Recipe.model_validate(given)


def test_every_stage_has_both_bounds_of_a_pass(plain: dict[str, Any]) -> None:
    """A recipe without them is written as it was before there was the second."""
    for name, stage in plain["stages"].items():
        given = {**stage, "microbatch_size": 4, "microbatch_tokens": 512}
        work = Recipe.model_validate({**plain, "stages": {**plain["stages"], name: given}}).stages[name]
        assert work.pass_limits == PassLimits(rows=4, tokens=512)
        written = Recipe.model_validate(plain).stages[name]
        assert written.pass_limits == UNLIMITED
        assert "microbatch_tokens" not in written.model_dump(mode="json")
        assert "microbatch_size" in written.model_dump(mode="json")


@every(
    ("limits", "rows"),
    [
        (UNLIMITED, 10),
        (PassLimits(4), 4),
        (PassLimits(tokens=99), 3),
        (PassLimits(2, 99), 2),
        (PassLimits(4, 9), 1),
    ],
)
def test_the_most_rows_of_a_pass(limits: PassLimits, rows: int) -> None:
    """There are ten rows of 30 positions each; one row is a pass, however long it is."""
    assert limits.rows_of(30, 10) == rows
    assert limits.or_rows(7) == PassLimits(limits.rows or 7, limits.tokens)


def test_a_gates_bound_is_on_the_side_that_was_given() -> None:
    least, most = Gate(metric="m", at_least=0.0), Gate(metric="m", at_most=2.0)
    assert (least.bound, least.relation, most.bound, most.relation) == (0.0, ">=", 2.0, "<=")


def test_splits_are_numbers_or_shares() -> None:
    split = Split(validation=256, test=0.1)
    assert (type(split.validation), type(split.test)) == (int, float)


@every("size", [0, 1.0, 1.5, 0.0, -3, True, "256"])
def test_splits_of_another_size_are_refused(size: Any) -> None:
    with pytest.raises(ValidationError):
        Split(test=size)


@every(
    "fields",
    [{"seed": True}, {"seed": "3"}, {"seed": 3.0}, {"seed": -1}, {"seed": 2**32}, {"learning_rate": True},
     {"learning_rate": "1e-5"}, {"learning_rate": 0}, {"learning_rate": float("inf")}, {"epochs": 0},
     {"gate": {"metric": "m", "at_least": "0.3"}}, {"resources": {"gpus": -1}}, {"resources": {"cpus": 0}}],
)  # fmt: skip
def test_numbers_are_numbers_of_the_right_kind_and_range(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SupervisedFineTuning.model_validate({"kind": "sft", "data": "demos", **fields})


def test_whole_numbers_are_numbers() -> None:
    stage = SupervisedFineTuning.model_validate({"kind": "sft", "data": "demos", "epochs": 2})
    assert stage.epochs == 2.0
    assert type(stage.epochs) is float


CUT = {"gpus": 8, "distributed": {"strategy": "fsdp2"}}


@every(
    ("made", "said"),
    [
        (lambda: Gate(metric="m"), "a gate has either at_least or at_most; give exactly one of them"),
        (lambda: Gate(metric="m", at_least=0, at_most=1), "a gate has either at_least or at_most"),
        (lambda: Reward.model_validate({"terms": [{}]}), "a reward term names either a model, a verifier, a judge, a reward server (http) or a length; give exactly one of them"),
        (lambda: Reward.model_validate({"terms": [{"model": "a", "verifier": "b"}]}), "a reward term names either a model, a verifier, a judge, a reward server (http) or a length"),
        (lambda: MissingEos(), "missing_eos takes either subtract or replace; give exactly one of them"),
        (lambda: MissingEos(subtract=1, replace=0), "missing_eos takes either subtract or replace"),
        (lambda: Judge(), "a judge is a verifier, a reward or a model; give exactly one of them"),
        (lambda: Judge(verifier="a", reward="b"), "a judge is a verifier, a reward or a model"),
        (lambda: Publication(stage="a", registered_model="m", after="b"), "after=b holds back an alias, and there is none"),
        (lambda: policy_stage(batch_size=100, minibatch_size=50),
         "batch_size=100 is not a multiple of algorithm.samples_per_prompt=16; use 96 or 112"),
        (lambda: policy_stage(batch_size=96, minibatch_size=64),
         "batch_size=96 is not a multiple of minibatch_size=64; use minibatch_size: 96 or a divisor of it"),
        (lambda: policy_stage(critic=None),
         "algorithm.advantage=gae needs a critic; name a value_pretraining or reward_model stage as critic, "
         "or a policy as fresh_critic"),
        (lambda: policy_stage(fresh_critic="sft"), "critic=value and fresh_critic=sft exclude each other; give one"),
        (lambda: policy_stage(algorithm="rloo", minibatch_size=256, epochs=2),
         "algorithm.importance_ratio=false takes one optimiser step on each rollout, but epochs=2 and "
         "minibatch_size=256 of batch_size=256 make more; use epochs: 1 and minibatch_size: 256"),
        (lambda: policy_stage(algorithm={"preset": "ppo", "importance_ratio": False}, minibatch_size=64),
         "algorithm.importance_ratio=false takes one optimiser step on each rollout, but epochs=1 and "
         "minibatch_size=64 of batch_size=256 make more; use epochs: 1 and minibatch_size: 256"),
        (lambda: policy_stage(algorithm={"preset": "vapo", "ptx_coef": 0.5}),
         "algorithm.ptx_coef=0.5 needs demonstrations; name a dataset as ptx, or set ptx_coef: 0"),
        (lambda: policy_stage(algorithm={"preset": "ppo", "kl_target": 6.0, "kl_horizon": 51}, batch_size=256),
         "algorithm.kl_horizon=51 is no more than a fifth of batch_size=256, so that one rollout could turn kl_coef "
         "negative; raise kl_horizon"),
        (lambda: policy_stage(algorithm={"preset": "ppo", "kl_coef": 0.1, "kl_kind": "full"}, resources=CUT),
         "algorithm.kl_kind=full reads all weights of the reference at once, and resources.distributed.strategy=fsdp2 cuts "
         "them; use strategy: ddp, or another kind of KL"),
        (lambda: policy_stage(algorithm={"preset": "ppo", "kl_loss_coef": 0.1, "kl_loss_kind": "full"}, resources=CUT),
         "algorithm.kl_loss_kind=full reads all weights of the reference at once"),
        (lambda: value_stage(returns={"kl_coef": 0.1, "kl_kind": "full"}, resources=CUT),
         "returns.kl_kind=full reads all weights of the reference at once"),
        (lambda: policy_stage(algorithm={"preset": "ppo", "policy_starts_at": 7}, iterations=7),
         "algorithm.policy_starts_at=7 leaves the policy none of iterations=7 to learn in; raise iterations, or lower "
         "policy_starts_at"),
        (lambda: ModelTerm(model="a", wrong=-1.0), "wrong=-1 is a verifier's score, and this term names a model; remove it"),
        (lambda: Reward(terms=({"model": "a"}, {"verifier": "b"}, {"model": "a", "weight": 2})),
         "terms name 'a' twice; add up their weights in one term"),
        (lambda: Reward(terms=({"model": "a"}, {"verifier": "a"})), "terms name 'a' twice; add up their weights"),
        (lambda: reward_model(), "a reward model learns either data (pairs) or rankings; give exactly one of them"),
        (lambda: reward_model(data="pairs", rankings="ranked"), "a reward model learns either data (pairs) or rankings"),
        (lambda: reward_model(rankings="ranked", lm_coef=0.3),
         "lm_coef=0.3 and centre_coef=0 are about pairs; with rankings set both to 0"),
        (lambda: reward_model(rankings="ranked", centre_coef=0.02), "lm_coef=0 and centre_coef=0.02 are about pairs"),
        (lambda: collection(), "pairs are made on either prompts or demonstrations; give exactly one of them"),
        (lambda: collection(prompts="tasks", demonstrations="demos"), "pairs are made on either prompts or demonstrations"),
        (lambda: collection(prompts="tasks"),
         "a judge chooses among responses to prompts, and is not asked about demonstrations; add judge"),
        (lambda: collection(demonstrations="demos", judge={"verifier": "arithmetic"}),
         "a judge chooses among responses to prompts, and is not asked about demonstrations; remove judge"),
        (lambda: collection(prompts="tasks", judge={"reward": "main"}, samples_per_prompt=1),
         "samples_per_prompt=1 leaves a judge nothing to choose among; use 2 or more"),
        (lambda: best_of_n(batch_size=100), "batch_size=100 is not a multiple of samples_per_prompt=8; use 96 or 104"),
        (lambda: best_of_n(batch_size=4), "batch_size=4 is not a multiple of samples_per_prompt=8; use 8 or 16"),
        (lambda: best_of_n(batch_size=128, minibatch_size=32),
         "batch_size=128 keeps 16 responses of samples_per_prompt=8, not a multiple of minibatch_size=32; "
         "use minibatch_size: 16 or a divisor of it"),
        (lambda: value_stage(samples_per_prompt=3), "batch_size=256 is not a multiple of samples_per_prompt=3; use 255 or 258"),
        (lambda: value_stage(minibatch_size=100), "batch_size=256 is not a multiple of minibatch_size=100"),
    ],
)  # fmt: skip
def test_rules_over_several_fields(made: Any, said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        made()
    assert said in str(caught.value)


@every(
    "made",
    [
        lambda: policy_stage(critic=None, fresh_critic="sft"),
        lambda: policy_stage(algorithm={"preset": "ppo", "kl_coef": 0.1, "kl_kind": "k3"}, resources=CUT),
        lambda: policy_stage(
            algorithm={"preset": "ppo", "kl_coef": 0.1, "kl_kind": "full"}, resources={**CUT, "gpus": 1}
        ),
        lambda: policy_stage(
            algorithm={"preset": "ppo", "kl_coef": 0.1, "kl_kind": "full"}, resources={"gpus": 8}
        ),
        lambda: policy_stage(critic=None, algorithm="dapo"),
        lambda: policy_stage(critic=None, algorithm={"preset": "ppo", "shared_trunk": True}),
        lambda: policy_stage(algorithm="rloo", minibatch_size=256),
        lambda: policy_stage(algorithm={"preset": "ppo", "kl_target": 6.0, "kl_horizon": 52}, batch_size=256),
        lambda: policy_stage(algorithm={"preset": "ppo", "kl_horizon": 1}),
        lambda: policy_stage(algorithm="ppo_max", ptx="demos"),
        lambda: policy_stage(algorithm={"preset": "ppo_max", "ptx_coef": 0}),
        lambda: VerifierTerm(verifier="a", wrong=-1.0),
        lambda: reward_model(data="pairs", lm_coef=0.3, centre_coef=0.02),
        lambda: reward_model(rankings="ranked"),
        lambda: collection(prompts="tasks", judge={"verifier": "arithmetic"}),
        lambda: collection(prompts="tasks", judge={"reward": "main"}, samples_per_prompt=4),
        lambda: collection(demonstrations="demos"),
        lambda: collection(demonstrations="demos", samples_per_prompt=1),
        lambda: Publication(stage="policy", registered_model="m"),
        lambda: best_of_n(),
        lambda: best_of_n(batch_size=128, minibatch_size=8),
        lambda: best_of_n(batch_size=16, samples_per_prompt=16, minibatch_size=1),
    ],
)
def test_what_those_rules_leave(made: Any) -> None:
    made()


def test_a_verifiers_term_gives_one_or_what_wrong_says() -> None:
    assert (VerifierTerm(verifier="a").wrong, VerifierTerm(verifier="a", wrong=-1).wrong) == (0.0, -1.0)


def test_terms_are_called_what_they_name() -> None:
    assert [ModelTerm(model="taste").name, VerifierTerm(verifier="arithmetic").name] == [
        "taste",
        "arithmetic",
    ]


def direct(**fields: Any) -> DirectPreferenceOptimization:
    return DirectPreferenceOptimization.model_validate(
        {"kind": "dpo", "init": "sft", "data": "pairs", **fields}
    )


@every(
    ("made", "field"),
    [
        (lambda: direct(beta=0), "beta"),
        (lambda: direct(reference=3), "reference"),
        (lambda: best_of_n(samples_per_prompt=1), "samples_per_prompt"),
        (lambda: best_of_n(critic="value"), "critic"),
        (lambda: collection(demonstrations="demos", samples_per_prompt=0), "samples_per_prompt"),
        (lambda: collection(demonstrations="demos", learning_rate=1e-5), "learning_rate"),
        (lambda: value_stage(returns={"kl_coef": -1}), "kl_coef"),
        (lambda: value_stage(returns={"lambda_value": 1}), "lambda_value"),
        (lambda: value_stage(gamma=1), "gamma"),
        (lambda: VerifierTerm(verifier="a", wrong="-1"), "wrong"),
    ],
)
def test_fields_of_the_wrong_kind_or_range(made: Any, field: str) -> None:
    with pytest.raises(ValidationError) as caught:
        made()
    assert [error["loc"][-1] for error in caught.value.errors()] == [field]


@every("name", ["Bad", "9lives", "a-b", "a.b", "", "a" * 64, "a\n", "модель"])
def test_names_are_plain(plain: dict[str, Any], name: str) -> None:
    """A dataset's name with odd characters is refused."""
    plain["data"][name] = plain["data"]["demos"]
    with pytest.raises(ValidationError, match="pattern"):
        Recipe.model_validate(plain)


@every("name", ["../x", "a/b", "", "a b", "-x", "a" * 129])
def test_registered_models_have_names_that_are_no_paths(name: str) -> None:
    with pytest.raises(ValidationError, match="pattern"):
        Publication(stage="policy", registered_model=name)


def test_columns_are_ours() -> None:
    """``columns`` maps to our own columns only; another name is refused."""
    with pytest.raises(ValidationError, match=r"columns.question"):
        Data.model_validate({"source": "x.csv", "columns": {"question": "b"}})


def test_a_recipe_needs_a_stage(plain: dict[str, Any]) -> None:
    plain["stages"] = {}
    with pytest.raises(ValidationError, match="at least 1"):
        Recipe.model_validate(plain)


def test_algorithm_is_what_a_policy_stage_holds() -> None:
    assert isinstance(policy_stage().algorithm, Algorithm)


@pytest.mark.parametrize("column", ["margin", "responses", "ranks"])
def test_a_template_makes_text_and_nothing_else(column: str) -> None:
    with pytest.raises(
        ValidationError, match=f"columns.{column}='{{a}} {{b}}' is a template, which makes a text"
    ):
        Data(source="x.json", columns={column: "{a} {b}"})
    assert Data(source="x.json", columns={"prompt": "{a} {b}", column: "there"}).columns[column] == "there"


def test_stop_strings_are_different_texts() -> None:
    assert Generation(stop=["\n\nHuman:", "#"]).stop == ("\n\nHuman:", "#")
    assert "stop" not in Generation().model_dump(mode="json")  # so that earlier recipes keep their stage keys
    for stop in ([""], ["a\N{REPLACEMENT CHARACTER}"], "\n", [1]):
        with pytest.raises(ValidationError):
            Generation(stop=stop)
    with pytest.raises(ValidationError, match=r"stop has '#' twice; leave one out"):
        Generation(stop=["#", "a", "#"])
