"""Environment variables of object storages that are empty, or at which obstore ends a process, are left out or refused by name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from vantage.storage.bucket import open_bucket

NOWHERE = "http://127.0.0.1:9"
"""A proxy that takes no connection: nothing leaves this machine."""
ASK = """
from vantage.storage.bucket import open_bucket
try:
    open_bucket("s3://bucket/runs", retry_seconds=0.1).get("a")
except Exception as error:
    print(error)
"""
ROOT = Path(__file__).parents[2]


def asked(**variables: str) -> str:
    """Return the first line of the error of a request in a process of its own; it names the address that obstore asked."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_PROXY_URL": NOWHERE}
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**environment, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[0]


@pytest.mark.parametrize(
    "empty",
    [{"AWS_ENDPOINT_URL": ""}, {"AWS_SESSION_TOKEN": "", "AWS_ENDPOINT": " "}, {"AWS_DEFAULT_REGION": ""}],
)
def test_an_empty_variable_is_none(empty: dict[str, str]) -> None:
    said = asked(AWS_REGION="eu-central-1", **empty)
    assert "https://s3.eu-central-1.amazonaws.com/bucket/runs/a " in said


def test_an_empty_region_is_the_default_one() -> None:
    assert "https://s3.us-east-1.amazonaws.com/bucket/runs/a " in asked(AWS_REGION="", AWS_ENDPOINT_URL="")


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3"])
@pytest.mark.parametrize(
    "value",
    [
        *("minio:9000", "minio", "127.0.0.1:9000", "/x", "http://", "https:/minio", "https://mi nio"),
        *("ftp://minio", "https://minio:99999", "https://minio?x=1", "https://minio#x", "https://münio"),
    ],
)
def test_an_endpoint_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(
        ValueError, match=rf"^{name}=.* is no address of a storage server; write https://HOST:PORT"
    ):
        open_bucket("s3://bucket")


def test_an_endpoint_with_a_login_is_refused_without_showing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://ada:canary@minio:9000")
    with pytest.raises(ValueError, match="is no address of a storage server") as refusal:
        open_bucket("s3://bucket")
    assert "canary" not in str(refusal.value)


@pytest.mark.parametrize("value", ["eu central", "../x", "a/b", "x" * 65])
@pytest.mark.parametrize("name", ["AWS_REGION", "AWS_DEFAULT_REGION"])
def test_a_region_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"^{name}=.* is no region"):
        open_bucket("s3://bucket")


@pytest.mark.parametrize("allowed", ["", "false", "0"])
def test_an_endpoint_without_tls_is_refused_unless_it_is_allowed(
    monkeypatch: pytest.MonkeyPatch, allowed: str
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    monkeypatch.setenv("AWS_ALLOW_HTTP", allowed)
    with pytest.raises(ValueError, match="has no TLS.*set AWS_ALLOW_HTTP=true where that network is yours"):
        open_bucket("s3://bucket")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    open_bucket("s3://bucket")


def test_other_storages_do_not_look_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "minio:9000")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "ada")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "aGVsbG8=")
    open_bucket("az://container")
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", "azurite:10000")
    with pytest.raises(ValueError, match=r"^AZURE_STORAGE_ENDPOINT='azurite:10000' is no address"):
        open_bucket("az://container")
