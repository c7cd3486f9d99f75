"""Decide between two attempts at a step whether its stage is trained further now, and from which state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vantage.attempts.jobs import RecipeStep
from vantage.runs.extending import Place, asks_to_extend, place_of
from vantage.runs.run import Run, read_runs
from vantage.schemas.recipe.stage import Training
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.verdicts import Verdict
from vantage.storage.storage import Storage


@dataclass(frozen=True)
class Extending:
    """Finds for each stage of one run what it goes on from."""

    run: Run
    store: Storage
    say: Callable[[str, str], None]
    """Function that prints a line in a style."""

    def place(self, step: RecipeStep, read: Mapping[str, Artifact]) -> Place:
        """Return what a step computes now, and what it goes on from; ``read``: role → artifact."""
        digests = {role: artifact.digest for role, artifact in read.items()}
        if not isinstance(step.work, Training):
            return Place(step, step.key_parts(digests))
        workspace, run_id = self.run.workspace, self.run.record.run_id
        return place_of(step, digests, self.store, lambda: read_runs(workspace), run_id=run_id)

    def next_place(self, step: RecipeStep, read: Mapping[str, Artifact]) -> Place | None:
        """Return the next computation of a step whose closed gate extends it; None: no gate asks for this, or it is not
        possible."""
        record = self.run.record.stages[step.name]
        if record.status != "gate_closed" or not asks_to_extend(step, record.verdicts):
            return None
        place = self.place(step, read)
        if place.key == record.stage_key:
            for refused in place.refused:
                self.say(f"  {step.name} {refused}", "yellow")
            return None
        self.say(f"  {step.name}: gate {_closed(record.verdicts)}; {place.in_words}", "yellow")
        return place


def _closed(verdicts: Sequence[Verdict]) -> str:
    """Return in words the closed gates that ask for further training."""
    return "; ".join(str(each) for each in verdicts if not each.passed and each.on_fail == "extend")
