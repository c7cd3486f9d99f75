"""The dependencies between the steps of a recipe, and the order that follows from them."""

from collections.abc import Mapping
from functools import reduce

from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.inputs import MODEL, Content, Data
from vantage.schemas.recipe.prompt_selection import PromptSelection
from vantage.schemas.recipe.recipe import Recipe
from vantage.schemas.recipe.rewards import Judge
from vantage.schemas.recipe.sources import Builtin
from vantage.schemas.recipe.stage import Stage
from vantage.schemas.recipe.stages import PolicyOptimization

CONTENT_COLUMNS: dict[str, tuple[str, ...]] = {
    "demonstrations": ("prompt", "response"),
    "preferences": ("prompt", "chosen", "rejected"),
    "rankings": ("prompt", "responses", "ranks"),
    "labelled_responses": ("prompt", "response", "label"),
    "prompts": ("prompt",),
}
"""Content → required columns. ``responses`` and ``ranks`` are lists of equal length; the best response has the lowest
rank, and equal ranks are a tie. ``label`` is true for a desirable response."""

OPTIONAL_COLUMNS: dict[str, tuple[str, ...]] = {
    "demonstrations": ("messages", "response_extra"),
    "preferences": ("margin", "subgroup", "messages", "chosen_extra", "rejected_extra"),
    "rankings": ("messages",),
    "labelled_responses": ("messages", "response_extra"),
    "prompts": ("answer", "messages"),
}
"""Content → optional columns: the smallest gap in score that a pair should have (Llama 2), the part of the
data that it belongs to, the reference answer for a verifier, the turns of a prompt that is a conversation, and the other
fields of a response that is a turn of one (``vantage.schemas.conversations.Message``)."""

MADE_COLUMNS = ("messages", *(f"{side}_extra" for side in ("response", "chosen", "rejected")))
"""Optional columns that no mapping names: they are made from conversations."""

_READ_FROM: dict[str, tuple[set[str], ...]] = {
    "prompt": ({"conversation"},),
    "response": ({"conversation"},),
    "chosen": (
        {"response_a", "response_b", "label"},
        {"responses", "label"},
        {"responses", "ranks"},
        {"responses", "scores"},
        {"response", "score"},
        {"response", "label"},
        {"conversation", "score"},
        {"conversation", "label"},
    ),
    "ranks": ({"scores"}, {"score"}, {"label"}),
    "responses": ({"response"}, {"conversation", "score"}, {"conversation", "label"}),
}
"""Required column → sets of columns of a file from which it can be made."""
_READ_FROM["rejected"] = _READ_FROM["chosen"]


def missing_columns(content: str, mapped: set[str]) -> list[str]:
    """Return the required columns that a file's mapping neither names nor can make from others.

    A pair of conversations has its prompt in both.
    """
    return [
        column
        for column in CONTENT_COLUMNS[content]
        if column not in mapped
        and not any(made_of <= mapped for made_of in _READ_FROM.get(column, ()))
        and not (column == "prompt" and content == "preferences")
    ]


MIXTURE_PREFIX = "mixtures."
"""Prefix of the implicit steps that mix datasets."""
CHECKED_ROWS = "checks.rows"
"""The implicit step that reads all rows as training will, before anything is trained."""
BENCHMARK_PREFIX = "benchmarks."
"""Prefix of the implicit steps that import folders of lm-eval tasks."""
OTHER_MODEL_PREFIX = "models."
"""Prefix of the implicit steps that import models beside the recipe's own."""
MERGED_PREFIX = "merged."
"""Prefix of the implicit steps that merge adapters."""

BUILTIN_VERIFIERS = ("arithmetic", "arithmetic_long", "arithmetic_habit")
"""Names of the built-in verifiers; a recipe's own are in its ``verifiers``."""


Inputs = Mapping[str, Mapping[str, str]]
"""Step → role → step whose artifact it reads."""

JUDGES: dict[str, tuple[str, ...]] = {"judge": ("judge",), "also": ("also",), "watch": ("watch", "judge")}
"""Field of a stage that names a judge of responses → where the judge is."""
WATCH_PROMPTS = "watch_prompts"
"""Role of the prompts that a watch has of its own."""
WATCHED_AT = ("watch", "prompts")
"""Path of these prompts in a stage."""


def stage_reference(stage: Stage) -> str | None:
    """Return the stage that KL is measured against: ``reference``, or the field that it defaults to.

    None: this kind of stage measures no KL, or the stage's loss reads no reference.
    """
    stand_in = KINDS[stage.kind].reference_from
    if stand_in is None or not getattr(stage, "reads_reference", True):
        return None
    name: str = getattr(stage, "reference", None) or getattr(stage, stand_in)
    return name


def dependencies(recipe: Recipe) -> dict[str, dict[str, str]]:
    """Return step → role → step whose artifact it reads; ``publish`` adds no dependency.

    Steps are the recipe's stages and the implicit ``model``, ``models.NAME``, ``data.NAME``, ``mixtures.NAME``, ``verifiers.NAME`` and
    ``benchmarks.NAME`` that they read. Roles are names of fields; the parts of a mixture have the roles ``part.0``, ``part.1`` …;
    test sets have the roles ``test_set.0``, ``test_set.1`` … in other datasets, and those of ``near_duplicates`` ``held_out.0``,
    ``held_out.1`` …; term i of reward r has the role ``reward.r.i`` if it is a model or one of the recipe's verifiers. A verifier has a dry run on each dataset that it judges (roles ``prompts.0``, ``prompts.1`` …); a
    built-in verifier only if the dataset is not from its own task. Before adapters are published, ``merged.STAGE`` makes a
    whole model of them.
    """
    stages = {name: _inputs(recipe, stage) for name, stage in recipe.stages.items()}
    read = {step for inputs in stages.values() for step in inputs.values()}
    mixtures = {
        f"{MIXTURE_PREFIX}{name}": {part_role(i): f"data.{part}" for i, part in enumerate(mixture.parts)}
        for name, mixture in recipe.mixtures.items()
        if f"{MIXTURE_PREFIX}{name}" in read
    }
    read |= {step for inputs in mixtures.values() for step in inputs.values()}
    datasets = _datasets_read(recipe, read)
    models = (
        f"{OTHER_MODEL_PREFIX}{name}" for name in recipe.models
    )  # a model that a stage replaces has no reader
    benchmarks = (f"{BENCHMARK_PREFIX}{name}" for name in recipe.benchmarks)
    before: dict[str, dict[str, str]] = {step: {} for step in (MODEL, *models) if step in read}
    checks = {CHECKED_ROWS: checked} if (checked := _checked_rows(recipe, read)) else {}
    after: dict[str, dict[str, str]] = {step: {} for step in benchmarks if step in read}
    verifiers = _verifier_steps(recipe)
    return {
        **before,
        **datasets,
        **after,
        **mixtures,
        **checks,
        **verifiers,
        **stages,
        **_merging_steps(recipe),
    }


def _reads_rows_with_another_model(recipe: Recipe, stage: Stage) -> bool:
    """Return whether a stage reads its rows with the tokenizer of a model beside the recipe's own."""
    reward_model = recipe.stages.get(getattr(stage, "reward_model", None) or "", stage)
    return recipe.other_model_of(reward_model) is not None


def checked_datasets(recipe: Recipe) -> tuple[str, ...]:
    """Return the datasets and mixtures that stages read with the recipe's model; none for a built-in one, which has no
    template."""
    if isinstance(recipe.model.origin, Builtin):
        return ()
    read = {
        getattr(stage, field): None
        for stage in recipe.stages.values()
        if not _reads_rows_with_another_model(recipe, stage)
        for field in KINDS[stage.kind].data
    }
    return tuple(name for name in read if name in recipe.data or name in recipe.mixtures)


def checked_role(position: int) -> str:
    """Return the role of a dataset whose rows are checked."""
    return f"data.{position}"


def _checked_rows(recipe: Recipe, read: set[str]) -> dict[str, str]:
    """Return role → step for the inputs of the check of all rows; empty if no stage reads the recipe's model."""
    names = checked_datasets(recipe)
    if MODEL not in read or not names:
        return {}
    return {MODEL: MODEL, **{checked_role(i): data_step(recipe, name) for i, name in enumerate(names)}}


def _datasets_read(recipe: Recipe, read: set[str]) -> dict[str, dict[str, str]]:
    """Return the steps that prepare datasets, each with those whose held-out prompts it leaves out."""
    apart = {name: _kept_apart_from(recipe, name) for name in recipe.data}
    names = {name for name in recipe.data if f"data.{name}" in read}
    while more := {other for name in names for other in apart[name].values()} - names:
        names |= more
    return {
        f"data.{name}": {role: f"data.{other}" for role, other in apart[name].items()}
        for name in recipe.data
        if name in names
    }


def _kept_apart_from(recipe: Recipe, name: str) -> dict[str, str]:
    """Return role → dataset whose held-out prompts this one does not train on."""
    near = recipe.data[name].near_duplicates
    named = enumerate(near.held_out_of if near else ())
    return {
        **{role_of_test_set(i): other for i, other in enumerate(other_test_sets(recipe, name))},
        **{held_out_role(i): other for i, other in named if not recipe.data[other].is_test_set},
    }


def other_test_sets(recipe: Recipe, name: str) -> tuple[str, ...]:
    """Return the test sets whose prompts this dataset leaves out; none, if it is one itself."""
    if recipe.data[name].is_test_set:
        return ()
    return tuple(other for other, data in recipe.data.items() if data.is_test_set)


def role_of_test_set(position: int) -> str:
    """Return the role of a test set."""
    return f"test_set.{position}"


def held_out_role(position: int) -> str:
    """Return the role of a dataset that ``near_duplicates.held_out_of`` names."""
    return f"held_out.{position}"


def _model_step(recipe: Recipe, name: str | None) -> str | None:
    """Return the step that makes the model of this name: a stage, ``model``, or one that imports another model."""
    if name is None or name not in recipe.models:
        return name
    return recipe.models[name].stand_in or f"{OTHER_MODEL_PREFIX}{name}"


def reward_imports(recipe: Recipe) -> frozenset[str]:
    """Return the steps that import a reward model: other models that a reward's term or a ``reward_evaluation`` stage names."""
    named = {term.stage for reward in recipe.rewards.values() for term in reward.terms}
    named |= {getattr(stage, "reward_model", None) for stage in recipe.stages.values()}
    return frozenset(f"{OTHER_MODEL_PREFIX}{name}" for name in recipe.models if name in named)


def part_role(position: int) -> str:
    """Return the role of a mixture's part."""
    return f"part.{position}"


def data_step(recipe: Recipe, name: str) -> str:
    """Return the step that makes the dataset of this name: prepared, mixed, or collected by a stage."""
    if name in recipe.mixtures:
        return f"{MIXTURE_PREFIX}{name}"
    return f"data.{name}" if name in recipe.data else name


def sources_of(recipe: Recipe, name: str) -> dict[str, Data]:
    """Return, by name, the recipe's datasets that the rows of a dataset or a mixture come from; none, if a stage collects
    them."""
    name = selected_from(recipe, name)
    parts = recipe.mixtures[name].parts if name in recipe.mixtures else (name,)
    return {part: recipe.data[part] for part in parts if part in recipe.data}


def selected_from(recipe: Recipe, name: str) -> str:
    """Return the dataset from which a ``prompt_selection`` stage selects; any other name as it is."""
    seen = {name}
    while isinstance(stage := recipe.stages.get(name), PromptSelection) and stage.prompts not in seen:
        name = stage.prompts
        seen.add(name)
    return name


def merging_step(stage: str) -> str:
    """Return the step that merges the adapters of a stage before they are published."""
    return f"{MERGED_PREFIX}{stage}"


def _merging_steps(recipe: Recipe) -> dict[str, dict[str, str]]:
    """Return the steps that merge the adapters of published stages."""
    return {
        merging_step(each.stage): {"adapters": each.stage}
        for each in recipe.publish
        if each.merge and trains_adapters(recipe, each.stage)
    }


def trains_adapters(recipe: Recipe, stage: str) -> bool:
    """Return whether the stage's artifact is only adapters (LoRA)."""
    return bool(getattr(recipe.stages.get(stage), "lora", None))


def _verifier_steps(recipe: Recipe) -> dict[str, dict[str, str]]:
    """Return the steps that import and try a verifier, each with the datasets of its dry run."""
    judged: dict[str, dict[str, None]] = {}
    for stage in recipe.stages.values():
        read = (
            (name, data)
            for role, name in verifiers_of(recipe, stage).items()
            for data in _judged(stage, role)
        )
        for name, data in read:
            origins = [each.origin for each in sources_of(recipe, data).values()]
            its_own = bool(origins) and all(
                isinstance(origin, Builtin) and origin.kind is not None and origin.name == name
                for origin in origins
            )
            if name in recipe.verifiers or (name in BUILTIN_VERIFIERS and not its_own):
                judged.setdefault(name, {}).update(
                    {data_step(recipe, selected_from(recipe, data)): None} if origins else {}
                )
    return {
        f"verifiers.{name}": {f"prompts.{i}": step for i, step in enumerate(judged[name])}
        for name in (*recipe.verifiers, *BUILTIN_VERIFIERS)
        if name in judged
    }


def _judged(stage: Stage, role: str) -> tuple[str, ...]:
    """Return the datasets whose prompts the verifier in this role judges responses to."""
    own: str = getattr(stage, "prompts", None) or ""
    watched: str | None = getattr(stage, WATCH_PROMPTS, None)
    if watched is None:
        return (own,)
    reward = judges_of(stage)["watch"].reward
    is_of_watch = role == "watch" or (reward is not None and role.startswith(f"reward.{reward}."))
    return (watched,) if is_of_watch else (own, watched)


def _inputs(recipe: Recipe, stage: Stage) -> dict[str, str]:
    kind = KINDS[stage.kind]
    named = {field: _model_step(recipe, getattr(stage, field)) for field in kind.reads}
    if kind.reference_from is not None:
        named["reference"] = stage_reference(stage)
    for field in kind.data:
        target = getattr(stage, field)
        named[field] = None if target is None else data_step(recipe, target)
    for field in kind.benchmarks:
        named[field] = f"{BENCHMARK_PREFIX}{getattr(stage, field)}"
    inputs: dict[str, str] = {role: step for role, step in named.items() if step is not None}
    for reward in rewards_read(stage):
        for i, term in enumerate(recipe.rewards[reward].terms):
            judging = term.judging_model.model if term.judging_model is not None else None
            if (step := _model_step(recipe, term.stage or judging)) is not None:
                inputs[f"reward.{reward}.{i}"] = step
    judges = {role: _model_step(recipe, judge.model) for role, judge in judges_of(stage).items()}
    inputs |= {role: step for role, step in judges.items() if step is not None}
    own = {role: name for role, name in verifiers_of(recipe, stage).items() if name in recipe.verifiers}
    return inputs | {role: f"verifiers.{name}" for role, name in own.items()}


def verifiers_of(recipe: Recipe, stage: Stage) -> dict[str, str]:
    """Return role → name of every verifier that a stage reads, built-in ones included."""
    named: dict[str, str | None] = {}
    for reward in rewards_read(stage):
        terms = enumerate(recipe.rewards[reward].terms)
        named |= {f"reward.{reward}.{i}": term.verifier_name for i, term in terms}
    named |= {field: judge.verifier for field, judge in judges_of(stage).items()}
    if isinstance(stage, PolicyOptimization):
        named["positive_verifier"] = stage.algorithm.positive_verifier
    return {role: name for role, name in named.items() if name is not None}


def rewards_read(stage: Stage) -> tuple[str, ...]:
    """Return the names of the rewards with which a stage scores responses, its own first, then those of its judges."""
    judging = [judge.reward for judge in judges_of(stage).values()]
    named = (getattr(stage, "reward", None), *judging)
    return tuple(dict.fromkeys(name for name in named if name is not None))


def judges_of(stage: Stage) -> dict[str, Judge]:
    """Return field → judge, for the judges of a stage; at most one of them is a reward."""
    whole: object = stage
    judges = {field: reduce(_part, path, whole) for field, path in JUDGES.items()}
    return {field: judge for field, judge in judges.items() if isinstance(judge, Judge)}


def _part(whole: object, field: str) -> object:
    return getattr(whole, field, None)


def ordered_steps(recipe: Recipe) -> list[str]:
    """Return all steps, each after those that it reads; otherwise in the recipe's order, ``model`` and data first.

    Raises:
        ValueError: as ``in_order``.
    """
    return in_order(dependencies(recipe))


def in_order(inputs_of: Inputs) -> list[str]:
    """Return the steps of ``dependencies``, each after those that it reads; otherwise in the given order.

    Raises:
        ValueError: stages wait for one another (a loaded recipe has no such cycle).
    """
    waiting = {step: set(inputs.values()) for step, inputs in inputs_of.items()}
    ordered: list[str] = []
    while waiting:
        ready = next((step for step, inputs in waiting.items() if not inputs), None)
        if ready is None:
            raise ValueError(f"stages wait for one another: {', '.join(waiting)}")
        ordered.append(ready)
        del waiting[ready]
        for inputs in waiting.values():
            inputs.discard(ready)
    return ordered


def content_of(recipe: Recipe, data_name: str) -> Content:
    """Return the content of a dataset or a mixture, from the stages that read it. Demonstrations may also be read as prompts.

    A dataset from which others are only kept apart has prompts.

    Raises:
        ValueError: no stage reads it, so its content is unknown.
    """
    names = {data_name, *(name for name, mixture in recipe.mixtures.items() if data_name in mixture.parts)}
    readings = [
        content
        for stage in recipe.stages.values()
        for field, content in KINDS[stage.kind].data.items()
        if getattr(stage, field) in names
    ]
    if not readings and any(data_name in _kept_apart_from(recipe, other).values() for other in recipe.data):
        return "prompts"
    if not readings:
        raise ValueError(f"data.{data_name} is read by no stage; remove it, or name it in one")
    return next((content for content in readings if content != "prompts"), "prompts")


def pool_of(recipe: Recipe, step: str) -> str | None:
    """Return the work pool that computes the step; None: the process that orders the run.

    Implicit steps run in that process, which has the recipe's files.
    """
    if step not in recipe.stages:
        return None
    return recipe.stages[step].resources.pool or recipe.workers
