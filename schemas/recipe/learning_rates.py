"""Default learning rates: published ones, scaled to the width of the recipe's model.

rate = published · PUBLISHED_WIDTH / width, in two digits. The width is the model's hidden size, for a reward model that starts
from another model that one's; the published rates are in ``vantage.schemas.kinds``.

With Adam, the best learning rate of a transformer's matrix falls with its width (µP, arXiv 2203.03466, table 3).
Published rates fall too: GPT-3 was trained at 6e-4 with width 768 and at 1.2e-4 with 4096 (arXiv 2005.14165, table
2.1); Hugging Face's handbook fine-tunes at 2e-5 with width 4096, 3e-4 with 2048 and 1e-3 with 576 to 960, which is
steeper than the rule. The rule is a default, not an optimum: for the quickstart's model (width 128), tuning gave three
times these rates. A stage's ``learning_rate`` overrides it.

Adapters (LoRA) learn at ten times the rate of all weights: Hugging Face's handbook trains zephyr-7b with both, SFT at
2e-5 and 2e-4, DPO at 5e-7 and 5e-6.
"""

from collections.abc import Iterator, Mapping

from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.stage import Training
from vantage.schemas.recipe.stages import PolicyOptimization

PUBLISHED_WIDTH = 4096
"""Hidden size of the models (about 7 billion parameters) for which the rates in ``vantage.schemas.kinds`` were published."""

LORA_FACTOR = 10.0
"""Rate of adapters over that of all weights."""


def unset_rates(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield (stage, field) of every learning rate that the recipe does not set."""
    for name, stage in recipe.stages.items():
        if isinstance(stage, Training) and stage.learning_rate is None:
            yield name, "learning_rate"
        if isinstance(stage, PolicyOptimization) and has_unset_critic_rate(stage):
            yield name, "critic_learning_rate"


def has_unset_critic_rate(stage: PolicyOptimization) -> bool:
    """Return whether the stage trains a critic and does not set its learning rate."""
    return stage.algorithm.trains_critic and stage.critic_learning_rate is None


def rate_for(kind: str, field: str, *, width: int, lora: bool = False) -> float:
    """Return the default rate of a kind of stage for a model of this hidden size, in two digits.

    Args:
        lora: whether adapters are trained, and not all weights.

    Raises:
        ValueError: nothing is published for the kind; its row in ``vantage.schemas.kinds`` lacks it.
    """
    published: float | None = getattr(KINDS[kind], field)
    if published is None:
        raise ValueError(f"a {kind} stage has no published {field}; add one to its row in schemas/kinds.py")
    factor = LORA_FACTOR if lora else 1.0
    return float(f"{factor * published * PUBLISHED_WIDTH / width:.1e}")


def with_learning_rates(recipe: Recipe, *, width: int, widths: Mapping[str, int] | None = None) -> Recipe:
    """Return the recipe with default learning rates filled in.

    Args:
        width: hidden size of the recipe's model.
        widths: other model → its hidden size, for those that a stage trains from; left out: ``width``.
    """
    stages = dict(recipe.stages)
    for name, field in unset_rates(recipe):
        stage = stages[name]
        has_lora = isinstance(stage, Training) and bool(stage.lora)
        own = (widths or {}).get(recipe.other_model_of(stage) or "", width)
        rate = rate_for(stage.kind, field, width=own, lora=has_lora)
        stages[name] = stages[name].model_copy(update={field: rate})
    return recipe.model_copy(update={"stages": stages})
