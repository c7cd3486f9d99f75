"""Plans from Python: what a run of a recipe would compute, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vantage.api.places import Place, overrides_of, workspace_of
from vantage.flows.shown_plan import plan_recipe
from vantage.runs.planning import PlannedStep

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Plan:
    """The actions that a run would take."""

    recipe: str
    """The recipe's name."""
    steps: Sequence[PlannedStep]
    """Each step with its action (``run``, ``resume``, ``reuse``, ``wait``) and the reasons."""
    warnings: Sequence[str]

    def frame(self) -> "pandas.DataFrame":
        """Return the plan as a table: a row for each step."""
        import pandas

        rows = [(step.name, step.label, "; ".join(step.reasons)) for step in self.steps]
        return pandas.DataFrame(rows, columns=["step", "action", "reasons"])

    def __repr__(self) -> str:
        lines = [": ".join([step.name, ", ".join([step.label, *step.reasons])]) for step in self.steps]
        return "\n".join(
            [self.recipe, *(f"  {line}" for line in lines), *(f"  warning: {each}" for each in self.warnings)]
        )


def plan(recipe: str | Path, *, set: Mapping[str, Any] | None = None, workspace: Place = None) -> Plan:
    """Plan a recipe, as ``vantage plan`` does; nothing is changed.

    Args:
        recipe: a file, or the name of a built-in recipe.
        set: field → value in place of the recipe's.
        workspace: a folder or a bucket.

    Raises:
        ValueError: the recipe is invalid, or this installation lacks what it needs.
    """
    planned = plan_recipe(str(recipe), overrides_of(set), workspace_of(workspace))
    return Plan(planned.recipe.recipe, planned.steps, planned.warnings)
