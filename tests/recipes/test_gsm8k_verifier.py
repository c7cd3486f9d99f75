"""The verifier of GSM8K's problems accepts right answers in the ways that people write them, and no wrong ones."""

from fractions import Fraction

import pytest

from vantage.recipes.gsm8k_verifier import final_number, verify

REFERENCE = "She sold 48/2 = <<48/2=24>>24 clips in May.\nIn all 48+24 = <<48+24=72>>72 clips.\n#### 72"
"""An answer in GSM8K's own form."""

RIGHT = [
    REFERENCE,
    "#### 72",
    "####72",
    "#### 72.",
    "#### 72.00",
    "#### $72",
    "#### \\$72 ",
    "#### 72 clips in 2 months",
    "#### 48 + 24 = 72",
    "#### **72**",
    "#### 144/2",
    "First I guessed #### 70\nThen I counted again.\n#### 72",
    "#### Step 1\n48/2 is 24.\n#### Step 2\nTogether 72.",
    "#### 1. Halve it\n24\n#### 2. Add\n48 and 24 is 72",
    "The answer is \\boxed{72}. I checked it 3 times.",
    "$\\boxed{\\text{72 clips}}$",
    "\\boxed{x = 72}",
    "\\boxed{\\frac{144}{2}} and so on, 5 times",
    "\\boxed{72",
    "#### 70\nNo: \\boxed{72}",
    "The answer is 72. There were 2 months.",
    "the final answer is: $72.",
    "**Answer:** 72 clips",
    "Answer = 72",
    "The answer is **72**.",
    "The answer is 48 + 24 = 72.",
    "The answer is 70. Wait, the answer is 72.",
    "In April 48, in May 24, so 72 clips.",
    "48 + 24 = 72",
    "72",
    "７２",
]
WRONG = [
    "",
    "I do not know.",
    "#### 27",
    "#### -72",
    "#### 7 2",
    "#### 72.5",
    "#### 72,5",
    "#### 720",
    "#### 72^2",
    "#### 72**2",
    "#### 72/0",
    "72 #### 24",
    "#### 72\n#### 24",
    "\\boxed{24} 72",
    "\\boxed{} 72",
    "The answer is 24. 72",
    "She sold 72 clips in 2 months",
    "seventy-two",
    "72e3",
    f"#### 72{'0' * 5000}",
    f"#### {'7' * 9000}/{'7' * 9000}",
    f"#### {'7' * 9000} 1/2",
]


@pytest.mark.parametrize("response", RIGHT)
def test_right(response: str) -> None:
    """These responses end in the number of the answer."""
    assert verify("", response, "#### 72")
    assert verify("", response, REFERENCE)
    assert not verify("", response, "#### 71")


@pytest.mark.parametrize("response", WRONG)
def test_wrong(response: str) -> None:
    """These responses do not end in the number of the answer."""
    assert not verify("", response, "#### 72")


@pytest.mark.parametrize(
    "text, number",
    [
        ("#### 1,234", Fraction(1234)),
        ("#### 1234567.50", Fraction(2469135, 2)),
        ("\\boxed{1{,}234}", Fraction(1234)),
        ("\\boxed{1\\,234}", Fraction(1234)),
        ("#### 1,23", None),
        ("#### -5", Fraction(-5)),
        ("#### - 5", Fraction(-5)),
        ("#### −5", Fraction(-5)),
        ("#### -$5", Fraction(-5)),
        ("#### $-5", Fraction(-5)),
        ("It is 10-5", Fraction(5)),
        ("It is 10 - 5", Fraction(5)),
        ("So:\n- 5", Fraction(5)),  # an item of a list
        ("between 3–5", Fraction(5)),
        ("#### 3/4", Fraction(3, 4)),
        ("#### 0.75", Fraction(3, 4)),
        ("#### .75", Fraction(3, 4)),
        ("\\boxed{\\dfrac{3}{4}}", Fraction(3, 4)),
        ("\\boxed{-\\frac{3}{4}}", Fraction(-3, 4)),
        ("\\boxed{1\\frac{1}{2}}", Fraction(3, 2)),
        ("#### 1 1/2", Fraction(3, 2)),
        ("#### 1½", Fraction(3, 2)),
        ("#### 20%", Fraction(20)),
        ("#### 1e3", Fraction(1000)),
        ("#### 2.5e-1", Fraction(1, 4)),
        ("#### 5kg", Fraction(5)),
        ("#### €5.50", Fraction(11, 2)),
        ("about 1/3", Fraction(1, 3)),
        ("no number at all", None),
    ],
)
def test_how_numbers_are_written(text: str, number: Fraction | None) -> None:
    assert final_number(text) == number


def test_a_reference_may_be_the_number_alone() -> None:
    assert verify("", "#### 1234", "1,234")
    assert not verify("", "#### 1234", "unknown")
    assert not verify("", "", "")


def test_a_row_without_answer_is_refused() -> None:
    with pytest.raises(ValueError, match="columns: {prompt: question, answer: answer}"):
        verify("", "#### 1", None)
