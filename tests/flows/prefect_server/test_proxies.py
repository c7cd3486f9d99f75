"""Proxies and certificates that Prefect's client cannot use are cleared where all is on this machine, else refused by name."""

import importlib.util
import os
from pathlib import Path

import certifi
import httpx
import pytest

from vantage.flows.prefect_server.proxies import check_proxies

UNUSABLE = [
    ("ALL_PROXY", "ftp://127.0.0.1:9"),
    ("https_proxy", "quic://127.0.0.1:9"),
    ("HTTP_PROXY", "http://[::1"),
]
if importlib.util.find_spec("socksio") is None:
    UNUSABLE += [("ALL_PROXY", "socks5://127.0.0.1:9"), ("all_proxy", "socks5h://127.0.0.1:9")]


@pytest.fixture(autouse=True)
def no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*os.environ]:
        if (
            name.upper().endswith("_PROXY")
            or name.startswith("SSL_CERT_")
            or name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")
        ):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(("name", "value"), UNUSABLE)
def test_it_is_cleared_where_all_servers_are_on_this_machine(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    check_proxies(elsewhere=False)
    assert name not in os.environ


@pytest.mark.parametrize(("name", "value"), UNUSABLE)
@pytest.mark.parametrize("variable", ["PREFECT_API_URL", "MLFLOW_TRACKING_URI"])
def test_it_is_refused_where_a_server_is_elsewhere(
    name: str, value: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setenv(variable, "https://server.example.org/api")
    with pytest.raises(
        ValueError, match=f"^{name}=.*{variable}=https://server.example.org/api is on another machine"
    ):
        check_proxies(elsewhere=False)
    assert os.environ[name] == value


def test_it_is_refused_where_the_storage_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "ftp://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"^ALL_PROXY=.*the bucket is on another machine"):
        check_proxies(elsewhere=True)


def test_a_refusal_shows_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "ftp://me:secretpassword@127.0.0.1:9")
    with pytest.raises(ValueError, match="ALL_PROXY") as refused:
        check_proxies(elsewhere=True)
    assert "secretpassword" not in str(refused.value)


def test_a_proxy_that_can_be_used_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.org:3128")
    check_proxies(elsewhere=True)
    assert os.environ["HTTPS_PROXY"] == "http://proxy.example.org:3128"


def test_certificates_that_are_not_there_are_cleared_or_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """httpx reads the file for every client, also for one that asks an address without TLS."""
    text = tmp_path / "none.pem"
    text.write_text("no certificate")
    for name, value in (("SSL_CERT_FILE", tmp_path / "missing.pem"), ("SSL_CERT_FILE", text)):
        monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example.org:3128")
        with pytest.raises(
            ValueError, match=rf"^{name}={value}: .* the bucket is .*; name a file of certificates"
        ):
            check_proxies(elsewhere=True)
        check_proxies(elsewhere=False)
        assert name not in os.environ
        assert os.environ["HTTPS_PROXY"], "the proxy is usable, and stays"
        httpx.Client().close()


@pytest.mark.parametrize(("name", "value"), UNUSABLE)
def test_of_unusable_certificates_and_an_unusable_proxy_both_are_cleared(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
    monkeypatch.setenv(name, value)
    check_proxies(elsewhere=False)
    assert not {"SSL_CERT_FILE", name} & set(os.environ)


def test_certificates_that_can_be_read_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    check_proxies(elsewhere=True)
    assert os.environ["SSL_CERT_FILE"] == certifi.where()


@pytest.mark.parametrize(("name", "value"), UNUSABLE)
def test_readable_certificates_are_kept_where_the_proxy_is_unusable(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=rf"^{name}="):
        check_proxies(elsewhere=True)
    check_proxies(elsewhere=False)
    assert os.environ["SSL_CERT_FILE"] == certifi.where()
    assert name not in os.environ
