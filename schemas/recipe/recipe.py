"""The recipe: one frozen value that describes a whole run.

The classes nest like the YAML and use the same names. Rules within one class are checked here; rules over the whole
recipe are checked when it is loaded (``vantage.schemas.checks.names``, ``vantage.schemas.checks.agreement``).
"""

from typing import Annotated

from pydantic import Field, StringConstraints

from vantage.schemas.frozen import Frozen, rule
from vantage.schemas.kinds import AnyResolvedStage, AnyStage, resolve_work
from vantage.schemas.recipe.builtin_verifiers import AnyVerifier
from vantage.schemas.recipe.fields import (
    MAX_NAMED,
    Name,
    PoolName,
    Seed,
    Switch,
    is_default,
    is_off,
    is_unset,
)
from vantage.schemas.recipe.inputs import Benchmark, Data, Generation, Mixture, Model, OtherModel
from vantage.schemas.recipe.notify import Notify
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.rollout import Sampling
from vantage.schemas.recipe.signing import Signing
from vantage.schemas.recipe.stage import Stage

StepName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_.-]{0,70}$")]
"""Name of a step, as ``vantage plan`` prints it."""
License = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f]+$")]
"""An SPDX identifier or expression (``Apache-2.0``), or the licence's own name."""


class Publication(Frozen):
    """A stage's model to be registered as a version of an MLflow registered model."""

    stage: Name
    """The stage whose model is published."""
    registered_model: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    """The model's name in MLflow."""
    alias: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,62}$")] | None = None
    """The alias to move to the new version; None: no alias is moved."""
    after: Name | None = None
    """The alias moves only if this stage's gate has passed."""
    merge: Switch = Field(True, exclude_if=is_default(True))
    """Register the whole model, which any library loads, if the stage trains adapters (LoRA). ``false``: register the adapters
    alone, which MLflow itself does not load."""

    approve: Switch = Field(False, exclude_if=is_off)
    """The alias moves only when a person has approved of it (``vantage approve RUN publish:NAME``)."""

    @property
    def target(self) -> str:
        """``NAME@ALIAS``, or ``NAME`` without an alias."""
        return self.registered_model if self.alias is None else f"{self.registered_model}@{self.alias}"

    @rule
    def _approve_needs_an_alias(self) -> None:
        if self.approve and self.alias is None:
            raise ValueError("approve=true holds back an alias, and there is none; add alias")

    @rule
    def _after_needs_an_alias(self) -> None:
        if self.after is not None and self.alias is None:
            raise ValueError(f"after={self.after} holds back an alias, and there is none; add alias")


class Recipe(Frozen):
    """One whole run."""

    recipe: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]
    """The recipe's own name."""
    seed: Seed = 0
    """Seed of every stage that has none of its own."""
    model: Model
    """The model that the pipeline starts from."""
    models: Annotated[dict[Name, OtherModel], Field(max_length=MAX_NAMED)] = Field(
        default_factory=dict, exclude_if=lambda models: not models
    )
    """Other models, by name: the ``policy`` of a collection, ``candidate`` or ``baseline`` of an evaluation, the ``init`` of a reward
    model, or the reward model of a reward's term. ``model.chat`` decides whether their prompts are wrapped."""
    generation: Generation = Generation()
    """Settings of sampled text, the same for all stages."""
    rollout: Sampling | None = Field(None, exclude_if=is_unset)
    """Settings of sampling for all stages that sample: each inherits the fields that its own ``rollout`` does not set. A stage that
    sets ``engine`` there inherits nothing, and one that sets ``url`` or ``servers`` inherits no other place. None: the loop."""
    data: Annotated[dict[Name, Data], Field(max_length=MAX_NAMED)]
    """Datasets, by name."""
    mixtures: dict[Name, Mixture] = Field(default_factory=dict, max_length=MAX_NAMED, exclude_if=is_unset)
    """Mixtures of datasets, by name."""
    verifiers: dict[Name, AnyVerifier] = Field(default_factory=dict, max_length=MAX_NAMED)
    """Rules that decide whether a response is right, by name: your own files, and built-in ones with their settings."""
    benchmarks: dict[Name, Benchmark] = Field(default_factory=dict, max_length=MAX_NAMED, exclude_if=is_unset)
    """Folders of lm-eval's tasks, by name."""
    rewards: dict[Name, Reward] = Field(default_factory=dict, max_length=MAX_NAMED)
    """Rewards, by name."""
    stages: Annotated[dict[Name, AnyStage], Field(min_length=1, max_length=MAX_NAMED)]
    """The stages, by name. Each runs after the stages that it reads, whatever their order here."""
    licenses: dict[StepName, License] = Field(default_factory=dict, max_length=MAX_NAMED, exclude_if=is_unset)
    """Licences, for model cards and bills of materials: of the ``model``, of ``models.NAME``, of ``data.NAME``, and of what a
    stage makes, by its name. In no stage key."""
    workers: PoolName | None = Field(None, exclude_if=is_unset)
    """Prefect work pool of every stage without ``resources.pool``. None: the process that orders the run computes."""
    publish: Annotated[tuple[Publication, ...], Field(max_length=MAX_NAMED)] = ()
    """Models to register in MLflow at the end of the run."""
    sign: Signing | None = Field(None, exclude_if=is_unset)
    """The key with which every artifact of the run is signed. None: none is signed. In no stage key."""
    notify: Notify | None = Field(None, exclude_if=is_unset)
    """Messages to people. None: none are sent."""

    def other_model_of(self, stage: Stage) -> str | None:
        """Return the model beside the recipe's own that a stage trains from; None: it trains from the recipe's, or trains nothing."""
        init: str | None = getattr(stage, "init", None)
        return init if init in self.models else None


class ResolvedRecipe(Recipe):
    """A recipe whose stages have all optional fields resolved."""

    stages: Annotated[dict[Name, AnyResolvedStage], Field(min_length=1, max_length=MAX_NAMED)]
    """The resolved stages, by name."""

    @classmethod
    def of(cls, recipe: Recipe) -> "ResolvedRecipe":
        """Return the recipe as a resolved one.

        Raises:
            pydantic.ValidationError: a stage has a field that is not resolved.
            ValueError: a stage has members or rounds, which the loader writes out as stages, or the recipe has a ``rollout`` for all.
        """
        if recipe.rollout is not None:
            raise ValueError(
                "rollout belongs to the stages of a loaded recipe; load the recipe from its file or its text"
            )
        for name, stage in recipe.stages.items():
            written_out = next(
                (f for f in ("members", "rounds") if getattr(stage, f, None) is not None), None
            )
            if written_out is not None:
                raise ValueError(
                    f"stages.{name}.{written_out} are stages of their own in a loaded recipe; load the recipe from its file or its "
                    "text"
                )
        stages = {name: resolve_work(stage) for name, stage in recipe.stages.items()}
        return cls.model_validate({**dict(recipe), "stages": stages})
