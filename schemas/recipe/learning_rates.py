"""Learning rates for stages that name none: published ones, scaled to the width of the recipe's model.

rate = PUBLISHED · PUBLISHED_WIDTH / width, in two digits, where width is the model's hidden size.

With Adam, the rate at which a matrix of a transformer learns best falls with its width (µP, arXiv 2203.03466,
table 3), and what is published falls so too: GPT-3 was trained at 6e-4 with width 768 and at 1.2e-4 with 4096 (arXiv
2005.14165, table 2.1); Hugging Face's handbook fine-tunes at 2e-5 with width 4096, 3e-4 with 2048 and 1e-3 with 576
to 960, steeper than the rule. So a rule, not an optimum: the quickstart's model (width 128) was tuned to three times
its rates. Any stage's ``learning_rate`` sets another.
"""

from collections.abc import Iterator

from schemas.recipe.recipe import Recipe
from schemas.recipe.stages import PolicyOptimization, Training

PUBLISHED_WIDTH = 4096
"""Hidden size of the models of about 7 billion parameters that the rates below were published for."""

PUBLISHED = {
    "sft": 2e-5,  # zephyr-7b-beta, alignment-handbook
    "best_of_n": 2e-5,  # the same loss as SFT
    "reward_model": 1e-5,  # 9e-6 in OpenRLHF's reward models
    "value_pretraining": 1e-5,  # inferred: like a reward model, a scalar head and its trunk learn fixed targets
    "dpo": 5e-7,  # zephyr-7b-beta
    "policy_optimization": 1e-6,  # VAPO, arXiv 2504.05118
}
"""Kind of stage → learning rate at that width."""

PUBLISHED_CRITIC = 2e-6
"""The same of the critic beside a policy (VAPO)."""


def unset_rates(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """(Stage, field) of every learning rate that the recipe leaves to the rule."""
    for name, stage in recipe.stages.items():
        if isinstance(stage, Training) and stage.learning_rate is None:
            yield name, "learning_rate"
        if isinstance(stage, PolicyOptimization):
            has_critic = stage.algorithm.reads_critic
            if has_critic and stage.critic_learning_rate is None:
                yield name, "critic_learning_rate"


def rate_for(kind: str, field: str, *, width: int) -> float:
    """The rate of a stage of this kind for a model of this hidden size, in two digits."""
    published = PUBLISHED_CRITIC if field == "critic_learning_rate" else PUBLISHED[kind]
    return float(f"{published * PUBLISHED_WIDTH / width:.1e}")


def with_learning_rates(recipe: Recipe, *, width: int) -> Recipe:
    """The recipe with every learning rate written out."""
    stages = dict(recipe.stages)
    for name, field in unset_rates(recipe):
        rate = rate_for(stages[name].kind, field, width=width)
        stages[name] = stages[name].model_copy(update={field: rate})
    return recipe.model_copy(update={"stages": stages})
