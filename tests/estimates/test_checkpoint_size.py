"""The estimated bytes of a checkpoint equal the weights that torch counts in the built-in model."""

import pytest
from transformers import LlamaForCausalLM

from tests.estimates.test_recipe_estimate import EVERY_KIND
from vantage.estimates.checkpoint_size import checkpoint_bytes, most_checkpoint_bytes
from vantage.models.builtin import builtin_config
from vantage.schemas.loading.recipe_file import parse_recipe
from vantage.schemas.recipe.learning_rates import with_learning_rates
from vantage.schemas.recipe.recipe import ResolvedRecipe

CONFIG = builtin_config("tiny")
POLICY = sum(each.numel() for each in LlamaForCausalLM(CONFIG).parameters())
CRITIC = POLICY + CONFIG.hidden_size
"""The trunk, whose embeddings are also the policy's output head, and a head of one number."""
WEIGHTS, MOMENTS = 4, 8


def size(name: str, text: str = EVERY_KIND) -> int:
    return checkpoint_bytes(ResolvedRecipe.of(with_learning_rates(parse_recipe(text), width=128)), name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sft", (WEIGHTS + MOMENTS) * POLICY),
        ("dpo", (WEIGHTS + MOMENTS) * POLICY),
        ("reward", (WEIGHTS + MOMENTS) * CRITIC),
        ("value", (WEIGHTS + MOMENTS + WEIGHTS) * CRITIC),
        ("policy", (WEIGHTS + MOMENTS + WEIGHTS) * POLICY + (WEIGHTS + MOMENTS) * CRITIC),
        ("critic_free", (WEIGHTS + MOMENTS + WEIGHTS) * POLICY),
        ("evaluation", 0),
    ],
)
def test_it_is_the_weights_the_moments_and_the_best_weights(name: str, expected: int) -> None:
    assert size(name) == expected


@pytest.mark.parametrize(
    "text",
    [
        EVERY_KIND,
        EVERY_KIND.replace("kind: value_pretraining,", "kind: value_pretraining, keep_optimizer: true,"),
    ],
)
def test_no_stage_exceeds_the_bound(text: str) -> None:
    recipe = ResolvedRecipe.of(with_learning_rates(parse_recipe(text), width=128))
    sizes = [checkpoint_bytes(recipe, name) for name in recipe.stages]
    assert 0 < max(sizes) <= most_checkpoint_bytes(recipe.model)


def test_a_kept_optimizer_is_kept_beside_the_best_weights() -> None:
    text = EVERY_KIND.replace("kind: value_pretraining,", "kind: value_pretraining, keep_optimizer: true,")
    assert size("value", text) - size("value") == MOMENTS * CRITIC


def test_moments_in_8_bits_are_a_quarter() -> None:
    text = EVERY_KIND.replace("{kind: sft,", "{kind: sft, optimizer_states: 8bit,")
    assert size("sft", text) == pytest.approx((WEIGHTS + 2 * (1 + 4 / 256)) * POLICY, abs=1)
