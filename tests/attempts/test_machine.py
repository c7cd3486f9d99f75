import asyncio
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vantage.attempts import machine
from vantage.attempts.exit_codes import ExitCode
from vantage.attempts.machine import (
    Machine,
    Share,
    available_cpus,
    available_gpus,
    check_resources,
    gpus_listed,
    with_uuids,
)
from vantage.cli.main import app
from vantage.runs.resolving import load_resolved
from vantage.schemas.recipe.stage import Resources


class Watched:
    """Stages that enter and leave when told, and what is seen of them."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.running: dict[str, Share] = {}
        self._leave: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def enter(self, name: str, resources: Resources) -> None:
        self._leave[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._stage(name, resources))
        await settle()

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        await self._tasks[name]
        await settle()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await settle()
        assert self._tasks[name].cancelled()

    async def _stage(self, name: str, resources: Resources) -> None:
        async with self.machine.reserve(resources) as share:
            self.running[name] = share
            try:
                await self._leave[name].wait()
            finally:
                del self.running[name]


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_stages_run_side_by_side_as_far_as_cpus_suffice() -> None:
    async def scenario() -> None:
        stages = Watched(Machine(cpus=4))
        await stages.enter("a", Resources(cpus=2))
        await stages.enter("b", Resources(cpus=1))
        await stages.enter("c", Resources(cpus=2))
        assert stages.running == {"a": Share(cpus=2), "b": Share(cpus=1)}
        await stages.leave("b")
        assert set(stages.running) == {"a", "c"}
        await stages.leave("a")
        await stages.leave("c")
        await stages.enter("d", Resources())
        assert stages.running == {"d": Share(cpus=4)}
        await stages.leave("d")

    asyncio.run(scenario())


def test_a_stage_that_wants_all_is_not_overtaken_for_ever_by_small_ones() -> None:
    async def scenario() -> None:
        stages = Watched(Machine(cpus=2))
        await stages.enter("small", Resources(cpus=1))
        await stages.enter("whole", Resources())
        await stages.enter("late", Resources(cpus=1))
        assert set(stages.running) == {"small"}
        await stages.leave("small")
        assert set(stages.running) == {"whole"}
        await stages.leave("whole")
        assert set(stages.running) == {"late"}
        await stages.leave("late")

    asyncio.run(scenario())


def test_more_cpus_than_there_are_is_all_of_them() -> None:
    assert Machine(cpus=2).share_of(Resources(cpus=64)) == (2, 0)


def test_every_stage_gets_other_gpus_and_gives_them_back() -> None:
    async def scenario() -> None:
        stages = Watched(Machine(cpus=8, gpus=("0", "1", "2")))
        await stages.enter("a", Resources(cpus=1))  # no number named: one
        await stages.enter("b", Resources(cpus=1, gpus=2))
        await stages.enter("none", Resources(cpus=1, gpus=0))
        assert stages.running["a"].gpus == ("0",)
        assert stages.running["b"].gpus == ("1", "2")
        assert stages.running["none"].gpus == ()
        await stages.enter("c", Resources(cpus=1, gpus=2))
        assert "c" not in stages.running
        await stages.leave("b")
        assert set(stages.running["c"].gpus) == {"1", "2"}
        for name in ("a", "c", "none"):
            await stages.leave(name)

    asyncio.run(scenario())


def test_without_a_gpu_none_is_taken_and_asking_for_one_is_refused() -> None:
    machine = Machine(cpus=2)
    assert machine.share_of(Resources()) == (2, 0)
    with pytest.raises(ValueError, match=r"resources\.gpus=1 is more than this machine's 0; ask for fewer"):
        machine.share_of(Resources(gpus=1))


def test_a_cancelled_wait_lets_the_next_one_through_and_loses_nothing() -> None:
    async def scenario() -> None:
        stages = Watched(Machine(cpus=2))
        await stages.enter("first", Resources(cpus=1))
        await stages.enter("whole", Resources())
        await stages.enter("second", Resources(cpus=1))
        await stages.cancel("whole")
        assert set(stages.running) == {"first", "second"}
        await stages.cancel("first")  # while it runs
        await stages.leave("second")
        await stages.enter("all", Resources())
        assert stages.running == {"all": Share(cpus=2)}
        await stages.leave("all")

    asyncio.run(scenario())


def test_a_wait_cancelled_in_the_moment_of_its_turn_gives_its_share_back() -> None:
    async def scenario() -> None:
        machine = Machine(cpus=1)
        stages = Watched(machine)
        async with machine.reserve(Resources()):
            await stages.enter("second", Resources())
        assert not stages.running, "second's turn has come, and it has not yet run"
        await stages.cancel("second")
        await stages.enter("third", Resources())
        assert set(stages.running) == {"third"}
        await stages.leave("third")

    asyncio.run(scenario())


class TestGpus:
    LISTING = """\
GPU 0: NVIDIA H200 (UUID: GPU-11111111-aaaa)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-22222222-bbbb)
  MIG 1g.10gb     Device  0: (UUID: MIG-33333333-cccc)
  MIG 2g.20gb     Device  1: (UUID: MIG-44444444-dddd)
"""

    def test_of_the_drivers_list_are_whole_ones_or_the_parts_of_those_cut_up(self) -> None:
        assert gpus_listed(self.LISTING) == ("GPU-11111111-aaaa", "MIG-33333333-cccc", "MIG-44444444-dddd")
        assert gpus_listed("No devices found.\n") == ()

    @pytest.mark.parametrize(
        ("visible", "gpus"), [("", ()), ("-1", ()), ("2", ("2",)), ("0, GPU-1", ("0", "GPU-1"))]
    )
    def test_named_by_the_environment_are_the_only_ones(
        self, monkeypatch: pytest.MonkeyPatch, visible: str, gpus: tuple[str, ...]
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert available_gpus() == gpus

    def test_are_asked_of_the_driver(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        driver = tmp_path / "nvidia-smi"
        driver.write_text(f"#!/bin/sh\ncat <<'END'\n{self.LISTING}END\n")
        driver.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        assert available_gpus() == ("GPU-11111111-aaaa", "MIG-33333333-cccc", "MIG-44444444-dddd")

    def test_have_one_name_whichever_was_given(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        assert with_uuids(("0", "GPU-1")) == ("0", "GPU-1")
        driver = tmp_path / "nvidia-smi"
        driver.write_text(f"#!/bin/sh\ncat <<'END'\n{self.LISTING}END\n")
        driver.chmod(0o755)
        assert with_uuids(("1", "0")) == ("MIG-33333333-cccc", "GPU-11111111-aaaa")
        assert with_uuids(("GPU-1", "0", "MIG-44444444-dddd")) == ("GPU-11111111-aaaa", "MIG-44444444-dddd")
        assert with_uuids(("7", "GPU-99", "M")) == ("7", "GPU-99", "M")

    def test_of_a_broken_driver_are_none(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{self.LISTING}END\nexit 9\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        assert available_gpus() == ()

    def test_of_a_driver_that_hangs_are_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def hang(command: list[str], *, timeout: float, **_: Any) -> None:
            raise subprocess.TimeoutExpired(command, timeout)

        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(machine.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
        monkeypatch.setattr(machine.subprocess, "run", hang)
        assert available_gpus() == ()


def test_cpus_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine has 64 CPUs, this process may use three, and no container sets a lower limit."""
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: {1, 2, 5})
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(machine, "whole_cpus", lambda cpus: cpus)
    assert available_cpus() == 3


def test_a_stage_that_needs_more_gpus_is_refused_unless_a_pool_computes_it(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "this_machine", lambda: Machine(cpus=2))
    gpus = "stages.sft.resources.gpus=4"
    with pytest.raises(ValueError, match=r"^stages\.sft\.resources\.gpus=4 is more than this machine's 0"):
        check_resources(load_resolved(recipe_file, [gpus])[0])
    check_resources(load_resolved(recipe_file, [gpus, "stages.sft.resources.pool=gpu"])[0])


def test_a_stage_whose_optimizer_needs_a_package_is_refused_unless_a_pool_computes_it(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.importlib.util, "find_spec", lambda name: None)
    states = "stages.sft.optimizer_states=8bit"
    with pytest.raises(
        ValueError, match=r"stages\.sft\.optimizer_states=8bit needs the package bitsandbytes"
    ):
        check_resources(load_resolved(recipe_file, [states])[0])
    check_resources(load_resolved(recipe_file, [states, "stages.sft.resources.pool=gpu"])[0])


def test_a_plan_refuses_what_needs_a_package_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine.importlib.util.find_spec
    monkeypatch.setattr(
        machine.importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else found(name)
    )
    options = ("--set", "model.quantization=nf4", "--set", "model.lora={rank: 2}")
    done = CliRunner().invoke(app, ["plan", "quickstart", *options])
    assert done.exit_code == ExitCode.BAD_INPUT
    assert "model.quantization=nf4 needs the package bitsandbytes; install it: pip install" in done.stderr
    assert "Traceback" not in done.output
