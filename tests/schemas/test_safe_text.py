"""Secrets and control characters are removed from text before it is shown."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.every import every
from vantage.schemas.safe_text import (
    markdown_text,
    safe_text,
    secrets_of,
    server_secrets,
    without_controls,
    without_secrets,
)

ENVIRONMENT = {
    "MLFLOW_TRACKING_URI": "https://ann:canary%21one@mlflow.example:5000/x",
    "MLFLOW_TRACKING_PASSWORD": "canary-two-2",
    "PREFECT_API_KEY": "pnu_canary3three",
    "PREFECT_API_AUTH_STRING": "admin:canary-four",
    "PREFECT_SERVER_DATABASE_CONNECTION_URL": "postgresql+asyncpg://p:canary@five5@db/prefect",
    "HF_TOKEN": "canary-six-6",
    "AWS_SECRET_ACCESS_KEY": "canary/seven+7",
    "HTTPS_PROXY": "http://proxy:canary-eight@proxy.example:3128",
    "OPENAI_API_KEY": "canary-nine-9",
    "AZURE_STORAGE_ACCOUNT_KEY": "canary-ten-10==",
    "AZURE_STORAGE_CONNECTION_STRING": "AccountName=ann;AccountKey=canary-eleven==",
    "SLACK_WEBHOOK_URL": "https://hooks.example/services/canary-twelve",
    "DB_PASS": "canary-thirteen",
    "MLFLOW_FLASK_SERVER_SECRET_KEY": "canary-fourteen",
    "VANTAGE_KEY_PASSWORD": "canary-fifteen",
    "SOME_PASSWORD": "short",
    "TOKENIZERS_PARALLELISM": "false",
    "PREFECT_HOME": "/home/ann/.prefect",
}
SECRETS = {
    "canary!one", "canary%21one", "canary-two-2", "pnu_canary3three", "canary-four", "admin:canary-four",
    "canary@five5", "canary-six-6", "canary/seven+7", "canary-eight", "canary-nine-9", "canary-ten-10==",
    "AccountName=ann;AccountKey=canary-eleven==", "//hooks.example/services/canary-twelve",
    "https://hooks.example/services/canary-twelve", "canary-thirteen", "canary-fourteen", "canary-fifteen",
}  # fmt: skip


def test_the_secrets_of_an_environment_are_found_by_name_and_in_addresses() -> None:
    assert set(secrets_of(ENVIRONMENT)) == SECRETS


def test_none_of_them_is_left_in_any_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    told = without_secrets(repr(ENVIRONMENT) + " ".join(SECRETS))
    assert "canary" not in told
    assert "TOKENIZERS_PARALLELISM': 'false'" in told and "mlflow.example:5000/x" in told


@every(
    ("text", "told"),
    [
        ("http://ann:hunter2@host/x", "http://***@host/x"),
        ("postgresql://ann:p@ss@host/db", "postgresql://***@host/db"),
        ("http://token@host", "http://***@host"),
        ("see http://host/x@y", "see http://host/x@y"),
        ("mail ann@example.org", "mail ann@example.org"),
        ("host/db?user=ann&password=hunter2&x=1", "host/db?user=ann&password=***&x=1"),
        ("hf_abcdefghijklmnopqrst", "hf_***"),
        ("AccountName=a;AccountKey=Eby8vdM02xNOcq==;B=c", "AccountName=a;AccountKey=***;B=c"),
        ("https://a.blob.example/b?sv=2024&sig=abc%2Fdef", "https://a.blob.example/b?sv=2024&sig=***"),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        (
            "basic instructions, eos_token='</s>' pad_token=5",
            "basic instructions, eos_token='</s>' pad_token=5",
        ),
    ],
)
def test_what_looks_like_a_login_is_masked_and_nothing_else(text: str, told: str) -> None:
    assert without_secrets(text) == told


def test_stages_and_our_own_server_need_none_of_the_clients_logins() -> None:
    assert sorted(server_secrets(ENVIRONMENT)) == [
        "MLFLOW_FLASK_SERVER_SECRET_KEY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_URI", "PREFECT_API_AUTH_STRING", "PREFECT_API_KEY",
        "PREFECT_SERVER_DATABASE_CONNECTION_URL", "VANTAGE_KEY_PASSWORD",
    ]  # fmt: skip


def test_what_steers_a_terminal_is_written_out() -> None:
    told = without_controls("a\x1b[2Jb\x9bm\r\x07\u202ec\u2066\u2028\t\n中 🙂 نص")
    assert told == "a\\u001b[2Jb\\u009bm\\u000d\\u0007\\u202ec\\u2066\\u2028\t\n中 🙂 نص"


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_can_be_printed_and_json_stays_the_same_json(text: str) -> None:
    safe = without_controls(text)
    assert safe.encode("utf-8").isascii() or safe.encode("utf-8")
    assert all(
        character in "\n\t" or not (ord(character) < 32 or 127 <= ord(character) < 160) for character in safe
    )
    assert without_controls(safe) == safe
    assert json.loads(without_controls(json.dumps(text, ensure_ascii=False))) == text
    assert "\x1b" not in safe_text(text)


@every(
    "text",
    [
        "[x](http://evil)",
        r"\[x\](http://evil)",
        r"\\[x\\](http://evil)",
        "<img src=x>",
        "a | b\n| c",
        "`x`",
        "**x**",
    ],
)
def test_no_text_becomes_markdown(text: str) -> None:
    """The text is read back as CommonMark reads it: a backslash before punctuation makes the next character plain."""
    escaped = markdown_text(text)
    plain, markup, place = "", "", 0
    while place < len(escaped):
        if escaped[place] == "\\" and place + 1 < len(escaped) and not escaped[place + 1].isalnum():
            plain += escaped[place + 1]
            place += 2
        else:
            markup += escaped[place]
            plain += escaped[place]
            place += 1
    assert plain == " ".join(text.split())
    assert not set("[]<>|`*\\\n") & set(markup)
