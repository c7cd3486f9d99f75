"""A mistake is described with its place, rule and remedy."""

from vantage.schemas.problems import (
    Problem,
    RecipeError,
    quote,
    suggest,
)


def test_a_problem_names_file_line_field_message_and_remedy() -> None:
    problem = Problem(("stages", "policy", "critic"), "'sft' is no critic", "use value", 14, "recipes/x.yaml")
    assert str(problem) == "recipes/x.yaml:14: stages.policy.critic: 'sft' is no critic; use value"


def test_an_override_is_named_once() -> None:
    problem = Problem(("stages", "policy", "seed"), "is wrong", source="--set stages.policy.seed=x")
    assert str(problem) == "--set stages.policy.seed=x: is wrong"
    above = Problem(("stages", "policy"), "is wrong", source="--set stages.policy.seed=x")
    assert str(above) == "--set stages.policy.seed=x: stages.policy: is wrong"


def test_an_error_prints_every_problem_on_a_line() -> None:
    error = RecipeError([Problem(("seed",), "one"), Problem((), "two", source="x.yaml")])
    assert str(error) == "seed: one\nx.yaml: two"
    assert len(error.problems) == 2


def test_long_values_are_cut() -> None:
    assert quote("a" * 1000) == "'" + "a" * 59 + "…"
    assert quote({"a": [1, None, True]}) == '{"a": [1, null, true]}'


def test_a_near_word_is_suggested_and_otherwise_all_are_listed() -> None:
    assert suggest("polcy", ["policy", "sft"]) == "did you mean 'policy'?"
    assert suggest("temp", ["max_tokens", "temperature"]) == "did you mean 'temperature'?"
    assert suggest("zzz", ["policy", "sft"]) == "use one of: policy, sft"
    assert suggest("zzz", []) == ""
