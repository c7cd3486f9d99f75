"""Find gates on a critic that could never open: bins that no response reaches, and prompts with a single response."""

import re
from collections.abc import Iterator

from vantage.schemas.metric_names import DOUBLING_TOKENS
from vantage.schemas.problems import Path, Problem, quote
from vantage.schemas.recipe.critic_head import ONE_VALUE
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.stages import ValuePretraining
from vantage.schemas.recipe.stages_that_collect import RolloutCollection
from vantage.schemas.splits import asked_test_rows

_BY_TOKENS = re.compile(r"explained_variance_(?:tokens_left|length)_(\d+)(?:_\d+)?")

_NEEDED_HEAD = {"quantile_calibration_error": "quantiles", "critic_disagreement": "ensemble"}
"""Metric → field of the head without which it is not measured."""
_EXAMPLES = {"quantiles": 32, "ensemble": 2}

SEVERAL_RESPONSES = {
    "explained_variance_within_prompts": 1,
    "rank_correlation": 1,
    "explained_variance_hardest": 1,
    "explained_variance_middle": 1,
    "explained_variance_easiest": 1,
    "others_mean_mse": 2,
}
"""Metric → responses that it needs: 1, more responses than test prompts, so that some prompts have two; 2, two for every
prompt."""


def critic_gate_problems(recipe: Recipe, name: str, stage: ValuePretraining) -> Iterator[Problem]:
    """Yield a problem for each gate of a value stage on a metric that this recipe cannot measure."""
    longest = recipe.generation.max_response_tokens
    for number, gate in enumerate(stage.gate):
        index = (number,) if len(stage.gate) > 1 else ()
        path: Path = ("stages", name, "gate", *index, "metric")
        if (found := _BY_TOKENS.fullmatch(gate.metric)) and int(found[1]) > longest:
            message = f"{quote(gate.metric)} is about more tokens than a response can have ({longest}: generation.max_response_tokens)"
            last = [tokens for tokens in DOUBLING_TOKENS if int(tokens.partition("_")[0]) <= longest][-1]
            yield Problem(path, message, f"use bins up to {last}")
        head = ONE_VALUE if stage.head is None else stage.head
        needed = _NEEDED_HEAD.get(gate.metric)
        if needed is not None and getattr(head, needed) is None:
            message = f"{quote(gate.metric)} needs a critic with {needed}, and this one has head={head.form}"
            yield Problem(
                path, message, f"set head: {{{needed}: {_EXAMPLES[needed]}}}, or leave the gate out"
            )
        remedies = _for_several_responses(recipe, name, stage, needed=SEVERAL_RESPONSES.get(gate.metric, 0))
        if remedies:
            message = f"{quote(gate.metric)} compares responses to one prompt, and there are too few to a test prompt"
            yield Problem(path, message, f"set {' and '.join(remedies)}")


def _for_several_responses(recipe: Recipe, name: str, stage: ValuePretraining, *, needed: int) -> list[str]:
    """Return the setting that gives test prompts several responses; empty if they have several, or if that is
    unknown."""
    collection, prompts = recipe.stages.get(stage.rollouts or ""), _test_prompts(recipe, stage)
    responses = stage.validation_samples if stage.test_samples is None else stage.test_samples
    remedies = []
    if prompts is not None and responses < needed * prompts + (needed == 1):
        remedies.append(f"stages.{name}.test_samples: {4 * prompts}")
    if isinstance(collection, RolloutCollection):
        each = collection.held_out_samples_per_prompt or collection.samples_per_prompt
        if needed and each < 2:
            remedies.append(f"stages.{stage.rollouts}.held_out_samples_per_prompt: 4")
    return remedies


def _test_prompts(recipe: Recipe, stage: ValuePretraining) -> int | None:
    """Return the number of test prompts, if the recipe asks for a number."""
    asked = asked_test_rows(recipe.data, recipe.mixtures, stage.prompts)
    return asked if isinstance(asked, int) else None
