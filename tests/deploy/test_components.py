"""The components for several GPUs, an ingress and TLS change the manifests and the compose file as Kubernetes and Compose merge them."""

import copy
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import compose_spec
import jsonpatch
import kubernetes_validate
import pytest
import yaml

from tests.deploy.test_manifests import DEPLOY, KUBERNETES, all_documents, compose, documents

COMPONENTS = sorted((DEPLOY / "components").iterdir())
NAMES = ("prefect.example.org", "mlflow.example.org")


def component(name: str) -> dict[str, Any]:
    [loaded] = documents(DEPLOY / "components" / name / "kustomization.yaml")
    return loaded


def patched(name: str) -> list[dict[str, Any]]:
    """Return the manifests with a component's patches, and what it adds."""
    made = copy.deepcopy(all_documents())
    for patch in component(name)["patches"]:
        target = patch["target"]
        [found] = [
            number
            for number, each in enumerate(made)
            if (each["kind"], each["metadata"]["name"]) == (target["kind"], target["name"])
        ]
        change = yaml.safe_load(patch["patch"])
        if isinstance(change, list):
            made[found] = jsonpatch.apply_patch(made[found], change)
        else:
            _merge_environment(made[found], change)
    for file in component(name).get("resources", []):
        made += documents(DEPLOY / "components" / name / file)
    return made


def _merge_environment(document: dict[str, Any], change: dict[str, Any]) -> None:
    """Merge variables as Kubernetes' strategic merge does."""
    [container] = change["spec"]["template"]["spec"]["containers"]
    assert {*container} == {"name", "env"}
    [base] = document["spec"]["template"]["spec"]["containers"]
    assert base["name"] == container["name"]
    for variable in container["env"]:
        base["env"] = [each for each in base["env"] if each["name"] != variable["name"]] + [variable]


def container_of(made: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    [found] = [each for each in made if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    [container] = found["spec"]["template"]["spec"]["containers"]
    return {**found["spec"], "container": container}


@pytest.mark.parametrize("path", COMPONENTS, ids=lambda path: path.name)
def test_kubernetes_accepts_what_a_component_makes(path: Path) -> None:
    for document in patched(path.name):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    readme = (DEPLOY / "README.md").read_text()
    assert f"deploy/components/{path.name}" in readme


def test_a_worker_of_eight_gpus_asks_for_eight() -> None:
    spec = container_of(patched("eight_gpus"), "StatefulSet", "gpu-worker")
    resources = spec["container"]["resources"]
    assert resources["limits"] == {"memory": "512Gi", "nvidia.com/gpu": 8}
    assert resources["requests"] == {"cpu": "64", "memory": "256Gi"}
    [memory] = spec["template"]["spec"]["volumes"]
    assert memory["emptyDir"]["sizeLimit"] == "64Gi"
    assert spec["container"]["command"] == ["vantage", "worker", "--pool", "gpu"], (
        "which uses all GPUs that it sees"
    )


def test_behind_an_ingress_both_servers_answer_to_their_public_names() -> None:
    made = patched("ingress")
    environment = {
        each["name"]: each.get("value")
        for each in container_of(made, "Deployment", "prefect")["container"]["env"]
    }
    assert environment["PREFECT_UI_API_URL"] == "https://prefect.example.org/api"
    assert environment["PREFECT_SERVER_CORS_ALLOWED_ORIGINS"] == "https://prefect.example.org"
    assert "PREFECT_SERVER_API_AUTH_STRING" in environment
    command = container_of(made, "Deployment", "mlflow")["container"]["command"]
    [hosts] = [each for each in command if each.startswith("--allowed-hosts=")]
    before = container_of(all_documents(), "Deployment", "mlflow")["container"]["command"]
    assert f"{hosts.removesuffix(',mlflow.example.org')}" in before
    assert {*command} - {*before} == {hosts, "--cors-allowed-origins=https://mlflow.example.org"}
    [ingress] = [each for each in made if each["kind"] == "Ingress"]
    assert [rule["host"] for rule in ingress["spec"]["rules"]] == [*NAMES]
    assert ingress["spec"]["tls"] == [{"hosts": [*NAMES], "secretName": "vantage-tls"}]
    served = {
        rule["http"]["paths"][0]["backend"]["service"]["name"]: rule["http"]["paths"][0]["backend"][
            "service"
        ]["port"]
        for rule in ingress["spec"]["rules"]
    }
    ports = {
        each["metadata"]["name"]: {"number": each["spec"]["ports"][0]["port"]}
        for each in made
        if each["kind"] == "Service" and each["metadata"]["name"] in served
    }
    assert served == ports


def test_compose_behind_tls_changes_nothing_but_names() -> None:
    added = yaml.safe_load((DEPLOY / "compose.tls.yaml").read_text())
    base = compose()
    merged = {
        **base,
        "services": {
            name: {**base["services"].get(name, {}), **service}
            for name, service in {**base["services"], **added["services"]}.items()
        },
        "volumes": {**base["volumes"], **added["volumes"]},
    }
    compose_spec.PyCompose.from_json(json.dumps(merged)).validate()
    command = added["services"]["mlflow"]["command"]
    before = base["services"]["mlflow"]["command"]
    changed = [each.partition("=")[0] for each in command if each not in before]
    assert changed == ["--allowed-hosts", "--cors-allowed-origins"]
    assert [each for each in before if each not in command] == [
        "--allowed-hosts=mlflow:5000,127.0.0.1:5000,localhost:5000"
    ]
    assert {name for name, service in added["services"].items() if "ports" in service} == {"tls"}
    caddy = (DEPLOY / "configuration" / "Caddyfile").read_text()
    used = {*re.findall(r"\{\$(\w+):", caddy)}
    assert used == {*added["services"]["tls"]["environment"]}


@pytest.mark.needs("kubectl")
@pytest.mark.parametrize("path", COMPONENTS, ids=lambda path: path.name)
def test_kustomize_makes_the_same_with_a_component(path: Path, tmp_path: Path) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [deploy]\ncomponents: [deploy/components/{path.name}]\n"
        "images: [{name: vantage, newName: registry.example.org/vantage, newTag: '2'}]\n"
    )
    built = subprocess.run(["kubectl", "kustomize", tmp_path], capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stderr
    made = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(built.stdout)}
    for document in made.values():
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    for expected in patched(path.name):
        if expected["kind"] in ("StatefulSet", "Deployment"):
            theirs = made[expected["kind"], expected["metadata"]["name"]]["spec"]["template"]["spec"][
                "containers"
            ][0]
            [ours] = expected["spec"]["template"]["spec"]["containers"]
            assert theirs.get("command") == ours.get("command")
            assert theirs["resources"] == ours["resources"]
            assert theirs["image"].startswith(("registry.example.org/vantage:2", "postgres:"))


@pytest.mark.needs("caddy")
def test_caddy_reads_its_file() -> None:
    read = subprocess.run(
        ["caddy", "validate", "--adapter", "caddyfile", "--config", DEPLOY / "configuration" / "Caddyfile"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert read.returncode == 0, read.stderr
