"""A chat template that asks for the date gets the recipe's in every stage, on every day and in every time zone."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

from tests.support.slow import slow
from tests.tasks import golden_runs
from tests.tasks.golden_results import Results
from vantage.schemas.kinds import STAGES
from vantage.storage.sealed_folders import seal
from vantage.tasks.stages import run_stage

pytestmark = pytest.mark.slow

TEMPLATE = "{{ strftime_now('%m%d%H') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
"""A template of six characters of the date, and then the texts."""
ZONES = {"Pacific/Kiritimati": 1_950_000_000, "Pacific/Pago_Pago": 1_730_000_000}
"""Time zone of a machine → the moment at which its stages run."""
MODELS = ("init", "reference", "fresh", "critic", "reward")
RUNS = {
    "sft": "sft",
    "reward_model": "reward_model",
    "dpo": "dpo",
    "kto": "kto",
    "best_of_n": "best_of_n",
    "distillation": "distillation",
    "value_pretraining": "value_pretraining",
    "policy_optimization": "policy_optimization: ppo",
    "rollout_collection": "rollout_collection",
    "prompt_selection": "prompt_selection",
    "preference_collection": "preference_collection",
    "reward_evaluation": "reward_evaluation",
    "benchmark_evaluation": "benchmark_evaluation",
    "evaluation": "evaluation",
}
"""Kind of stage → the golden run that tests it."""
FAST = ("dpo", "evaluation", "prompt_selection")
WITHOUT_TEMPLATE = {"prompt_selection"}
"""Kinds that render no template: their prompts are rendered already."""


@contextmanager
def _machine(zone: str, seconds: int) -> Iterator[None]:
    """Let the machine be in this time zone inside the block, and let chat templates that ask the clock see this moment."""

    class Moved(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Moved":
            return cls.fromtimestamp(seconds, tz)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", zone)
        patch.setattr(chat_template_utils, "datetime", Moved)
        time.tzset()
        yield
    time.tzset()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Results]]:
    """Yield zone → the runs on its machine; what several of them read is made once."""
    chatting = golden_runs.RUNS["benchmark_evaluation"]
    work = {**chatting.work, "chat_template": True}
    asking = golden_runs.Run(chatting.kind, work, chatting.inputs, chatting.seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(golden_runs.RUNS, "benchmark_evaluation", asking)
        yield {zone: _with_template(Results(tmp_path_factory.mktemp("zone"))) for zone in ZONES}


def _with_template(results: Results) -> Results:
    for name in MODELS:
        path = results.folder(name) / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return results


def test_every_kind_of_stage_is_tried() -> None:
    assert RUNS.keys() == STAGES.keys()


@pytest.mark.parametrize("kind", [*FAST, *slow(*(kind for kind in RUNS if kind not in FAST))])
def test_a_stage_gives_the_same_on_another_day_in_another_zone(
    kind: str, results: dict[str, Results], tmp_path: Path
) -> None:
    if kind == "benchmark_evaluation":
        pytest.importorskip("lm_eval", reason="pip install -e '.[lm-eval]'")
    made = []
    for zone, seconds in ZONES.items():
        with _machine(zone, seconds):
            made.append(results[zone].of(RUNS[kind]))
    assert made[0].artifact == made[1].artifact
    assert made[0].result.metrics == made[1].result.metrics

    other = tmp_path / "another date"
    (other / "scratch").mkdir(parents=True)
    (other / "output").mkdir()
    changes = {"date": date(2031, 4, 1), "scratch": other / "scratch", "output": other / "output"}
    result = run_stage(made[0].job.model_copy(update=changes))
    # also a stage that keeps its first weights measures other numbers
    is_other = seal(other / "output") != made[0].artifact or result.metrics != made[0].result.metrics
    assert is_other == (kind not in WITHOUT_TEMPLATE), "the recipe's date is what it reads"
