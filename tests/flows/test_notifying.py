"""People get messages about a run, which Apprise sends as webhook calls and e-mail to real servers on loopback."""

import email
import email.policy
import html
import json
import re
import socket
import threading
import time
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests
from mlflow.tracking import MlflowClient

from tests.support.orchestrated import Witness, attempt_all, orchestrated
from vantage.flows import messages
from vantage.flows.messages import Message, Messenger
from vantage.runs.approving import answer
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace
from vantage.tasks.training.progress import StageProgress

pytestmark = pytest.mark.usefixtures("unsent")

CANARY = "canary-in-an-address"
HOSTILE = """\
value: explained_variance 0.2 <= 0.9 & closed
row 3 is '<img src="http://example.org/x.png">' and *bold* _not_ `code`
log: /home/ada/a_run/logs/value.log
    vantage resume 0001-fake-abcdef --workspace '/home/ada/<here>'"""
"""A message that quotes data; a service shows these characters and no others."""
MENTIONS = (
    "<!channel> <!here|x> <@U123> @everyone @here <https://example.org|a link> ada@all.example.org "
    '<mailto:ada@example.org|a link> <users/all> <at user_id="all"> @**all** @*team* @ada [a link](https://example.org) model@best cd /srv/@lab/ws /@everyone'
)
ASKS = ("stages.value.gate.at_least=0.9", "stages.value.gate.on_fail=approve")
PUBLISHES = "publish=[{stage: policy, registered_model: notified, alias: best, approve: true}]"


class Webhook(ThreadingHTTPServer):
    """Remembers what it was sent."""

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.status = 200
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                outer.paths.append(self.path)
                self.send_response(outer.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def titles(self) -> list[str]:
        return [each["title"] for each in self.received]


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Webhook]:
    server = Webhook()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HOOK", f"json://127.0.0.1:{server.server_port}/{CANARY}")
    yield server
    server.shutdown()
    server.server_close()


def go_through(workspace: Workspace, recipe: Path, *overrides: str) -> list[str]:
    with orchestrated(workspace, recipe, "notify={urls: [HOOK]}", *overrides) as orchestrator:
        attempt_all(orchestrator)
        orchestrator.end()
        witness = getattr(orchestrator.watcher, "_watcher", orchestrator.watcher)
    assert isinstance(witness, Witness)
    return witness.lines


def test_a_run_tells_what_waits_and_how_it_ended_and_no_secret_is_written_down(
    workspace: Workspace,
    recipe_file: Path,
    webhook: Webhook,
    ledger_database: str,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("DEBUG")
    lines = go_through(workspace, recipe_file, *ASKS)
    assert webhook.titles == ["fake: value waits for approval", "fake: ended: waiting approval"]
    [record] = read_runs(workspace)
    asked = webhook.received[0]["message"]
    assert f"run {record.run_id}" in asked
    assert "explained_variance 0.400 >= 0.9: CLOSED" in asked
    assert f"approve {record.run_id} value --reason WHY --workspace {workspace.root}" in asked
    assert "1 waiting approval, 2 blocked" in webhook.received[1]["message"]
    assert webhook.paths[0].startswith(f"/{CANARY}")

    lines += go_through(workspace, recipe_file, *ASKS)
    assert len(webhook.titles) == 2, "the same question again is no news"

    answer(workspace, record.run_id, "value", approved=True, by="ada", reason="fine")
    lines += go_through(workspace, recipe_file, *ASKS)
    assert webhook.titles[2:] == ["fake: ended: completed"]

    lines += go_through(workspace, recipe_file, "stages.value.gate.at_least=0.2")
    assert len(webhook.titles) == 3, "a run of stored artifacts alone is no news"
    lines += go_through(workspace, recipe_file, "stages.value.gate.at_least=0.2", "notify.reused=true")
    assert webhook.titles[3:] == ["fake: ended: completed"]

    assert not any("notify:" in line for line in lines)
    written = [path.read_bytes() for path in workspace.root.rglob("*") if path.is_file()]
    assert not any(CANARY.encode() in content for content in written)
    assert MlflowClient(ledger_database).search_experiments()  # makes the database, if no other test has
    database = Path(ledger_database.removeprefix("sqlite:///"))
    assert CANARY.encode() not in database.read_bytes()
    told = capfd.readouterr()
    ours = [each.getMessage() for each in caplog.records if not each.name.startswith("urllib3")]
    assert CANARY not in told.out + told.err + "\n".join([*lines, *ours])


def test_a_closed_gate_and_a_failure_are_told_when_they_happen(
    workspace: Workspace, recipe_file: Path, webhook: Webhook
) -> None:
    workspace.root.mkdir()
    (workspace.root / "refuse.txt").write_text("other")
    recipe_file.write_text(recipe_file.read_text() + "  other: {kind: sft, data: demonstrations, seed: 3}\n")
    go_through(workspace, recipe_file, "stages.value.gate.at_least=0.9", "notify.on=[gate_closed, failed]")
    assert sorted(webhook.titles) == ["fake: other failed", "fake: value gate closed"]
    failed = next(each["message"] for each in webhook.received if "failed" in each["title"])
    assert "row 7 has no prompt" in failed
    assert "resume" in failed


def test_a_message_that_cannot_be_sent_fails_no_run(
    workspace: Workspace, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK", "json://127.0.0.1:9/secret-part")
    lines = go_through(workspace, recipe_file, *ASKS)
    assert read_runs(workspace)[0].status == "waiting_approval"
    told = [line for line in lines if "notify:" in line]
    assert len(told) == 1, "of two messages"
    assert "notify: HOOK: the message was not accepted" in told[0]
    assert "secret-part" not in told[0]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (None, "notify: HOOK: the variable is not set, so no message was sent"),
        ("nosuch://x/secret-part", "notify: HOOK: it holds something that is no address of Apprise"),
        ("json://127.0.0.1:9/secret-part", "notify: HOOK: the message was not accepted"),
        ("json://127.0.0.1:9 nosuch://x/secret-part", "notify: HOOK: it holds something that is no address"),
    ],
)
def test_what_cannot_be_sent_is_told_once(
    monkeypatch: pytest.MonkeyPatch, address: str | None, said: str
) -> None:
    monkeypatch.delenv("HOOK", raising=False)
    if address:
        monkeypatch.setenv("HOOK", address)
    told: list[str] = []
    messenger = Messenger(("HOOK",), told.append)
    messenger.send(Message("a", "b"))
    messenger.send(Message("c", "d"))
    messenger.close()
    assert len(told) == 1
    assert said in told[0]
    assert "secret-part" not in told[0]


def test_an_address_that_never_answers_delays_nothing_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "SECONDS_EACH", 30.0)
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("HOOK", f"json://127.0.0.1:{silent.getsockname()[1]}")
        messenger = Messenger(("HOOK",), said.append)
        began = time.monotonic()
        messenger.send(Message("a", "b"))
        messenger.send(Message("c", "d"))
        assert time.monotonic() - began < 1.0
        messenger.close(timeout_seconds=3.0)
        assert 2.7 < time.monotonic() - began < 9.0
    assert said[0].startswith("notify: a message was not sent in time")


def test_an_e_mail_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mail server of thirty lines, which speaks as much SMTP as one message needs."""
    received: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, connection.makefile("rwb") as stream:

                def reply(text: str) -> None:
                    stream.write(f"{text}\r\n".encode())
                    stream.flush()

                reply("220 here")
                while line := stream.readline():
                    command = line.split()[0].upper()
                    if command == b"DATA":
                        reply("354 go on")
                        for text in iter(stream.readline, b".\r\n"):
                            received.append(text.decode())
                        reply("250 taken")
                    elif command == b"QUIT":
                        reply("221 bye")
                        return
                    else:
                        reply("250 fine")

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port = server.getsockname()[1]
        monkeypatch.setenv("MAIL", f"mailto://127.0.0.1:{port}?from=run@example.org&to=ada@example.org")
        said: list[str] = []
        messenger = Messenger(("MAIL",), said.append)
        messenger.send(Message("fake: ended: completed", HOSTILE))
        messenger.close()
        thread.join(5)
    mail = email.message_from_string("".join(received), policy=email.policy.default)
    assert said == []
    assert mail["Subject"] == "fake: ended: completed"
    assert mail["To"] == "ada@example.org"
    assert mail.get_content_type() == "text/plain", "no part is HTML"
    assert mail.get_content().replace("\r\n", "\n").rstrip("\n") == HOSTILE


def _content(body: str | bytes) -> dict[str, Any]:
    """Return the fields of a request, which are JSON or a form."""
    text = body.decode() if isinstance(body, bytes) else body
    return json.loads(text) if text.startswith("{") else dict(urllib.parse.parse_qsl(text))


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Collect what Apprise's plugins post to outside services. None of it leaves this process."""
    found: list[dict[str, Any]] = []

    def send_nowhere(
        self: requests.Session, request: requests.PreparedRequest, **_: Any
    ) -> requests.Response:
        found.append(_content(request.body or b"{}"))
        answer = requests.Response()
        answer.status_code = 200
        answer._content = b'{"ok": true, "code": 0}' if "slack" not in str(request.url) else b"ok"
        return answer

    monkeypatch.setattr(requests.Session, "send", send_nowhere)
    return found


def send(monkeypatch: pytest.MonkeyPatch, address: str, body: str) -> None:
    said: list[str] = []
    monkeypatch.setenv("HOOK", address)
    messenger = Messenger(("HOOK",), said.append)
    messenger.send(Message("value <= 0.9", body))
    messenger.close()
    assert said == []


SLACK = "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ/"
TELEGRAM = "tgram://123456789:AAABBBCCCDDDEEEFFFGGGHHHIIIJJJKKKLL/12345/"
DISCORD = f"discord://{'4' * 24}/{'A' * 64}/"


def test_slack_shows_the_characters_as_they_are(
    monkeypatch: pytest.MonkeyPatch, posted: list[dict[str, Any]]
) -> None:
    """Slack's documentation asks for these three characters to be escaped in a text; ``mrkdwn: false`` leaves ``*`` and
    ``_`` alone.
    """
    send(monkeypatch, SLACK, HOSTILE)
    [message] = posted
    assert message["mrkdwn"] is False
    [attachment] = message["attachments"]
    assert html.unescape(attachment["text"]) == HOSTILE
    assert "<" not in attachment["text"] + attachment["title"]
    assert html.unescape(attachment["title"]) == "value <= 0.9"


def test_slack_in_blocks_is_plain_text(monkeypatch: pytest.MonkeyPatch, posted: list[dict[str, Any]]) -> None:
    send(monkeypatch, f"{SLACK}?blocks=yes", HOSTILE)
    [attachment] = posted[0]["attachments"]
    texts = [block["text"] for block in attachment["blocks"] if "text" in block]
    assert {each["type"] for each in texts} == {"plain_text"}
    assert HOSTILE in [each["text"] for each in texts]


@pytest.mark.parametrize("format_", ["", "?format=markdown", "?format=markdown&mdv=v2", "?format=text"])
def test_telegram_gets_html_that_it_takes(
    monkeypatch: pytest.MonkeyPatch, posted: list[dict[str, Any]], format_: str
) -> None:
    """Telegram refuses a message with any tag but its own, and one with a bare ``<``; it shows no ``<br>``. In its
    Markdown, one ``_`` alone is refused too.
    """
    send(monkeypatch, TELEGRAM + format_, HOSTILE)
    [message] = posted
    assert message["parse_mode"] == "HTML"
    bare = re.sub(r"</?b>", "", message["text"])
    assert "<" not in bare
    assert re.search(r"&(?!(lt|gt|amp|quot|#\d+);)", bare) is None
    shown = html.unescape(bare)
    for line in HOSTILE.splitlines():
        assert line.strip() in shown.replace("\xa0", " ")
    assert len(shown.splitlines()) >= len(HOSTILE.splitlines())


MATTERMOST = f"mmosts://example.org/{'a' * 24}"
ZULIP = f"zulip://bot@example/{'a' * 32}/builds"
GOOGLE_CHAT = f"gchat://workspace/{'k' * 39}/{'t' * 40}"
ADDRESSES = {
    "slack": SLACK, "blocks": f"{SLACK}?blocks=yes", "telegram": TELEGRAM, "discord": DISCORD, "mattermost": MATTERMOST,
    "zulip": ZULIP, "google chat": GOOGLE_CHAT, "feishu": f"feishu://{'a' * 36}",
}  # fmt: skip


@pytest.mark.parametrize("address", ADDRESSES.values(), ids=ADDRESSES)
def test_data_mentions_nobody_and_links_nowhere(
    monkeypatch: pytest.MonkeyPatch, posted: list[dict[str, Any]], address: str
) -> None:
    send(monkeypatch, address, MENTIONS)
    text = html.unescape(json.dumps(posted[0], ensure_ascii=False))
    for mention in (
        "<!channel",
        "<!here",
        "<@U123",
        "<https:",
        "<mailto:",
        "<users/",
        "<at ",
        "@**all",
        "@*team",
        "@ada",
        "link](",
    ):
        assert mention not in text
    assert re.search(r"(?<!\w)@(everyone|here)", text) is None
    assert "ada@all.example.org" in text, "an address is no mention"
    assert "model@best" in text, "an alias is no mention"
    assert "/srv/@lab/ws" in text, "nor is a part of a path, which may be in a command"
    assert "channel" in text


@pytest.mark.parametrize(
    ("on", "titles"), [("[gate_closed]", ["fake: policy guard fired"] * 2), ("[failed]", [])]
)
def test_a_guard_that_fires_is_told_once(
    workspace: Workspace, recipe_file: Path, webhook: Webhook, on: str, titles: list[str]
) -> None:
    """Each firing is one message, although a stage reports all its firings each time, and a resumed one begins with
    fewer."""
    first, second = (
        f"guard entropy below 0.1, 3 reports in a row: fired after step {step}" for step in (4, 9)
    )
    with orchestrated(workspace, recipe_file, f"notify={{urls: [HOOK], on: {on}}}") as orchestrator:
        for firings in ((), (first,), (first,), (first, second), (first,), (first, second)):
            report = StageProgress(
                phase="running", step=4, total=9, metrics={}, firings=firings, started=0.0, updated=0.0
            )
            orchestrator.watcher.progressed("policy", report)
        orchestrator.end()
    assert [title for title in webhook.titles if "guard" in title] == titles
    for sent, firing in zip(webhook.received, (first, second), strict=False):
        assert firing in sent["message"]
        assert "look at it: " in sent["message"]


def test_stages_that_send_their_first_messages_at_once_share_one_thread(
    webhook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads would send beside each other, and the end of the run would wait for one of them."""
    begun = []

    class Slow(threading.Thread):
        def __init__(self, **given: Any) -> None:
            if "name" in given:  # the server of the webhook begins a thread without one for each request
                begun.append(given["name"])
            time.sleep(0.1)
            super().__init__(**given)

    messenger = Messenger(("HOOK",), pytest.fail)
    senders = [
        threading.Thread(target=messenger.send, args=(Message(title=title, body="b"),)) for title in "ab"
    ]
    with monkeypatch.context() as patched:
        patched.setattr(messages.threading, "Thread", Slow)
        for sender in senders:
            sender.start()
        for sender in senders:
            sender.join()
    messenger.close()
    assert begun == ["vantage-messages"]
    assert sorted(webhook.titles) == ["a", "b"]
