"""Warnings about a stage beside its gates appear, on metrics that are written by hand."""

from typing import Any

from tests.support.every import every
from vantage.schemas.kinds import KINDS
from vantage.schemas.records.metric_warnings import RULES, dropped_summary, warnings_of


def test_every_rule_reads_headline_metrics_that_there_are() -> None:
    headlines = {name for kind in KINDS.values() for name in kind.headline}
    for rule in RULES:
        assert {name for name in (rule.metric, rule.of, rule.less) if name} <= headlines


@every(
    ("metrics", "said"),
    [
        ({"dropped_rows": 12.0, "repeated_rows": 4.0, "source_rows": 400.0}, "2 % of the source's rows cannot be used"),
        ({"dropped_rows": 90.0, "repeated_rows": 90.0, "source_rows": 400.0}, "22 % of the source's rows repeat"),
        ({"prompts_too_long_share": 137 / 261}, "52 % of the rows were left out, since their prompts are longer"),
        ({"responses_cut_share": 0.25}, "25 % of the data's responses were cut off"),
        ({"unknown_token_share": 1.0}, "100 % of the tokens are unknown to the model's tokenizer"),
        ({"single_byte_share": 0.93}, "93 % of the tokens are single bytes"),
        ({"truncated_share": 0.9}, "90 % of the sampled responses were cut off"),
        ({"truncated_share": 0.5}, "50 % of the sampled responses were cut off"),
        ({"tied_share": 0.9}, "90 % of the prompts gave no pair"),
        ({"return_variance": 0.0}, "all returns are equal"),
        ({"reward_spread": 0.0}, "all responses got the same score"),
    ],
)  # fmt: skip
def test_what_is_never_wanted_is_warned_of(metrics: dict[str, float | None], said: str) -> None:
    [warning] = warnings_of(metrics)
    assert warning.startswith(said)


@every(
    "metrics",
    [
        {},
        {"dropped_rows": 4.0, "repeated_rows": 0.0, "source_rows": 400.0},
        {"dropped_rows": 40.0, "repeated_rows": 40.0, "source_rows": 400.0},
        {"dropped_rows": 0.0, "repeated_rows": 0.0, "source_rows": 0.0},
        {"dropped_rows": 4.0},  # an artifact of a version that did not measure the others
        {"prompts_too_long_share": 0.01, "responses_cut_share": 0.1, "unknown_token_share": 0.01},
        {"single_byte_share": 0.5, "truncated_share": 0.49, "tied_share": 0.8},
        {"return_variance": 1e-9, "reward_spread": 0.1},
        {"return_variance": None, "truncated_share": None},
    ],
)
def test_what_may_be_is_not(metrics: dict[str, float | None]) -> None:
    assert warnings_of(metrics) == ()


def test_what_was_left_out_is_one_line_with_the_reasons() -> None:
    metrics: dict[str, Any] = {"dropped_rows": 3.0, "repeated_rows": 1.0, "source_rows": 1060.0}
    reasons = {"not JSON": 2, "repeats an earlier row": 1}
    assert (
        dropped_summary(metrics, reasons)
        == "3 of 1,060 rows dropped (not JSON: 2, repeats an earlier row: 1)"
    )
    assert (
        dropped_summary(
            {
                "prompts_too_long": 137.0,
                "prompts_too_long_share": 137 / 261,
                "responses_cut": 2.0,
                "responses_cut_share": 0.004,
                "rows_alike_after_cut": 1.0,
            }
        )
        == "137 prompts too long (52 %); 2 responses cut off (0.4 %); 1 rows with equal responses after the cut"
    )
    assert dropped_summary({"dropped_rows": 0.0, "prompts_too_long": 0.0, "responses_cut": 0.0}) is None
    assert dropped_summary({}) is None
