"""A kill in the middle of any stage leaves no trace in what it produces."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tasks.kills import killed_in, same_weights_in_half_the_micro_batch
from vantage.ledger.journal import read
from vantage.schemas.metric_names import (
    ANSWERS,
    COMPILED,
    CRITIC_ENSEMBLE,
    CRITIC_FORMS,
    DEMONSTRATED,
    DIFFICULTY,
    ENGINE,
    ENSEMBLE,
    GRAPHS,
    IMPORTANCE,
    LOSSES_OF_SWITCHES,
    NONFINITE,
    REWARD_DATA,
    TERM_QUANTILES,
    UNCOMPILED,
    VALIDATION_TERMS,
    WATCHED,
)
from vantage.schemas.records.metrics import curve_metric_names, estimated_metric_names, headline_metric_names
from vantage.tasks.data import examples
from vantage.tasks.data.rows import read_rows
from vantage.tasks.stages import run_stage
from vantage.tasks.training import preemption
from vantage.tasks.training.attempt import Attempt
from vantage.tasks.training.scratch import JOURNAL, read_committed

Contents = Callable[[Path], dict[str, bytes]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "reward", "value", "policy"])
@pytest.mark.parametrize("step", [1, 3])
def test_a_stage_killed_and_run_again_gives_the_same_bytes(
    name: str, step: int, pipeline: Any, contents: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = contents(pipeline.folder(name))
    with killed_in(step, monkeypatch):
        run_stage(pipeline.job(name, folder=tmp_path))
    job = pipeline.job(name, folder=tmp_path)
    result = run_stage(job)
    assert contents(job.output) == whole
    assert result == pipeline.results[name]
    steps = [entry.step for entry in read(job.scratch / JOURNAL)]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["value", "policy"])
def test_a_stage_asked_to_stop_while_it_samples_saves_at_once_and_ends_with_the_same_bytes(
    name: str, pipeline: Any, contents: Contents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's checkpoints are three steps apart; the request comes in the middle of the third step's rollout."""
    pipeline.folder(name)  # makes the results that are compared
    job = pipeline.job(name, folder=tmp_path, checkpoint_every=3)
    in_step: list[int] = []
    unmoved, decode = Attempt.unmoved, examples.decode_all

    def counted(self: Attempt) -> Any:
        in_step.append(self.step)
        return unmoved(self)

    def asked(*args: Any) -> list[str]:
        if in_step and in_step[-1] == 2:
            preemption._remember(15, None)
        return decode(*args)

    with monkeypatch.context() as patched:
        patched.setattr(preemption, "_signals_received", 0)
        patched.setattr(Attempt, "unmoved", counted)
        patched.setattr(examples, "decode_all", asked)
        with pytest.raises(preemption.Preempted, match="stopped on request after step 2 of"):
            run_stage(job)
    assert read_committed(job.scratch)[0] == 2
    job = pipeline.job(name, folder=tmp_path, checkpoint_every=3)
    assert run_stage(job) == pipeline.results[name]
    assert contents(job.output) == contents(pipeline.folder(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "microbatch_size", "half"),
    [("sft", None, 8), ("reward", 4, 2), ("value", 8, 4), ("policy", 8, 4)],
)
def test_a_stage_that_ran_out_of_memory_ends_with_the_same_weights_in_half_the_micro_batch(
    name: str,
    microbatch_size: int | None,
    half: int,
    pipeline: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def job_in(folder: Path, **changes: Any) -> Any:
        return pipeline.job(name, folder=folder, **changes)

    same_weights_in_half_the_micro_batch(
        run_stage, job_in, tmp_path, microbatch_size=microbatch_size, half=half, monkeypatch=monkeypatch
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "reward", "policy"])
def test_the_same_job_gives_the_same_bytes_and_another_seed_does_not(
    name: str, pipeline: Any, contents: Contents, tmp_path: Path
) -> None:
    whole = contents(pipeline.folder(name))
    job = pipeline.job(name, folder=tmp_path / "again")
    run_stage(job)
    assert contents(job.output) == whole
    other = pipeline.job(name, folder=tmp_path / "other").model_copy(update={"seed": 6})
    run_stage(other)
    assert contents(other.output)["model.safetensors"] != whole["model.safetensors"]


# Metrics of policy optimisation whose switches the pipeline's policy has off (test_presets_run turns them on)
OF_OTHER_SWITCHES = {
    "ptx_nll",
    "trust_region_undone",
    "kl_loss",
    "old_kl",
    "kl_penalty_coef",
    "reward_moments_mean",
    "reward_moments_std",
    "greedy_score_mean",
    "critic_weight",
    "baseline_mean",
    *IMPORTANCE,
    *LOSSES_OF_SWITCHES,
    *REWARD_DATA,
    *DEMONSTRATED,
    *DIFFICULTY,
    *CRITIC_ENSEMBLE,
}


@pytest.mark.parametrize("name", ["demonstrations", "sft", "reward", "value", "policy"])
def test_a_stage_reports_exactly_the_metrics_of_the_page(name: str, pipeline: Any) -> None:
    kind = pipeline.job(name).work.kind
    of_switches = {
        "critic_weight_mean",
        "validation_watch_score",
        "contaminated_rows",
        "near_duplicate_rows",
        *UNCOMPILED,
        *CRITIC_FORMS,
        *DIFFICULTY,
    }
    assert set(pipeline.metrics(name)) == headline_metric_names(kind) - of_switches
    journal = pipeline.root / name / "scratch" / JOURNAL
    written = {metric for entry in read(journal) for metric in entry.metrics} if journal.exists() else set()
    if name == "policy":
        assert not written & OF_OTHER_SWITCHES
        written |= {"positive_nll", *OF_OTHER_SWITCHES}  # no response may have been held to be right
    named = {metric.replace("score_mean_reward", "score_mean_TERM") for metric in written}
    assert named == curve_metric_names(kind) - {
        *(
            *GRAPHS,
            *ENGINE,
            *COMPILED,
            *NONFINITE,
            *WATCHED,
            *ENSEMBLE,
            *TERM_QUANTILES,
            *VALIDATION_TERMS,
            *ANSWERS,
        ),
        "seconds_beside",
    }, "a GPU's, and those of other switches"


@pytest.mark.parametrize("name", ["demonstrations", "sft", "reward", "value", "policy", "evaluation"])
def test_every_estimate_comes_with_its_uncertainty(name: str, pipeline: Any) -> None:
    """An estimate counts as many prompts as the test or validation split has, where no prompt is in it twice."""
    kind = pipeline.job(name).work.kind
    has = ("verifier", "samples.2") if kind == "evaluation" else None
    metrics, uncertainty = pipeline.metrics(name), pipeline.result(name).uncertainty
    # bins with no or one response have no interval
    measured = {each for each in estimated_metric_names(kind, has=has) if metrics[each] is not None}
    assert measured <= uncertainty.keys() <= estimated_metric_names(kind, has=has)
    whole = [each for each in uncertainty if name != "value" or each in ("explained_variance", "value_mse")]
    assert len(whole) > 1 or name == "sft" or not uncertainty
    assert all(1 < uncertainty[each].n <= uncertainty[each].rows for each in whole)
    if name == "evaluation":
        assert {each.n for each in uncertainty.values()} == {8}
        assert {each.rows for each in uncertainty.values()} == {8, 16}
    if name == "sft":
        rows = read_rows(pipeline.folder("demonstrations"), "test")
        assert uncertainty["test_nll"].rows == len(rows)
        assert uncertainty["test_nll"].n == len({row["prompt"] for row in rows})


def test_an_evaluation_reports_exactly_what_its_judge_can_tell(pipeline: Any) -> None:
    assert set(pipeline.metrics("evaluation")) == headline_metric_names(
        "evaluation", has=("verifier", "samples.2")
    )


def test_a_rank_that_writes_nothing_does_not_look_at_what_the_first_is_writing(
    pipeline: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that the first renames just then would be missing when its size is asked for."""
    monkeypatch.setenv("RANK", "1")
    output = tmp_path / "of the first rank"
    looked_at: list[Path] = []
    monkeypatch.setattr(Path, "rglob", lambda path, pattern: looked_at.append(path) or iter(()))
    run_stage(pipeline.job("prompts").model_copy(update={"scratch": tmp_path / "scratch", "output": output}))
    assert not output.exists()
    assert output not in looked_at


def test_no_artifact_holds_a_pickle(pipeline: Any) -> None:
    for name in ("model", "demonstrations", "sft", "reward", "value", "policy", "evaluation"):
        suffixes = {path.suffix for path in pipeline.folder(name).rglob("*") if path.is_file()}
        assert suffixes <= {".safetensors", ".json", ".parquet", ".jinja", ".txt"}, name
