"""Remember what MLflow answers about a database, for the next audit of a database with the same content.

Most tests tamper with files, or audit a run twice. Of all that such an audit does, two thirds were the same questions to
MLflow about the same rows.
"""

import hashlib
import sqlite3
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from functools import wraps
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from weakref import WeakKeyDictionary

import pytest

from vantage.ledger.to_mlflow.audited_runs import AuditedServer

ABOUT_RUNS = ("destination", "runs", "run", "knows", "tags_of", "tags_with")
"""Questions whose answers come from no table of registered models."""
ABOUT_MODELS = ("model", "version", "versions", "versions_of")
REGISTERED = ("registered_model", "model_version")
"""Beginnings of the names of the tables of registered models."""
_MOST = 32


class RememberedAnswers:
    """Answers to the questions of ``AuditedServer``, by the content of the database that was asked."""

    def __init__(self) -> None:
        self._contents: WeakKeyDictionary[AuditedServer, dict[bool, str] | None] = WeakKeyDictionary()
        self._answers: OrderedDict[str, dict[str, Any]] = OrderedDict()
        """Content → question → answer, for the contents that were asked about last."""
        self.asks_again = False
        """Every question is asked, for tests that count them."""

    def patch(self, patched: pytest.MonkeyPatch) -> None:
        """Let every ``AuditedServer`` answer from here; a server that has failed goes on to fail."""
        for name in (*ABOUT_RUNS, *ABOUT_MODELS):
            patched.setattr(AuditedServer, name, self._remembering(getattr(AuditedServer, name)))

    def _remembering(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(ask)
        def answer(server: AuditedServer, *asked: Any) -> Any:
            content = None if self.asks_again or server._why_not is not None else self._content(server)
            if content is None:
                return ask(server, *asked)
            digest = content[ask.__name__ in ABOUT_RUNS]
            known, question = self._answers.setdefault(digest, {}), f"{ask.__name__} {asked!r}"
            self._answers.move_to_end(digest)
            if len(self._answers) > _MOST:
                self._answers.popitem(last=False)
            if question not in known:
                known[question] = ask(server, *asked)
            return known[question]

        return answer

    def _content(self, server: AuditedServer) -> dict[bool, str] | None:
        """Return the digests of all tables, and (True) of those without registered models; None: of a server's, or damaged."""
        if server not in self._contents:
            path = Path(unquote(urlsplit(server._address).path)[1:])
            is_file = server._address.startswith("sqlite") and path.is_file()
            self._contents[server] = digests_of(path) if is_file else None
        return self._contents[server]


def digests_of(database: Path) -> dict[bool, str] | None:
    """Return the digests of all that a database holds, and (True) of what it holds beside registered models; None: it is damaged."""
    rows, models = hashlib.sha256(), hashlib.sha256()
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            connection.text_factory = lambda text: text.decode(errors="surrogateescape")
            schema = connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()
            rows.update(repr(schema).encode())
            for name in (name for kind, name, _ in schema if kind == "table"):
                found = connection.execute(f'SELECT rowid, * FROM "{name}"').fetchall()
                (models if name.startswith(REGISTERED) else rows).update(repr((name, found)).encode())
    except (sqlite3.Error, UnicodeError):
        return None
    of_runs = rows.hexdigest()
    return {True: of_runs, False: f"{of_runs} {models.hexdigest()}"}
