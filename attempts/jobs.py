"""Build the request of an attempt from a step of a recipe: the work, the parts of its key, and the request itself."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import date as date_type
from pathlib import Path
from typing import Any

from vantage.attempts.former_recipes import found_now
from vantage.attempts.machine import at_most_asked, available_cpus
from vantage.models.source_digest import import_digest
from vantage.models.source_facts import CLOCK, DATE, PADDING, UNKNOWN, facts_of
from vantage.schemas.kinds import KINDS
from vantage.schemas.recipe.inputs import DEFAULT_DATE, MODEL, Data, Generation, Model, SourcedModel
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.sources import Builtin, LocalPath
from vantage.schemas.recipe.stage import Gate, Resources, Stage
from vantage.schemas.recipe.stages import threads_for_each
from vantage.schemas.recipe.verifiers import Verifier
from vantage.schemas.recipe.work import (
    CheckRows,
    ImportBenchmark,
    ImportModel,
    ImportRewardModel,
    ImportVerifier,
    MergePolicy,
    MergeRewardModel,
    MixData,
    ModelImport,
    PrepareData,
    Work,
)
from vantage.schemas.records.artifacts import Artifact, StoredModel
from vantage.schemas.records.attempt import RUN_STAGE, AttemptRequest, Share
from vantage.schemas.records.extensions import Shorter
from vantage.schemas.records.stage_key import key_parts, stage_key
from vantage.schemas.source_files import (
    VERIFIER_LIMIT,
    data_limit,
    digest_of_files,
    digest_of_folder,
    files_of,
    hash_file,
)
from vantage.schemas.splits import is_only_dataset, shares_of
from vantage.schemas.steps import (
    BENCHMARK_PREFIX,
    CHECKED_ROWS,
    MERGED_PREFIX,
    MIXTURE_PREFIX,
    OTHER_MODEL_PREFIX,
    Inputs,
    checked_datasets,
    content_of,
    dependencies,
    in_order,
    other_test_sets,
    pool_of,
    reward_imports,
    rewards_read,
    sources_of,
)
from vantage.schemas.verifier_uses import uses_of
from vantage.tasks.rewards.libraries import versions_of

DATA_PREFIX = "data."
"""Prefix of the implicit steps that prepare data."""
VERIFIER_PREFIX = "verifiers."
"""Prefix of the implicit steps that import verifiers."""
BASE_SUFFIX = ".base"
"""Suffix of a role; ``ROLE.base`` is the base model on which the role's adapters were trained."""

_ONE_CPU = Resources(cpus=1, gpus=0, hang_seconds=86400.0)
"""Resources of implicit steps. Their time limit is a day, since a model may be downloaded over a slow line."""


def work_of(recipe: ResolvedRecipe, step: str) -> Work:
    """Return the work of a step: a stage of the recipe, or an implicit step."""
    if step == MODEL:
        return ImportModel(model=recipe.model.model_copy(update={"lora": None, "date": DEFAULT_DATE}))
    if step.startswith(OTHER_MODEL_PREFIX):
        other = recipe.models[step.removeprefix(OTHER_MODEL_PREFIX)]
        model = Model(source=other.source, base=other.base)
        return ImportRewardModel(model=model) if step in reward_imports(recipe) else ImportModel(model=model)
    if step.startswith(DATA_PREFIX):
        name = step.removeprefix(DATA_PREFIX)
        return PrepareData(
            content=content_of(recipe, name),
            data=found_now(recipe.data[name]),
            test_sets=other_test_sets(recipe, name),
            shares=shares_of(recipe),
            alone=is_only_dataset(recipe, name),
        )
    if step.startswith(MIXTURE_PREFIX):
        name = step.removeprefix(MIXTURE_PREFIX)
        mixture = recipe.mixtures[name]
        total = sum(mixture.parts.values())
        return MixData(
            content=content_of(recipe, name),
            parts=tuple(mixture.parts),
            weights=tuple(weight / total for weight in mixture.parts.values()),
            rows=mixture.rows,
            split=mixture.split,
        )
    if step == CHECKED_ROWS:
        names = checked_datasets(recipe)
        return CheckRows(
            datasets=names,
            contents=tuple(content_of(recipe, name) for name in names),
            max_dropped=tuple(_max_dropped(sources_of(recipe, name)) for name in names),
        )
    if step.startswith(VERIFIER_PREFIX):
        name = step.removeprefix(VERIFIER_PREFIX)
        verifier = recipe.verifiers.get(name) or Verifier(source=str(Builtin(name)))
        return ImportVerifier(verifier=found_now(verifier), uses=uses_of(recipe, name))
    if step.startswith(BENCHMARK_PREFIX):
        return ImportBenchmark(benchmark=found_now(recipe.benchmarks[step.removeprefix(BENCHMARK_PREFIX)]))
    if step.startswith(MERGED_PREFIX):
        name = step.removeprefix(MERGED_PREFIX)
        is_policy = KINDS[recipe.stages[name].kind].makes == "policy"
        return MergePolicy(adapters=name) if is_policy else MergeRewardModel(adapters=name)
    return recipe.stages[step]


def gates_of(recipe: ResolvedRecipe, step: str) -> tuple[Gate, ...]:
    """Return the step's gates; an implicit step has none."""
    return recipe.stages[step].gate if step in recipe.stages else ()


def resources_of(recipe: ResolvedRecipe, step: str) -> Resources:
    """Return CPUs, GPUs and time limit of a step; an implicit step has one CPU."""
    return recipe.stages[step].resources if step in recipe.stages else _ONE_CPU


@dataclass(frozen=True, kw_only=True)
class RecipeStep:
    """One step of a recipe, with everything that its plan, its key and its attempts read from the recipe."""

    name: str
    reads: Mapping[str, str]
    """Role → step whose artifact it reads."""
    work: Work
    gates: tuple[Gate, ...]
    resources: Resources
    pool: str | None
    """The work pool that computes the step; None: the process of the run does."""
    generation: Generation
    rewards: Mapping[str, Reward]
    chat: bool | None
    date: date_type
    """The date of today in templates."""
    seed: int
    key_seed: int | None
    """The seed in the step's key; None: its work uses no random numbers."""
    answers: bool
    """Whether the recipe has verifiers, which read the answers of prompts."""
    max_dropped: Mapping[str, float]
    """Role → largest share of unusable rows."""
    imported: tuple[SourcedModel, ...]
    """The models on which the step depends, directly or not."""

    def key_parts(
        self,
        inputs: Mapping[str, str],
        *,
        source: Mapping[str, str] | None = None,
        facts: Collection[str] | None = None,
    ) -> dict[str, Any]:
        """Return the parts of the step's key, given the content digests of its inputs (role → digest).

        Args:
            inputs: role → digest.
            source: ``source_of`` the step's work, if it is known; None: it is read.
            facts: those of ``vantage.models.source_facts`` that hold for a model on which the step depends; None: they
            are read from the models.

        Raises:
            OSError, ValueError: a source cannot be read, or does not match the recipe.
        """
        return key_parts(
            self.work,
            generation=self.generation,
            rewards=self.rewards,
            seed=self.key_seed,
            inputs={**inputs, **(source_of(self.work) if source is None else source)},
            extra=self._extra(facts),
        )

    def _extra(self, facts: Collection[str] | None) -> dict[str, Any]:
        """Return the fields of the recipe that the step reads besides its own configuration."""
        if isinstance(self.work, PrepareData):
            # Prompts prepared by a version without verifiers may lack the answers of their file.
            return {"answers": True} if self.answers and self.work.content == "prompts" else {}
        if isinstance(self.work, ImportVerifier):
            versions = versions_of(self.work.verifier, name=self.name)
            return {"libraries": versions} if versions else {}
        if not isinstance(self.work, Stage | CheckRows):
            return {}
        facts = frozenset[str]().union(*map(facts_of, self.imported)) if facts is None else facts
        reads_date = CLOCK in facts or (self.date != DEFAULT_DATE and (DATE in facts or UNKNOWN in facts))
        return {
            "chat": self.chat,
            **({"date": self.date.isoformat()} if reads_date and self.chat is not False else {}),
            **({"padding": "learns"} if PADDING in facts else {}),
        }


def steps_of(recipe: ResolvedRecipe) -> dict[str, RecipeStep]:
    """Return name → step, for all steps of a recipe, each after its inputs."""
    inputs = dependencies(recipe)
    works: dict[str, Work] = {}
    steps: dict[str, RecipeStep] = {}
    for name in in_order(inputs):
        works[name] = work_of(recipe, name)
        steps[name] = _step(recipe, name, inputs, works)
    return steps


def step_of(recipe: ResolvedRecipe, name: str) -> RecipeStep:
    """Return one step of a recipe, or an implicit step that no other step reads."""
    inputs = {name: {}, **dependencies(recipe)}
    return _step(recipe, name, inputs, {each: work_of(recipe, each) for each in _behind(inputs, name)})


def _step(recipe: ResolvedRecipe, name: str, inputs: Inputs, works: Mapping[str, Work]) -> RecipeStep:
    """Return the step; ``works`` holds its work, and that of every step that it depends on."""
    behind = (works[each] for each in _behind(inputs, name))
    return RecipeStep(
        name=name,
        reads=inputs[name],
        work=works[name],
        gates=gates_of(recipe, name),
        resources=resources_of(recipe, name),
        generation=recipe.generation,
        rewards=rewards_of(recipe, name),
        chat=recipe.model.chat,
        date=recipe.model.date,
        seed=seed_of(recipe, name),
        key_seed=_seed_in_key(recipe, works[name]),
        answers=bool(recipe.verifiers),
        max_dropped=max_dropped_of(recipe, inputs[name]),
        imported=tuple(work.model for work in behind if isinstance(work, ModelImport)),
        pool=pool_of(recipe, name),
    )


def _behind(inputs: Inputs, step: str) -> list[str]:
    """Return the step and all that it depends on, directly or not."""
    waiting, seen = [step], set[str]()
    while waiting:
        each = waiting.pop()
        seen.add(each)
        waiting += set(inputs[each].values()) - seen
    return sorted(seen)


def key_parts_of(
    recipe: ResolvedRecipe,
    step: str,
    inputs: Mapping[str, str],
    *,
    source: Mapping[str, str] | None = None,
    facts: Collection[str] | None = None,
) -> dict[str, Any]:
    """Return the parts of the key of one step of a recipe, as ``RecipeStep.key_parts`` does."""
    return step_of(recipe, step).key_parts(inputs, source=source, facts=facts)


def request_for(
    step: RecipeStep,
    inputs: Mapping[str, Artifact],
    *,
    run_id: str,
    storage: str,
    log: Path,
    share: Share | None = None,
    only_reuse: bool = False,
    microbatch_tokens: int | None = None,
    microbatch_size: int | None = None,
    extends: Shorter | None = None,
    made_with: Mapping[str, str] | None = None,
    function: str = RUN_STAGE,
) -> AttemptRequest:
    """Return the request of one attempt at the step; ``inputs``: role → artifact, bases of adapters among them (``with_bases``).

    ``AttemptRequest`` describes the other arguments. A base is in no key: the digest of its adapters identifies it.

    Raises:
        OSError, ValueError: a source cannot be read, or does not match the recipe.
    """
    read = {role: artifact.digest for role, artifact in inputs.items() if not role.endswith(BASE_SUFFIX)}
    parts = step.key_parts(read)
    return AttemptRequest(
        run_id=run_id,
        step=step.name,
        stage_key=stage_key(parts),
        key_parts=parts,
        work=step.work,
        generation=step.generation,
        chat=step.chat,
        date=step.date,
        seed=step.seed,
        rewards=dict(step.rewards),
        max_dropped=dict(step.max_dropped),
        inputs=dict(inputs),
        storage=storage,
        share=share,
        only_reuse=only_reuse,
        microbatch_tokens=microbatch_tokens,
        microbatch_size=microbatch_size,
        resources=step.resources,
        extends=extends,
        made_with=dict(made_with or {}),
        log=log,
        function=function,
    )


def with_bases(inputs: Mapping[str, Artifact], known: Iterable[Artifact]) -> dict[str, Artifact]:
    """Return the inputs. For each input that holds only adapters, also return their base model as ``ROLE.base``.

    Args:
        known: artifacts of the run, among them the base models.

    Raises:
        ValueError: a base is not among ``known``.
    """
    by_digest = {artifact.digest: artifact for artifact in known}
    found = dict(inputs)
    for role, artifact in inputs.items():
        base = artifact.base if isinstance(artifact, StoredModel) else None
        if base is not None and base not in by_digest:
            raise ValueError(f"{role}: no step of this run made {base}, which is the base of its adapters")
        if base is not None:
            found[f"{role}{BASE_SUFFIX}"] = by_digest[base]
    return found


def threads_of(share: Share | None, work: Work) -> int:
    """Return the number of torch's CPU threads: as many as the stage has CPUs, or half as many if it samples during its
    training; OMP_NUM_THREADS if that is less."""
    return at_most_asked(threads_for_each(work, share.cpus if share else available_cpus()))


def seed_of(recipe: ResolvedRecipe, step: str) -> int:
    """Return the stage's own seed, or the recipe's."""
    own = recipe.stages[step].seed if step in recipe.stages else None
    return recipe.seed if own is None else own


def rewards_of(recipe: ResolvedRecipe, step: str) -> dict[str, Reward]:
    """Return name → reward, for the rewards that the step scores with."""
    names = rewards_read(recipe.stages[step]) if step in recipe.stages else ()
    return {name: recipe.rewards[name] for name in names}


def max_dropped_of(recipe: ResolvedRecipe, reads: Mapping[str, str]) -> dict[str, float]:
    """Return role → largest share of unusable rows, for the recipe's datasets that a step reads; for a mixture the
    largest of its parts.

    ``reads``: role → step whose artifact it reads.
    """
    read = {
        role: sources_of(recipe, source.partition(".")[2])
        for role, source in reads.items()
        if source.startswith((DATA_PREFIX, MIXTURE_PREFIX))
    }
    return {role: _max_dropped(sources) for role, sources in read.items()}


def _max_dropped(sources: Mapping[str, Data]) -> float:
    return max(each.max_dropped for each in sources.values())


def _seed_in_key(recipe: ResolvedRecipe, work: Work) -> int | None:
    """Return the seed of a stage, of a mixture, or of a built-in model's weights; other implicit steps have none."""
    if isinstance(work, ModelImport):
        return recipe.seed if isinstance(work.model.origin, Builtin) else None
    if isinstance(work, Stage):
        return recipe.seed if work.seed is None else work.seed
    return recipe.seed if isinstance(work, MixData) else None


def facts_in_key(parts: Mapping[str, Any]) -> frozenset[str]:
    """Return the facts that the parts of a key state, so that the key can be made again without the models' sources."""
    extra = parts.get("extra", {})
    stated = {"date": (CLOCK, DATE), "padding": (PADDING,)}
    return frozenset(fact for name, facts in stated.items() if name in extra for fact in facts)


def source_of(work: Work) -> dict[str, str]:
    """Return ``source`` → sha256 of the present source of an implicit step; empty if the source's text already
    determines the content.

    Raises:
        OSError, ValueError: the source cannot be read.
    """
    if isinstance(work, ModelImport):
        return {"source": import_digest(work.model)}
    if isinstance(work, PrepareData) and isinstance(work.data.origin, LocalPath):
        files = files_of(work.data.origin.path)
        return {"source": digest_of_files([hash_file(file, data_limit()) for file in files])}
    if isinstance(work, ImportVerifier) and isinstance(work.verifier.origin, LocalPath):
        return {"source": hash_file(work.verifier.origin.path, VERIFIER_LIMIT)}
    if isinstance(work, ImportBenchmark):
        return {"source": digest_of_folder(work.benchmark.origin.path)}
    return {}
