"""An attempt describes the machine, the image and the installed packages; nothing in it names a person, a host or a path."""

import getpass
import hashlib
import importlib.metadata
import platform
import socket
from pathlib import Path

import pytest

from tests.support.version import PROJECT_VERSION
from vantage.attempts.identity import environment as subject
from vantage.attempts.identity.environment import constraints_digest, environment
from vantage.attempts.identity.hardware import container_image, hardware
from vantage.attempts.identity.identity import identity
from vantage.attempts.identity.shown import describe
from vantage.attempts.provenance import drift, provenance
from vantage.flows.pools.job_variables import job_variables
from vantage.schemas.recipe.stage import Resources


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_machine_with_two_gpus_in_a_container(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    write(
        proc / "cpuinfo",
        "processor\t: 0\nmodel name\t: AMD EPYC  9654 96-Core Processor\nprocessor\t: 1\nmodel name\t: x\n",
    )
    write(proc / "meminfo", "MemTotal:       528280724 kB\nMemFree: 1 kB\n")
    write(proc / "self" / "cgroup", "0::/\n")
    write(proc / "self" / "mountinfo", f"31 22 0:28 / {cgroup} rw - cgroup2 cgroup2 rw\n")
    write(cgroup / "memory.max", "68719476736\n")
    for bus in ("0000:1a:00.0", "0000:3d:00.0"):
        write(
            proc / f"driver/nvidia/gpus/{bus}/information",
            "Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-secret\n",
        )
    write(
        proc / "driver/nvidia/version",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder)\nGCC version:  gcc 12\n",
    )
    told = hardware(proc)
    assert told.pop("cpus").isdecimal()
    assert told == {
        "cpu": "AMD EPYC 9654 96-Core Processor", "memory": "64.0 GiB", "gpus": "2 × NVIDIA H200", "driver": "570.86.15",
    }  # fmt: skip
    write(
        proc / "driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC\n",
    )
    write(cgroup / "memory.max", "max\n")
    assert (hardware(proc)["driver"], hardware(proc)["memory"]) == ("535.104.05", "503.8 GiB")


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    told = hardware(tmp_path)
    assert (told["cpu"], told["memory"], told["gpus"], told["driver"]) == (
        platform.machine(),
        "unknown",
        "none",
        "none",
    )


def test_the_image_is_what_a_pool_or_podman_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VANTAGE_IMAGE", raising=False)
    assert container_image(tmp_path / "none") == "unknown"
    write(tmp_path / "env", 'engine="podman-5.1"\nname="box"\nid="1"\nimage="host/vantage:2"\nimageid="3"\n')
    assert container_image(tmp_path / "env") == "host/vantage:2"
    monkeypatch.setenv("VANTAGE_IMAGE", "host/vantage:3@sha256:ab")
    assert container_image(tmp_path / "env") == "host/vantage:3@sha256:ab"


def test_an_attempt_on_a_pool_is_told_its_image() -> None:
    assert job_variables(Resources(image="vantage:7"))["env"]["VANTAGE_IMAGE"] == "vantage:7"
    assert "VANTAGE_IMAGE" not in job_variables(Resources())["env"]


def test_everything_that_is_installed_is_listed() -> None:
    told = {each.name: each for each in environment().installed}
    for name in ("pydantic", "torch", "pyarrow", "mlflow"):
        assert told[name].version == importlib.metadata.version(name)
    assert len(told) >= 50
    assert [each.name for each in environment().installed] == sorted(told)
    assert told["pydantic"].license == "MIT"


@pytest.mark.parametrize(
    "headers, expected",
    [
        ("License-Expression: MIT OR Apache-2.0\nLicense: old", "MIT OR Apache-2.0"),
        ("License: BSD-3-Clause", "BSD-3-Clause"),
        ("License: UNKNOWN\nClassifier: License :: OSI Approved :: MIT License", "MIT License"),
        # a text that begins with a ruler, as kiwisolver's does; scipy's and MLflow's begin with a copyright
        (
            "License: =====\n         The terms\n        \n        =====\nClassifier: License :: OSI Approved :: BSD License",
            "BSD License",
        ),
        ("License: Copyright 2018\n        \n\t\tRedistribution\nLicense-File: LICENSE", ""),
        ("Classifier: License :: OSI Approved", ""),
        (f"License: {'the whole text ' * 20}\nClassifier: License :: OSI Approved :: zlib", "zlib"),
        ("Summary: none", ""),
    ],
)
def test_licences_as_the_metadata_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, headers: str, expected: str
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    write(
        first / "some_Thing-1.0.dist-info/METADATA",
        f"Name: some_Thing\nVersion: 1.0\n{headers}\n\nLicense: body\n",
    )
    write(second / "some_thing-0.9.dist-info/METADATA", "Name: some.thing\nVersion: 0.9\n\n")
    write(second / "nameless-1.dist-info/METADATA", "Version: 1\n\n")
    monkeypatch.setattr(subject.sys, "path", [str(first), str(second)])
    environment.cache_clear()
    (found,) = environment().installed
    environment.cache_clear()
    assert (found.name, found.version, found.license) == ("some-thing", "1.0", expected)


def test_constraints_are_those_that_pip_is_told_else_the_checkouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    own = Path(__file__).parents[3] / "constraints.txt"
    assert constraints_digest() == hashlib.sha256(own.read_bytes()).hexdigest()
    write(tmp_path / "c.txt", "torch==2.13.0\n")
    monkeypatch.setenv("PIP_CONSTRAINT", str(tmp_path / "c.txt"))
    assert constraints_digest() == hashlib.sha256(b"torch==2.13.0\n").hexdigest()
    monkeypatch.setenv("PIP_CONSTRAINT", f"{tmp_path}/c.txt {tmp_path}/d.txt")
    assert constraints_digest() == "unknown"


def test_nothing_of_it_names_a_person_a_host_or_a_path_or_holds_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("REGISTRY_PASSWORD", "hunter22-canary")
    monkeypatch.setenv(
        "VANTAGE_IMAGE", "https://me:hunter22-canary@host/vantage:1\x1b[2J\nsecond line" + "x" * 999
    )
    told = identity()
    text = " ".join(told.values()) + environment().content.decode()
    for private in ("hunter22-canary", str(Path.home()), str(Path.cwd()), "/root", "\x1b", "\n"):
        assert private not in text
    names = {getpass.getuser(), socket.gethostname()}
    assert names.isdisjoint(text.replace('"', " ").split())
    assert max(map(len, told.values())) <= 300


def test_it_is_flat_text_beside_the_provenance_and_never_compared() -> None:
    compared, told = provenance("sft", threads=1, world_size=1), identity()
    assert all(isinstance(value, str) and value for value in told.values())
    assert set(compared).isdisjoint(told)
    elsewhere = {**compared, **told, "revision": "b" * 40, "cpu": "another", "environment": "c" * 64}
    assert drift(elsewhere, compared) == [], "what another machine recorded is no drift"
    assert drift(compared, compared) == [], "nor is what an earlier version did not record"


def test_one_line_for_people() -> None:
    told = {**provenance("sft", threads=1, world_size=1), **identity(), "revision": "ab" * 20, "dirty": "yes"}
    assert describe(told).startswith(
        f"vantage {PROJECT_VERSION}, revision abababababab with changes, Python 3."
    )
    assert "package " in describe({**told, "revision": "unknown"})
    assert "abababababab, Python 3." in describe({**told, "dirty": "no"})
    assert "abababababab (changes unknown), Python 3." in describe({**told, "dirty": "unknown"})
    ranks = describe({**told, "image": "unknown", "ranks": "2 until step 5, then 1"})
    assert ranks.endswith(" · ranks: 2 until step 5, then 1")
    assert describe({**told, "image": "vantage:1", "gpus": "1 × H200"}).endswith("image vantage:1")
    assert describe(provenance("sft", threads=1, world_size=1)) == "", "of an earlier version"
