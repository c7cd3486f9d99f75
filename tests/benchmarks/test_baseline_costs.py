"""The table of costs on its page is the one that is counted, and agrees with the loops by hand."""

from pathlib import Path

from benchmarks.baseline_costs import ARMS, row, table

PAGE = Path(__file__).parents[2] / "docs" / "baselines.md"


def test_the_page_has_the_counted_table() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "write it anew: python benchmarks/baseline_costs.py"


def test_what_a_plain_policy_gradient_costs_by_hand() -> None:
    """The stage samples 256 responses in each of 7 iterations. It validates on 256 before them, after the fourth and
    after the last, and tests once on 256.

    Policy, reference and reward score each response of a rollout and of the test; the reward alone scores validation.
    """
    rollouts, validated, tested = 7 * 256, 3 * 256, 256
    cells = row(ARMS[0])[1:]
    expected = (0, 0, 0, rollouts + validated + tested, 3 * rollouts + validated + 3 * tested, rollouts)
    assert cells[:6] == [f"{number:,}" for number in expected]
    assert cells[6] == "6.0", "a trained policy counts 4, reference and reward model 1 each"
