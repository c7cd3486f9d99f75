"""The files of deploy/ are valid by the schemas of the programs that read them; no network is used."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import compose_spec
import kubernetes_validate
import pytest
import yaml
from docker.types import HostConfig
from docker.utils import parse_bytes
from prefect.server.schemas.actions import WorkPoolCreate
from prefect.utilities.templating import apply_values
from prefect_docker.worker import DockerWorkerJobConfiguration

from deploy.servers.mlflow_server import write_auth_config
from deploy.servers.postgres import DATABASES
from deploy.servers.settings import Settings
from vantage.flows.pools.job_variables import job_variables
from vantage.schemas.recipe.stage import Resources

DEPLOY = Path(__file__).parents[2] / "deploy"
KUBERNETES = "1.34"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
SECRET = re.compile(r"PASSWORD|SECRET|AUTH_STRING|ACCESS_KEY")


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def all_documents() -> list[dict[str, Any]]:
    return [document for path in MANIFESTS for document in documents(path)]


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return loaded


def containers() -> Iterator[dict[str, Any]]:
    for document in all_documents():
        template = document.get("spec", {}).get("template")
        if template:
            yield from template["spec"]["containers"]


# Kubernetes


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_is_what_kubernetes_accepts(path: Path) -> None:
    for document in documents(path):
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_schemas_refuse_a_wrong_field_and_a_wrong_type() -> None:
    [worker] = [
        each for each in documents(DEPLOY / "kubernetes" / "gpu_worker.yaml") if each["kind"] != "Service"
    ]
    for change in ({"replicas": "one"}, {"replica": 1}):
        broken = {**worker, "spec": {**worker["spec"], **change}}
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(broken, KUBERNETES, strict=True)


def test_kustomize_takes_every_manifest_and_makes_every_configuration() -> None:
    [kustomization] = documents(DEPLOY / "kustomization.yaml")
    assert {DEPLOY / each for each in kustomization["resources"]} == {*MANIFESTS}
    made = {each["name"]: each["files"] for each in kustomization["configMapGenerator"]}
    assert all((DEPLOY / file).is_file() for files in made.values() for file in files)
    used = {
        volume["configMap"]["name"]
        for document in all_documents()
        for volume in document.get("spec", {}).get("template", {}).get("spec", {}).get("volumes", [])
        if "configMap" in volume
    }
    assert used == {*made}


def test_everything_that_the_issue_names_is_there() -> None:
    named = {(each["kind"], each["metadata"]["name"]) for each in all_documents()}
    assert named >= {
        ("Deployment", "prefect"),
        ("Deployment", "mlflow"),
        ("StatefulSet", "postgres"),
        ("Job", "work-pool"),
        ("StatefulSet", "gpu-worker"),
        ("Deployment", "orders-worker"),
    }
    orders, gpu = sorted(
        (each for each in containers() if each["name"] == "worker"), key=lambda each: -len(each["command"])
    )
    assert gpu["command"] == ["vantage", "worker", "--pool", "gpu"]
    assert gpu["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert orders["command"] == ["vantage", "worker", "--pool", "orders", "--gpus", "", "--limit", "4"]
    assert "nvidia.com/gpu" not in orders["resources"]["limits"]
    services = compose()["services"]
    assert {*services} == {"postgres", "prefect", "mlflow", "work_pool", "orders_worker", "gpu_worker"}
    assert services["orders_worker"]["command"] == orders["command"]
    assert services["gpu_worker"]["command"] == gpu["command"]
    assert "deploy" not in services["orders_worker"], "it takes no GPU"


def test_kubernetes_logins_are_only_referred_to_and_the_readme_creates_them() -> None:
    assert "Secret" not in {each["kind"] for each in all_documents()}
    refers: set[tuple[str, str]] = set()
    for container in containers():
        for variable in container["env"]:
            if "valueFrom" in variable:
                reference = variable["valueFrom"]["secretKeyRef"]
                refers.add((reference["name"], reference["key"]))
            elif SECRET.search(variable["name"]):
                assert re.fullmatch(r"vantage:\$\(PREFECT_PASSWORD\)", variable["value"]), variable
    readme = (DEPLOY / "README.md").read_text()
    created = set(re.findall(r"--from-literal=([a-z-]+)=", readme))
    assert refers == {("vantage-logins", key) for key in created}
    assert len(created) == 4


# Docker


def test_the_compose_file_follows_the_specification() -> None:
    read = compose_spec.PyCompose.from_json(json.dumps(compose()))
    read.validate()
    assert "gpu_worker" in read.service_names()


@pytest.mark.parametrize("change", [{"imagee": "x"}, {"ports": [{"target": "many"}]}])
def test_the_specification_refuses_mistakes(change: dict[str, Any]) -> None:
    broken = compose()
    broken["services"]["mlflow"] |= change
    with pytest.raises(ValueError):
        compose_spec.PyCompose.from_json(json.dumps(broken))


def test_compose_names_volumes_services_and_files_that_exist() -> (
    None
):  # the specification does not ask for it
    volumes, services = compose()["volumes"], compose()["services"]
    for service in services.values():
        assert {*service.get("depends_on", {})} <= {*services}
        for mount in service.get("volumes", []):
            source = mount.partition(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith(".") else source in volumes, mount


def test_compose_logins_come_from_a_file_of_the_user_and_ports_are_this_machines() -> None:
    required = set()
    for service in compose()["services"].values():
        for name, value in service["environment"].items():
            if value is None:  # handed on if the user's file has it, else not set
                assert name.startswith(("AWS_", "AZURE_", "GOOGLE_")), name
            elif SECRET.search(name):
                required |= {*re.findall(r"\$\{(\w+):\?", value)}
                assert re.fullmatch(r"(vantage:)?\$\{\w+:\?[^}]+\}", value), (name, value)
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    [names] = re.findall(r"for name in ([A-Z_ ]+); do", (DEPLOY / "README.md").read_text())
    assert required == {*names.split()}


def test_no_container_gets_an_empty_variable() -> None:  # an empty endpoint or region of a storage is one
    for service in compose()["services"].values():
        assert not [
            each
            for each in service["environment"].values()
            if each is not None and (not each or ":-" in each)
        ]
    for container in containers():
        assert all(each.get("value", "x") for each in container["env"])


def test_containers_and_make_servers_have_the_same_databases(tmp_path: Path) -> None:
    script = (DEPLOY / "configuration" / "databases.sql").read_text()
    assert tuple(re.findall(r"CREATE DATABASE (\w+);", script)) == DATABASES
    settings = Settings(postgres_folder=tmp_path, postgres_password="x" * 32, ports={"postgres": 5432})
    write_auth_config(settings, tmp_path)
    ours = (tmp_path / "mlflow_auth.ini").read_text().replace(f":{'x' * 32}@127.0.0.1:", "@postgres:")
    theirs = (DEPLOY / "configuration" / "mlflow_auth.ini").read_text()
    assert ours == theirs.partition("\n")[2]


# Work pools


def template(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DEPLOY / "pools" / f"{name}.json").read_text())
    return loaded


def filled(name: str, resources: Resources, **given: Any) -> dict[str, Any]:
    """Return the job configuration of a stage's attempt, filled in as Prefect's workers do it."""
    properties = template(name)["variables"]["properties"]
    defaults = {key: each["default"] for key, each in properties.items() if "default" in each}
    values = {
        **defaults,
        "name": "attempt",
        "command": "prefect flow-run execute",
        **job_variables(resources),
        **given,
    }
    configuration: dict[str, Any] = apply_values(template(name)["job_configuration"], values)
    return configuration


ASKED = Resources(gpus=2, cpus=12, memory="96Gi", image="registry/vantage:2", node_selector={"gpu": "h200"})


@pytest.mark.parametrize("name", ["docker", "kubernetes"])
def test_prefects_server_accepts_the_template(name: str) -> None:
    WorkPoolCreate(name="pool", type=name, base_job_template=template(name))
    broken = template(name)
    broken["job_configuration"]["more"] = "{{ undeclared }}"
    with pytest.raises(ValueError, match="undeclared"):
        WorkPoolCreate(name="pool", type=name, base_job_template=broken)


@pytest.mark.parametrize("name", ["docker", "kubernetes"])
def test_every_variable_of_a_template_is_described_and_used(name: str) -> None:
    text = json.dumps(template(name)["job_configuration"])
    properties = template(name)["variables"]["properties"]
    assert set(re.findall(r"\{\{ (\w+) \}\}", text)) == {*properties}
    assert all(each["title"] and each["description"] for each in properties.values())


def job(resources: Resources, **given: Any) -> dict[str, Any]:
    """Return the Kubernetes job of an attempt, with the variables as a list, as the worker writes them."""
    manifest: dict[str, Any] = filled("kubernetes", resources, **given)["job_manifest"]
    pod = manifest["spec"]["template"]["spec"]
    # prefect-kubernetes 0.8 refuses a manifest without them here, where Kubernetes has no such fields and drops them.
    assert (pod.pop("parallelism"), pod.pop("completions")) == (1, 1)
    [container] = pod["containers"]
    container["env"] = [{"name": key, "value": value} for key, value in container["env"].items()]
    container["args"] = container["args"].split()
    return manifest


def test_a_job_has_as_much_more_time_to_end_as_its_stage_has_to_save() -> None:
    def seconds(resources: Resources) -> int:
        found: int = job(resources)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        return found

    assert (seconds(Resources()), seconds(Resources(grace_seconds=300.5))) == (600, 881)


def test_kubernetes_accepts_the_job_of_an_attempt() -> None:
    for resources in (ASKED, Resources()):
        kubernetes_validate.validate(job(resources), KUBERNETES, strict=True)


def test_a_stages_resources_are_those_of_its_job() -> None:
    pod = job(ASKED)["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["resources"] == {
        "requests": {"cpu": 12, "memory": "96Gi"},
        "limits": {"memory": "96Gi", "nvidia.com/gpu": 2},
    }
    assert (container["image"], pod["nodeSelector"]) == ("registry/vantage:2", {"gpu": "h200"})
    assert {"name": "PYTHONSAFEPATH", "value": "1"} in container["env"]


def test_a_job_makes_one_pod_which_is_never_started_again() -> None:
    spec = job(ASKED)["spec"]
    assert (spec["parallelism"], spec["completions"], spec["backoffLimit"]) == (1, 1, 0)
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {
            "cache": {"name": "cache", "persistentVolumeClaim": {"claimName": "vantage-cache"}},
            "shared_memory": "64Gi",
        },
    ],
)
def test_a_job_has_a_volume_where_the_image_has_its_cache(given: dict[str, Any]) -> None:
    manifest = job(ASKED, **given)
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    pod = manifest["spec"]["template"]["spec"]
    mounted = {each["mountPath"]: each["name"] for each in pod["containers"][0]["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    cache = volumes[mounted["/cache"]]
    if given:
        assert cache == given["cache"]
    else:
        claim = cache["ephemeral"]["volumeClaimTemplate"]["spec"]
        assert claim["resources"]["requests"]["storage"] == "200Gi"
    memory = volumes[mounted["/dev/shm"]]["emptyDir"]
    assert memory == {"medium": "Memory", "sizeLimit": given.get("shared_memory", "8Gi")}


def test_docker_accepts_the_container_of_an_attempt() -> None:
    configuration = DockerWorkerJobConfiguration(**filled("docker", ASKED))
    assert configuration.image == "registry/vantage:2"
    assert configuration.volumes == ["vantage-cache:/cache"]
    assert compose()["volumes"]["cache"] == {"name": "vantage-cache"}, "one cache for the machine"
    assert parse_bytes(configuration.mem_limit) == 32 * 2**30
    given = configuration.container_create_kwargs
    assert given is not None
    host = HostConfig(version="1.43", **given)
    [devices] = host["DeviceRequests"]
    assert (devices["Count"], devices["Capabilities"]) == (2, [["gpu"]])
    unknown = {*template("docker")["job_configuration"]} - {*DockerWorkerJobConfiguration.model_fields}
    assert not unknown
