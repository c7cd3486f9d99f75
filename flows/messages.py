"""Send messages to people in the background, by Apprise: a slow or dead address neither delays nor fails a run."""

import html
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from apprise import NotifyBase

CLOSE_SECONDS = 10.0
"""Seconds that the end of a run waits for messages that are being sent."""

SECONDS_EACH = 5.0
"""Seconds that Apprise waits for a connection, and for each answer, unless the address contains ``cto`` and ``rto``."""


_BREAK = "\u200b"
"""A zero-width space: it is invisible, and keeps services from recognising markup around it."""
_MENTION = re.compile(
    r"<(?=[!@#]|[a-z][a-z0-9+.-]*:|users/|at\b)|(?<![\w/])@(?=[\w*])|\](?=\()"
    r"|(?<!\w)@(?=(?:everyone|here|channel|all|room|team|online)\b)",
    re.IGNORECASE,
)
"""Beginnings of texts that services read as a mention of people, or as a link with another text.

``<!channel>`` and ``<https://…|text>`` are for Slack, ``<users/all>`` for Google Chat, ``<at …>`` for Feishu,
``@**all**`` for Zulip, ``[text](https://…)`` for Discord and Mattermost, and ``@name`` is a person or a group almost
everywhere. A part of a path (``/@name/``) is not changed, since it may be in a command.
"""
_MARKS_UP = frozenset({"tgram"})
"""Services whose plugin has no plain text. They get it as HTML; in Markdown, ``_`` and ``*`` would not be escaped."""
_ESCAPES = frozenset({"slack"})
"""Services that read ``&``, ``<`` and ``>`` of a plain text as their own markup, which the plugin does not escape."""


@dataclass(frozen=True)
class Message:
    """A short plain text."""

    title: str
    body: str


class Messenger:
    """Sends messages to the addresses in some environment variables, one after the other, in a thread of its own."""

    def __init__(self, variables: tuple[str, ...], warn: Callable[[str], None]) -> None:
        """
        Args:
            variables: names of environment variables, each with one or more addresses.
            warn: called once, in the thread, with the first error; the text contains no address.
        """
        self._variables = variables
        self._warn = warn
        self._warned = False
        self._starting = threading.Lock()
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self, message: Message) -> None:
        """Queue the message for sending; returns at once. Several stages may call this, each in its own thread."""
        with self._starting:  # two threads could send at the same time, and `close` would end only one
            if self._thread is None:
                self._thread = threading.Thread(target=self._send_all, name="vantage-messages", daemon=True)
                self._thread.start()
        self._messages.put(message)

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Wait for the queued messages for a limited time; messages that are left then are not sent."""
        if self._thread is None:
            return
        self._messages.put(None)
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            self._say("a message was not sent in time")

    def _send_all(self) -> None:
        while (message := self._messages.get()) is not None:
            for variable in self._variables:
                try:
                    if problem := _send(message, variable, os.environ):
                        self._say(f"{variable}: {problem}")
                except Exception as error:
                    # an error of a library about an address, whose text may contain the secret
                    self._say(f"{variable}: {type(error).__name__}")

    def _say(self, problem: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(
                f"notify: {problem}; the run goes on, and further problems of this kind are not reported"
            )


def _send(message: Message, variable: str, environment: Mapping[str, str]) -> str | None:
    """Send to every address of the variable; returns the errors, without the address."""
    addresses = environment.get(variable, "").split()
    if not addresses:
        return "the variable is not set, so no message was sent"
    log = logging.getLogger("apprise")
    log.propagate = False  # its messages contain addresses
    if not log.handlers:
        log.addHandler(logging.NullHandler())
    import apprise

    problem = None
    for address in addresses:
        began = time.monotonic()
        # One address at a time: for several, Apprise starts threads that the process would wait for at its end.
        service = apprise.Apprise.instantiate(_bounded(address))
        if service is None:
            problem = "it holds something that is no address of Apprise"
        elif not _notify(service, message):
            problem = f"the message was not accepted (after {time.monotonic() - began:.1f} s)"
    return problem


def _notify(service: "NotifyBase", message: Message) -> bool:
    """Send plain text, which the service shows unchanged; returns whether it was accepted.

    A message may quote data, so nothing in it may be read as markup, as a link, or as a mention of people.
    """
    from apprise import Apprise, NotifyFormat

    title, body = (
        _MENTION.sub(lambda found: f"{found[0]}{_BREAK}", text) for text in (message.title, message.body)
    )
    scheme = str(next(iter(service.schemas()), ""))  # type: ignore[no-untyped-call]
    service.notify_format = NotifyFormat.HTML if scheme in _MARKS_UP else NotifyFormat.TEXT
    if scheme in _ESCAPES and not getattr(service, "use_blocks", False):
        body = html.escape(body, quote=False)
    one = Apprise()
    one.add(service)
    return bool(one.notify(title=title, body=body, body_format=NotifyFormat.TEXT))


def _bounded(address: str) -> str:
    """Return the address with time limits, if it has none."""
    limits = "&".join(f"{name}={SECONDS_EACH}" for name in ("cto", "rto") if f"{name}=" not in address)
    return f"{address}{'&' if '?' in address else '?'}{limits}" if limits else address
