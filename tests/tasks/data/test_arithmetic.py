import hashlib
import json
import re
from itertools import islice, pairwise
from math import prod

import pytest

from vantage.models.builtin import CHARACTERS
from vantage.tasks.data.arithmetic import (
    ANSWER_SLIP_RATE,
    DIALS,
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
    """A side by the prompt alone, in about the shares."""
    return (8 * ["train"] + ["validation", "test"])[sum(prompt.encode()) % 10]


def draw_prompts(seed: int, counts: dict[str, int], dial: Dial = SHORT) -> list[dict[str, str]]:
    return list(prompts(seed=seed, wanted=counts, shares=SHARES, side_of=some_side, dial=dial))


of_both = pytest.mark.parametrize("dial", DIALS.values(), ids=DIALS)


def recount(prompt: str, response: str) -> tuple[set[str], bool]:
    """The kinds of slip in a response, and whether its answer is right: read from the texts alone."""
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


@of_both
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


@of_both
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


@of_both
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


@of_both
def test_short_problems_come_often_among_the_pairs(dial: Dial) -> None:
    lengths = [
        len(parse_prompt(row["prompt"], dial=dial).changes)
        for row in preferences(seed=9, count=4000, dial=dial)
    ]
    assert set(lengths) == set(range(1, dial.max_steps + 1))
    short = [length <= dial.short_pairs[1] for length in lengths]
    assert sum(short) / len(short) == pytest.approx(SHORT_PAIR_SHARE, abs=0.032)


@of_both
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
