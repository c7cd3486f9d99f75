"""Drive headless Chromium over its own protocol, to see a page as it is really drawn."""

import json
import subprocess
import tempfile
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from websockets.sync.client import connect
from websockets.sync.connection import Connection

from tests.support.needs import chromium

SECONDS = 60.0


class Tab:
    """One page of the browser."""

    def __init__(self, socket: Connection) -> None:
        self._socket = socket
        self._number = 0
        self.session = ""
        """The page's session id, which commands carry on the browser's one connection."""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the protocol; return its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._socket.send(json.dumps(message | ({"sessionId": self.session} if self.session else {})))
        while True:
            said: dict[str, Any] = json.loads(self._socket.recv(timeout=SECONDS))
            if said.get("id") == self._number:
                assert "error" not in said, said
                answer: dict[str, Any] = said["result"]
                return answer
            self.events.append(said)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; the page's content policy does not apply to the protocol."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def show(self, page: Path, *, width: int, height: int = 800, dark: bool = False) -> None:
        """Open a file at a width, light or dark, and wait until it is drawn."""
        self._prepare(width=width, height=height, dark=dark)
        self.call("Page.navigate", url=page.as_uri())
        self.until("document.readyState === 'complete'")

    def visit(self, url: str, *, until: str, width: int = 1400, height: int = 1200) -> None:
        """Open an address, as if nothing had been open before, and wait until JavaScript says so."""
        self._prepare(width=width, height=height, dark=False)
        self.call("Page.navigate", url="about:blank")
        self.until("location.href === 'about:blank'")
        self.events.clear()
        self.call("Page.navigate", url=url)
        self.until(until)

    def until(self, expression: str) -> None:
        """Wait until JavaScript says so; an error of the expression is a no."""
        asked = f"(() => {{ try {{ return Boolean({expression}) }} catch {{ return false }} }})()"
        give_up = time.monotonic() + SECONDS
        while True:
            with suppress(AssertionError):  # between two pages no page can answer
                if self.value(asked):
                    return
            assert time.monotonic() < give_up, f"never: {expression}; the page says {self.text()[-3000:]!r}"
            time.sleep(0.1)

    def text(self) -> str:
        """Return what there is to read."""
        return str(self.value("document.body ? document.body.innerText : ''"))

    def links(self) -> dict[str, set[str]]:
        """Return text of a link → where links with this text lead, without what follows a question mark."""
        found: dict[str, set[str]] = {}
        for text, address in self.value(
            "[...document.querySelectorAll('a')].map(e => [e.innerText.trim(), e.href])"
        ):
            found.setdefault(text, set()).add(address.partition("?")[0])
        return found

    def rows(self) -> list[list[str]]:
        """Return the cells of every row of every table."""
        found: list[list[str]] = self.value(
            "[...document.querySelectorAll('tr')].map(e => [...e.cells].map(cell => cell.innerText.trim()))"
        )
        return found

    def press_text(self, text: str) -> None:
        """Click what has exactly this text."""
        pressed = self.value(
            "(() => { const found = [...document.querySelectorAll('*')].filter(e => e.childElementCount === 0 && "
            f"e.innerText && e.innerText.trim() === {json.dumps(text)}); found.forEach(e => e.click()); return found.length }})()"
        )
        assert pressed, f"nothing on the page is called {text}"

    def _prepare(self, *, width: int, height: int, dark: bool) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()

    def press(self, key: str, code: int, *, text: str = "") -> None:
        """Press a key once. ``text`` is what it types."""
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more
            )

    def complaints(self) -> list[str]:
        """Return what the console said, and errors of scripts."""
        self.value("1")  # events that came before the answer
        return [
            json.dumps(event["params"])
            for event in self.events
            if event.get("method")
            in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        ]

    def requests(self) -> list[str]:
        """Return every address that was asked for."""
        self.value("1")
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def picture(self, file: Path) -> None:
        """Take a picture of the whole page, as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        file.write_bytes(b64decode(shot["data"]))


@contextmanager
def opened_tab() -> Iterator[Tab]:
    """Yield a browser with one page; it ends with the block."""
    program = chromium()
    assert program is not None
    with tempfile.TemporaryDirectory(prefix="vantage-chromium-", ignore_cleanup_errors=True) as profile:
        command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
        process = subprocess.Popen(
            [*command, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            with connect(_address(process), max_size=None, open_timeout=SECONDS) as socket:
                yield _tab(socket)
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _address(process: "subprocess.Popen[str]") -> str:
    """Return where the browser listens, as it reports itself."""
    assert process.stderr is not None
    for line in process.stderr:
        if "DevTools listening on " in line:
            return line.partition("listening on ")[2].strip()
    raise AssertionError("the browser has ended")


def _tab(socket: Connection) -> Tab:
    tab = Tab(socket)
    target = tab.call("Target.createTarget", url="about:blank")["targetId"]
    tab.session = tab.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    return tab
