"""Warnings about a recipe that is valid: probable mistakes, and settings that a paper advises against."""

from collections.abc import Iterator, Sequence

from vantage.schemas.checks.algorithm_warnings import algorithm_warnings
from vantage.schemas.checks.engines import engine_warnings
from vantage.schemas.recipe.evaluations import PolicyEvaluation
from vantage.schemas.recipe.recipe import Publication, Recipe
from vantage.schemas.recipe.stages import PolicyOptimization, ValuePretraining
from vantage.schemas.recipe.stages_on_data import DirectPreferenceOptimization
from vantage.schemas.steps import Inputs, in_order, rewards_read, sources_of


def warnings(recipe: Recipe, inputs: Inputs) -> list[str]:
    """Return warnings for the author of the recipe; none of them stops a run.

    ``inputs``: step → role → step that it reads, as ``dependencies`` returns it.
    """
    found = [*_unread(recipe, inputs), *_unrelated_gates(recipe.publish, inputs)]
    for name, stage in recipe.stages.items():
        if stage.resources.gpus and "precision" not in stage.model_fields_set:
            found.append(
                f"stages.{name}.precision: left out, so that {stage.resources.gpus} GPUs compute in float32; precision: auto "
                "computes in bfloat16, and `vantage estimate --gpu NAME` shows how much sooner it ends"
            )
        found += engine_warnings(name, stage)
        if isinstance(stage, PolicyEvaluation) and stage.candidate == stage.baseline:
            found.append(f"stages.{name}.baseline: '{stage.baseline}' is compared with itself")
        if isinstance(stage, ValuePretraining):
            found += _ungated_reward(recipe, name, stage)
        if isinstance(stage, PolicyOptimization):
            found += algorithm_warnings(recipe, name, stage)
        if isinstance(stage, DirectPreferenceOptimization):
            found += _unread_margin(recipe, name, stage)
            found += _beta_of_sums(name, stage)
    return found


def _unread(recipe: Recipe, inputs_of: Inputs) -> Iterator[str]:
    read = {step for inputs in inputs_of.values() for step in inputs.values()}
    shown = {name for name, stage in recipe.stages.items() if isinstance(stage, PolicyEvaluation)}
    trained_from = {
        step for name, inputs in inputs_of.items() if name not in shown for step in inputs.values()
    }
    scored = {name for stage in recipe.stages.values() for name in rewards_read(stage)}
    yield from (f"data.{name}: no stage reads it" for name in recipe.data if f"data.{name}" not in read)
    yield from (
        f"mixtures.{name}: no stage reads it" for name in recipe.mixtures if f"mixtures.{name}" not in read
    )
    yield from (
        f"verifiers.{name}: no stage reads it" for name in recipe.verifiers if f"verifiers.{name}" not in read
    )
    yield from (
        f"benchmarks.{name}: no stage reads it"
        for name in recipe.benchmarks
        if f"benchmarks.{name}" not in read
    )
    yield from (f"rewards.{name}: no stage reads it" for name in recipe.rewards if name not in scored)
    yield from (
        f"stages.{name}: no policy_optimization stage starts from this critic"
        for name, stage in recipe.stages.items()
        if isinstance(stage, ValuePretraining) and name not in trained_from
    )


def _unread_margin(recipe: Recipe, name: str, stage: DirectPreferenceOptimization) -> Iterator[str]:
    sources = sources_of(recipe, stage.data or "").items()
    named = [f"data.{each}.columns.margin" for each, data in sources if "margin" in data.columns]
    if named:
        yield (
            f"stages.{name}.data: the margins of '{stage.data}' are not read by DPO (arXiv 2305.18290 has none); "
            f"a reward_model reads them, or remove {named[0]}"
        )


def _beta_of_sums(name: str, stage: DirectPreferenceOptimization) -> Iterator[str]:
    """Warn if β has a size for sums over a response's tokens, but the loss reads their mean."""
    means = "simpo" if stage.loss == "simpo" else "length_normalised" if stage.length_normalised else None
    if means is not None and stage.loss != "ipo" and stage.beta < 1:
        papers = "2 to 10 (arXiv 2405.14734)" if means == "simpo" else "5 to 10 (arXiv 2411.15124)"
        yield (
            f"stages.{name}.beta: {stage.beta:g} is small for means over a response's tokens, which {means} compares: the "
            f"policy would hardly learn; the paper has {papers}"
        )


def _unrelated_gates(publish: Sequence[Publication], inputs: Inputs) -> Iterator[str]:
    upstream = _upstream(inputs)
    for i, publication in enumerate(publish):
        after, stage = publication.after, publication.stage
        if after is not None and after != stage and stage not in upstream[after]:
            yield f"publish.{i}.after: '{after}' does not read '{stage}', so its gate does not judge it"


def _upstream(inputs: Inputs) -> dict[str, set[str]]:
    """Return step → every step that it depends on, directly or not."""
    upstream: dict[str, set[str]] = {}
    for step in in_order(inputs):
        direct = set(inputs[step].values())
        upstream[step] = direct.union(*(upstream[each] for each in direct))
    return upstream


def _ungated_reward(recipe: Recipe, name: str, stage: ValuePretraining) -> Iterator[str]:
    if not any(gate.metric == "explained_variance" for gate in stage.gate):
        return
    for term in recipe.rewards[stage.reward].terms:
        trained = recipe.stages.get(term.stage or "")
        if trained is not None and not trained.gate:
            yield (
                f"stages.{name}.gate: scores of a reward model at chance level can be predicted well too; "
                f"give stages.{term.stage} a gate on pair_accuracy"
            )
