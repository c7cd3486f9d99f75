"""A bad API key of a server is refused before anything is asked, and no message contains a key."""

import pytest

from vantage.tasks.rewards.api_keys import api_key

FIELD = "rewards.main.terms.0.judge.api_key_variable"


def test_a_key_is_the_value_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRITIC_API_KEY", "sk-1/a+b=")
    assert api_key("CRITIC_API_KEY", FIELD) == "sk-1/a+b="
    assert api_key(None, FIELD) is None
    monkeypatch.setenv("CRITIC_API_KEY", "ApiKey sk-1")
    assert api_key("CRITIC_API_KEY", FIELD) == "ApiKey sk-1", (
        "a header of the recipe's choice may hold two words"
    )


@pytest.mark.parametrize("value", [" sk-1", "sk-1 ", "sk-1\n", "\tsk-1", " ", "sk-1\r\n", "sk-1\u00a0"])
def test_white_space_around_a_key_is_refused_without_showing_the_key(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library that sends headers refuses such a value with a message that contains it."""
    monkeypatch.setenv("CRITIC_API_KEY", value)
    with pytest.raises(
        ValueError, match=f"{FIELD}=CRITIC_API_KEY names a variable whose value begins or"
    ) as refused:
        api_key("CRITIC_API_KEY", FIELD)
    assert "sk-1" not in str(refused.value)


@pytest.mark.parametrize("value", ["sk-\n1", "sk-\x7f1", "sk-é1"])
def test_characters_that_no_key_has_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CRITIC_API_KEY", value)
    with pytest.raises(ValueError, match="with characters that no API key has") as refused:
        api_key("CRITIC_API_KEY", FIELD)
    assert "sk-" not in str(refused.value)


@pytest.mark.parametrize("value", [None, ""])
def test_a_variable_without_a_value_is_refused(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CRITIC_API_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("CRITIC_API_KEY", value)
    with pytest.raises(
        ValueError, match="CRITIC_API_KEY names a variable that is not set; set it to the server"
    ):
        api_key("CRITIC_API_KEY", FIELD)
