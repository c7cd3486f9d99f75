"""Remember what MLflow answers about the rows of a database, for the next audit that finds the same rows.

Each test audits a copy of one run, in which it has changed little or nothing. Two thirds of an audit are questions to MLflow,
nearly all of them about what the test has not changed.
"""

import hashlib
import sqlite3
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from weakref import WeakKeyDictionary

import pytest

from vantage.ledger.to_mlflow.audited_runs import AuditedServer

OF_RUNS = ("destination", "runs", "knows", "tags_with")
"""Questions that no table of registered models answers."""
OF_ONE_RUN = ("run", "tags_of", "_active_run", "_read")
"""Questions of the same kind about one of MLflow's runs, whose id or entity is the last argument."""
OF_MODELS = ("model", "version", "versions", "versions_of")
"""Questions that no table in ``LOGGED`` answers."""

REGISTERED = ("registered_model", "model_version")
"""Beginnings of the names of the tables of registered models."""
LOGGED = ("tags", "params", "metrics", "latest_metrics")
"""Tables with what each run has logged."""
_MOST = 500


@dataclass(frozen=True)
class Content:
    """Digests of the rows that questions are about."""

    of_runs: str
    of_models: str
    of_any_run: str
    """All rows but those of registered models, and what runs have logged."""
    logged: dict[object, str]
    """Id of a run → what it has logged."""

    def about(self, question: str, last: Any) -> tuple[str, str]:
        """Return the digest of what answers a question, and the last argument as text."""
        if question in OF_ONE_RUN:
            run_id = getattr(getattr(last, "info", None), "run_id", last)
            return f"{self.of_any_run} {self.logged.get(run_id)}", repr(run_id)
        return (self.of_runs if question in OF_RUNS else self.of_models), repr(last)


class RememberedAnswers:
    """Answers to the questions of ``AuditedServer``, by the rows that they are about."""

    def __init__(self) -> None:
        self._contents: WeakKeyDictionary[AuditedServer, Content | None] = WeakKeyDictionary()
        self._answers: OrderedDict[str, dict[str, Any]] = OrderedDict()
        """Digest → question → answer, for what was asked about last."""
        self.asks_again = False
        """Whether every question is asked again, for tests that count them."""

    def patch(self, patched: pytest.MonkeyPatch) -> None:
        """Let every ``AuditedServer`` answer from here; a server that has failed goes on to fail."""
        for name in (*OF_RUNS, *OF_ONE_RUN, *OF_MODELS):
            patched.setattr(AuditedServer, name, self._remembering(getattr(AuditedServer, name)))

    def _remembering(self, ask: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(ask)
        def answer(server: AuditedServer, *asked: Any) -> Any:
            content = None if self.asks_again or server._why_not is not None else self._content(server)
            if content is None:
                return ask(server, *asked)
            digest, last = content.about(ask.__name__, asked[-1])
            others = () if ask.__name__ in OF_ONE_RUN else asked[:-1]  # without the client
            question = f"{ask.__name__} {others!r} {last}"
            known = self._answers.setdefault(digest, {})
            self._answers.move_to_end(digest)
            if len(self._answers) > _MOST:
                self._answers.popitem(last=False)
            if question not in known:
                known[question] = ask(server, *asked)
            return known[question]

        return answer

    def _content(self, server: AuditedServer) -> Content | None:
        """Return the digests of a server's database; None: it is no file, or damaged."""
        if server not in self._contents:
            path = Path(unquote(urlsplit(server._address).path)[1:])
            is_file = server._address.startswith("sqlite") and path.is_file()
            self._contents[server] = content_of(path) if is_file else None
        return self._contents[server]


def content_of(database: Path) -> Content | None:
    """Return the digests of a database; None: it is damaged. They are computed once for equal files, as most copies are."""
    file = hashlib.sha256(database.read_bytes()).hexdigest()
    if file not in _contents:
        _contents[file] = _read_content(database)
    return _contents[file]


_contents: dict[str, Content | None] = {}
"""sha256 of a database file → its digests."""


def _read_content(database: Path) -> Content | None:
    shared, registered, logged = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    of_run: dict[object, Any] = {}
    try:
        with closing(sqlite3.connect(f"{database.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            connection.text_factory = lambda text: text.decode(errors="surrogateescape")
            schema = connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()
            shared.update(repr(schema).encode())
            for name in (name for kind, name, _ in schema if kind == "table"):
                found = connection.execute(f'SELECT rowid, * FROM "{name}"')
                rows = found.fetchall()
                if name in LOGGED:
                    logged.update(repr((name, rows)).encode())
                    place = [column[0] for column in found.description].index("run_uuid")
                    for row in rows:
                        of_run.setdefault(row[place], hashlib.sha256()).update(repr((name, row[1:])).encode())
                else:
                    part = registered if name.startswith(REGISTERED) else shared
                    part.update(repr((name, rows)).encode())
    except (sqlite3.Error, ValueError):
        return None
    return Content(
        of_runs=f"{shared.hexdigest()} {logged.hexdigest()}",
        of_models=f"{shared.hexdigest()} of models {registered.hexdigest()}",
        of_any_run=f"{shared.hexdigest()} of a run",
        logged={run_id: each.hexdigest() for run_id, each in of_run.items()},
    )
