"""Pools, probes, logins and addresses of the files of deploy/ work with real servers."""

import datetime
import ipaddress
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import requests
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from deploy.servers.lifecycle import read_settings
from deploy.servers.postgres import OwnPostgres
from tests.deploy.conftest import EXPORT, ROOT, Servers
from tests.deploy.test_manifests import all_documents, compose
from tests.support.fixtures import RECIPE
from tests.support.fork_server import WITH_PREFECT
from tests.support.ports import own_port
from tests.support.real_runs import wait_for
from vantage.flows.pools.alive import ALIVE_FILE
from vantage.flows.prefect_server.server import is_healthy

pytestmark = pytest.mark.slow


def container(name: str) -> dict[str, Any]:
    [found] = [
        each["spec"]["template"]["spec"]["containers"][0]
        for each in all_documents()
        if each["kind"] in ("Deployment", "StatefulSet") and each["metadata"]["name"] == name
    ]
    return dict(found)


def answer(probe: dict[str, Any], address: str) -> int:
    asked = probe["httpGet"]
    headers = {each["name"]: each["value"] for each in asked.get("httpHeaders", [])}
    timeout = probe.get("timeoutSeconds", 1) + 5  # two busy cores
    return requests.get(f"{address}{asked['path']}", headers=headers, timeout=timeout).status_code


def healthy(service: str, port: int) -> bool:
    """Return whether the compose file's check of a service passes, asked of another port."""
    _, program, *arguments = compose()["services"][service]["healthcheck"]["test"]
    assert program == "python"
    arguments = [each.replace(":4200/", f":{port}/").replace(":5000/", f":{port}/") for each in arguments]
    return subprocess.run([sys.executable, *arguments], capture_output=True, timeout=60).returncode == 0


def job_of_the_pool() -> list[str]:
    """Return the command with which Kubernetes and Compose make the work pool."""
    [job] = [each for each in all_documents() if each["kind"] == "Job"]
    command: list[str] = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command == compose()["services"]["work_pool"]["command"]
    return command


# Other machines come first: the servers begin with addresses, and go on without them


def certificate(folder: Path) -> tuple[Path, Path]:
    """Return a certificate for ``localhost`` that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            ),
            critical=False,
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = folder / "certificate.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return files


class Proxy:
    """What Caddy does for these servers: it ends TLS and passes the bytes on, the Host header among them."""

    def __init__(self, files: tuple[Path, Path]) -> None:
        self.target = 0
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(*files)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"https://localhost:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, plain: socket.socket) -> None:
        with (
            suppress(OSError),
            closing(self._context.wrap_socket(plain, server_side=True)) as client,
            closing(socket.create_connection(("127.0.0.1", self.target))) as server,
        ):
            threading.Thread(target=self._pass_on, args=(server, client), daemon=True).start()
            self._pass_on(client, server)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError, ValueError):
            while data := source.recv(65536):
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def proxies(tmp_path: Path) -> Iterator[tuple[Path, Proxy, Proxy]]:
    files = certificate(tmp_path)
    made = Proxy(files), Proxy(files)
    yield files[0], *made
    for each in made:
        each.close()


@pytest.mark.timeout(600)
def test_a_run_on_another_machine_uses_both_servers_through_tls(
    servers: Servers, tmp_path: Path, proxies: tuple[Path, Proxy, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    authority, prefect, mlflow = proxies
    here, messages = servers.up("--prefect-address", prefect.address, "--mlflow-address", mlflow.address)
    assert "Those for other machines are in" in messages
    prefect.target = int(here["PREFECT_API_URL"].removesuffix("/api").rpartition(":")[2])
    mlflow.target = int(here["MLFLOW_TRACKING_URI"].rpartition(":")[2])
    lines = (servers.folder / "environment.elsewhere").read_text().splitlines()
    elsewhere = {each[1]: each[2] for line in lines if (each := EXPORT.match(line))}
    assert elsewhere == {
        **here,
        "PREFECT_API_URL": f"{prefect.address}/api",
        "MLFLOW_TRACKING_URI": mlflow.address,
    }
    page = requests.get(f"{prefect.address}/ui-settings", verify=authority, timeout=30).json()
    assert page["api_url"] == f"{prefect.address}/api", "a browser elsewhere asks there"
    assert not is_healthy(f"{prefect.address}/api"), "its authority is not trusted"
    monkeypatch.setenv("PREFECT_API_SSL_CERT_FILE", str(authority))
    assert is_healthy(f"{prefect.address}/api")
    asked = {"url": f"{prefect.address}/api/flows/filter", "json": {}, "verify": authority, "timeout": 30}
    login = tuple(here["PREFECT_API_AUTH_STRING"].split(":"))
    assert requests.post(**asked).status_code == 401
    assert requests.post(**asked, auth=login, headers={"Origin": prefect.address}).status_code == 200
    assert requests.post(**asked, auth=login, headers={"Origin": "https://other"}).status_code == 403
    assert requests.post(**asked, auth=login, headers={"Host": "other"}).status_code == 421
    mlflow_asked = {
        "url": f"{mlflow.address}/api/2.0/mlflow/experiments/search?max_results=5",
        "verify": authority,
    }
    users = (here["MLFLOW_TRACKING_USERNAME"], here["MLFLOW_TRACKING_PASSWORD"])
    assert requests.get(**mlflow_asked, timeout=30).status_code == 401
    assert requests.get(**mlflow_asked, auth=users, timeout=30).status_code == 200
    assert requests.get(**mlflow_asked, auth=users, headers={"Host": "other"}, timeout=30).status_code == 403

    recipe = tmp_path / "fake.yaml"
    recipe.write_text(RECIPE)
    done = WITH_PREFECT.run(
        [
            *(sys.executable, "-m", "tests.support.fake_vantage", "run", str(recipe)),
            *("--workspace", str(tmp_path / "workspace")),
        ],
        env={
            **os.environ,
            **elsewhere,
            "PREFECT_API_SSL_CERT_FILE": str(authority),
            "MLFLOW_TRACKING_SERVER_CERT_PATH": str(authority),
            "PYTHONPATH": str(ROOT),
        },
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    flow_runs = requests.post(
        f"{here['PREFECT_API_URL']}/flow_runs/filter", json={}, auth=login, timeout=30
    ).json()
    assert [each["state_name"] for each in flow_runs] == ["Completed"]
    forgotten, _ = servers.up("--prefect-address", "", "--mlflow-address", "")
    assert not (servers.folder / "environment.elsewhere").exists()
    assert requests.post(
        f"{forgotten['PREFECT_API_URL']}/flows/filter", json={}, auth=login, headers={"Host": prefect.address}
    ).status_code in (400, 421)


def test_an_address_without_tls_is_refused(servers: Servers) -> None:
    command = [sys.executable, "-m", "deploy.servers", "up", "--data", str(servers.folder)]
    refused = subprocess.run(
        [*command, "--prefect-address", "http://prefect.example.org"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert refused.returncode == 69
    assert "--prefect-address=http://prefect.example.org is not https://NAME" in refused.stderr


# The servers themselves


def test_the_work_pool_is_made_once_and_what_a_person_set_stays(servers: Servers) -> None:
    variables, _ = servers.up()
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **variables, "PATH": programs}

    def make_pool() -> None:
        done = subprocess.run(job_of_the_pool(), env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr

    def prefect(*words: str) -> str:
        done = WITH_PREFECT.run([sys.executable, "-m", "prefect", *words], env=environment, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    make_pool()
    prefect("work-pool", "set-concurrency-limit", "gpu", "3")
    prefect("work-pool", "pause", "gpu")
    before = prefect("work-pool", "inspect", "gpu", "--output", "json")
    make_pool()
    assert prefect("work-pool", "inspect", "gpu", "--output", "json") == before
    pool = json.loads(before)
    assert (pool["type"], pool["is_paused"], pool["concurrency_limit"]) == ("process", True, 3)


def test_probes_pass_without_a_login_and_a_database_that_is_away_restarts_no_server(servers: Servers) -> None:
    variables, _ = servers.up()
    prefect, mlflow = variables["PREFECT_API_URL"].removesuffix("/api"), variables["MLFLOW_TRACKING_URI"]
    for name, address in (("prefect", prefect), ("mlflow", mlflow)):
        found = container(name)
        assert answer(found["livenessProbe"], address) == answer(found["readinessProbe"], address) == 200
        assert healthy(name, int(address.rpartition(":")[2]))
        assert not healthy(name, own_port())
    settings = read_settings(servers.folder)
    postgres = OwnPostgres(settings)
    where = ["--host", "127.0.0.1", "--port", str(settings.ports["postgres"])]
    asked = [
        *(container("postgres")[probe]["exec"]["command"] for probe in ("livenessProbe", "readinessProbe")),
        compose()["services"]["postgres"]["healthcheck"]["test"][1:],
    ]

    def ready(command: list[str]) -> bool:
        program = postgres.programs() / command[0]
        return (
            subprocess.run([program, *command[1:], *where], capture_output=True, timeout=30).returncode == 0
        )

    assert [ready(each) for each in asked] == [True] * 3
    assert postgres.stop()
    assert [ready(each) for each in asked] == [False] * 3
    assert answer(container("prefect")["readinessProbe"], prefect) == 503
    assert answer(container("prefect")["livenessProbe"], prefect) == 200
    assert answer(container("mlflow")["livenessProbe"], mlflow) == 200


def test_a_worker_marks_that_it_lives_also_while_its_server_is_away(servers: Servers, tmp_path: Path) -> None:
    variables, _ = servers.up()
    alive = tmp_path / "alive"
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT), ALIVE_FILE: str(alive)}
    command = container("orders-worker")["command"]
    worker = WITH_PREFECT.popen(
        [sys.executable, "-c", "from vantage.cli.main import main; main()", *command[1:]],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    probe = container("orders-worker")["livenessProbe"]["exec"]["command"]
    try:
        wait_for(alive.exists, seconds=100)
        asked = subprocess.run([sys.executable, *probe[1:]], env=environment, capture_output=True, timeout=60)
        assert asked.returncode == 0, asked.stderr
        login = tuple(variables["PREFECT_API_AUTH_STRING"].split(":"))
        pool = requests.get(f"{variables['PREFECT_API_URL']}/work_pools/orders", auth=login, timeout=30)
        assert pool.status_code == 200, "it has created its pool"
        servers.down()
        before = alive.stat().st_mtime_ns
        wait_for(lambda: alive.stat().st_mtime_ns > before + 5 * 10**9, seconds=100)
        assert worker.poll() is None
    finally:
        worker.send_signal(signal.SIGTERM)
        worker.communicate(timeout=100)


# systemd's command


@pytest.mark.timeout(600)
def test_watched_servers_come_back_and_end_with_the_process_that_watches(servers: Servers) -> None:
    servers.down()
    watching = subprocess.Popen(
        [sys.executable, "-m", "deploy.servers", "watch", "--data", str(servers.folder)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: all(servers.processes().values()), seconds=200, pause=0.25)
        wait_for(lambda: (servers.folder / "environment").exists(), seconds=200)
        variables, _ = servers.up()
        killed = servers.processes()["mlflow"]
        for pid in killed:
            with suppress(ProcessLookupError):  # it may end with another one
                os.kill(pid, signal.SIGKILL)
        wait_for(
            lambda: servers.processes()["mlflow"] and not servers.processes()["mlflow"] & killed,
            seconds=60,
            pause=0.25,  # a look reads the environment of every process
        )
        again, _ = servers.up()
        assert again == variables
    finally:
        watching.send_signal(signal.SIGTERM)
        _, messages = watching.communicate(timeout=120)
    assert watching.returncode == 0, messages
    assert servers.processes() == {"postgres": set(), "prefect": set(), "mlflow": set()}
