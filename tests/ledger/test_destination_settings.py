"""Which destinations beside MLflow the environment names."""

import pytest

from vantage.ledger.destination_settings import is_any_set, openlineage_url


@pytest.mark.parametrize(
    ("url", "disabled", "found"),
    [
        (None, None, None),
        ("", None, None),
        ("http://host:5000", None, "http://host:5000"),
        ("http://host:5000", "false", "http://host:5000"),
        ("http://host:5000", " TRUE ", None),
    ],
)
def test_the_server_of_openlineage_is_that_of_the_environment(
    url: str | None, disabled: str | None, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {
        "OPENLINEAGE_URL": url,
        "OPENLINEAGE_DISABLED": disabled,
        "VANTAGE_TENSORBOARD": None,
    }.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert openlineage_url() == found
    assert is_any_set() == (found is not None)
    monkeypatch.setenv("VANTAGE_TENSORBOARD", "/folder")
    assert is_any_set()
