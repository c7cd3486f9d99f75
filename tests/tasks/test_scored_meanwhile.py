"""A verifier judges the responses of a batch while the next one is sampled; the results are the same."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from tests.tasks.kills import same_bytes_after_a_kill
from vantage.models import sampling
from vantage.schemas.recipe.rewards import Reward
from vantage.schemas.recipe.stages import BestOfN
from vantage.schemas.recipe.terms import VerifierTerm
from vantage.schemas.recipe.verifiers import Verifier
from vantage.schemas.recipe.work import ImportVerifier
from vantage.schemas.records.job import StageJob
from vantage.tasks.data.examples import Prompts
from vantage.tasks.rewards.verifier_file import BrokenVerifier
from vantage.tasks.rollout import rollouts
from vantage.tasks.rollout.scored_meanwhile import Meanwhile
from vantage.tasks.stages import run_stage

Contents = Callable[[Path], dict[str, bytes]]
PATIENCE = 120.0
VERIFIER = """\
import time
from pathlib import Path

asked = Path({asked!r})

def verify(prompt: str, response: str, answer: str | None) -> bool:
    with asked.open("a") as file:
        file.write("asked\\n")
    time.sleep({seconds})
    {fault}
    return len(response) % 2 == 0
"""


def job_in(
    folder: Path, pipeline: Any, *, seconds: float = 0.0, fault: str = "", iterations: int = 1
) -> StageJob:
    """Return a job of best of two: four batches of four responses in each iteration, judged by a file that notes each
    call.
    """
    folder.mkdir(parents=True, exist_ok=True)
    work = BestOfN(
        kind="best_of_n",
        init="sft",
        reward="main",
        prompts="prompts",
        iterations=iterations,
        batch_size=16,
        minibatch_size=8,
        samples_per_prompt=2,
        validation_samples=4,
        validate_every=9,
        learning_rate=1e-3,
        microbatch_size=4,
        checkpoint_every=1,
    )
    job: StageJob = pipeline.job("sft", folder=folder / "stage")
    prompts = pipeline.folder("prompts")
    verifier = folder / "verifier"
    if not verifier.is_dir():
        (folder / "mine.py").write_text(
            VERIFIER.format(asked=str(folder / "asked.txt"), seconds=seconds, fault=fault)
        )
        verifier.mkdir()
        made = pipeline.job("model", folder=folder / "import").model_copy(
            update={
                "work": ImportVerifier(verifier=Verifier(source=str(folder / "mine.py"))),
                "inputs": {},
                "output": verifier,
            }
        )
        run_stage(made)
    inputs = {"init": pipeline.folder("sft"), "prompts": prompts, "reward.main.0": verifier}
    reward = {"main": Reward(terms=(VerifierTerm(verifier="mine", wrong=-1.0),))}
    return job.model_copy(update={"work": work, "rewards": reward, "inputs": inputs})


class Asked:
    """A verifier that notes what it is asked."""

    def __init__(self) -> None:
        self.cases: list[tuple[str, str, str | None]] = []
        self.kept_up = 0

    def begin(self, cases: list[tuple[str, str, str | None]]) -> None:
        self.cases += cases

    def keep_up(self) -> None:
        self.kept_up += 1


class Words:
    """A codec whose texts are the ids."""

    def response_texts(self, responses: list[list[int]]) -> list[str]:
        return ["-".join(map(str, ids)) for ids in responses]


def test_every_verifier_is_asked_about_the_prompt_of_each_row() -> None:
    """Two responses to the third prompt, the first and the second each come in the order of their lengths."""
    prompts = Prompts(["a", "b", "c"], [[1], [2], [3]], ["x", None, "z"], num_too_long=0)
    asked = [Asked(), Asked()]
    listener = Meanwhile(cast(Any, asked), cast(Any, Words()), prompts, indices=[2, 2, 0, 0, 1, 1])
    listener.sampled([5, 0], [[7], [8, 9]])
    listener.sampled([2], [[4]])
    listener.keep_up()
    for verifier in asked:
        assert verifier.cases == [("b", "7", None), ("c", "8-9", "z"), ("a", "4", "x")]
        assert verifier.kept_up == 1


@pytest.mark.slow
def test_it_has_the_first_batch_before_the_second_is_sampled(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second batch is held up until the first was asked about, so asking after the last would wait for ever."""
    job, asked = job_in(tmp_path, pipeline), tmp_path / "asked.txt"
    sample, sample_batch = sampling.sample, sampling._sample_batch
    of_calls: list[list[int]] = []
    """Numbers of cases that had been asked about before each batch, one list for each call of the sampler."""

    def sampled_anew(*args: Any, **named: Any) -> Any:
        of_calls.append([])
        return sample(*args, **named)

    def waiting(*args: Any, on_token: Any, **named: Any) -> Any:
        before, deadline = of_calls[-1], time.monotonic() + PATIENCE
        while before and lines(asked) <= before[-1] and time.monotonic() < deadline:
            on_token(0, 1)
            time.sleep(0.01)
        before.append(lines(asked))
        return sample_batch(*args, on_token=on_token, **named)

    monkeypatch.setattr("vantage.tasks.rollout.engine.sample", sampled_anew)
    monkeypatch.setattr(sampling, "_sample_batch", waiting)
    run_stage(job)
    rollout = next(counts for counts in of_calls if len(counts) == 4)
    assert rollout == sorted(set(rollout)), (
        "before each batch, more had been asked about than before the last"
    )


def lines(file: Path) -> int:
    return len(file.read_text().splitlines()) if file.is_file() else 0


@pytest.mark.slow
@pytest.mark.parametrize("slow", ["verifier", "sampler"])
def test_which_is_slower_changes_no_bit_and_no_case_is_asked_about_twice(
    slow: str, pipeline: Any, tmp_path: Path, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(rollouts, "scored_meanwhile", lambda *_: None)
        one_by_one = job_in(tmp_path / "one by one", pipeline)
        expected = run_stage(one_by_one)
    sample_batch = sampling._sample_batch

    def slowly(*args: Any, **named: Any) -> Any:
        time.sleep(0.2)
        return sample_batch(*args, **named)

    if slow == "sampler":
        monkeypatch.setattr(sampling, "_sample_batch", slowly)
    job = job_in(tmp_path / slow, pipeline, seconds=0.05 if slow == "verifier" else 0.0)
    assert run_stage(job) == expected
    assert contents(job.output) == contents(one_by_one.output)
    assert lines(tmp_path / slow / "asked.txt") == lines(tmp_path / "one by one" / "asked.txt") > 0


@pytest.mark.slow
def test_its_fault_is_that_of_the_stage(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the verifier in its thread ends the stage with this error."""
    told = []
    for name, patch in (("meanwhile", False), ("afterwards", True)):
        with monkeypatch.context() as patched:
            if patch:
                patched.setattr(rollouts, "scored_meanwhile", lambda *_: None)
            with pytest.raises(BrokenVerifier) as broken:
                run_stage(job_in(tmp_path / name, pipeline, fault="import os; os._exit(7)"))
        told.append(str(broken.value).partition(" for prompt")[0])
    assert told[0] == told[1]
    assert "ended its process (exit code 7)" in told[0]


@pytest.mark.slow
def test_a_killed_stage_ends_with_the_same_bytes(
    pipeline: Any, tmp_path: Path, contents: Contents, monkeypatch: pytest.MonkeyPatch
) -> None:
    same_bytes_after_a_kill(
        run_stage,
        lambda folder: job_in(folder, pipeline, iterations=3),
        tmp_path,
        step=1,
        contents=contents,
        monkeypatch=monkeypatch,
    )
