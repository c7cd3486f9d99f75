"""Real processes ask judges: several ranks, one that is killed again and again, and one that must stop."""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fake_judge_server import FakeJudge, points
from tests.support.fork_server import ROOT, WITH_TORCH
from tests.support.on_ranks import on_ranks
from tests.support.stand_in import command_of
from tests.tasks.rewards.test_served_scores import PROMPTS, fresh, judge, load, question, scored
from vantage.schemas.recipe.served_scores import JudgeServer
from vantage.tasks.rewards.answer_file import answers_in
from vantage.tasks.training import preemption
from vantage.tasks.training.answer_record import answer_metrics
from vantage.tasks.training.scratch import ANSWERS

__all__ = ["fresh"]


def scored_in(folder: Path) -> dict[str, Any]:
    """Score all responses by the judge that the folder describes, as one process does, or one of several ranks."""
    server = JudgeServer.model_validate_json((folder / "judge.json").read_bytes())
    scores = torch.tensor(scored(load(folder, server))["judge"])
    return {"scores": scores, "asked": answer_metrics()["judge_asked"]}


def main() -> None:
    """Print the scores, in a process of its own."""
    print(*scored_in(Path(sys.argv[1]))["scores"].tolist())


def described(folder: Path, server: FakeJudge, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "judge.json").write_text(judge(server, **fields).model_dump_json())
    return folder


@pytest.mark.slow
def test_two_ranks_ask_each_question_once(tmp_path: Path) -> None:
    with FakeJudge() as server:
        found = on_ranks(scored_in, described(tmp_path / "ranks", server))
    expected = [float(points(question(row))) for row in range(len(PROMPTS))]
    assert [rank["scores"].tolist() for rank in found] == [expected, expected]
    assert [rank["asked"] for rank in found] == [len(PROMPTS)] * 2
    assert set(server.seen.questions.values()) == {1}


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_asks_asks_nothing_again_that_was_answered(tmp_path: Path) -> None:
    with FakeJudge(delay=0.15) as server:
        folder = described(tmp_path / "killed", server, at_once=2)
        kept: set[str] = set()
        kills = 0
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        for answers in (1, 5, 6, 13, 22):  # this answer is there when the process is killed
            before = server.seen.num_requests
            with WITH_TORCH.popen(command_of(__name__, str(folder)), env=environment) as process:
                while len(list(answers_in(folder / ANSWERS))) < answers:
                    time.sleep(0.01)
                process.kill()
                assert process.wait(30.0) == -signal.SIGKILL
            kills += 1
            asked = {body["messages"][0]["content"] for body in server.seen.bodies[before:]}
            assert not asked & kept
            kept = {each.asked["messages"][0]["content"] for each in answers_in(folder / ANSWERS)}
        ended = WITH_TORCH.run_main(__name__, str(folder))
    assert ended.returncode == 0, ended.stderr
    expected = [float(points(question(row))) for row in range(len(PROMPTS))]
    assert list(map(float, ended.stdout.split())) == expected
    assert server.seen.num_requests <= len(PROMPTS) + 2 * kills
    lines = (folder / ANSWERS).read_text().splitlines()
    assert len({json.loads(line)["question"] for line in lines}) == len(lines) == len(PROMPTS)


def test_a_request_to_stop_is_heard_while_a_judge_is_waited_for(tmp_path: Path, fresh: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with FakeJudge(delay=30.0) as server:
        scores = load(tmp_path, judge(server))
        preemption.listen()
        try:
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            began = time.monotonic()
            with pytest.raises(preemption.Requested), preemption.at_once():
                scored(scores)
            assert time.monotonic() - began < 15.0
        finally:
            signal.signal(signal.SIGTERM, before)
            preemption._signals_received = 0
