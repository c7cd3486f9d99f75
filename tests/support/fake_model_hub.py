"""Serve a Hugging Face hub of one machine that takes commits of models over loopback, large files by LFS, and gives them back."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree|preupload|commit)(?:/(.+))?)?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_BATCH = re.compile(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch")


@dataclass
class ModelHub:
    """The server's address, and what it holds."""

    address: str
    commits: dict[str, list[tuple[str, dict[str, bytes]]]] = field(default_factory=dict)
    """Repository → its commits, each with all files."""
    tokens: set[str] = field(default_factory=set)
    """Logins that were sent."""
    changes: dict[str, bytes] = field(default_factory=dict)
    """Path → bytes that it keeps in place of those that it is sent."""
    loses: set[str] = field(default_factory=set)
    """Paths that it does not keep."""
    refuses: int = 0
    """HTTP status with which it answers every commit; 0: it takes them."""
    large: dict[str, bytes] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)


@contextmanager
def fake_model_hub() -> Iterator[ModelHub]:
    """Serve until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    hub = ModelHub(f"http://127.0.0.1:{server.server_address[1]}")
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Print nothing."""

    @property
    def hub(self) -> ModelHub:
        hub: ModelHub = self.server.hub  # type: ignore[attr-defined]
        return hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        body = self._body()
        self.hub.large[hashlib.sha256(body).hexdigest()] = body
        self._send(b"", 200)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self) -> None:
        body, path = self._body(), unquote(urlsplit(self.path).path)
        self.hub.tokens.add(self.headers.get("Authorization", ""))
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif found := _BATCH.fullmatch(path):
            objects = [
                {**each, "actions": {"upload": {"href": f"{self.hub.address}/large", "header": {}}}}
                for each in json.loads(body)["objects"]
            ]
            self._json({"transfer": "basic", "objects": objects})
        elif found := _API.fullmatch(path):
            self._api(found[1], found[2], found[3], body)
        elif found := _FILE.fullmatch(path):
            self._file(*found.groups())
        else:
            self._json({"error": path}, 404, {"X-Error-Code": "EntryNotFound"})

    def _create(self, asked: dict[str, Any]) -> None:
        repository = f"{asked['organization']}/{asked['name']}"
        if repository in self.hub.commits:
            self._json({"url": f"{self.hub.address}/{repository}"}, 409)
            return
        self.hub.commits[repository] = [("0" * 40, {".gitattributes": b"*.safetensors filter=lfs\n"})]
        self.hub.private[repository] = asked.get("private") or asked.get("visibility") == "private"
        self._json({"url": f"{self.hub.address}/{repository}"})

    def _api(self, repository: str, what: str | None, rest: str | None, body: bytes) -> None:
        commits = self.hub.commits.get(repository)
        if commits is None:
            self._json({"error": "no repository"}, 404, {"X-Error-Code": "RepoNotFound"})
        elif what == "preupload":
            modes = [
                {
                    "path": each["path"],
                    "uploadMode": "lfs" if each["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for each in json.loads(body)["files"]
            ]
            self._json({"files": modes})
        elif what == "commit":
            self._commit(repository, [json.loads(line) for line in body.splitlines()])
        else:
            revision = (rest or "main").split("/")[0]
            commit, files = self._at(repository, revision)
            if what == "tree":
                self._json(
                    [
                        {"type": "file", "path": path, "oid": commit, "size": len(each)}
                        for path, each in files.items()
                    ]
                )
            else:
                siblings = [{"rfilename": path} for path in files]
                self._json({"id": repository, "sha": commit, "siblings": siblings})

    def _at(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]]:
        commits = self.hub.commits[repository]
        return next((each for each in commits if each[0] == revision), commits[-1])

    def _commit(self, repository: str, lines: list[dict[str, Any]]) -> None:
        if self.hub.refuses:
            self._json({"error": "refused"}, self.hub.refuses)
            return
        parent, files = self._at(repository, "main")
        files = dict(files)
        for line in lines:
            value = line["value"]
            if line["key"] == "header" and value.get("parentCommit") not in (None, parent):
                self._json({"error": "the branch has moved"}, 412)
                return
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        kept = {path: each for path, each in files.items() if path not in self.hub.loses}
        kept |= {path: each for path, each in self.hub.changes.items() if path in kept}
        oid = hashlib.sha1(json.dumps([parent, sorted(kept)]).encode()).hexdigest()
        self.hub.commits[repository].append((oid, kept))
        self._json(
            {"commitUrl": f"{self.hub.address}/{repository}/commit/{oid}", "commitOid": oid, "success": True}
        )

    def _file(self, repository: str, revision: str, path: str) -> None:
        commit, files = self._at(repository, revision)
        if path not in files:
            self._json({"error": path}, 404, {"X-Error-Code": "EntryNotFound"})
            return
        content = files[path]
        etag = hashlib.sha1(content).hexdigest()
        self._send(content, 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(
            json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})}
        )

    def _send(self, content: bytes, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
