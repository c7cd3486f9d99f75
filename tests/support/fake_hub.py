"""Serve a Hugging Face hub on loopback: repositories of datasets at one commit, with a count of what is fetched."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

Repositories = Mapping[str, Mapping[str, bytes]]
"""Repository → path of a file → its bytes."""

_RESOLVE = re.compile(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_API = re.compile(r"/api/datasets/([^/]+/[^/]+)(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?")


@dataclass
class FakeHub:
    """The server's address, and what it was asked."""

    address: str
    commit: str
    repositories: Repositories
    asked: list[str] = field(default_factory=list)
    """Method and path of every request, in their order."""
    sent: dict[str, int] = field(default_factory=dict)
    """Path of a file → bytes of it that were sent."""
    is_gone: bool = False
    """Whether the hub hangs up on every request."""

    def bytes_sent(self, ending: str) -> int:
        """Return how many bytes of the files with this ending were sent."""
        return sum(count for path, count in self.sent.items() if path.endswith(ending))


@contextmanager
def fake_hub(repositories: Repositories, commit: str) -> Iterator[FakeHub]:
    """Serve the repositories, each of which has this commit and no other."""
    server = _Server(("127.0.0.1", 0), _Handler)
    hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}", commit, repositories)
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing about a client that has gone."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    @property
    def hub(self) -> FakeHub:
        hub: FakeHub = self.server.hub  # type: ignore[attr-defined]
        return hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        if self.hub.is_gone:
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append(f"{self.command} {path}")
        if found := _RESOLVE.fullmatch(path):
            self._file(*found.groups())
        elif found := _API.fullmatch(path):
            self._listing(*found.groups(), body=body)
        else:
            self._refuse("EntryNotFound")

    def _files(self, repository: str, revision: str | None) -> Mapping[str, bytes] | None:
        files = self.hub.repositories.get(repository)
        if files is None:
            self._refuse("RepoNotFound")
            return None
        if revision not in (None, "main", self.hub.commit):
            self._refuse("RevisionNotFound")
            return None
        return files

    def _file(self, repository: str, revision: str, name: str) -> None:
        files = self._files(repository, revision)
        if files is None:
            return
        if name not in files:
            self._refuse("EntryNotFound")
            return
        content, status, headers = (
            files[name],
            200,
            {"ETag": f'"{_oid(files[name])}"', "Accept-Ranges": "bytes"},
        )
        size = len(content)
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            first, last = int(wanted[1]), min(int(wanted[2] or size - 1), size - 1)
            content, status = content[first : last + 1], 206
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        self._send(content, status, headers, name=name)

    def _listing(
        self, repository: str, what: str | None, revision: str | None, under: str | None, *, body: bytes
    ) -> None:
        files = self._files(repository, revision)
        if files is None:
            return
        if what == "tree":
            found: Any = _tree(files, under or "")
        elif what == "paths-info":
            asked = json.loads(body)["paths"]
            found = [each for each in _tree(files, "") if each["path"] in asked]
        else:
            found = {
                "id": repository,
                "sha": self.hub.commit,
                "siblings": [{"rfilename": name} for name in files],
            }
        self._send(json.dumps(found).encode(), 200, {"Content-Type": "application/json"})

    def _refuse(self, code: str) -> None:
        self._send(b"", 404, {"X-Error-Code": code})

    def _send(
        self, content: bytes, status: int, headers: Mapping[str, str], *, name: str | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {**headers, "X-Repo-Commit": self.hub.commit}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if name is not None:
            self.hub.sent[name] = self.hub.sent.get(name, 0) + len(content)
        with suppress(ConnectionError):  # a client that has read enough hangs up
            self.wfile.write(content)


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _tree(files: Mapping[str, bytes], under: str) -> list[dict[str, Any]]:
    """Return the files and folders below a folder, at any depth."""
    folders = {
        str(folder)
        for name in files
        for folder in PurePosixPath(name).parents
        if str(folder) not in (".", under)
    }
    rows = [{"type": "directory", "path": name, "oid": _oid(name.encode()), "size": 0} for name in folders]
    rows += [
        {"type": "file", "path": name, "oid": _oid(each), "size": len(each)} for name, each in files.items()
    ]
    return sorted(
        (row for row in rows if str(row["path"]).startswith(f"{under}/" if under else "")),
        key=lambda row: str(row["path"]),
    )
