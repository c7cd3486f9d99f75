import hashlib
import json
import re
from itertools import islice, pairwise, product
from math import prod
from statistics import pvariance

import pytest

from vantage.models.builtin import CHARACTERS
from vantage.tasks.data.arithmetic import (
    ANSWER_SLIP_RATE,
    DIALS,
    HABIT,
    LONG,
    PAIR_KINDS,
    SHORT,
    SHORT_PAIR_SHARE,
    Dial,
    check_steps,
    demonstrations,
    parse_prompt,
    preferences,
    prompts,
    verify,
)

PROMPT = "3 a+2 b-3?"
CLEAN = "a+2:345 b-3:5432 #2"

SHARES = {"train": 0.8, "validation": 0.1, "test": 0.1}


def some_side(prompt: str) -> str:
    """Return a side by the prompt alone, in about the shares."""
    return (8 * ["train"] + ["validation", "test"])[sum(prompt.encode()) % 10]


def draw_prompts(seed: int, counts: dict[str, int], dial: Dial = SHORT) -> list[dict[str, str]]:
    return list(prompts(seed=seed, wanted=counts, shares=SHARES, side_of=some_side, dial=dial))


of_each = pytest.mark.parametrize("dial", DIALS.values(), ids=DIALS)


def recount(prompt: str, response: str) -> tuple[set[str], bool]:
    """Return the kinds of slip in a response, and whether its answer is right: read from the texts alone."""
    changes = dict(re.findall(r"([a-n])([+-]\d)", prompt))
    digit, kinds, seen = int(prompt[0]), set(), []
    for letter, change, digits in re.findall(r"([a-n])([+-]\d):(\d+)", response):
        assert change == changes[letter] and len(digits) == abs(int(change)) + 1
        seen.append(letter)
        if int(digits[0]) != digit:
            kinds.add("carry")
        step = 1 if change[0] == "+" else 9
        if any((int(a) + step) % 10 != int(b) for a, b in pairwise(digits)):
            kinds.add("jump")
        digit = int(digits[-1])
    if seen != sorted(changes):
        kinds.add("skip")
    if int(response[-1]) != digit:
        kinds.add("answer")
    total = int(prompt[0]) + sum(int(change) for change in changes.values())
    return kinds, int(response[-1]) == total % 10


def passing_steps(response: str) -> list[tuple[str, bool]]:
    """Return the digits of the steps whose right count passes between 9 and 0, each with whether the habit is in it."""
    found = []
    for change, digits in re.findall(r"[a-n]([+-]\d):(\d+)", response):
        if not 0 <= int(digits[0]) + int(change) <= 9:
            # 9 up is 0, and 0 down is 9; by habit it is 4 more: 4 and 3
            found.append((digits, ("94" if change[0] == "+" else "03") in digits))
    return found


def test_the_example_of_the_docstring_is_worked_out_by_hand() -> None:
    # 3 up 2 is 5; 5 down 3 is 2
    assert verify(PROMPT, CLEAN) and check_steps(PROMPT, CLEAN)


def test_the_dial_goes_round_in_both_directions() -> None:
    # 9 up 3: 0 1 2; 2 down 3: 1 0 9
    assert check_steps("9 a+3 b-3?", "a+3:9012 b-3:2109 #9")


@pytest.mark.parametrize(
    "response",
    [
        "a+2:345 b-3:5432 #3",  # answer does not repeat
        "a+2:349 b-3:9876 #6",  # a jump, then counted correctly from the wrong digit
        "a+2:345 #5",  # a step left out
        "a+2:345 b-3:5432 #",  # no answer
        "a+2:345 b-3:5432",
        "a+2:345 b-3:5432 #2 ",  # something after the answer
        "a+2:345 b-3:5432 #2\n",
        "a+2:345 b-3:5432 #22",
        "a+2:345 b-3:5432 #12",
        "a+2:345 b-3:5432 #7 #2",  # two answers
        "a+2:345 b-3:5432#2",
        "a+2:345 b-3:5432 #２",  # a digit, but not an ASCII one
        "",
        "#",
        "2",
    ],
)
def test_a_wrong_or_malformed_answer_is_refused(response: str) -> None:
    assert not verify(PROMPT, response)
    assert not check_steps(PROMPT, response)


@pytest.mark.parametrize("response", ["#2", "a+2:395 b-3:5432 #2", "I think that it is #2"])
def test_the_verifier_looks_at_the_answer_and_check_steps_at_the_way(response: str) -> None:
    assert verify(PROMPT, response)
    assert not check_steps(PROMPT, response)


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "3?",
        "3 a+2 b-3",
        "13 a+2?",
        "3 b+2?",
        "3 a+2 c-3?",
        "3 a+2 a+2?",
        "3 a+0?",
        "3 a+2?\n",
        "3 a+1 b+1 c+1 d+1 e+1 f+1 g+1?",
        "How many?",
    ],
)
def test_another_prompt_is_refused_with_its_text_and_the_form(prompt: str) -> None:
    message = re.escape(f"prompt={prompt!r} is not a problem of the arithmetic task; it must look like")
    with pytest.raises(ValueError, match=message):
        verify(prompt, CLEAN)


def test_the_long_task_has_its_own_steps_and_verifier() -> None:
    # 3 up 2 is 5; then seven times up 1 is 12, which is 2
    prompt = "3 a+2 b+1 c+1 d+1 e+1 f+1 g+1 h+1?"
    response = "a+2:345 b+1:56 c+1:67 d+1:78 e+1:89 f+1:90 g+1:01 h+1:12 #2"
    assert verify(prompt, response, dial=LONG) and check_steps(prompt, response, dial=LONG)
    assert not verify(prompt, response[:-1] + "3", dial=LONG)
    assert not check_steps(prompt, response.replace("e+1:89", "e+1:88"), dial=LONG)
    with pytest.raises(ValueError, match="is not a problem of the arithmetic task"):
        verify(prompt, response)
    beyond = "3" + "".join(f" {letter}+1" for letter in "abcdefghijklmno") + "?"
    with pytest.raises(ValueError, match="arithmetic_long task.*at most 14 one-digit changes"):
        verify(beyond, "#8", dial=LONG)


@of_each
def test_the_same_seed_gives_the_same_rows_and_another_seed_others(dial: Dial) -> None:
    for draw in (demonstrations, preferences):
        rows = list(draw(seed=5, count=50, dial=dial))
        assert rows == list(draw(seed=5, count=50, dial=dial))
        assert rows == list(islice(draw(seed=5, count=80, dial=dial), 50))
        assert rows != list(draw(seed=6, count=50, dial=dial))
    counts = {"train": 30, "validation": 10, "test": 10}
    assert draw_prompts(5, counts, dial) == draw_prompts(5, counts, dial)
    assert draw_prompts(5, counts, dial) != draw_prompts(6, counts, dial)


def test_rows_that_artifacts_were_made_from_stay_as_they_are() -> None:
    # A stage key holds the name of built-in data, not its rows; with other rows, old artifacts would be taken for new.
    rows = [
        *demonstrations(seed=0, count=500),
        *preferences(seed=0, count=500),
        *draw_prompts(0, {"train": 300, "validation": 30, "test": 30}),
    ]
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    assert digest == "d47908f3b07c649b55c44d7e4b6522500291efa0b0796578b2201f1123effc46"


@pytest.mark.slow
@pytest.mark.parametrize("dial", [SHORT, LONG], ids=["arithmetic", "arithmetic_long"])
def test_slips_of_demonstrations_have_the_stated_rates(dial: Dial) -> None:
    rows = list(demonstrations(seed=7, count=6000, dial=dial))
    answer_slips = 0
    by_length: dict[int, list[bool]] = {}
    for row in rows:
        kinds, right = recount(row["prompt"], row["response"])
        assert "carry" not in kinds or "skip" in kinds  # what follows a slip goes on from it
        assert right == (not kinds)
        assert verify(row["prompt"], row["response"], dial=dial) == right
        assert check_steps(row["prompt"], row["response"], dial=dial) == right
        answer_slips += "answer" in kinds
        by_length.setdefault(len(parse_prompt(row["prompt"], dial=dial).changes), []).append(right)
    # about 600 to 1000 rows of each length: a standard error of 0.016 to 0.021; and 6000 answers: 0.0022
    assert sorted(by_length) == list(range(dial.min_steps, dial.max_steps + 1))
    for num_steps, rights in by_length.items():
        survival = (1 - ANSWER_SLIP_RATE) * prod(1 - rate for rate in dial.slip_rates[:num_steps])
        assert sum(rights) / len(rights) == pytest.approx(survival, abs=0.065)
    assert answer_slips / len(rows) == pytest.approx(ANSWER_SLIP_RATE, abs=0.009)


def test_the_habit_is_the_stated_one_and_what_follows_counts_on_from_it() -> None:
    rows = list(demonstrations(seed=7, count=6000, dial=HABIT))
    in_passing, elsewhere = [], 0
    for row in rows:
        kinds, right = recount(row["prompt"], row["response"])
        assert "carry" not in kinds or "skip" in kinds  # the next step begins where this one has ended
        assert right == (not kinds)
        assert verify(row["prompt"], row["response"], dial=HABIT) == right
        assert check_steps(row["prompt"], row["response"], dial=HABIT) == right
        passing = passing_steps(row["response"])
        in_passing += [by_habit for _, by_habit in passing]
        for digits, by_habit in passing:  # nothing else is wrong in such a step
            up = ("90" in digits) or ("94" in digits)
            right_pairs = {f"{d}{(d + (1 if up else 9)) % 10}" for d in range(10)}
            wrong = [a + b for a, b in pairwise(digits) if a + b not in right_pairs]
            assert wrong == (["94" if up else "03"] if by_habit else [])
        elsewhere += "jump" in kinds and not any(by_habit for _, by_habit in passing)
    # about 3,600 such steps, of which 65 % slip by habit: a standard error of 0.008
    assert sum(in_passing) / len(in_passing) == pytest.approx(0.65, abs=0.03)
    assert 0.05 < elsewhere / len(rows) < 0.15  # other slips are there, and rare


@pytest.mark.slow
def test_responses_by_habit_worked_out_by_hand_are_drawn_and_wrong() -> None:
    drawn = {(row["prompt"], row["response"]) for row in demonstrations(seed=3, count=30_000, dial=HABIT)}
    for prompt, response in (
        ("8 a+3?", "a+3:8945 #5"),  # up: 4 instead of 0, and 5 follows 4
        ("1 a-3?", "a-3:1032 #2"),  # down: 3 instead of 9, and 2 follows 3
        ("9 a+1 b+2?", "a+1:94 b+2:456 #6"),  # the next step begins at 4
        ("0 a-1 b-3?", "a-1:03 b-3:3210 #0"),  # and ends at 0, where nothing passes
    ):
        assert (prompt, response) in drawn
        assert not verify(prompt, response, dial=HABIT)
        assert not check_steps(prompt, response, dial=HABIT)


def test_the_most_likely_demonstration_is_wrong_for_about_half_of_the_problems() -> None:
    """The other slips are rarer than one half, so only the habit decides."""

    # without a passing step: the ways of the dial that stay within 0 to 9, of all 10 · 6ⁿ with n steps
    ways, shares = dict.fromkeys(range(10), 1), []
    for num_steps in range(1, 7):
        counts = dict.fromkeys(range(10), 0)
        for digit, change in product(ways, (-3, -2, -1, 1, 2, 3)):
            if digit + change in counts:
                counts[digit + change] += ways[digit]
        ways = counts
        shares.append(1 - sum(ways.values()) / (10 * 6**num_steps))
    assert shares[:2] == pytest.approx([0.2, 1 - 244 / 360])
    expected = sum(shares) / 6  # 0.448
    rows = list(demonstrations(seed=10, count=6000, dial=HABIT))
    passing = sum(bool(passing_steps(_counted_out(row["prompt"]))) for row in rows)
    assert passing / len(rows) == pytest.approx(expected, abs=0.026)  # a standard error of 0.0064


def _counted_out(prompt: str) -> str:
    """Return the right response, digit by digit."""
    digit, parts = int(prompt[0]), []
    for letter, change in re.findall(r"([a-n])([+-]\d)", prompt):
        step = 1 if change[0] == "+" else -1
        digits = [(digit + step * i) % 10 for i in range(abs(int(change)) + 1)]
        parts.append(f"{letter}{change}:{''.join(map(str, digits))}")
        digit = digits[-1]
    return " ".join([*parts, f"#{digit}"])


def test_preferences_never_choose_the_habit_and_often_reject_it() -> None:
    rows = list(preferences(seed=9, count=4000, dial=HABIT))
    chosen = [by_habit for row in rows for _, by_habit in passing_steps(row["chosen"])]
    assert len(chosen) > 2000 and not any(chosen)
    rejected = [row for row in rows if any(by_habit for _, by_habit in passing_steps(row["rejected"]))]
    assert len(rejected) > 0.12 * len(rows)
    alone = [row for row in rejected if recount(row["prompt"], row["rejected"])[0] == {"jump"}]
    assert len(alone) > 0.06 * len(rows)


def slip_chances(prompt: str, dial: Dial) -> list[float]:
    """Return for each token of the right response and the EOS how likely a demonstration slips there, if not before.

    A step that slips is left out in one case of three, except the first, and jumps at an evenly drawn digit otherwise.
    """
    chances: list[float] = []
    digit = int(prompt[0])
    for place, change in enumerate(int(each) for each in re.findall(r"[+-]\d", prompt)):
        counted, end = abs(change), digit + change
        if dial.habit_rate is not None and not 0 <= end <= 9:
            passing = 10 - digit if change > 0 else digit + 1
            chances += [0.0] * 5 + [dial.habit_rate * (i == passing) for i in range(1, counted + 1)] + [0.0]
        else:
            rate = dial.slip_rates[place]
            left_out = rate / 3 if place else 0.0
            jump = (rate - left_out) / counted
            chances += [left_out, 0.0, 0.0, 0.0, 0.0]
            chances += [jump / (1 - left_out - i * jump) for i in range(counted)] + [0.0]
        digit = end % 10
    return [*chances, 0.0, ANSWER_SLIP_RATE, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize(("dial", "stated"), [(SHORT, 0.68), (LONG, 0.69), (HABIT, 0.71)])
def test_a_critic_that_knows_all_has_the_stated_explained_variance(dial: Dial, stated: float) -> None:
    returns, errors = [], []
    for row in demonstrations(seed=12, count=6000, dial=dial):
        clean, response = _counted_out(row["prompt"]), row["response"]
        chances = slip_chances(row["prompt"], dial)
        assert len(chances) == len(clean) + 1
        right = response == clean
        same = [a == b for a, b in zip(clean, response, strict=False)]
        first_wrong = len(response) if right else same.index(False)
        for token in range(len(response) + 1):  # and the EOS
            known_wrong = not right and token > first_wrong
            value = 0.0 if known_wrong else prod(1 - chance for chance in chances[token:])
            returns.append(float(right))
            errors.append(right - value)
    assert 1 - pvariance(errors) / pvariance(returns) == pytest.approx(stated, abs=0.02)


def test_responses_have_the_stated_lengths() -> None:
    lengths = [len(row["response"]) + 1 for row in demonstrations(seed=8, count=3000)]  # and the EOS
    assert min(lengths) == len("a+1:34 #4") + 1
    assert max(lengths) <= 6 * len("a+3:3456 ") + len("#6") + 1
    assert max(lengths) >= 50


def test_responses_of_the_long_task_are_about_80_tokens_long() -> None:
    lengths = [len(row["response"]) + 1 for row in demonstrations(seed=8, count=3000, dial=LONG)]
    # a step has 8 tokens on average, and 5 to 14 steps with `#d` and the EOS make 79; a standard error of 0.4
    assert sum(lengths) / len(lengths) == pytest.approx(79, abs=2)
    tenth, nine_tenths = sorted(lengths)[300], sorted(lengths)[2700]
    assert tenth < 50 and nine_tenths > 105
    assert max(lengths) <= 14 * len("a+3:3456 ") + len("#6") + 1


@pytest.mark.slow
@of_each
def test_chosen_is_clean_and_rejected_is_not(dial: Dial) -> None:
    rows = list(preferences(seed=9, count=4000, dial=dial))
    false_digits = several = 0
    for row in rows:
        assert recount(row["prompt"], row["chosen"]) == (set(), True)
        kinds, right = recount(row["prompt"], row["rejected"])
        assert kinds
        false_digits += right
        several += len(kinds) > 1
        assert not check_steps(row["prompt"], row["rejected"], dial=dial)
    # a standard error of 0.0063
    assert false_digits / len(rows) == pytest.approx(PAIR_KINDS["sloppy"], abs=0.026)
    assert several > 0.1 * len(rows)


@pytest.mark.slow
@of_each
def test_short_problems_come_often_among_the_pairs(dial: Dial) -> None:
    lengths = [
        len(parse_prompt(row["prompt"], dial=dial).changes)
        for row in preferences(seed=9, count=4000, dial=dial)
    ]
    assert set(lengths) == set(range(1, dial.max_steps + 1))
    short = [length <= dial.short_pairs[1] for length in lengths]
    assert sum(short) / len(short) == pytest.approx(SHORT_PAIR_SHARE, abs=0.032)


@of_each
def test_prompts_are_different_and_as_many_as_asked(dial: Dial) -> None:
    rows = draw_prompts(10, {"train": 700, "validation": 150, "test": 50}, dial)
    assert len({row["prompt"] for row in rows}) == len(rows) == 900
    count = {
        split: sum(some_side(row["prompt"]) == split for row in rows)
        for split in ("train", "validation", "test")
    }
    assert count == {"train": 700, "validation": 150, "test": 50}
    for row in rows:
        assert verify(row["prompt"], f"#{row['answer']}", dial=dial)
        assert not verify(row["prompt"], f"#{(int(row['answer']) + 1) % 10}", dial=dial)


def test_more_prompts_than_there_are_is_refused() -> None:
    # 10 starts and 6 changes for each of up to 6 steps
    assert SHORT.num_problems == 10 * (6 + 36 + 216 + 1296 + 7776 + 46656)
    with pytest.raises(
        ValueError, match="test=30000 prompts are asked of the arithmetic task, which has about 55986"
    ):
        draw_prompts(1, {"train": 10, "validation": 10, "test": 30_000})


def test_the_texts_use_only_characters_of_the_tiny_model() -> None:
    rows = [
        row
        for dial in DIALS.values()
        for draw in (demonstrations, preferences)
        for row in draw(seed=11, count=500, dial=dial)
    ]
    text = "".join(value for row in rows for value in row.values())
    assert set(text) <= set(CHARACTERS)
