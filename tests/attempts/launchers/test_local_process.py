"""Stages run in real child processes of a real fork server; the functions they run are in ``fake_stages``."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.launchers import local_process as launching
from vantage.attempts.launchers.launcher import StageFailed
from vantage.attempts.launchers.local_process import (
    LocalProcess,
    attempt_folder,
    last_line,
    warm_up,
)
from vantage.schemas.recipe.inputs import Generation, Model
from vantage.schemas.recipe.work import ImportModel
from vantage.schemas.records.attempt import Share
from vantage.schemas.records.job import StageJob, StageResult

ROOT = Path(__file__).parents[3]


def job_in(folder: Path, **changes: object) -> StageJob:
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    job = StageJob(
        run_id="r1",
        name="model",
        attempt=1,
        stage_key="0" * 64,
        seed=17,
        work=ImportModel(model=Model(source="builtin:tiny")),
        generation=Generation(),
        scratch=scratch,
        output=folder / "output",
        threads=1,
    )
    return job.model_copy(update=changes)


def run_fake(folder: Path, stage: str, *, grace: float = 20.0, **options: object) -> StageResult:
    launcher = LocalProcess(grace=grace)
    return launcher.launch(
        job_in(folder),
        log=folder / "log.txt",
        function=f"tests.support.fake_stages.{stage}",
        **options,  # type: ignore[arg-type]
    )


def wait_for(condition: Callable[[], object], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def state(pid: int) -> str:
    """Return the kernel's letter for a process: R, S, D, T (stopped), Z (ended, not yet reaped), or X where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def is_alive(pid: int) -> bool:
    return state(pid) not in "ZX"


def daemons_in(folder: Path) -> list[int]:
    return [int(pid) for pid in (folder / "scratch" / "daemons").read_text().split()]


FOREIGN = {
    **{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "1"},
    **{"TORCHELASTIC_RUN_ID": "a", "SLURM_PROCID": "1", "USE_TORCH": "0", "PYTHONWARNINGS": "error"},
}
LOGINS = {"MLFLOW_TRACKING_PASSWORD": "word", "OPENLINEAGE_API_KEY": "key"}
"""Modules that only the process that records needs, and no stage."""


@pytest.mark.parametrize("fork_server_has_them", [True, False])
def test_variables_of_another_program_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server_has_them: bool
) -> None:
    launching.forkserver._forkserver._stop()  # type: ignore[attr-defined]
    for name, value in (FOREIGN | LOGINS).items():
        monkeypatch.setenv(name, value)
    if fork_server_has_them:  # as if another program than Vantage had started it
        with monkeypatch.context() as patched:
            patched.setattr(launching, "not_inherited", lambda _: [])
            for read_when_loaded in ("USE_TORCH", "PYTHONWARNINGS"):
                patched.delenv(read_when_loaded)
            warm_up()
    try:
        result = run_fake(tmp_path, "tell")
    finally:
        if fork_server_has_them:  # otherwise the fork server is a usual one, which the next test can use
            launching.forkserver._forkserver._stop()  # type: ignore[attr-defined]
    assert result.metrics["seed"] == 17
    assert result.metrics["torch_was_loaded"]
    assert set(result.samples[0]["variables"]).isdisjoint(FOREIGN | LOGINS)
    ours = {name: os.environ[name] for name in FOREIGN | LOGINS}
    assert ours == FOREIGN | LOGINS, "they are as they were"


def test_a_long_temporary_folder_is_no_obstacle(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    code = (
        "from multiprocessing import forkserver\n"
        "forkserver.set_forkserver_preload = lambda modules: None\n"
        "from vantage.attempts.launchers.local_process import warm_up\n"
        "warm_up(); print(forkserver._forkserver._forkserver_address); forkserver._forkserver._stop()\n"
        "import tempfile; print(tempfile.gettempdir())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    address, temporary = done.stdout.splitlines()
    assert address.startswith("/tmp/")
    assert not Path(address).parent.exists(), "the folder is removed at the end"
    assert temporary == str(folder), "all else is still where the user wants it"


class TestResult:
    def test_comes_back_from_a_process_that_holds_torch_and_leads_its_own_group(self, tmp_path: Path) -> None:
        result = run_fake(tmp_path, "tell")

        assert result.metrics == {
            "seed": 17,
            "threads": 1,
            "leads_own_group": 1.0,
            "torch_was_loaded": 1.0,
        }
        assert result.samples[0]["pid"] != os.getpid()
        assert result.samples[0]["orchestrator_modules"] == []

    def test_what_a_stage_says_of_itself_is_in_the_log_with_the_time(self, tmp_path: Path) -> None:
        LocalProcess().launch(
            job_in(tmp_path), log=tmp_path / "log.txt", function="tests.support.fake_stages.log_lines"
        )
        log = (tmp_path / "log.txt").read_text()
        assert re.fullmatch(r"\d\d:\d\d:\d\d train: 1016 rows\n", log), "and nothing else"

    def test_everything_printed_is_in_the_log(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        run_fake(tmp_path, "tell")

        log = (tmp_path / "log.txt").read_text()
        assert "printed by the stage\n" in log
        assert "printed by a program of the stage\n" in log
        assert "a warning\n" in log
        assert "printed" not in capfd.readouterr().out

    def test_job_and_result_lie_in_the_attempts_folder(self, tmp_path: Path) -> None:
        job = job_in(tmp_path, attempt=3)

        result = LocalProcess().launch(
            job, log=tmp_path / "log.txt", function="tests.support.fake_stages.tell"
        )

        assert attempt_folder(job) == tmp_path / "scratch" / "attempt-3"
        assert StageJob.model_validate_json((attempt_folder(job) / "job.json").read_bytes()) == job
        assert StageResult.model_validate_json((attempt_folder(job) / "result.json").read_bytes()) == result

    def test_of_an_earlier_launch_of_the_same_attempt_is_not_taken_for_this_one(self, tmp_path: Path) -> None:
        run_fake(tmp_path, "log_lines")
        earlier = attempt_folder(job_in(tmp_path)) / "torchrun" / "rank-0"
        earlier.parent.mkdir()
        earlier.write_text("1")
        with pytest.raises(StageFailed, match="ended with status 0"):
            run_fake(tmp_path, "end_without_a_result")
        assert not earlier.exists(), "another process may have its number now"
        with pytest.raises(StageFailed, match="returned NoneType, not StageResult"):
            run_fake(tmp_path, "return_nothing")
        with pytest.raises(StageFailed, match="killed from outside"):
            run_fake(tmp_path, "be_killed")

    def test_does_not_wait_for_a_thread_that_the_stage_left_behind(self, tmp_path: Path) -> None:
        assert run_fake(tmp_path, "leave_a_thread").metrics == {"done": 1.0}

    def test_many_at_once_each_get_their_own(self, tmp_path: Path) -> None:
        folders = [tmp_path / str(number) for number in range(6)]
        for folder in folders:
            folder.mkdir()

        def run(seed: int) -> float | None:
            job = job_in(folders[seed], seed=seed)
            return (
                LocalProcess()
                .launch(job, log=folders[seed] / "log.txt", function="tests.support.fake_stages.tell")
                .metrics["seed"]
            )

        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(run, range(6))) == [0, 1, 2, 3, 4, 5]


class TestDaemons:
    """Processes that a stage started, and that have left its group, its session and its tree."""

    def test_end_with_a_stage_that_ends_well(self, tmp_path: Path) -> None:
        run_fake(tmp_path, "leave_daemons")
        assert len(daemons_in(tmp_path)) == 3
        assert not any(is_alive(pid) for pid in daemons_in(tmp_path))

    def test_end_with_a_stage_that_is_killed(self, tmp_path: Path) -> None:
        with pytest.raises(StageFailed, match="killed from outside"):
            run_fake(tmp_path, "leave_daemons_and_be_killed")
        assert len(daemons_in(tmp_path)) == 3
        assert not any(is_alive(pid) for pid in daemons_in(tmp_path))

    def test_of_another_stage_that_still_works_are_left_alone(self, tmp_path: Path) -> None:
        working, ending = tmp_path / "working", tmp_path / "ending"
        working.mkdir()
        ending.mkdir()
        stop = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(run_fake, working, "leave_daemons_and_work", stop=stop)
            try:
                wait_for(lambda: (working / "scratch" / "working").exists())
                with pytest.raises(StageFailed):
                    run_fake(ending, "leave_daemons_and_be_killed")
                assert not any(is_alive(pid) for pid in daemons_in(ending))
                assert all(is_alive(pid) for pid in daemons_in(working))
            finally:
                stop.set()
            with pytest.raises(StageFailed, match="saved at step 3"):
                other.result()
        assert not any(is_alive(pid) for pid in daemons_in(working))


class TestShare:
    def test_gives_torch_its_threads_and_cuda_its_devices(self, tmp_path: Path) -> None:
        job = job_in(tmp_path, threads=None)

        result = LocalProcess().launch(
            job,
            log=tmp_path / "log.txt",
            function="tests.support.fake_stages.tell",
            share=Share(cpus=2, gpus=("0", "3")),
        )

        assert result.metrics["threads"] == 2
        assert result.samples[0]["gpus"] == "0,3"

    def test_without_gpus_hides_those_of_the_machine(self, tmp_path: Path) -> None:
        assert run_fake(tmp_path, "tell", share=Share(cpus=1)).samples[0]["gpus"] == ""


def test_the_orchestrators_environment_is_left_as_it_was() -> None:
    before = dict(os.environ)
    warm_up()
    assert dict(os.environ) == before


class TestFailure:
    @pytest.mark.parametrize(
        ("stage", "exit_code", "cause", "message"),
        [
            ("refuse", ExitCode.BAD_INPUT, "refused", "data.prompts: row 7 has no prompt; remove it"),
            ("exhaust_memory", ExitCode.OUT_OF_MEMORY, "memory", "cannot allocate 1 TiB"),
            ("fill_disk", ExitCode.STORAGE, "storage", "[Errno 28] No space left on device: '/x/y'"),
        ],
    )
    def test_that_a_user_can_mend_comes_as_its_own_words(
        self, tmp_path: Path, stage: str, exit_code: int, cause: str, message: str
    ) -> None:
        """An error that a user can mend is reported in its own words."""
        with pytest.raises(StageFailed) as failed:
            run_fake(tmp_path, stage)

        assert (failed.value.failure.exit_code, failed.value.failure.cause, failed.value.failure.message) == (
            exit_code,
            cause,
            message,
        )

    @pytest.mark.parametrize(
        ("stage", "message"),
        [
            ("save_tensors_beyond_the_limit", r"I/O error: File too large \(os error 27\)"),
            ("save_with_torch_beyond_the_limit", "unexpected pos"),
            ("write_rows_beyond_the_limit", r"\[Errno 27\]"),
            ("fill_a_database_beyond_the_limit", "disk I/O error"),
            ("save_where_nothing_fits", "the disk took no more, not even the reason"),
        ],
    )
    def test_of_a_full_disk_is_understood_in_every_librarys_words(
        self, tmp_path: Path, stage: str, message: str
    ) -> None:
        with pytest.raises(StageFailed, match=message) as failed:
            run_fake(tmp_path, stage)

        assert (failed.value.failure.exit_code, failed.value.failure.cause) == (ExitCode.STORAGE, "storage")
        assert failed.value.failure.remedy.startswith("make room")

    def test_that_nobody_foresaw_names_the_log_and_its_last_line(self, tmp_path: Path) -> None:
        """An unforeseen error is reported with the log's path and its last line."""
        with pytest.raises(StageFailed) as failed:
            run_fake(tmp_path, "break_down")

        assert failed.value.failure.exit_code == ExitCode.INTERNAL
        assert failed.value.log == tmp_path / "log.txt"
        assert "last line of the log: KeyError: 'no such thing'" in str(failed.value)
        assert str(tmp_path / "log.txt") in str(failed.value)
        assert "Traceback" in (tmp_path / "log.txt").read_text()

    def test_shows_no_secret_that_only_the_orchestrator_knows(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        warm_up()  # so that no process of the stage knows it
        monkeypatch.setenv("REGISTRY_PASSWORD", "hunter22_canary")
        with pytest.raises(StageFailed, match="has no attribute") as failed:
            run_fake(tmp_path, "hunter22_canary")

        assert "hunter22_canary" not in str(failed.value)

    def test_of_a_process_that_crashed_in_c_is_told_from_its_status(self, tmp_path: Path) -> None:
        with pytest.raises(StageFailed, match=r"ended with status 134; last line of the log: \S") as failed:
            run_fake(tmp_path, "crash")

        assert failed.value.failure.exit_code == ExitCode.INTERNAL
        assert "Fatal Python error: Aborted" in (tmp_path / "log.txt").read_text()

    def test_of_a_process_that_crashed_while_the_kernel_killed_another_one_is_its_own(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The count is that of the group of the kernel, in which other stages are too."""
        counts = iter([4, 5])
        monkeypatch.setattr(launching, "oom_kills", lambda: next(counts))
        with pytest.raises(StageFailed, match=r"ended with status 134") as failed:
            run_fake(tmp_path, "crash")

        assert failed.value.failure.exit_code == ExitCode.INTERNAL

    def test_of_a_process_killed_from_outside_may_be_retried(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(launching, "oom_kills", lambda: 4)
        with pytest.raises(StageFailed, match="killed from outside") as failed:
            run_fake(tmp_path, "be_killed")

        assert (failed.value.failure.exit_code, failed.value.failure.cause) == (ExitCode.RESUME, "killed")

    def test_of_a_process_that_the_kernel_killed_for_memory_says_memory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counts = iter([4, 5])
        monkeypatch.setattr(launching, "oom_kills", lambda: next(counts))
        with pytest.raises(StageFailed, match="memory ran out") as failed:
            run_fake(tmp_path, "be_killed")

        assert (failed.value.failure.exit_code, failed.value.failure.cause) == (
            ExitCode.OUT_OF_MEMORY,
            "memory",
        )

    @pytest.mark.slow
    def test_of_the_fork_server_itself_may_be_retried_and_the_next_stage_gets_a_new_one(
        self, tmp_path: Path
    ) -> None:
        def kill_its_fork_server() -> None:
            if (tmp_path / "scratch" / "working").exists():
                os.kill(launching.forkserver._forkserver._forkserver_pid, signal.SIGKILL)

        with pytest.raises(StageFailed) as failed:
            run_fake(tmp_path, "save_when_asked", on_poll=kill_its_fork_server)

        assert failed.value.failure.exit_code == ExitCode.RESUME
        assert run_fake(tmp_path, "tell").metrics["seed"] == 17

    def test_of_a_fork_server_that_never_lives_is_told_after_three_tries(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tries: list[None] = []

        def refuse(_: object) -> None:
            tries.append(None)
            raise ConnectionRefusedError

        monkeypatch.setattr(launching.ForkServerProcess, "start", refuse)
        with pytest.raises(
            StageFailed,
            match=r"forked from ends as soon as it is started; .*vantage\.attempts\.launchers\.forkserver",
        ):
            run_fake(tmp_path, "tell")
        assert len(tries) == 3


class TestStop:
    def test_lets_the_stage_save_and_says_resume_me(self, tmp_path: Path) -> None:
        stop = threading.Event()

        def stop_when_it_works() -> None:
            if (tmp_path / "scratch" / "working").exists():
                stop.set()

        with pytest.raises(StageFailed, match="saved at step 3") as failed:
            run_fake(tmp_path, "save_when_asked", stop=stop, on_poll=stop_when_it_works)

        assert (failed.value.failure.exit_code, failed.value.failure.cause) == (ExitCode.RESUME, "preempted")
        assert (tmp_path / "scratch" / "checkpoint").read_text() == "step 3"

    def test_set_before_the_process_could_listen_still_reaches_it(self, tmp_path: Path) -> None:
        stop = threading.Event()
        stop.set()

        with pytest.raises(StageFailed, match="saved at step 3"):
            run_fake(tmp_path, "save_when_asked", stop=stop)

    def test_kills_a_deaf_stage_and_its_programs_when_grace_is_over(self, tmp_path: Path) -> None:
        stop = threading.Event()
        working = tmp_path / "scratch" / "working"

        with pytest.raises(StageFailed, match="stopped before it could save") as failed:
            run_fake(
                tmp_path,
                "never_listen",
                stop=stop,
                on_poll=lambda: stop.set() if working.exists() else None,
                grace=0.5,
            )

        assert failed.value.failure.exit_code == ExitCode.RESUME
        wait_for(lambda: not any(is_alive(int(pid)) for pid in working.read_text().split()))

    def test_an_error_of_the_caller_leaves_no_process(self, tmp_path: Path) -> None:
        """The stage and all that it started end, whatever session they are in, and the launcher forgets the stage."""
        working = tmp_path / "scratch" / "working"
        before = set(launching._stages)
        daemons = []

        def fail_once_it_works() -> None:
            if working.exists() and working.read_text():
                daemons.extend(daemons_in(tmp_path))
                raise RuntimeError("the screen is gone")

        with pytest.raises(RuntimeError, match="the screen is gone"):
            run_fake(tmp_path, "leave_daemons_and_work", on_poll=fail_once_it_works)

        assert launching._stages == before
        assert len(daemons) == 3
        wait_for(lambda: not any(is_alive(pid) for pid in [*daemons, int(working.read_text())]))


class TestHang:
    @pytest.mark.slow
    def test_is_killed_with_its_programs_and_the_log_says_where_it_stood(self, tmp_path: Path) -> None:
        with pytest.raises(
            StageFailed, match=r"^no progress for 2 s: the stage hung and was killed"
        ) as failed:
            run_fake(tmp_path, "never_listen", hang_seconds=2.0)

        assert (failed.value.failure.exit_code, failed.value.failure.cause) == (ExitCode.HUNG, "hung")
        log = (tmp_path / "log.txt").read_text()
        assert "vantage: no progress for 2 s; stacks of its threads:" in log
        assert re.search(r'File ".*fake_stages\.py", line \d+ in never_listen', log)
        pids = (tmp_path / "scratch" / "working").read_text().split()
        wait_for(lambda: not any(is_alive(int(pid)) for pid in pids))

    def test_of_a_thread_is_in_the_log_too(self, tmp_path: Path) -> None:
        with pytest.raises(StageFailed, match="hung"):
            run_fake(tmp_path, "wait_for_a_thread", hang_seconds=2.0)

        log = (tmp_path / "log.txt").read_text()
        assert "in sleep_for_ever" in log
        assert "in wait_for_a_thread" in log

    @pytest.mark.slow
    def test_is_not_what_goes_on_reporting(self, tmp_path: Path) -> None:
        assert run_fake(tmp_path, "report_slowly", hang_seconds=6.0).metrics == {"reports": 8.0}


ORCHESTRATOR = """
import sys, threading
from pathlib import Path
sys.path.append({root!r})
{first}
from tests.attempts.launchers.test_local_process import job_in
from vantage.attempts.launchers.local_process import LocalProcess, warm_up
folder = Path({folder!r})
(folder / "main-ran").open("a").write("x")
warm_up()
# From a thread that is not the main one, as the pipeline does.
options = dict(log=folder / "log.txt", function="tests.support.fake_stages.{stage}")
thread = threading.Thread(target=LocalProcess().launch, args=(job_in(folder),), kwargs=options)
thread.start()
thread.join()
"""


def start_orchestrator(folder: Path, stage: str, *, bare: bool = True) -> subprocess.Popen[bytes]:
    """Start an orchestrator as ``python -m`` does in a folder of the user, which is then the first entry of the path.

    Args:
        bare: its fork server loads no libraries of stages; this one finds the tests on a path of the environment.
    """
    (folder / "orchestrator.py").write_text(
        ORCHESTRATOR.format(
            root=str(ROOT),
            folder=str(folder),
            stage=stage,
            first="import tests.support.bare_preload" if bare else "",
        )
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    if bare:
        environment["PYTHONPATH"] = str(ROOT)
    return subprocess.Popen(
        [sys.executable, "-m", "orchestrator"], cwd=folder, env=environment, start_new_session=True
    )


def descendants(pid: int) -> set[int]:
    children = {
        int(child)
        for task in Path(f"/proc/{pid}/task").glob("*")
        for child in (task / "children").read_text().split()
    }
    return children.union(*(descendants(child) for child in children))


@pytest.mark.slow
class TestOrchestrator:
    def test_has_its_main_module_run_once_and_a_users_models_folder_stands_in_for_ours_nowhere(
        self, tmp_path: Path
    ) -> None:
        (tmp_path / "models").mkdir()
        (tmp_path / "models" / "__init__.py").write_text("raise SystemExit('the wrong models')")

        assert start_orchestrator(tmp_path, "tell", bare=False).wait(100) == 0

        result = (attempt_folder(job_in(tmp_path)) / "result.json").read_bytes()
        told = StageResult.model_validate_json(result).samples[0]
        assert told["models"] == str(ROOT / "vantage" / "models" / "__init__.py")
        assert "" not in told["path"]
        assert str(tmp_path) not in told["path"]
        assert (tmp_path / "main-ran").read_text() == "x"

    @pytest.mark.parametrize("whole_group", [False, True])
    def test_leaves_no_daemon_of_a_stage_when_killed(self, tmp_path: Path, whole_group: bool) -> None:
        orchestrator = start_orchestrator(tmp_path, "leave_daemons_and_work")
        try:
            working = tmp_path / "scratch" / "working"
            wait_for(lambda: working.exists() and working.read_text(), seconds=100)
            daemons = daemons_in(tmp_path)
            assert len(daemons) == 3 and all(is_alive(pid) for pid in daemons)
        finally:
            (os.killpg if whole_group else os.kill)(orchestrator.pid, signal.SIGKILL)
            orchestrator.wait()
        wait_for(lambda: not any(is_alive(pid) for pid in daemons), seconds=60)

    @pytest.mark.parametrize("whole_group", [False, True])
    def test_alone_gets_the_groups_signals_and_leaves_no_process_when_killed(
        self, tmp_path: Path, whole_group: bool
    ) -> None:
        orchestrator = start_orchestrator(tmp_path, "save_when_asked")
        try:
            working = tmp_path / "scratch" / "working"
            wait_for(lambda: working.exists() and working.read_text(), seconds=100)
            started = descendants(orchestrator.pid)
            assert int(working.read_text()) in started
            assert len(started) == 3, "fork server, resource tracker and stage"

            # Ctrl-C and a terminated group reach neither stage nor fork server.
            os.kill(orchestrator.pid, signal.SIGSTOP)  # this process must not handle the signals itself
            wait_for(lambda: state(orchestrator.pid) == "T")
            os.killpg(orchestrator.pid, signal.SIGINT)
            os.killpg(orchestrator.pid, signal.SIGTERM)
            time.sleep(0.5)
            assert all(is_alive(pid) for pid in started)
        finally:
            (os.killpg if whole_group else os.kill)(orchestrator.pid, signal.SIGKILL)
            orchestrator.wait()

        wait_for(lambda: not any(is_alive(pid) for pid in started))
        assert not (tmp_path / "scratch" / "checkpoint").exists(), "it was killed, not asked"


class TestLastLine:
    def test_is_the_last_that_is_not_blank(self, tmp_path: Path) -> None:
        (tmp_path / "log").write_text("x" * 20_000 + "\nboom: λ\n\n  \n", encoding="utf-8")
        assert last_line(tmp_path / "log") == "boom: λ"
        (tmp_path / "log").write_text("x" * 20_000)
        assert last_line(tmp_path / "log") == "x" * 8192, "a message is no longer than that"

    def test_of_no_log_says_so(self, tmp_path: Path) -> None:
        assert last_line(tmp_path / "log") == "(the log was never written)"
        (tmp_path / "log").touch()
        assert last_line(tmp_path / "log") == "(the log is empty)"

    def test_of_an_earlier_process_is_left_out(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        log.write_text("boom\n")
        assert last_line(log, begin=5) == "(it wrote nothing)"
        log.write_text("boom\nbang\n")
        assert last_line(log, begin=5) == "bang"
