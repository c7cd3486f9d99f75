"""The scheduling benchmark counts lost and doubled work correctly."""

from benchmarks.schedule_many_report import (
    STEPS_OF_A_PIPELINE,
    Pipeline,
    count_steps,
    refill_seconds,
)

STEPS = ["model", "a", "b", "c", "sft", "reward", "value", "policy", "evaluation"]


def history(*events: str, pipeline: int = 1, step: str = "sft") -> list[tuple[int, str, str]]:
    return [(pipeline, step, event) for event in events]


def test_a_lost_and_a_doubled_step_are_counted() -> None:
    assert len(STEPS) == STEPS_OF_A_PIPELINE
    whole = [row for step in STEPS for row in history("started", "done", step=step)]
    rows = [
        *whole,
        *history("started", "lost", "started", "done", pipeline=2),
        *history("started", "done", "started", "done", pipeline=2, step="reward"),
        *history("started", pipeline=2, step="value"),
    ]
    assert count_steps(rows, 1 + 1) == {
        "steps expected": 18,
        "steps done": 11,
        "steps lost": 7,
        "steps done twice": 1,
        "first attempts lost on purpose, and retried": 1,
        "steps with any other history": 2,
    }


def test_a_slot_is_refilled_by_the_start_after_its_end() -> None:
    runs = [(0.0, 10.0), (0.0, 12.0), (11.5, 20.0), (12.25, 30.0)]  # 2 slots: 10 → 11.5 and 12 → 12.25
    pipelines = [Pipeline(index, "Completed", *each) for index, each in enumerate(runs)]
    assert refill_seconds(pipelines, 2) == [1.5, 0.25]
