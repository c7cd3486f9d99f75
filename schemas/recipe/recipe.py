"""The recipe: one frozen value that describes one whole run.

The classes nest like the YAML does and use the same names. What a single field can say of itself is checked
here; what only the whole recipe can say is checked when it is loaded (``schemas.checks.names``, ``schemas.checks.agreement``).
"""

from typing import Annotated

from pydantic import Field, StringConstraints

from schemas.frozen import Frozen, rule
from schemas.kinds import AnyResolvedStage, AnyStage, as_it_runs
from schemas.recipe.fields import MAX_NAMED, Name, Seed
from schemas.recipe.inputs import (
    Data,
    Generation,
    Model,
    Verifier,
)
from schemas.recipe.rewards import Reward


class Publication(Frozen):
    """A stage's model that becomes a version of an MLflow registered model."""

    stage: Name
    """The stage whose model is published."""
    registered_model: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
    """The model's name in MLflow."""
    alias: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,62}$")] | None = None
    """The alias that is moved to the new version; None: none is."""
    after: Name | None = None
    """The alias moves only after this stage's gate has passed."""

    @rule
    def _something_to_hold_back(self) -> None:
        if self.after is not None and self.alias is None:
            raise ValueError(f"after={self.after} holds back an alias, and there is none; add alias")


class Recipe(Frozen):
    """One whole run."""

    recipe: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,62}$")]
    """The recipe's own name."""
    seed: Seed = 0
    """What every stage without a seed of its own derives its random numbers from."""
    model: Model
    """The model that the pipeline starts from."""
    generation: Generation = Generation()
    """What every stage agrees on about sampled text."""
    data: Annotated[dict[Name, Data], Field(max_length=MAX_NAMED)]
    """Datasets, by the names under which stages read them."""
    verifiers: dict[Name, Verifier] = Field(default_factory=dict, max_length=MAX_NAMED)
    """Rules of your own that say whether a response is right, by name."""
    rewards: dict[Name, Reward] = Field(default_factory=dict, max_length=MAX_NAMED)
    """Rewards, by the names under which stages read them."""
    stages: Annotated[dict[Name, AnyStage], Field(min_length=1, max_length=MAX_NAMED)]
    """The stages, by the names under which others refer to them; the order is that of what they read."""
    publish: Annotated[tuple[Publication, ...], Field(max_length=MAX_NAMED)] = ()
    """Models that become versions of registered models at the end of the run."""


class ResolvedRecipe(Recipe):
    """A recipe as it runs: what its stages may leave open is written out."""

    stages: Annotated[dict[Name, AnyResolvedStage], Field(min_length=1, max_length=MAX_NAMED)]
    """The stages, nothing of which is left to be chosen."""

    @classmethod
    def of(cls, recipe: Recipe) -> "ResolvedRecipe":
        """The recipe, in which everything has been written out.

        Raises:
            pydantic.ValidationError: a stage still leaves something open.
        """
        stages = {name: as_it_runs(stage) for name, stage in recipe.stages.items()}
        return cls.model_validate({**dict(recipe), "stages": stages})
