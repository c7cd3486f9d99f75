"""Ports of tests are free and differ."""

import socket

from tests.support.ports import EACH, own_port


def test_each_call_has_another_port_on_which_nothing_listens() -> None:
    ports = [own_port() for _ in range(20)]
    assert len(set(ports)) == 20
    for port in ports:
        socket.create_server(("127.0.0.1", port)).close()


def test_a_port_that_is_taken_is_left_out() -> None:
    first = own_port()
    begin = first - first % EACH
    with socket.create_server(("127.0.0.1", begin + (first + 1) % EACH)):
        assert own_port() == begin + (first + 2) % EACH
