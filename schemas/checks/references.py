"""What the names in a recipe refer to: each is looked up once, and must be something of the right kind."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from vantage.schemas.checks.partial_recipe import PartialPublication, PartialRecipe, PartialStage
from vantage.schemas.kind import PUBLISHED, Kind
from vantage.schemas.kinds import kinds_collecting, kinds_making
from vantage.schemas.problems import MAX_PROBLEMS, Path, Problem, quote, suggest
from vantage.schemas.recipe.inputs import MODEL
from vantage.schemas.steps import BUILTIN_VERIFIERS


@dataclass(frozen=True)
class Reference:
    """A field that names something."""

    path: Path
    name: str
    problem: Problem | None = None
    """What is wrong with the name. None also after the first ``MAX_PROBLEMS`` wrong names."""

    @property
    def field(self) -> str:
        """The last part of its path."""
        return str(self.path[-1])


References = tuple[Reference, ...]


@dataclass(frozen=True, kw_only=True)
class RecipeReferences:
    """All references of a recipe, by what has the field: a stage, a model, a reward, a mixture or a dataset."""

    models: Mapping[str, References]
    """Stage → its fields that name a stage, the recipe's model, or another model."""
    stand_ins: Mapping[str, References]
    """Other model → the stage that stands in for it."""
    judging_models: Mapping[str, References]
    """Stage → models that judge in it."""
    rewards: Mapping[str, References]
    """Stage → the rewards that it reads."""
    reward_models: Mapping[str, References]
    """Reward → stages whose scores are its terms."""
    parts: Mapping[str, References]
    """Mixture → datasets."""
    data: Mapping[str, References]
    """Stage → datasets, mixtures, or stages that collect a dataset."""
    held_out: Mapping[str, References]
    """Dataset → others whose held-out prompts it leaves out."""
    scoring_verifiers: Mapping[str, References]
    """Reward → verifiers that are its terms."""
    stage_verifiers: Mapping[str, References]
    """Stage → verifiers in its own fields."""
    benchmarks: Mapping[str, References]
    """Stage → benchmarks."""
    publications: Sequence[References]
    """Of each item of ``publish``: the published stage, and the one whose gate has to pass."""
    licenses: References
    """Steps whose licences are given."""


def resolved_references(recipe: PartialRecipe) -> RecipeReferences:
    """Look up every name in a recipe."""
    names = _Names(recipe)
    stages = recipe.stages.items()
    kinds = [(name, stage, stage.kind) for name, stage in stages if stage.kind is not None]
    return RecipeReferences(
        models={name: tuple(names.models(name, stage, kind)) for name, stage, kind in kinds},
        stand_ins={
            name: (names.stage(("models", name, "otherwise"), otherwise, kinds_making(("policy",))),)
            for name, otherwise in recipe.models.items()
            if otherwise is not None
        },
        judging_models={name: tuple(names.judging_models(name, stage, kind)) for name, stage, kind in kinds},
        rewards={name: tuple(names.rewards(name, stage, kind)) for name, stage, kind in kinds},
        reward_models={
            name: tuple(
                names.stage((*term.path, field), target, kinds_making(("reward_model",)))
                for term in terms
                for field, target in term.reward_models.items()
            )
            for name, terms in recipe.rewards.items()
        },
        parts={
            name: tuple(names.part(name, part) for part in parts) for name, parts in recipe.mixtures.items()
        },
        data={name: tuple(names.data(name, stage, kind)) for name, stage, kind in kinds},
        held_out={
            name: tuple(names.held_out(name, path, other) for path, other in data.held_out_of)
            for name, data in recipe.data.items()
        },
        scoring_verifiers={
            name: tuple(
                names.verifier((*term.path, field), verifier)
                for term in terms
                for field, verifier in term.verifiers.items()
            )
            for name, terms in recipe.rewards.items()
        },
        stage_verifiers={name: tuple(names.stage_verifiers(name, stage)) for name, stage in stages},
        benchmarks={name: tuple(names.benchmarks(name, stage, kind)) for name, stage, kind in kinds},
        publications=tuple(tuple(names.publication(i, each)) for i, each in enumerate(recipe.publish)),
        licenses=tuple(names.licensed(step) for step in recipe.licenses),
    )


class _Names:
    """The names of a recipe. References are looked up in the order in which their problems are reported."""

    def __init__(self, recipe: PartialRecipe) -> None:
        self._recipe = recipe
        self._kinds = {
            name: stage.kind.name for name, stage in recipe.stages.items() if stage.kind is not None
        }
        self._num_wrong = 0

    def _reference(self, path: Path, name: str, problems: Iterator[Problem]) -> Reference:
        """Return the reference with the first of its problems. After ``MAX_PROBLEMS`` wrong names none is looked for."""
        problem = next(problems, None) if self._num_wrong < MAX_PROBLEMS else None
        self._num_wrong += problem is not None
        return Reference(path, name, problem)

    def models(self, name: str, stage: PartialStage, kind: Kind) -> Iterator[Reference]:
        """Yield the references to models in the stage's own fields."""
        for field, artifacts in kind.reads.items():
            target, path = stage.texts.get(field), ("stages", name, field)
            if target is None:
                continue
            if field in kind.other_models and target in self._recipe.models:
                yield Reference(path, target)
            else:
                yield self.stage(path, target, kinds_making(artifacts))

    def judging_models(self, name: str, stage: PartialStage, kind: Kind) -> Iterator[Reference]:
        """Yield the references to models that judge in the stage: policies, or other models."""
        for field, judge in stage.judges.items():
            path = ("stages", name, field, "model")
            if judge.model is None or field not in kind.work.model_fields:
                continue
            if judge.model in self._recipe.models:
                yield Reference(path, judge.model)
            else:
                yield self.stage(path, judge.model, kinds_making(("policy",)))

    def rewards(self, name: str, stage: PartialStage, kind: Kind) -> Iterator[Reference]:
        """Yield the references to rewards, where the kind of stage has such a field."""
        fields = kind.work.model_fields
        named: dict[Path, str | None] = {("stages", name, "reward"): stage.texts.get("reward")}
        named |= {("stages", name, field, "reward"): judge.reward for field, judge in stage.judges.items()}
        for path, reward in named.items():
            if reward is not None and path[2] in fields:
                yield self._reference(path, reward, self._reward_problems(path, reward))

    def benchmarks(self, name: str, stage: PartialStage, kind: Kind) -> Iterator[Reference]:
        """Yield the references to benchmarks."""
        for field in kind.benchmarks:
            path, target = ("stages", name, field), stage.texts.get(field)
            if target is not None:
                yield self._reference(path, target, self._benchmark_problems(path, target))

    def data(self, name: str, stage: PartialStage, kind: Kind) -> Iterator[Reference]:
        """Yield the references to datasets, mixtures, and stages that collect a dataset."""
        for field, content in kind.data.items():
            path, target, collectors = (
                ("stages", name, field),
                stage.texts.get(field),
                kinds_collecting(content),
            )
            if target is None:
                continue
            if collectors and target in self._recipe.stages and target not in self._recipe.datasets:
                yield self.stage(path, target, collectors)
            else:
                yield self._reference(path, target, self._data_problems(path, target, collectors))

    def stage_verifiers(self, name: str, stage: PartialStage) -> Iterator[Reference]:
        """Yield the references to verifiers in the stage's own fields, whatever its kind."""
        named: dict[Path, str | None] = {
            ("stages", name, field, "verifier"): judge.verifier for field, judge in stage.judges.items()
        }
        named["stages", name, "algorithm", "positive_verifier"] = stage.positive_verifier
        for path, verifier in named.items():
            if verifier is not None:
                yield self.verifier(path, verifier)

    def publication(self, i: int, publication: PartialPublication) -> Iterator[Reference]:
        """Yield the references to the published stage, and to the one whose gate has to pass."""
        published = tuple(name for name in kinds_making(PUBLISHED) if name != MODEL)
        path, after = ("publish", i, "after"), publication.after
        if publication.stage is not None:
            yield self.stage(("publish", i, "stage"), publication.stage, published)
        if after is not None:
            yield self._reference(path, after, self._gate_problems(path, after))

    def stage(self, path: Path, name: str, allowed: tuple[str, ...]) -> Reference:
        """Look up a stage (or the model) that must be of an allowed kind."""
        return self._reference(path, name, self._stage_problems(path, name, allowed))

    def part(self, mixture: str, part: str) -> Reference:
        """Look up a part of a mixture: a dataset with a source."""
        path = ("mixtures", mixture, "parts", part)
        return self._reference(path, part, self._part_problems(path, mixture, part))

    def held_out(self, name: str, path: Path, other: str) -> Reference:
        """Look up a dataset whose held-out prompts the dataset ``name`` leaves out."""
        return self._reference(path, other, self._held_out_problems(name, path, other))

    def verifier(self, path: Path, name: str) -> Reference:
        """Look up a verifier: one of the recipe's, or a built-in one."""
        return self._reference(path, name, self._verifier_problems(path, name))

    def licensed(self, step: str) -> Reference:
        """Look up a step whose licence is given."""
        path = ("licenses", step)
        return self._reference(path, step, self._license_problems(path, step))

    def _stage_problems(self, path: Path, target: str, allowed: tuple[str, ...]) -> Iterator[Problem]:
        itself = path[1] if path[0] == "stages" else None
        fitting = [name for name, kind in self._kinds.items() if kind in allowed and name != itself]
        fitting += [MODEL] if MODEL in allowed else []
        remedy = f"use one of: {', '.join(fitting)}" if fitting else f"add a {_kinds_text(allowed)}"
        field = str(path[-1])
        rule = f"{field} names a" if field.endswith("s") else f"{_article(field)} {field} is a"
        rule = f"{rule} {_kinds_text(allowed)}"
        if target == MODEL:
            if MODEL not in allowed:
                yield Problem(path, f"'{MODEL}' is the recipe's model; {rule}", remedy)
        elif target == itself:
            yield Problem(path, f"'{target}' is this stage itself", remedy)
        elif target in self._recipe.models and target not in self._recipe.stages:
            message = f"'{target}' is another model, which stages sample from and compare with; {rule}"
            yield Problem(path, message, remedy)
        elif target not in self._recipe.stages:
            yield _unknown(path, "no stage", target, fitting, remedy)
        elif target in self._kinds and self._kinds[target] not in allowed:
            yield Problem(path, f"'{target}' is {with_article(self._kinds[target])}; {rule}", remedy)

    def _reward_problems(self, path: Path, reward: str) -> Iterator[Problem]:
        if reward not in self._recipe.rewards:
            yield _unknown(path, "no reward", reward, self._recipe.rewards, "define it under rewards")

    def _benchmark_problems(self, path: Path, target: str) -> Iterator[Problem]:
        if target not in self._recipe.benchmarks:
            yield _unknown(
                path, "no benchmark", target, self._recipe.benchmarks, "define it under benchmarks"
            )

    def _data_problems(self, path: Path, target: str, collectors: tuple[str, ...]) -> Iterator[Problem]:
        if target not in self._recipe.datasets:
            collecting = [name for name, kind in self._kinds.items() if kind in collectors]
            known = [*self._recipe.datasets, *collecting]
            yield _unknown(path, "no dataset", target, known, "define it under data")

    def _part_problems(self, path: Path, mixture: str, part: str) -> Iterator[Problem]:
        if part in self._recipe.data:
            return
        if part in self._recipe.mixtures:
            message = f"'{part}' is this mixture itself" if part == mixture else f"'{part}' is a mixture too"
            yield Problem(path, message, "name datasets here, each with its weight")
        elif part in self._recipe.stages:
            message = f"'{part}' is a stage; a part of a mixture is a dataset under data"
            yield Problem(path, message, "name a dataset")
        else:
            yield _unknown(path, "no dataset", part, self._recipe.data, "define it under data")

    def _held_out_problems(self, name: str, path: Path, other: str) -> Iterator[Problem]:
        if other == name:
            remedy = "its own held-out prompts count anyway; leave it out"
            yield Problem(path, f"{quote(name)} is the dataset itself", remedy)
        elif other in self._recipe.mixtures:
            yield Problem(path, f"{quote(other)} is a mixture", "name its parts")
        elif other not in self._recipe.data:
            yield _unknown(path, "no dataset", other, self._recipe.data, "define it under data")

    def _verifier_problems(self, path: Path, verifier: str) -> Iterator[Problem]:
        if verifier not in BUILTIN_VERIFIERS and verifier not in self._recipe.verifiers:
            known = (*self._recipe.verifiers, *BUILTIN_VERIFIERS)
            yield _unknown(path, "no verifier", verifier, known)

    def _gate_problems(self, path: Path, target: str) -> Iterator[Problem]:
        gated = [name for name, stage in self._recipe.stages.items() if stage.has_gate]
        remedy = f"use one of: {', '.join(gated)}" if gated else "give a stage a gate"
        if target not in self._recipe.stages:
            yield _unknown(path, "no stage", target, gated, remedy)
        elif target not in gated:
            yield Problem(path, f"'{target}' has no gate that could pass", remedy)

    def _license_problems(self, path: Path, step: str) -> Iterator[Problem]:
        sections = {"models": self._recipe.models, "data": self._recipe.data}
        known = [f"{section}.{name}" for section, named in sections.items() for name in named]
        known = [MODEL, *known, *self._recipe.stages]
        if step not in known:
            yield _unknown(path, "nothing here", step, known)


def _unknown(path: Path, none: str, name: str, known: Iterable[str], otherwise: str = "") -> Problem:
    return Problem(path, f"{none} is called {quote(name)}", suggest(name, known) or otherwise)


def with_article(kind: str) -> str:
    """Return ``an sft stage``, ``a reward_model stage`` …"""
    return f"{_article(kind)} {kind} stage"


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" or word == "sft" else "a"


def _kinds_text(kinds: tuple[str, ...]) -> str:
    stages = f"{' or '.join(kind for kind in kinds if kind != MODEL)} stage"
    return f"{stages}, or the recipe's model" if MODEL in kinds else stages
