"""Any preset can be an override of the quickstart, as the README promises."""

from typing import get_args

from tests.support.every import every
from vantage.schemas.checks.warnings import warnings
from vantage.schemas.loading.recipe_file import load_recipe
from vantage.schemas.recipe.presets import PresetName
from vantage.schemas.steps import dependencies

ONE_STEP = ("policy_gradient", "a2c", "rloo", "remax", "a_star_po")
"""Without a ratio a rollout is good for one optimiser step."""
COLLECTED = ("pvpo", "a_star_po", "spo")
COLLECTED_STAGE = [
    "stages.collected={kind: rollout_collection, policy: sft, prompts: prompts, reward: main, samples_per_prompt: 4}",
    "stages.policy.rollouts=collected",
]
"""Their baselines begin with responses that are sampled beforehand."""


@every("preset", get_args(PresetName))
def test_a_preset_is_one_override_and_what_it_asks_for(preset: str) -> None:
    overrides = [f"stages.policy.algorithm={preset}"]
    if preset in ONE_STEP:
        overrides.append("stages.policy.minibatch_size=256")
    if preset in COLLECTED:
        overrides += COLLECTED_STAGE
    if preset == "ppo_max":
        overrides.append("stages.policy.ptx=demonstrations")
    recipe = load_recipe("quickstart", overrides)
    policy = recipe.stages["policy"]
    assert policy.algorithm.preset == preset
    reads = dependencies(recipe)["policy"]
    assert ("critic" in reads) == (policy.algorithm.advantage == "gae")
    assert ("ptx" in reads) == (preset == "ppo_max")
    assert ("rollouts" in reads) == (preset in COLLECTED)
    unread = "stages.value: no policy_optimization stage starts from this critic"
    assert (unread in warnings(recipe, dependencies(recipe))) == ("critic" not in reads)


def test_the_mixtures_of_the_readme() -> None:
    load_recipe("quickstart", ["stages.policy.algorithm=grpo"])
    mixture = ["stages.policy.algorithm.kl_loss_coef=0.04", "stages.policy.algorithm.kl_loss_kind=full"]
    algorithm = load_recipe("quickstart", mixture).stages["policy"].algorithm
    assert (algorithm.preset, algorithm.kl_loss_coef, algorithm.kl_loss_kind) == ("vapo", 0.04, "full")
