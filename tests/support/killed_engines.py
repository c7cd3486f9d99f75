"""Run stages whose vLLM is killed at chosen moments. Child processes run this module by name; a test imports its names of files alone."""

import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psutil

from tests.support import fake_vllm, served_stages
from tests.support.processes import read_living
from vantage.schemas.records.job import StageJob, StageResult
from vantage.tasks.rollout import running_vllm
from vantage.tasks.rollout.remote_engine import RemoteEngine
from vantage.tasks.rollout.vllm_server import VllmServer
from vantage.tasks.stages import run_stage

KILLS = "kills.json"
"""File in the scratch folder: a list of kills, {phase, at, after}.

``at`` counts the beginnings of the phase in this attempt, from 1; ``after`` is the seconds from there to the kill."""
KILLED = "killed.txt"
"""File in the scratch folder: the phase of each kill so far, a line each."""


class _Moments:
    """Counts how often each phase has begun, and kills at the chosen moments."""

    def __init__(self, job: StageJob, kill: Callable[[int], None]) -> None:
        """Make an engine that is killed. ``kill`` gets the number of the kill, from 0."""
        file = job.scratch / KILLS
        self._chosen: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
        self._killed, self._kill = job.scratch / KILLED, kill
        self._begun: Counter[str] = Counter()

    def begins(self, phase: str) -> None:
        self._begun[phase] += 1
        for number, each in enumerate(self._chosen):
            if (each["phase"], each["at"]) == (phase, self._begun[phase]):
                threading.Timer(each["after"], self._end, (number, phase)).start()

    def _end(self, number: int, phase: str) -> None:
        with self._killed.open("a") as file:
            file.write(f"{phase}\n")
        self._kill(number)

    def before(self, owner: type, method: str, phase: str) -> None:
        """Have the phase begin with each call of the method."""
        original = getattr(owner, method)

        def called(*arguments: Any, **named: Any) -> Any:
            self.begins(phase)
            return original(*arguments, **named)

        setattr(owner, method, called)

    def after(self, owner: type, method: str, phase: str) -> None:
        """Have the phase begin when a call of the method has ended."""
        original = getattr(owner, method)

        def called(*arguments: Any, **named: Any) -> Any:
            result = original(*arguments, **named)
            self.begins(phase)
            return result

        setattr(owner, method, called)


def run_in_process(job: StageJob) -> StageResult:
    """Do the stage with the small module vllm, which sleeps while others compute; its process is what is killed."""
    sys.modules.update(fake_vllm.modules())
    running_vllm.ON_CPU["enable_sleep_mode"] = True
    moments = _Moments(job, lambda _: os.kill(os.getpid(), signal.SIGKILL))
    moments.before(fake_vllm.FakeEngine, "step", "sampling")
    moments.before(running_vllm.RunningVllm, "_gathered", "updating")  # once for each weight
    moments.after(fake_vllm.FakeLLM, "sleep", "asleep")
    return run_stage(job)


def run_with_servers(job: StageJob) -> StageResult:
    """Do the stage with servers of its own, the small one, in turns one of which is killed."""

    def kill_a_server(number: int) -> None:
        lines = read_living(psutil.Process().children(recursive=True), psutil.Process.cmdline)
        servers = [
            each
            for each, line in lines.items()
            if "--load-format" in line and "vantage.tasks.rollout.guarded_process" not in line
        ]
        if servers:  # otherwise all servers have ended, and none is started again yet
            with suppress(psutil.NoSuchProcess):
                servers[number % len(servers)].kill()

    moments = _Moments(job, kill_a_server)
    moments.before(VllmServer, "draw", "sampling")
    moments.before(VllmServer, "take_weights", "updating")
    moments.after(RemoteEngine, "generate", "asleep")
    return served_stages.run(job)
