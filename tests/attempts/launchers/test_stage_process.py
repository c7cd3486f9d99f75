"""Each error gets its exit code; the life of a whole process is tested in ``test_launch``."""

import errno
import os
import signal
import subprocess
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.attempts.launchers.test_local_process import job_in
from vantage.attempts.exit_codes import ExitCode, may_be_retried
from vantage.attempts.launchers.descendants import _living_descendants
from vantage.attempts.launchers.stage_process import _masked_stream, compute, explain, import_function
from vantage.schemas.records.job import StageResult
from vantage.storage.records import BucketNotFound
from vantage.storage.refs import DamagedObject
from vantage.tasks.rewards.answered_scores import BudgetSpent, UnreadableAnswer
from vantage.tasks.rewards.asking import JudgeRefused, JudgeUnavailable
from vantage.tasks.rollout.remote_engine import EngineUnavailable
from vantage.tasks.rollout.running_vllm import VllmCannotStart, VllmFailed
from vantage.tasks.stages import run_stage
from vantage.tasks.training.nonfinite import TrainingDiverged
from vantage.tasks.training.preemption import Preempted, TimeIsUp


def test_only_torchs_own_error_and_pythons_mean_memory() -> None:
    import torch

    for error in (MemoryError(), torch.OutOfMemoryError("tried to allocate 2 GiB")):
        assert (explain(error).exit_code, explain(error).cause) == (ExitCode.OUT_OF_MEMORY, "memory")
    assert explain(RuntimeError("out of memory")).cause == "internal"


def test_an_allocator_that_raises_a_plain_error_is_understood() -> None:
    import torch

    with pytest.raises(RuntimeError) as refused:
        torch.empty(10**15)
    assert type(refused.value) is RuntimeError
    assert explain(refused.value).message.startswith("DefaultCPUAllocator: can't allocate memory: you tried")
    for error in (
        refused.value,
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
    ):
        assert (explain(error).exit_code, explain(error).cause) == (ExitCode.OUT_OF_MEMORY, "memory")


def test_what_torch_says_of_memory_is_cut_to_what_happened() -> None:
    import torch

    told = (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB of which 7.94 MiB is "
        "free. Including non-PyTorch memory, this process has 79.09 GiB memory in use.\nIf reserved but unallocated "
        "memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )
    assert explain(torch.OutOfMemoryError(told)).message == told.split(" Including")[0]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO, errno.EDQUOT])
def test_a_disk_that_takes_no_more_is_not_the_users_input(number: int) -> None:
    assert explain(OSError(number, "sorry")).exit_code == ExitCode.STORAGE


def test_divergence_is_told_from_a_refused_recipe() -> None:
    failure = explain(TrainingDiverged("the gradient's norm is nan at step 7"))

    assert (failure.exit_code, failure.cause) == (ExitCode.BAD_INPUT, "diverged")
    assert failure.message == "the gradient's norm is nan at step 7"
    assert "learning_rate" in failure.remedy


def test_an_engine_that_does_not_answer_is_a_temporary_failure() -> None:
    failure = explain(EngineUnavailable("no server of rollout.url could sample for 120 s"))
    assert (failure.exit_code, failure.cause) == (ExitCode.RESUME, "engine")
    assert may_be_retried(failure.exit_code) and "rollout.url" in failure.remedy


def test_vllm_that_breaks_is_tried_again_in_another_process_unless_it_never_started() -> None:
    """A GPU's context that an error has broken is gone for the whole process."""
    broken = explain(VllmFailed("vLLM raised an error while it sampled: illegal memory access"))
    assert (broken.exit_code, broken.cause) == (ExitCode.RESUME, "engine")
    assert may_be_retried(broken.exit_code) and "rollout.max_rows" in broken.remedy
    never = explain(VllmCannotStart("vLLM could not start: no such architecture"))
    assert (never.exit_code, never.cause) == (ExitCode.BAD_INPUT, "refused")
    assert "rollout.engine: loop" in never.remedy


def test_a_judge_that_does_not_answer_or_costs_too_much_can_be_asked_again() -> None:
    """The first is asked again by itself, and the second when a person has raised the budget."""
    dead = explain(JudgeUnavailable("rewards.main.terms.0.url=http://critic does not answer"))
    assert (dead.exit_code, dead.cause) == (ExitCode.RESUME, "engine")
    assert may_be_retried(dead.exit_code) and "asks nothing twice" in dead.remedy
    spent = explain(BudgetSpent("rewards.main.terms.0.budget.cost=5 is spent"))
    assert (spent.exit_code, spent.cause) == (ExitCode.GATE_CLOSED, "guard")
    assert not may_be_retried(spent.exit_code) and "raise the budget" in spent.remedy
    for refusal in (JudgeRefused("404: no such model"), UnreadableAnswer("3 answers cannot be read")):
        assert explain(refusal).exit_code == ExitCode.BAD_INPUT


def test_a_missing_file_and_a_model_that_does_not_validate_are_refused() -> None:
    with pytest.raises(ValueError) as invalid:
        StageResult.model_validate({"metrics": {"loss": "x"}})

    assert explain(invalid.value).exit_code == ExitCode.BAD_INPUT
    missing = explain(FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/x.jsonl"))
    assert (missing.exit_code, missing.cause) == (ExitCode.BAD_INPUT, "refused")
    assert "/data/x.jsonl" in missing.message


def test_a_preempted_stage_is_to_be_resumed() -> None:
    failure = explain(Preempted("saved at step 3"))
    assert (failure.exit_code, failure.cause) == (ExitCode.RESUME, "preempted")
    time_is_up = explain(TimeIsUp("saved at step 3"))
    assert (time_is_up.exit_code, time_is_up.cause) == (ExitCode.RESUME, "time")
    assert "raise the limit" in time_is_up.remedy


def test_what_the_storage_has_lost_is_made_anew_and_no_bad_input() -> None:
    damaged = explain(DamagedObject("objects/ab is missing"))
    assert (damaged.exit_code, damaged.cause) == (ExitCode.STORAGE, "storage")
    assert damaged.remedy == "run the same command again, which makes it anew"
    bucket = explain(BucketNotFound("s3://none does not exist"))
    assert (bucket.exit_code, bucket.cause) == (ExitCode.STORAGE, "storage")
    assert bucket.remedy.startswith("look at the bucket's address")


def raised_from(
    error: BaseException, cause: BaseException | None, *, while_handling: BaseException
) -> BaseException:
    """Return the error as it is when it was raised from a cause, or from None, while another was handled."""
    error.__context__ = while_handling
    error.__cause__ = cause
    return error


def test_a_full_disk_below_an_error_is_found_unless_the_error_was_raised_from_none() -> None:
    full, other = OSError(errno.ENOSPC, "No space left on device"), KeyError("x")
    implied = RuntimeError("cannot save")
    implied.__context__ = full
    assert explain(implied).cause == "storage"
    assert explain(raised_from(RuntimeError("cannot save"), full, while_handling=other)).cause == "storage"
    assert explain(raised_from(RuntimeError("cannot save"), None, while_handling=full)).cause == "internal"


def test_an_error_of_tensors_is_of_the_disk_by_its_number_alone() -> None:
    """The library is in Rust, so that no OSError lies below its errors."""
    error = type("SafetensorError", (Exception,), {})
    assert explain(error("I/O error: No space left on device (os error 28)")).cause == "storage"
    assert explain(error("I/O error: No such file or directory (os error 2)")).cause == "internal"
    assert explain(error("Error while deserializing header")).cause == "internal"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("x"), "KeyError: 'x'"),
        (AssertionError(), "AssertionError: AssertionError"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_everything_else_is_our_fault_and_says_its_type(error: BaseException, message: str) -> None:
    failure = explain(error)
    assert (failure.exit_code, failure.cause, failure.message) == (ExitCode.INTERNAL, "internal", message)


@pytest.mark.parametrize("name", ["vantage.tasks.stages.run_stage", "tasks.stages.run_stage"])
def test_a_request_that_was_queued_before_modules_had_a_prefix_is_understood(name: str) -> None:
    assert import_function(name) is run_stage


@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_the_first_of_a_stages_processes_alone_writes_the_result(
    rank: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    job_file = tmp_path / "job.json"
    job_file.write_text(job_in(tmp_path).model_dump_json())
    compute(job_file, "tests.support.fake_stages.log_lines")
    assert (tmp_path / "result.json").exists() == (rank != "1")


def test_a_log_shows_no_secret_of_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGISTRY_PASSWORD", "hunter22-canary")
    with (tmp_path / "log").open("w") as log:
        print("hunter22-canary \x1b[1m数", file=_masked_stream(log.fileno()))
    shown = (tmp_path / "log").read_text()
    assert "hunter22-canary" not in shown
    assert shown.endswith(" \x1b[1m数\n"), "all else is as the stage has written it"


def test_living_descendants_are_found_at_any_depth_and_ended_ones_are_not() -> None:
    """One that nobody has waited for stays until then, and so would a search for living ones."""
    child = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())

    def found(*, keep: Collection[int] = ()) -> set[int]:
        return {child.pid, grandchild} & set(_living_descendants(os.getpid(), keep))

    try:
        assert found() == {child.pid, grandchild}
        assert found(keep=[child.pid]) == set()
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert child.pid not in found()
    finally:
        os.kill(grandchild, signal.SIGKILL)
        child.kill()
        child.communicate()
