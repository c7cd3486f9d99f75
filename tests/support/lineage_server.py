"""Serve OpenLineage on loopback, and keep the events that arrive."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Lineage:
    """The server's address, what it has received, and how it answers."""

    url: str
    events: list[dict[str, Any]] = field(default_factory=list)
    """The events that it confirmed, in their order."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Path and login of every request."""
    answers: int | None = None
    """The number of events that it still confirms; then it answers 503. None: all."""
    loses_answers: bool = False
    """Whether the server keeps an event and answers 503 all the same."""


@contextmanager
def lineage_server() -> Iterator[Lineage]:
    """Serve on a free port until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            lineage.asked.append((self.path, self.headers.get("Authorization", "")))
            confirms = lineage.answers is None or lineage.answers > 0
            if lineage.answers is not None:
                lineage.answers -= confirms
            if confirms or lineage.loses_answers:
                lineage.events.append(json.loads(body))
            self.send_response(201 if confirms else 503)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *ignored: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    lineage = Lineage(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield lineage
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
