"""What a run's operations add up to, and how it reads."""

import hashlib

import pytest

from schemas.artifacts import Dataset, PolicyCheckpoint
from tasks.ledger_entries import (
    FinishStage,
    Input,
    Link,
    LogMetrics,
    OpenRun,
    OpenStage,
    RecordReuse,
    RunEntry,
    after,
    flatten,
    from_json,
    new_rows,
    stage_note,
    to_json,
)


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def policy(name: str) -> PolicyCheckpoint:
    return PolicyCheckpoint(
        uri=f"objects/{sha(name)}",
        digest=sha(name),
        stage_key=sha(f"key of {name}"),
        parents={},
        tokenizer_digest=sha("tokenizer"),
    )


DEMONSTRATIONS = Dataset(
    uri="objects/d", digest=sha("d"), stage_key=sha("dk"), parents={}, content="demonstrations"
)
OPEN_RUN = OpenRun(time=1, run_id="0001-tiny-abcdef", experiment="tiny", name="tiny", recipe={})
OPEN_STAGE = OpenStage(
    time=2,
    stage="sft",
    kind="sft",
    stage_key=sha("k"),
    attempt=1,
    params={},
    inputs={
        "init": Input(stage="model", artifact=policy("model")),
        "data": Input(stage="data.demonstrations", artifact=DEMONSTRATIONS),
    },
)
FINISH_STAGE = FinishStage(
    time=3, stage="sft", outcome="completed", artifact=policy("sft"), provenance={}, reason=None
)
REUSE = RecordReuse(
    time=4, stage="sft", kind="sft", stage_key=sha("k"), params={}, inputs={}, artifact=policy("sft")
)


def entry(*operations: OpenRun | OpenStage | FinishStage | RecordReuse | LogMetrics) -> RunEntry:
    total = None
    for operation in operations:
        total = after(total, operation)
    assert total is not None
    return total


def test_nested_values_become_dotted_params_written_as_in_json() -> None:
    recipe = {
        "seed": 17,
        "stages": {
            "value": {
                "gamma": 1.0,  # equal to True for Python, and yet no truth value
                "gate": [{"metric": "explained_variance", "at_least": 0.3}],
                "reference": None,
                "shuffle": True,
                "betas": (0.9, 0.999),
                "rewards": {},
                "extra": [],
            }
        },
    }
    assert flatten(recipe) == {
        "seed": "17",
        "stages.value.gamma": "1.0",
        "stages.value.gate.0.metric": "explained_variance",
        "stages.value.gate.0.at_least": "0.3",
        "stages.value.reference": "null",
        "stages.value.shuffle": "true",
        "stages.value.betas.0": "0.9",
        "stages.value.betas.1": "0.999",
        "stages.value.rewards": "{}",
        "stages.value.extra": "[]",
    }


def test_every_operation_survives_the_outbox() -> None:
    rows = (("loss", 0.25, 1000, 0), ("loss", float("inf"), 1001, 1))
    for operation in (OPEN_RUN, OPEN_STAGE, FINISH_STAGE, REUSE, LogMetrics(stage="sft", rows=rows)):
        assert from_json(to_json(operation)) == operation


def test_a_metric_is_told_once_a_step_whatever_is_passed_again() -> None:
    told = entry(
        OPEN_RUN, OPEN_STAGE, LogMetrics(stage="sft", rows=(("loss", 2.0, 10, 0), ("loss", 1.0, 20, 1)))
    )
    again = [("loss", 2.0, 10, 0), ("loss", 1.0, 20, 1), ("loss", 0.9, 31, 1), ("loss", 0.5, 30, 2)]
    assert new_rows(told, "sft", again) == [("loss", 0.5, 30, 2)]
    assert new_rows(told, "reward", again[:1]) == [("loss", 2.0, 10, 0)]
    assert new_rows(told, "sft", [("kl", 0.1, 10, 0)]) == [("kl", 0.1, 10, 0)]


def test_an_artifact_of_this_runs_own_dead_attempt_is_completed_and_not_reused() -> None:
    assert entry(OPEN_RUN, OPEN_STAGE, OPEN_RUN, REUSE).stages["sft"].outcome == "completed"
    assert entry(OPEN_RUN, REUSE).stages["sft"].outcome == "reused"
    assert entry(OPEN_RUN, REUSE, OPEN_RUN, REUSE).stages["sft"].outcome == "reused"


def test_operations_that_cannot_come_here_say_what_has_to_come_first() -> None:
    with pytest.raises(ValueError, match="finish_stage before open_run"):
        after(None, FINISH_STAGE)
    with pytest.raises(ValueError, match="stage 'sft' was never opened in run 0001-tiny-abcdef"):
        entry(OPEN_RUN, FINISH_STAGE)


def test_the_second_line_of_a_stages_page_names_and_links_its_parents() -> None:
    makers = {
        policy("model").digest: Link(run="#/m", run_name="model of run 0001", model="#/models/m"),
        DEMONSTRATIONS.digest: Link(run="#/d", run_name="data.demonstrations of run 0001"),
    }
    lines = stage_note(entry(OPEN_RUN, OPEN_STAGE), "sft", "#/run", makers).splitlines()
    assert (
        lines[0].rstrip() == "**sft** · sft · attempt 1 · running · a stage of run [0001-tiny-abcdef](#/run)"
    )
    assert lines[1].rstrip() == "**Parents:** init: [model](#/m) · data: [data.demonstrations](#/d)"
    table = [line for line in lines if line.startswith("| ")]
    assert table[1:] == [
        f"| init | [policy](#/models/m) | [model of run 0001](#/m) | `{sha('model')[:16]}` |",
        f"| data | dataset | [data.demonstrations of run 0001](#/d) | `{sha('d')[:16]}` |",
    ]


def test_a_reason_can_break_neither_table_nor_link() -> None:
    failed = FINISH_STAGE.model_copy(
        update={"outcome": "failed", "artifact": None, "reason": "a | b\n[x](javascript:alert(1)) <script>"}
    )
    note = stage_note(entry(OPEN_RUN, OPEN_STAGE, failed), "sft", "#/run", {})
    assert r"a \| b \[x\](javascript:alert(1)) \<script\>" in note.splitlines()[2]
