"""Fields of every server that a stage asks questions, and whose answers it keeps."""

from typing import Annotated, Any, ClassVar

from pydantic import Field, StringConstraints

from vantage.schemas.frozen import Frozen, rule
from vantage.schemas.recipe.fields import Count, Positive, QueriedUrl, Switch, is_default, is_unset
from vantage.schemas.safe_text import is_secret_name

_OWN_HEADERS = frozenset(
    {
        *("accept", "accept-encoding", "connection", "content-length", "content-type", "host"),
        *("transfer-encoding", "user-agent"),
    }
)
"""Headers, in lower case, that describe a request."""


class CalledServer(Frozen):
    """Address of a server, its key, and the limits of requests to it."""

    not_in_key: ClassVar[frozenset[str]] = frozenset(
        {
            *("url", "api_key_variable", "key_header", "at_once", "request_seconds"),
            *("requests_per_minute", "patience_seconds", "budget", "price", "batch"),
        }
    )
    """Fields that change no answer."""

    url: QueriedUrl
    """Address of the server; it may have a query (``?api-version=2026-01-01``). In no stage key."""
    api_key_variable: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")] | None = (
        Field(None, exclude_if=is_unset)
    )
    """Environment variable that holds the server's API key. None: it asks for none. In no stage key."""
    key_header: Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9-]{0,63}$")] | None = Field(
        None, exclude_if=is_unset
    )
    """Header that holds the API key as it is: ``api-key``. None: ``Authorization`` holds it as a bearer token. In no stage key."""
    at_once: Count = Field(32, exclude_if=is_default(32))
    """Most requests that are under way at once. In no stage key."""
    request_seconds: Positive = Field(60.0, exclude_if=is_default(60.0))
    """Most seconds of one request; it is repeated then. In no stage key."""
    requests_per_minute: Positive | None = Field(None, exclude_if=is_unset)
    """Most requests in a minute, repeated ones included. None: no limit. In no stage key."""
    patience_seconds: Positive = Field(300.0, exclude_if=is_default(300.0))
    """Seconds without any answer after which the stage ends, to be resumed (exit code 75). In no stage key."""

    def address(self, path: str = "") -> str:
        """Return the address of a path at the server, before the query; without a path, the server's own address as it is."""
        place, mark, query = self.url.partition("?")
        return f"{place.rstrip('/')}{path}{mark}{query}" if path else self.url

    def in_key(self) -> dict[str, Any]:
        """Return the fields that decide the answers, as JSON."""
        return self.model_dump(mode="json", exclude=set(self.not_in_key))

    @rule
    def _a_key_is_masked(self) -> None:
        variable = self.api_key_variable
        if variable is None:
            return
        if variable.startswith(("PREFECT_", "MLFLOW_", "VANTAGE_")):
            raise ValueError(
                f"api_key_variable={variable} begins like a variable that stages do not get; use another name"
            )
        if not is_secret_name(variable):
            raise ValueError(
                f"api_key_variable={variable} would not be masked in logs; use a name that ends in _API_KEY or _TOKEN"
            )

    @rule
    def _a_header_has_a_key(self) -> None:
        if self.key_header is None:
            return
        if self.api_key_variable is None:
            raise ValueError(
                f"key_header={self.key_header} holds the API key, and api_key_variable names none; add it, or leave key_header out"
            )
        if self.key_header.lower() in _OWN_HEADERS:
            raise ValueError(
                f"key_header={self.key_header} is a header that every request has; name the one that the server reads its key from"
            )

    @rule
    def _the_query_holds_no_key(self) -> None:
        names = [part.partition("=")[0] for part in self.url.partition("?")[2].split("&")]
        if secret := next((name for name in names if _may_be_secret(name)), None):
            raise ValueError(
                f"url has a query with {secret!r}, which may be a key, and recipes are kept as text; leave it out, and name the variable "
                "of the key in api_key_variable and the header that holds it in key_header"
            )


def _may_be_secret(name: str) -> bool:
    """Return whether the value of such a name in a query is a secret, by the rule for names of variables."""
    return name.lower() in ("code", "sig", "signature") or is_secret_name(f"_{name.replace('-', '_')}")


class TeacherServer(CalledServer):
    """A server of vLLM that returns the log-probabilities of given tokens, and samples from the teacher if it is asked to."""

    model: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    """The model's name at the server."""
    sampled: Switch = Field(False, exclude_if=is_default(False))
    """Whether the server also samples the teacher's responses to the test prompts, so that its score and the share of its lead are
    measured."""

    @property
    def name(self) -> str:
        """The name of what it serves, in messages."""
        return "teacher"

    @rule
    def _the_address_is_the_servers(self) -> None:
        if self.url.partition("?")[0].rstrip("/").endswith("/v1"):
            raise ValueError(
                f"url={self.url} ends in /v1, and the server is asked for paths outside it too; leave /v1 out"
            )
