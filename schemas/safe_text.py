"""Make text safe for a terminal, page, log or record: secrets are masked, control characters are escaped."""

import os
import re
from collections.abc import Mapping
from functools import lru_cache
from urllib.parse import unquote

MASK = "***"

SHORTEST_SECRET = 8
"""Characters of the shortest secret that is masked everywhere; a shorter one may be a common word (``mlflow``), and is
masked in addresses only."""

_SECRET_NAME = re.compile(
    r"(PASSWORD|PASSWD|PASSPHRASE|_PASS|_PWD|SECRET|TOKEN|_PAT|APIKEY|ACCESSKEY|PRIVATEKEY|_KEY|CREDENTIALS?|AUTH_STRING"
    r"|COOKIE|CONNECTION_STRING|WEBHOOK(_URL)?)(_ID)?$",
    re.IGNORECASE,
)
"""Names of environment variables whose whole value is a secret."""

_LOGIN = re.compile(r"(?<=://)([^\s/?#'\"<>]*)@")
"""Pattern of the login in an address, before its host: greedy, since a password may contain ``@``."""

_FIELD = re.compile(
    r"((?<![A-Za-z0-9_])(?:password|passwd|pwd|token|access_token|auth_token|secret|api_?key|access_?key|account_?key|shared_?access_?key|sig"
    r"|auth_string)=)"
    r"[^\s&'\"<>,;]+",
    re.IGNORECASE,
)
"""Pattern of ``password=…`` in the query of an address, or in a database's message."""

_HUB_TOKEN = re.compile(r"\b(hf_|api_org_|pnu_|pnb_|ghp_|github_pat_)[A-Za-z0-9_]{16,}")
_HEADER = re.compile(r"(authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic)\s+)[^\s'\",]+", re.IGNORECASE)

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line feed, characters that change text direction or end a line, surrogates."""


_MARKUP = re.compile(r"([\\|\[\]`*<>])")


def without_secrets(text: str) -> str:
    """Return the text with logins in addresses, tokens, and every secret of this process's environment masked."""
    for secret in secrets_of(os.environ):
        text = text.replace(secret, MASK)
    text = _LOGIN.sub(f"{MASK}@", text)
    text = _FIELD.sub(rf"\1{MASK}", text)
    text = _HUB_TOKEN.sub(rf"\1{MASK}", text)
    return _HEADER.sub(rf"\1{MASK}", text)


def without_controls(text: str) -> str:
    """Return the text with control characters escaped as in JSON (ESC: ``\\u001b``), except line feeds and tabs."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def safe_text(text: str) -> str:
    """Return the text without secrets and control characters."""
    return without_controls(without_secrets(text))


def markdown_text(text: str) -> str:
    """Return the text in one line, which Markdown shows unchanged, also in a cell of a table: no link, no markup, no HTML."""
    return _MARKUP.sub(r"\\\1", " ".join(text.split()))


def secrets_of(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the secrets in an environment, the longest first: values of variables named so, and passwords in addresses."""
    return _secrets_in(tuple(sorted(environment.items())))


def is_secret_name(name: str) -> bool:
    """Return whether the value of an environment variable of this name is masked everywhere."""
    return _SECRET_NAME.search(name) is not None


def server_secrets(environment: Mapping[str, str]) -> list[str]:
    """Return variables with the logins of Prefect's and MLflow's clients, and the password of a key for signatures, which neither
    stages nor our own server need."""
    return [
        name
        for name, value in environment.items()
        if name.startswith(("PREFECT_", "MLFLOW_", "VANTAGE_"))
        and (_SECRET_NAME.search(name) or _LOGIN.search(value))
    ]


@lru_cache(maxsize=8)
def _secrets_in(variables: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    found: set[str] = set()
    for name, value in variables:
        if _SECRET_NAME.search(name):
            found |= {value, *value.split(":")[1:]}  # user:password
        for login in _LOGIN.findall(value):
            password = login.partition(":")[2] or login
            found |= {password, unquote(password)}
    return tuple(
        sorted((secret for secret in found if len(secret) >= SHORTEST_SECRET), key=len, reverse=True)
    )
