"""An attempt may end anywhere; the next one goes on, and the result shows no trace of it."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.tasks.kills import Killed
from vantage.ledger.journal import read
from vantage.schemas.canonical_json import canonical_json
from vantage.schemas.recipe.inputs import Generation
from vantage.schemas.recipe.stages_on_data import SupervisedFineTuning
from vantage.schemas.records.job import StageJob
from vantage.tasks.training import attempt, engine_record, preemption, step_metrics
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.checkpoints import IncompleteCheckpoint
from vantage.tasks.training.networks import weights_of
from vantage.tasks.training.nonfinite import TrainingDiverged
from vantage.tasks.training.optimization import make_optimizer, take_step
from vantage.tasks.training.scratch import CHECKPOINTS, JOURNAL, read_committed
from vantage.tasks.training.seeds import generator
from vantage.tasks.training.stage_state import NoState

TOTAL = 7


@dataclass(frozen=True)
class Lowest:
    """The state of an attempt: the lowest loss so far."""

    lowest: float = 1e9


def sft_job(folder: Path, *, checkpoint_every: int) -> StageJob:
    return StageJob(
        run_id="0001-test",
        name="sft",
        attempt=1,
        stage_key="0" * 64,
        seed=5,
        work=SupervisedFineTuning(
            kind="sft", data="d", learning_rate=1e-3, checkpoint_every=checkpoint_every
        ),
        generation=Generation(),
        scratch=folder,
        output=folder / "output",
    )


def train(job: StageJob, *, kill_after: int | None = None, total: int = TOTAL) -> dict[str, torch.Tensor]:
    """Train a tiny regression; raise ``Killed`` after ``kill_after`` steps."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = make_optimizer(network, weight_decay=0.1)
    attempt = Attempt(
        job,
        total=total,
        modules={"network": network},
        optimizers={"network": optimizer},
        state=Lowest(),
        keeps_best=True,
    )
    with attempt:
        if not attempt.best:
            attempt.best = weights_of(network)
        for done, step in enumerate(attempt.remaining()):
            if kill_after is not None and done == kill_after:
                raise Killed
            inputs = torch.randn(16, 4, generator=generator(job.seed, "data", step))
            loss = (network(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
            loss.backward()
            take_step(optimizer, network, learning_rate=0.05, max_grad_norm=1.0)
            if loss.item() < attempt.state.lowest:
                attempt.state = Lowest(loss.item())
                attempt.best = weights_of(network)
            attempt.finish_step({"loss": loss.item()}, num_tokens=16, headline="loss")
    return {
        **weights_of(network),
        **{f"best.{name}": tensor for name, tensor in attempt.best.items()},
        "lowest": torch.tensor(attempt.state.lowest),
    }


@pytest.mark.parametrize("kill_after", range(TOTAL))
def test_killed_after_any_step_it_ends_with_the_same_bits(tmp_path: Path, kill_after: int) -> None:
    whole = train(sft_job(tmp_path / "whole", checkpoint_every=2))
    job = sft_job(tmp_path / "cut", checkpoint_every=2)
    with pytest.raises(Killed):
        train(job, kill_after=kill_after)
    resumed = train(job)
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name


def test_killed_again_and_again_it_still_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = train(sft_job(tmp_path / "whole", checkpoint_every=1))
    job = sft_job(tmp_path / "cut", checkpoint_every=1)
    for _ in range(TOTAL - 1):
        with pytest.raises(Killed):
            train(job, kill_after=1)
    resumed = train(job)
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_the_journal_has_every_step_once_after_a_kill(tmp_path: Path) -> None:
    job = sft_job(tmp_path, checkpoint_every=3)
    with pytest.raises(Killed):
        train(job, kill_after=5)  # steps 4 and 5 are in the journal, the checkpoint is of step 3
    assert [entry.step for entry in read(job.scratch / JOURNAL)] == [1, 2, 3, 4, 5]
    assert read_committed(job.scratch)[0] == 3
    train(job)
    assert [entry.step for entry in read(job.scratch / JOURNAL)] == [1, 2, 3, 4, 5, 6, 7]
    step, offset = read_committed(job.scratch)
    assert (step, offset) == (TOTAL, (job.scratch / JOURNAL).stat().st_size)


def test_an_engine_is_told_how_many_iterations_have_ended_also_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is recorded as if an engine had sampled for it; steps 4 and 5 are done again."""
    pass_metrics = step_metrics.pass_metrics

    def sampled() -> dict[str, float]:
        iteration = engine_record.ended_iterations()
        engine_record.note_sampled(digest="1f", gap=0.0, iteration=iteration)
        return pass_metrics()

    monkeypatch.setattr(attempt, "pass_metrics", sampled)
    job = sft_job(tmp_path, checkpoint_every=3)
    engine_record.note_ended(17)  # by an earlier stage of this process
    with pytest.raises(Killed):
        train(job, kill_after=5)
    engine_record.note_ended(17)
    train(job)
    assert [entry.metrics["sampled_iteration"] for entry in read(job.scratch / JOURNAL)] == list(range(TOTAL))


def test_a_request_to_stop_saves_the_step_that_was_just_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = sft_job(tmp_path / "cut", checkpoint_every=100)
    steps_until_request = iter([False, False, False, True])
    with monkeypatch.context() as patched:
        patched.setattr(preemption, "requested", lambda: next(steps_until_request))
        with pytest.raises(preemption.Preempted, match="stopped on request after step 4 of 7"):
            train(job)
    assert read_committed(job.scratch)[0] == 4
    resumed = train(job)
    whole = train(sft_job(tmp_path / "whole", checkpoint_every=100))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_a_request_while_nothing_has_moved_saves_the_step_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = sft_job(tmp_path, checkpoint_every=100)
    passed: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(preemption, "_signals_received", 0)
        network = nn.Linear(1, 1)
        with (
            pytest.raises(preemption.Preempted, match="stopped on request after step 3 of 7"),
            Attempt(job, total=7, modules={"network": network}, optimizers={}, state=NoState()) as attempt,
        ):
            for step in attempt.remaining():
                with attempt.unmoved():
                    if step == 3:
                        preemption._remember(15, None)
                    passed.append(step)
                network.weight.data.fill_(step)
                attempt.finish_step({"loss": 1.0}, num_tokens=1, headline="loss")
    assert passed == [0, 1, 2]
    again = nn.Linear(1, 1)
    with Attempt(job, total=7, modules={"network": again}, optimizers={}, state=NoState()) as attempt:
        assert (attempt.step, again.weight.item()) == (3, 2.0)


def test_a_request_before_anything_was_done_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = sft_job(tmp_path, checkpoint_every=100)
    monkeypatch.setattr(preemption, "_signals_received", 1)
    with (
        pytest.raises(preemption.Preempted, match="stopped on request after step 0 of 7"),
        Attempt(job, total=7, modules={}, optimizers={}, state=NoState()) as attempt,
    ):
        for _ in attempt.remaining():
            with attempt.unmoved():
                raise AssertionError("a request that came before is heard at the door")
    assert read_committed(job.scratch)[0] == 0


def test_a_finished_loop_is_not_run_again(tmp_path: Path) -> None:
    job = sft_job(tmp_path, checkpoint_every=100)
    first = train(job)
    again = train(job, kill_after=0)  # would be killed at its first step
    assert all(torch.equal(tensor, again[name]) for name, tensor in first.items())


def test_stopping_early_survives_a_resume(tmp_path: Path) -> None:
    job = sft_job(tmp_path, checkpoint_every=100)
    for _ in range(2):
        network = nn.Linear(1, 1)
        with Attempt(job, total=10, modules={"network": network}, optimizers={}, state=NoState()) as attempt:
            for step in attempt.remaining():
                attempt.finish_step({"loss": 1.0}, num_tokens=1, headline="loss")
                if step == 3:
                    attempt.stop()
        assert attempt.step == 4


@pytest.mark.parametrize(
    "missing", ["network.weights", "network.optimizer", "best", "stage", "stopped", "journal_offset"]
)
def test_a_checkpoint_that_lacks_a_part_is_refused_by_name(tmp_path: Path, missing: str) -> None:
    job = sft_job(tmp_path, checkpoint_every=2)
    with pytest.raises(Killed):
        train(job, kill_after=3)
    remove_part(job.scratch / CHECKPOINTS, missing)
    with pytest.raises(IncompleteCheckpoint, match=rf"{missing} is missing"):
        train(job)


def test_every_value_of_the_stages_state_is_needed(tmp_path: Path) -> None:
    job = sft_job(tmp_path, checkpoint_every=2)
    with pytest.raises(Killed):
        train(job, kill_after=3)
    remove_part(job.scratch / CHECKPOINTS, "stage", key="lowest")
    with pytest.raises(IncompleteCheckpoint, match=r"checkpoint-00000002: stage\.lowest is missing"):
        train(job)


@pytest.mark.parametrize(("guards", "step"), [("off", 0), (None, 1)])
def test_a_metric_that_is_not_finite_ends_the_attempt_at_the_second_time(
    tmp_path: Path, guards: str | None, step: int
) -> None:
    job = sft_job(tmp_path, checkpoint_every=1)
    job = job.model_copy(update={"work": job.work.model_copy(update={"guards": guards})})
    with (
        Attempt(job, total=3, modules={}, optimizers={}, state=NoState()) as attempt,
        pytest.raises(TrainingDiverged, match=f"loss is nan at step {step}; lower the learning rate"),
    ):
        for _ in attempt.remaining():
            attempt.finish_step({"loss": float("nan")}, num_tokens=1, headline="loss")


def remove_part(checkpoints: Path, part: str, *, key: str | None = None) -> None:
    """Rewrite the newest checkpoint without one part, or without one value of a state, with a manifest that fits."""
    folder = max(checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    for path in folder.iterdir():
        path.chmod(0o644)
    description = json.loads((folder / "state.json").read_bytes())
    stored = load_file(folder / "tensors.safetensors")
    named = {**stored, **{name: stored[origin].clone() for name, origin in description["aliases"].items()}}
    kept = {name: tensor for name, tensor in named.items() if not name.startswith(f"{part}/")}
    save_file(kept, folder / "tensors.safetensors")
    description["aliases"] = {}
    if key is None:
        description["state"].pop(part, None)
    else:
        del description["state"][part][key]
    (folder / "state.json").write_text(canonical_json(description))
    files = [
        {
            "path": path.name,
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(folder.iterdir())
        if path.name != "manifest.json"
    ]
    (folder / "manifest.json").write_text(canonical_json({"files": files}))
