"""An HTTP server on loopback that keeps what it is sent, in place of a service."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Recorded:
    """The server's address, its requests, and how it answers."""

    url: str
    received: list[tuple[str, bytes]] = field(default_factory=list)
    """Path and body of each request that was accepted."""
    status: int = 204
    """HTTP status of all answers."""
    headers: list[dict[str, str]] = field(default_factory=list)
    """Headers of each request that was accepted."""


@contextmanager
def recording_server() -> Iterator[Recorded]:
    """Serve on a free port until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if recorded.status < 400:
                recorded.received.append((self.path, body))
                recorded.headers.append(dict(self.headers))
            self.send_response(recorded.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *ignored: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    recorded = Recorded(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield recorded
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
