"""A gate on what the recipe cannot measure is refused when it is loaded, not after hours of training."""

import pytest

from tests.support.every import every
from vantage.schemas.checks.critic_gates import SEVERAL_RESPONSES
from vantage.schemas.kinds import KINDS
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.problems import RecipeError

GATE = "gate: {metric: explained_variance, at_least: 0.3}"


@pytest.fixture
def text(text: str) -> str:
    """Return the recipe with 64 test prompts and responses of at most 72 tokens."""
    text = text.replace("model: {", "generation: {max_response_tokens: 72}\nmodel: {")
    return text.replace('arithmetic/prompts"}', 'arithmetic/prompts", split: {test: 64}}')


def problems(text: str) -> list[str]:
    try:
        parse_recipe(text)
    except RecipeError as error:
        return str(error).splitlines()
    return []


@every("family", ["tokens_left", "length"])
@every(("tokens", "is_reached"), [("1", True), ("64_127", True), ("128_255", False), ("65536", False)])
def test_bins_that_no_response_reaches(text: str, family: str, tokens: str, is_reached: bool) -> None:
    metric = f"explained_variance_{family}_{tokens}"
    found = problems(text.replace(GATE, f"gate: {{metric: {metric}, at_least: 0.0, confidence: 0.9}}"))
    if is_reached:
        assert found == []
    else:
        [problem] = found
        assert (
            f"stages.value.gate.metric: '{metric}' is about more tokens than a response can have (72"
            in problem
        )
        assert problem.endswith("use bins up to 64_127")


@every(
    ("metric", "samples", "is_enough"),
    [
        ("rank_correlation", 64, False),
        ("rank_correlation", 65, True),
        ("explained_variance_hardest", 64, False),
        ("others_mean_mse", 127, False),
        ("others_mean_mse", 128, True),
        ("explained_variance", 8, True),
    ],
)
def test_responses_of_one_prompt(text: str, metric: str, samples: int, is_enough: bool) -> None:
    gate = f"gate: {{metric: {metric}, at_least: 0.0}}"
    for field in ("test_samples", "validation_samples"):
        found = problems(text.replace(GATE, f"{field}: {samples}\n    {gate}"))
        assert bool(found) is not is_enough
        assert is_enough or "set stages.value.test_samples: 256" in found[0]
    unknown = text.replace(", split: {test: 64}", "")
    assert problems(unknown.replace(GATE, f"test_samples: {samples}\n    {gate}")) == []


@pytest.mark.parametrize(("per_prompt", "is_enough"), [(1, False), (2, True)])
def test_collected_responses_of_one_prompt(text: str, per_prompt: int, is_enough: bool) -> None:
    collection = f"""collected:
    kind: rollout_collection
    policy: sft
    prompts: tasks
    reward: main
    held_out_samples_per_prompt: {per_prompt}
  value:"""
    gate = "rollouts: collected\n    test_samples: 128\n    gate: {metric: others_mean_mse, at_most: 9}"
    found = problems(text.replace("  value:", f"  {collection}").replace(GATE, gate))
    assert bool(found) is not is_enough, found
    assert is_enough or "set stages.collected.held_out_samples_per_prompt: 4" in found[0]


def test_of_several_gates_the_wrong_one_is_named(text: str) -> None:
    gates = "gate: [{metric: explained_variance, at_least: 0}, {metric: explained_variance_length_128_255, at_least: 0}]"
    [problem] = problems(text.replace(GATE, gates))
    assert "stages.value.gate.1.metric" in problem


def test_the_metrics_exist() -> None:
    """The metrics that need several responses are metrics of value stages."""
    assert SEVERAL_RESPONSES.keys() <= set(KINDS["value_pretraining"].estimates)
