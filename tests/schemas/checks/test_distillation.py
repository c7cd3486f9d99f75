"""Recipes with a distillation read the right inputs, are refused where they are wrong, and have the teacher in the key."""

from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from tests.support.every import every
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.distillation import Distillation
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.learning_rates import with_learning_rates
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.terms import VerifierTerm
from vantage.schemas.records.stage_key import key_parts, stage_key
from vantage.schemas.steps import dependencies, rewards_read

VERIFIED = Reward(terms=(VerifierTerm(verifier="arithmetic"),))
SERVED = {"url": "http://teacher:8000", "model": "large"}
STUDENT = {"kind": "distillation", "init": "sft", "teacher": "large", "reward": "main", "prompts": "tasks"}


@pytest.fixture
def plain(plain: dict[str, Any]) -> dict[str, Any]:
    """Return the small recipe with another model as the teacher of its SFT."""
    plain["models"] = {"large": {"source": "builtin:nano"}}
    plain["stages"]["student"] = dict(STUDENT)
    return plain


def parsed(plain: dict[str, Any], **changes: Any) -> Recipe:
    plain["stages"]["student"] |= changes
    return parse_recipe(yaml.safe_dump(plain))


def test_a_teacher_is_another_model_a_stage_or_the_recipes_model(plain: dict[str, Any]) -> None:
    recipe = parsed(plain)
    read = dependencies(recipe)["student"]
    assert (read["init"], read["teacher"]) == ("sft", "models.large")
    assert rewards_read(recipe.stages["student"]) == ("main",)
    plain["models"] = {}
    for teacher in ("policy", "model"):
        assert dependencies(parsed(plain, teacher=teacher))["student"]["teacher"] == teacher


@every(
    ("changes", "message"),
    [
        ({"teacher": "sft"}, "teacher=sft is the student itself, from which it has nothing to learn; name another"),
        ({"teacher": "reward"}, "'reward' is a reward_model stage; a teacher is a sft"),
        ({"teacher": "lagre"}, "no stage is called 'lagre'"),
        ({"init": "large", "teacher": "policy"}, "stages.student.init: 'large' is"),
        ({"batch_size": 64, "minibatch_size": 32, "samples_per_prompt": 3}, "batch_size=64 is not a multiple of samples_per_prompt=3"),
        ({"minibatch_size": 48}, "batch_size=256 is not a multiple of minibatch_size=48"),
        ({"resources": {"distributed": {"strategy": "fsdp2", "ranks": 2}}}, "reads all weights of the teacher at once, and resources.distributed"),
        ({"resources": {"offload": ["reference"]}}, "this stage reads no reference; leave reference out"),
        ({"rollouts": "collected"}, "a stage of kind distillation has no 'rollouts'"),
        ({"rollout": {"ahead": 1}}, "rollout.ahead"),
        ({"teacher_server": SERVED}, "both of teacher and teacher_server are there; give one of them"),
        ({"teacher": None}, "neither of teacher and teacher_server is there; give one of them"),
        ({"teacher": None, "teacher_server": SERVED}, "kl=full sums over the vocabulary, and teacher_server returns the log-probability of "
         "each sampled token alone; set kl: sampled, or name a folder or a stage as teacher"),
        ({"teacher": None, "kl": "sampled", "teacher_server": SERVED | {"url": "http://teacher:8000/v1/"}},
         "url=http://teacher:8000/v1/ ends in /v1, and the server is asked for paths outside it too; leave /v1 out"),
        ({"teacher": None, "kl": "sampled", "teacher_server": SERVED | {"api_key_variable": "TEACHER"}}, "would not be masked in logs"),
        ({"teacher": None, "kl": "sampled", "teacher_server": {"url": "http://teacher:8000"}}, "teacher_server.model: is required"),
        ({"teacher": None, "kl": "sampled", "teacher_server": SERVED, "resources": {"distributed": {"strategy": "fsdp2", "ranks": 2}}},
         "distillation reads all weights at once, and resources.distributed"),
        ({"gate": {"metric": "teacher_lead", "at_least": 0.8}}, "did you mean 'teacher_lead_share'?"),
        ({"guards": {"metric": "kl_coef", "above": 1.0}}, "a distillation stage has no curve 'kl_coef'"),
    ],
)  # fmt: skip
def test_what_is_refused(plain: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    """A wrong distillation stage is refused by its field."""
    plain["stages"]["student"] = STUDENT | changes
    with pytest.raises(RecipeError) as refused:
        parse_recipe(yaml.safe_dump(plain))
    assert message in str(refused.value)


def test_a_gate_on_the_share_of_the_lead_may_have_a_confidence(plain: dict[str, Any]) -> None:
    gate = {"metric": "teacher_lead_share", "at_least": 0.8, "confidence": 0.95}
    [found] = parsed(plain, gate=gate).stages["student"].gate
    assert (found.metric, found.confidence) == ("teacher_lead_share", 0.95)


@pytest.mark.parametrize("metric", ["teacher_lead_share", "teacher_score"])
def test_a_gate_on_the_score_of_a_served_teacher_is_refused(plain: dict[str, Any], metric: str) -> None:
    """Nothing samples from such a teacher, so its score is unknown, unless `sampled: true` asks the server for samples."""
    served = {"kl": "sampled", "teacher_server": SERVED, "gate": {"metric": metric, "at_least": 0.5}}
    del plain["stages"]["student"]["teacher"], plain["models"]
    with pytest.raises(RecipeError) as refused:
        parsed(plain, **served)
    [problem] = str(refused.value).splitlines()[-1:]
    assert f"a distillation stage does not measure '{metric}'; set teacher_server.sampled: true" in problem
    assert "or name a folder or a stage as teacher" in problem
    sampled = served | {"teacher_server": SERVED | {"sampled": True}}
    assert parsed(plain, **sampled).stages["student"].gate[0].metric == metric
    [gate] = parsed(plain, gate={"metric": "test_score", "at_least": 0.5}).stages["student"].gate
    assert gate.metric == "test_score"


def test_a_served_teacher_needs_temperature_one(plain: dict[str, Any]) -> None:
    del plain["stages"]["student"]["teacher"], plain["models"]
    plain["generation"] = plain.get("generation", {}) | {"temperature": 0.7}
    with pytest.raises(RecipeError) as refused:
        parsed(plain, kl="sampled", teacher_server=SERVED)
    assert (
        "stages.student.teacher_server: the server returns log-probabilities at temperature 1, and generation.temperature=0.7; "
        "set generation.temperature: 1.0, or name a folder or a stage as teacher"
    ) in str(refused.value)


def test_the_key_names_the_served_model_and_not_where_it_is() -> None:
    def parts(**fields: Any) -> dict[str, Any]:
        plain = {name: value for name, value in STUDENT.items() if name != "teacher"}
        work = Distillation.model_validate({**plain, "kl": "sampled", "teacher_server": SERVED | fields})
        inputs = {"init": "0" * 64, "prompts": "1" * 64}
        return key_parts(
            work, generation=Generation(), rewards={"main": VERIFIED}, seed=1, inputs=inputs, extra={}
        )

    assert parts()["configuration"]["teacher_server"] == {"model": "large"}
    elsewhere = {
        "url": "https://other",
        "api_key_variable": "TEACHER_API_KEY",
        "at_once": 4,
        "patience_seconds": 9.0,
    }
    assert parts() == parts(**elsewhere, request_seconds=5.0, requests_per_minute=60)
    assert stage_key(parts()) != stage_key(parts(model="larger"))


def test_the_new_fields_leave_earlier_keys_alone() -> None:
    found = Distillation.model_validate(STUDENT).model_dump(mode="json")
    assert not {"kl", "teacher_server"} & found.keys()


def test_the_teachers_weights_are_part_of_the_key() -> None:
    def key(teacher: str) -> str:
        work = Distillation.model_validate(STUDENT)
        inputs = {"init": "0" * 64, "prompts": "1" * 64, "teacher": teacher * 64}
        return stage_key(
            key_parts(
                work, generation=Generation(), rewards={"main": VERIFIED}, seed=1, inputs=inputs, extra={}
            )
        )

    assert key("2") == key("2") != key("3")


def test_the_stage_needs_a_teacher() -> None:
    with pytest.raises(ValidationError, match="teacher"):
        Distillation.model_validate({name: value for name, value in STUDENT.items() if name != "teacher"})


def test_the_learning_rate_is_minillms_by_the_width_of_the_model(plain: dict[str, Any]) -> None:
    """The rate is 5e-6 at width 4,096."""
    found = with_learning_rates(parsed(plain), width=1024).stages["student"]
    assert isinstance(found, Distillation) and found.learning_rate == 2e-5
