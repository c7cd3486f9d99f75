"""A look at a server in a place of Ray's tells its stage whether it runs; no cluster is needed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

from vantage.tasks.rollout import servers_on_nodes
from vantage.tasks.rollout.server_process import Program
from vantage.tasks.rollout.servers_on_nodes import PlacedProcess


@pytest.mark.parametrize(
    ("answer", "is_running", "is_lost"),
    [
        (True, True, False),
        (False, False, False),
        (GetTimeoutError("busy"), True, False),
        (RayActorError(), False, True),
        (ActorUnavailableError("its node is gone", None), False, True),
    ],
)
def test_what_a_look_at_it_says(
    answer: Any, is_running: bool, is_lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that answers late runs; one whose actor is gone does not, from the first look on."""

    def get(reference: Any, *, timeout: float) -> Any:
        if isinstance(reference, Exception):
            raise reference
        return reference

    monkeypatch.setattr(servers_on_nodes.ray, "get", get)
    process = PlacedProcess(None, {"CPU": 1.0}, 0, Program(("true",), Path("log"), {}, {}))  # type: ignore[arg-type]
    process._actor = SimpleNamespace(is_running=SimpleNamespace(remote=lambda: answer))
    process._url = "http://127.0.0.1:1"
    assert (process.is_running(), process.is_lost()) == (is_running, is_lost)
