"""One attempt runs on two ranks with a real stage: its artifact is right, and one process goes on where the two stopped."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vantage.attempts.jobs import request_for, steps_of
from vantage.attempts.run_attempt import Unobserved, run_attempt
from vantage.runs.resolving import load_resolved
from vantage.schemas.records.artifacts import Artifact
from vantage.schemas.records.attempt import AttemptBegun, AttemptOutcome
from vantage.schemas.steps import dependencies
from vantage.storage.storage import open_storage
from vantage.tasks.training.scratch import read_committed

RECIPE = """\
recipe: ranks
seed: 5
model: {source: "builtin:tiny"}
data:
  demonstrations: {source: "builtin:arithmetic/demonstrations", rows: 120}
stages:
  sft: {kind: sft, data: demonstrations, batch_size: 16, learning_rate: 1e-3, checkpoint_every: 2}
"""
LEARNING_RATE = 1e-3


class StopAfterTheFirstCheckpoint(Unobserved):
    """An observer that asks to stop as soon as a checkpoint is there."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._scratch = Path()

    def begun(self, begun: AttemptBegun) -> None:
        self._scratch = begun.scratch

    def polled(self) -> None:
        if read_committed(self._scratch)[0]:
            self.stop.set()


@pytest.fixture
def attempt(tmp_path: Path) -> Any:
    """Return a function from a storage's name and a number of ranks to an attempt at the stage, whose inputs it makes
    first.
    """
    (tmp_path / "ranks.yaml").write_text(RECIPE)

    def run(storage: str, *, ranks: int, made_with: Any = None, **options: Any) -> AttemptOutcome:
        override = f"stages.sft.resources.distributed.ranks={ranks}"
        recipe, _ = load_resolved(str(tmp_path / "ranks.yaml"), [override])
        artifacts: dict[str, Artifact] = {}
        for step in ("model", "data.demonstrations", "sft"):
            request = request_for(
                steps_of(recipe)[step],
                {role: artifacts[source] for role, source in dependencies(recipe)[step].items()},
                run_id="r",
                storage=str(tmp_path / storage),
                log=tmp_path / f"{storage}-{step}.log",
                made_with=made_with if step == "sft" else None,
            )
            outcome = run_attempt(request, **(options if step == "sft" else {}))
            if outcome.artifact is not None:
                artifacts[step] = outcome.artifact
        return outcome

    return run


def weights(folder: Path, outcome: AttemptOutcome) -> dict[str, torch.Tensor]:
    assert outcome.artifact is not None, outcome.failure
    return load_file(open_storage(str(folder)).folder(outcome.artifact) / "model.safetensors")


def test_two_ranks_stop_and_one_process_goes_on_which_provenance_marks(attempt: Any, tmp_path: Path) -> None:
    alone = attempt("alone", ranks=1)
    watching = StopAfterTheFirstCheckpoint()
    stopped = attempt("several", ranks=2, observer=watching, stop=watching.stop)
    assert stopped.failure.cause == "preempted"
    assert stopped.provenance["world_size"] == "2"
    assert 2 <= stopped.committed_step < 7

    resumed = attempt("several", ranks=1, made_with=stopped.provenance)
    assert (resumed.status, resumed.attempt) == ("made", 2)
    assert resumed.provenance["resumed_across"] == "world_size: 2 → 1"
    assert resumed.provenance["not_bitwise"] == "begun on 2 processes, continued on 1"
    expected, found = (
        weights(tmp_path / name, outcome) for name, outcome in (("alone", alone), ("several", resumed))
    )
    differences = torch.cat([(found[name] - expected[name]).abs().flatten() for name in expected])
    assert differences.max() < 0.05 * LEARNING_RATE
    assert alone.artifact.stage_key == resumed.artifact.stage_key, (
        "how many processes compute is not in the key"
    )
