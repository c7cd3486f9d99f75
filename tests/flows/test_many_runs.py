"""Five runs at once share their first stages, beside ``status`` in a loop and ``cancel``: none fails, and nothing is made twice."""

import random
import subprocess
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.orchestrated import attempt_all, events, orchestrated, pace
from tests.support.real_runs import Starter
from vantage.attempts.exit_codes import ExitCode
from vantage.flows.cancelling import cancel_run
from vantage.runs.record import RunRecord
from vantage.runs.run import damaged_runs, read_runs
from vantage.runs.status import run_state
from vantage.runs.workspace import Workspace

pytestmark = pytest.mark.slow

RUNS = 5
CANCELLED = 2
SHARED = ("model", "data.demonstrations", "data.preferences", "data.prompts", "sft", "reward", "value")


def override(number: int) -> str:
    """Return an override that changes a run's policy and no stage before it."""
    return f"stages.policy.learning_rate={number + 1}e-6"


class Status:
    """Reads every run as ``vantage status`` does, again and again until it is closed, and keeps what is wrong."""

    def __init__(self, workspace: Workspace) -> None:
        self.looks = 0
        self.problems: list[object] = []
        self._workspace = workspace
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(timeout=60)

    def _look(self) -> None:
        while not self._ended.is_set():
            try:
                views = [run_state(self._workspace, record) for record in read_runs(self._workspace)]
                self.problems += damaged_runs(self._workspace)
                self.problems += [each.damage or each.contradictions for each in views]
            except Exception as error:  # no error at all may be shown
                self.problems.append(repr(error))
            self.problems = [each for each in self.problems if each]
            self.looks += 1
            time.sleep(0.2)


def active_runs(workspace: Workspace) -> list[RunRecord]:
    return [each for each in read_runs(workspace) if each.status == "running" and "sft" in each.stages]


@pytest.mark.usefixtures("prefect_url")
def test_five_runs_share_stages_beside_status_and_cancel(
    workspace: Workspace, recipe_file: Path, start_vantage: Starter, tmp_path: Path
) -> None:
    pace(workspace, 0.1)
    chance = random.Random(33)
    under_way = {number: start_vantage("--set", override(number)) for number in range(RUNS)}
    status, to_cancel, ends = Status(workspace), CANCELLED, Counter[int]()
    try:
        deadline = time.monotonic() + 900
        while under_way:
            assert time.monotonic() < deadline, "they never ended"
            if to_cancel and len(running := active_runs(workspace)) >= 2:
                cancel_run(workspace, chance.choice(running))
                to_cancel -= 1
            for number, process in list(under_way.items()):
                output = ended(process)
                if output is None:
                    continue
                code = ExitCode(process.returncode)
                ends[code] += 1
                assert code in (ExitCode.OK, ExitCode.RESUME), output
                del under_way[number]
                if code == ExitCode.RESUME:
                    under_way[number] = start_vantage("--set", override(number))
            time.sleep(0.3)
    finally:
        status.close()

    assert status.problems == []
    assert status.looks > 10
    assert ends[ExitCode.OK] == RUNS
    assert ends[ExitCode.RESUME] <= CANCELLED, "whoever is cancelled as it ends may complete"
    started = Counter(line for line in events(workspace) if line.split()[0] in SHARED)
    assert set(started.values()) == {1}, started
    expected = digests_of_runs_alone(Workspace(tmp_path / "alone"), recipe_file)
    completed = [each for each in read_runs(workspace) if each.status == "completed"]
    assert len(completed) == RUNS
    assert {each.overrides: digests(each) for each in completed} == expected
    assert leftovers(workspace) == []


def ended(process: subprocess.Popen[str]) -> str | None:
    """Return what a process printed, or None while it runs."""
    with suppress(subprocess.TimeoutExpired):
        return "".join(process.communicate(timeout=0.01))
    return None


def digests(record: RunRecord) -> dict[str, str | None]:
    return {name: stage.digest for name, stage in record.stages.items()}


def digests_of_runs_alone(workspace: Workspace, recipe: Path) -> dict[tuple[str, ...], dict[str, str | None]]:
    """Return override → the digests of its run, one after the other and undisturbed."""
    for number in range(RUNS):
        with orchestrated(workspace, recipe, override(number), in_process=True) as orchestrator:
            attempt_all(orchestrator)
            orchestrator.run.update(status="completed", overrides=(override(number),))
    return {each.overrides: digests(each) for each in read_runs(workspace)}


def leftovers(workspace: Workspace) -> list[Path]:
    """Return scratch folders of stages, and files that were to replace others."""
    scratch = workspace.store / "scratch"
    return [*(scratch.iterdir() if scratch.is_dir() else ()), *workspace.root.rglob("*.new*")]
