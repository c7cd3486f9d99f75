"""How the pages read."""

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
    run_note,
    stage_note,
)


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
