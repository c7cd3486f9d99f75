"""Terms with named scores load or are refused by rule, and the dry run of a verifier gets what it has to check."""

from pathlib import Path
from typing import Any

import pytest

from vantage.schemas.checks.score_switches import score_problems
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError
from vantage.schemas.recipe.algorithm import Algorithm
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.score_rules import ScoreRange, ScoreRule
from vantage.schemas.recipe.terms import VerifierTerm
from vantage.schemas.verifier_uses import uses_of

NAMED = "{verifier: mine, weight: 2.0, scores: {style: {weight: 0.5, clip: {low: 0, high: 1}, offset: -0.5}, facts: {}}}"


def with_term(text: str, term: str) -> str:
    """Return the small recipe with a verifier of its own, and a term of its reward in line 12."""
    return text.replace("rewards:\n", "verifiers:\n  mine: {source: mine.py}\nrewards:\n").replace(
        "      - {model: reward}\n", f"      - {{model: reward}}\n      - {term}\n"
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text("")
    return tmp_path


def test_rules_of_named_scores_load_and_are_written_again(text: str, folder: Path) -> None:
    recipe = parse_recipe(with_term(text, NAMED), folder=folder)
    term = recipe.rewards["main"].terms[1]
    assert isinstance(term, VerifierTerm)
    assert term.scores == {
        "style": ScoreRule(weight=0.5, clip=ScoreRange(low=0.0, high=1.0), offset=-0.5),
        "facts": ScoreRule(),
    }
    assert term.rule_of("style").weight == 1.0 and term.rule_of("facts").weight == 2.0
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_terms_without_them_are_written_as_ever() -> None:
    """What is written is in the keys of the stages that read the reward."""
    reward = Reward.model_validate({"terms": [{"model": "reward"}, {"verifier": "a", "wrong": -1.0}]})
    assert reward.model_dump(mode="json")["terms"] == [
        {"weight": 1.0, "model": "reward", "verifier": None, "wrong": 0.0},
        {"weight": 1.0, "model": None, "verifier": "a", "wrong": -1.0},
    ]


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (
            "{verifier: mine, offset: 1.0, scores: {a: {}}}",
            "rewards.main.terms.1: clip, offset and whiten apply to one score, and this term has several; give them to a name under "
            "scores",
        ),
        (
            "{verifier: mine, clip: {}}",
            "rewards.main.terms.1.clip: clip has neither low nor high; give one or both, or leave clip out",
        ),
        (
            "{verifier: mine, clip: {low: 1, high: 1}}",
            "rewards.main.terms.1.clip: clip.low=1 is not below clip.high=1; give the smaller bound as low",
        ),
        ("{verifier: mine, scores: {Style: {}}}", "'Style' is not a valid name"),
        (
            "{verifier: mine, scores: {a: {wait: 1}}}",
            "rewards.main.terms.1.scores.a.wait: there is no field 'wait' here; did you mean",
        ),
        ("{model: reward, scores: {a: {}}}", "there is no field 'scores' here"),
    ],
)
def test_refusals_name_the_line_the_field_and_the_remedy(
    text: str, folder: Path, term: str, message: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        parse_recipe(with_term(text, term), name="x.yaml", folder=folder)
    assert "x.yaml:13: " in str(refused.value) and message in str(refused.value)


def test_a_model_of_an_ensemble_has_no_rule_of_its_own() -> None:
    terms = [{"model": "a"}, {"model": "b", "offset": 1.0}]
    with pytest.raises(ValueError, match="b has a clip, an offset, whiten or step_ends; leave it out"):
        Reward.model_validate({"terms": terms, "ensemble": {"combine": "mean"}})


def test_the_dry_run_is_given_every_use_of_a_verifier(plain: dict[str, Any]) -> None:
    plain["verifiers"] = {
        "mine": {"source": "builtin:exact_match"},
        "other": {"source": "builtin:exact_match"},
    }
    plain["rewards"]["main"]["terms"] = [{"model": "reward"}, {"verifier": "mine", "wrong": -1.0}]
    plain["rewards"]["unread"] = {"terms": [{"verifier": "mine"}]}
    plain["stages"]["policy"]["algorithm"] = {"preset": "vapo", "positive_verifier": "mine"}
    plain["stages"]["evaluation"]["judge"] = {"verifier": "mine"}
    recipe = Recipe.model_validate(plain)
    uses = uses_of(recipe, "mine")
    assert [use.path for use in uses] == [
        "rewards.main.terms.1",  # once, though two stages read it
        "stages.policy.algorithm.positive_verifier",
        "stages.evaluation.judge.verifier",
    ]
    assert [use.term for use in uses] == [VerifierTerm(verifier="mine", wrong=-1.0), None, None]
    assert uses_of(recipe, "other") == ()


@pytest.mark.parametrize(
    ("switches", "message"),
    [
        (
            {"preset": "rloo"},
            "normalise_each_score is a form of advantage=group_normalised, and advantage is leave_one_out; use "
            "advantage: group_normalised, or normalise_each_score: false",
        ),
        (
            {"preset": "grpo", "kl_coef": 0.1},
            "kl_coef=0.1 changes the sum of the scores, which normalise_each_score does not read; use kl_loss_coef in its place",
        ),
        ({"preset": "grpo", "reward_scaling": "scale"}, "reward_scaling=scale changes the sum of the scores"),
        ({"preset": "grpo", "reward_clip": 1.0}, "give clip to the terms or named scores of the reward"),
        ({"preset": "grpo", "overlong_buffer": 0.2}, "use overlong_filter, or a named score"),
        ({"preset": "grpo", "whiten_advantages": True}, "leave it out: the sum is whitened already"),
    ],
)
def test_each_score_is_normalised_only_where_nothing_else_is_added(
    switches: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError) as refused:
        Algorithm.model_validate({**switches, "normalise_each_score": True})
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("field", "value"), [("missing_eos", {"subtract": 1.0}), ("ensemble", {"combine": "mean"})]
)
def test_a_reward_with_more_than_scores_cannot_be_normalised_score_by_score(
    text: str, folder: Path, field: str, value: dict[str, Any]
) -> None:
    plain = text.replace("algorithm: vapo", "algorithm: {preset: grpo, normalise_each_score: true}")
    recipe = parse_recipe(plain, folder=folder)
    reward = recipe.rewards["main"].model_copy(update={field: value})
    [problem] = score_problems({"main": reward}, "policy", recipe.stages["policy"])
    assert problem.path == ("stages", "policy", "algorithm", "normalise_each_score")
    assert f"'main' has {field}, which is no score that could be normalised within a group" == problem.message


@pytest.mark.parametrize(
    ("term", "message"),
    [
        (
            "{length: linear, buffer: 0.2}",
            "buffer belongs to length: overlong, and this is length: linear; leave it out",
        ),
        (
            "{length: overlong}",
            "buffer belongs to length: overlong, and this is length: overlong; give one, DAPO's is 0.2",
        ),
        (
            "{length: relative, limit: 9}",
            "limit=9 is not read by length: relative, which compares responses to one prompt",
        ),
        ("{length: square}", "rewards.main.terms.1.length: 'square' is not"),
        (
            "{length: linear, verifier: mine}",
            "a reward term names either a model, a verifier, a judge, a reward server (http) or a length; give exactly one",
        ),
    ],
)
def test_length_penalties_that_make_no_sense_are_refused(
    text: str, folder: Path, term: str, message: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        parse_recipe(with_term(text, term), name="x.yaml", folder=folder)
    assert "x.yaml:13: " in str(refused.value) and message in str(refused.value)


GROUPS = "compares the lengths of responses to one prompt, and samples_per_prompt is 1"


@pytest.mark.parametrize(
    ("term", "algorithm", "message"),
    [
        ({"length": "linear", "weight": 0.5}, "vapo", None),
        ({"length": "overlong", "buffer": 0.2}, "grpo", None),
        ({"length": "relative"}, "vapo", None),
        ({"length": "relative"}, {"preset": "grpo", "samples_per_prompt": 1}, f"'main' {GROUPS}"),
        ({"length": "relative"}, {"preset": "grpo", "samples_per_prompt": 4}, None),
        (
            {"length": "overlong", "buffer": 0.2},
            {"preset": "grpo", "overlong_buffer": 0.2},
            "'main' has a term length: overlong, and algorithm.overlong_buffer is the same penalty",
        ),
    ],
)
def test_length_penalties_fit_the_policy_stages_that_read_them(
    plain: dict[str, Any], term: dict[str, Any], algorithm: Any, message: str | None
) -> None:
    plain["stages"]["policy"]["algorithm"] = algorithm
    plain["rewards"]["main"]["terms"].append(term)
    recipe = Recipe.model_validate(plain)
    found = [each.message for each in score_problems(recipe.rewards, "policy", recipe.stages["policy"])]
    assert found == ([] if message is None else [message])


@pytest.mark.parametrize("kind", ["linear", "relative"])
def test_a_critic_cannot_learn_what_depends_on_other_responses(text: str, folder: Path, kind: str) -> None:
    written = with_term(text, f"{{length: {kind}}}")
    if kind == "linear":
        parse_recipe(written, folder=folder)
        return
    with pytest.raises(RecipeError) as refused:
        parse_recipe(written, name="x.yaml", folder=folder)
    assert (
        "stages.value.reward: 'main' compares lengths within a group, which a critic of single responses cannot predict; use "
        "length: linear or overlong"
    ) in str(refused.value)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ("vapo", None),
        ({"preset": "grpo", "reward_scaling": "scale"}, "has moments of scores that are not whitened"),
        ({"preset": "grpo", "normalise_each_score": True}, "normalises each score already"),
        (
            {"preset": "grpo", "advantage": "greedy_baseline"},
            "greedy_baseline compares with responses of another rollout",
        ),
        (
            {"preset": "grpo", "advantage": "reference_mean"},
            "reference_mean compares with responses of another rollout",
        ),
    ],
)
def test_whitened_scores_fit_the_stages_that_read_them(
    plain: dict[str, Any], algorithm: Any, message: str | None
) -> None:
    plain["stages"]["policy"]["algorithm"] = algorithm
    if message is not None and message.startswith("reference_mean"):
        plain["stages"]["policy"]["rollouts"] = "collected"
    plain["rewards"]["main"]["terms"].append({"verifier": "arithmetic", "scores": {"a": {"whiten": True}}})
    recipe = Recipe.model_validate(plain)
    found = [each.message for each in score_problems(recipe.rewards, "policy", recipe.stages["policy"])]
    assert found == ([] if message is None else [f"{message}, and 'main' has a score with whiten"])


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            {"terms": [{"model": "a", "whiten": True, "offset": 1.0}]},
            "offset=1 has no effect on a score whose mean is",
        ),
        (
            {"terms": [{"model": "a", "whiten": True}], "missing_eos": {"replace": -1.0}},
            "use missing_eos.subtract",
        ),
        (
            {"terms": [{"verifier": "a", "whiten": True, "scores": {"b": {}}}]},
            "give them to a name under scores",
        ),
    ],
)
def test_whitening_that_makes_no_sense_is_refused(reward: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reward.model_validate(reward)


def test_collected_responses_cannot_be_whitened(plain: dict[str, Any]) -> None:
    plain["rewards"]["main"]["terms"] = [{"model": "reward", "whiten": True}]
    plain["stages"]["collected"] = {
        "kind": "rollout_collection",
        "policy": "sft",
        "prompts": "tasks",
        "reward": "main",
    }
    plain["stages"]["value"]["rollouts"] = "collected"
    recipe = Recipe.model_validate(plain)
    [problem] = score_problems(recipe.rewards, "value", recipe.stages["value"])
    assert problem.path == ("stages", "value", "rollouts")
    assert (
        problem.message
        == "'main' has a score with whiten, and collected responses have no parts of their scores"
    )


@pytest.mark.parametrize(
    ("algorithm", "switch"),
    [
        ("vapo", None),
        ({"preset": "grpo", "reward_scaling": "scale"}, "reward_scaling"),
        ({"preset": "grpo", "reward_clip": 1.0}, "reward_clip"),
        ({"preset": "grpo", "normalise_each_score": True}, "normalise_each_score"),
        ({"preset": "grpo", "advantage": "greedy_baseline"}, "advantage"),
    ],
)
def test_step_scores_fit_the_stages_that_read_them(
    plain: dict[str, Any], algorithm: Any, switch: str | None
) -> None:
    plain["stages"]["policy"]["algorithm"] = algorithm
    plain["rewards"]["main"]["terms"] = [{"model": "reward", "step_ends": {"text": "\n"}}]
    recipe = Recipe.model_validate(plain)
    found = list(score_problems(recipe.rewards, "policy", recipe.stages["policy"]))
    assert [each.path[-1] for each in found] == ([] if switch is None else [switch])
    for each in found:
        assert (
            each.message == "reads one score of a whole response, and 'main' scores the steps of a response"
        )
    stage = recipe.stages["value"].model_copy(update={"rollouts": "collected"})
    [problem] = score_problems(recipe.rewards, "value", stage)
    assert problem.path == ("stages", "value", "rollouts")
