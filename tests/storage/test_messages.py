"""Messages about an attempt arrive from another machine, and the logs of several attempts follow one another."""

from obstore.store import MemoryStore

from vantage.storage.messages import logs_before, logs_with, messages_of, newest_messages, newest_number

KEY = "a" * 64


def test_the_newest_request_has_the_largest_number_however_many_digits() -> None:
    remote = MemoryStore()
    assert newest_number(remote, KEY) == 0 and newest_messages(remote, KEY) is None
    for number in (2, 9, 10):
        messages_of(remote, KEY, number).write("beat", b"1")
    messages_of(remote, "b" * 64, 11).write("beat", b"1")
    assert newest_number(remote, KEY) == 10
    newest = newest_messages(remote, KEY)
    assert newest is not None and newest.number == 10


def test_a_message_is_created_once() -> None:
    messages = messages_of(MemoryStore(), KEY, 1)
    assert messages.read("outcome.json") is None
    assert messages.create("outcome.json", b"first")
    assert not messages.create("outcome.json", b"second")
    assert messages.read("outcome.json") == b"first"


def test_each_log_begins_on_a_line_of_its_own() -> None:
    logs = logs_with(b"", 1, b"one\n")
    assert logs == b"== request 1 for a worker\none\n"
    both = logs_with(logs, 2, b"two")
    assert both == b"== request 1 for a worker\none\n== request 2 for a worker\ntwo"
    assert logs_with(both, 3, b"").endswith(b"two\n== request 3 for a worker\n")
    assert logs_before(both, 2) == logs
    assert logs_before(both, 4) == both
