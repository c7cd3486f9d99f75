"""The pages of runs, stages and models in MLflow have the verdict, links and reasons, and no text breaks their tables."""

from types import SimpleNamespace
from typing import Any

from tests.ledger.small_run import sha
from tests.ledger.told_operations import (
    DEMONSTRATIONS,
    FINISH_STAGE,
    OPEN_RUN,
    OPEN_STAGE,
    entry,
    policy,
)
from vantage.ledger.notes import (
    Link,
    artifact_key,
    numbers,
    run_note,
    stage_and_evaluations,
    stage_note,
)
from vantage.ledger.operations import FinishRun
from vantage.schemas.records.uncertainty import Uncertainty


def test_the_second_line_of_a_stages_page_names_and_links_its_parents() -> None:
    producers = {
        artifact_key(policy("model")): Link(run="#/m", run_name="model of run 0001", model="#/models/m"),
        artifact_key(DEMONSTRATIONS): Link(run="#/d", run_name="data.demonstrations of run 0001"),
    }
    lines = stage_note(entry(OPEN_RUN, OPEN_STAGE), "sft", "#/run", producers).splitlines()
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


def test_a_reason_with_backslashes_makes_no_link_either() -> None:
    failed = FINISH_STAGE.model_copy(
        update={"outcome": "failed", "artifact": None, "reason": r"\[log in\](https://evil.example)"}
    )
    note = stage_note(entry(OPEN_RUN, OPEN_STAGE, failed), "sft", "#/run", {})
    assert r"\\\[log in\\\](https://evil.example)" in note.splitlines()[2]


def test_a_stages_page_tells_what_was_left_out_and_what_is_warned_of() -> None:
    assert FINISH_STAGE.artifact is not None
    cut = FINISH_STAGE.artifact.model_copy(
        update={
            "metrics": {
                "prompts_too_long": 137.0,
                "prompts_too_long_share": 137 / 261,
                "unknown_token_share": 1.0,
            }
        }
    )
    finished = FINISH_STAGE.model_copy(update={"artifact": cut})
    told = entry(OPEN_RUN, OPEN_STAGE, finished)
    head = [line.rstrip() for line in stage_note(told, "sft", "#/run", {}).splitlines()]
    assert head[2] == "**Left out:** 137 prompts too long (52 %)"
    assert head[3].startswith("**Warning:** 52 % of the rows were left out")
    assert head[4].startswith("**Warning:** 100 % of the tokens are unknown")
    assert r"(\<unk\>)" in head[4]
    [row] = [line for line in run_note(told, {}, {}).splitlines() if line.startswith("| sft ")]
    assert "**Warning:** 100 % of the tokens are unknown" in row


def test_a_runs_page_begins_with_the_verdict_and_links() -> None:
    ended = FinishRun(time=9, outcome="completed", conclusion="better: accuracy +0.382 (0.334 to 0.428)")
    told = entry(OPEN_RUN, OPEN_STAGE, FINISH_STAGE, ended)
    links = {"all runs of this recipe": "#/all", "registered model [x](javascript:alert(1))": "#/models/x"}
    head = [line.rstrip() for line in run_note(told, {}, {}, links).splitlines()]
    assert head[0] == "better: accuracy +0.382 (0.334 to 0.428)"
    assert head[1] == "Recipe **tiny** · completed"
    assert head[2].startswith("**Links:** [all runs of this recipe](#/all) · [registered model ")
    assert r"\[x\](javascript:alert(1))](#/models/x)" in head[2], "a name makes no link of its own"


def test_a_run_of_an_earlier_version_has_no_verdict_on_its_page() -> None:
    told = entry(OPEN_RUN, FinishRun(time=9, outcome="failed"))
    assert run_note(told, {}, {}).startswith("Recipe **tiny** · failed")


def test_numbers_have_four_digits_units_and_intervals() -> None:
    """0.040193588 is shown with four digits. With so many prompts its interval at 95 % is ± 1.96 standard errors."""
    assert FINISH_STAGE.artifact is not None
    known = Uncertainty(n=100_000, rows=100_000, standard_error=0.001)
    measured = FINISH_STAGE.artifact.model_copy(
        update={
            "metrics": {"test_nll": 0.040193588, "train_rows": 17880.0, "unknown_token_share": 0.0},
            "uncertainty": {"test_nll": known},
        }
    )
    finished = FINISH_STAGE.model_copy(update={"artifact": measured})
    assert numbers(entry(OPEN_RUN, OPEN_STAGE, finished).stages["sft"]) == [
        "test_nll 0.04019 nats/token (0.03823 to 0.04215)",
        "train_rows 17,880 rows",
    ]
    assert numbers(entry(OPEN_RUN, OPEN_STAGE).stages["sft"]) == []


def test_a_model_is_described_by_the_evaluations_that_it_is_the_candidate_of() -> None:
    def of(name: str, kind: str, **inputs: str) -> SimpleNamespace:
        return SimpleNamespace(
            name=name,
            kind=kind,
            inputs={role: SimpleNamespace(stage=stage) for role, stage in inputs.items()},
        )

    stages = [
        of("sft", "sft", init="model"),
        of("policy", "policy_optimization", init="sft"),
        of("first", "evaluation", candidate="sft", baseline="model"),
        of("last", "evaluation", candidate="policy", baseline="sft"),
        of("checked", "reward_evaluation", reward_model="sft"),
    ]
    told: Any = SimpleNamespace(stages={each.name: each for each in stages})
    names = {
        stage: [each.name for each in stage_and_evaluations(told, stage)] for stage in ("sft", "policy", "x")
    }
    assert names == {"sft": ["sft", "first"], "policy": ["policy", "last"], "x": []}
