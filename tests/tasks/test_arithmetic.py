import re
from itertools import islice, pairwise

import pytest

from models.builtin import CHARACTERS
from tasks.arithmetic import (
    ANSWER_SLIP_RATE,
    MAX_STEPS,
    NUM_PROBLEMS,
    PAIR_KINDS,
    SHORT_PAIR_SHARE,
    SLIP_RATES,
    check_steps,
    demonstrations,
    parse_prompt,
    preferences,
    prompts,
    split_of,
    verify,
)

PROMPT = "3 a+2 b-3?"
CLEAN = "a+2:345 b-3:5432 #2"


def recount(prompt: str, response: str) -> tuple[set[str], bool]:
    """The kinds of slip in a response, and whether its answer is right: read from the texts alone."""
    changes = dict(re.findall(r"([a-f])([+-]\d)", prompt))
    digit, kinds, seen = int(prompt[0]), set(), []
    for letter, change, digits in re.findall(r"([a-f])([+-]\d):(\d+)", response):
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


def test_the_same_seed_gives_the_same_rows_and_another_seed_others() -> None:
    for draw in (demonstrations, preferences):
        rows = list(draw(seed=5, count=50))
        assert rows == list(draw(seed=5, count=50))
        assert rows == list(islice(draw(seed=5, count=80), 50))
        assert rows != list(draw(seed=6, count=50))
    counts = {"train": 30, "validation": 10, "test": 10}
    assert list(prompts(seed=5, **counts)) == list(prompts(seed=5, **counts))
    assert list(prompts(seed=5, **counts)) != list(prompts(seed=6, **counts))


def test_a_prompt_is_on_one_side_in_all_datasets_and_seeds() -> None:
    rows = [
        row
        for seed in (1, 2)
        for row in (
            *demonstrations(seed=seed, count=1500),
            *preferences(seed=seed, count=1500),
            *prompts(seed=seed, train=1000, validation=200, test=200),
        )
    ]
    sides: dict[str, set[str]] = {}
    for row in rows:
        sides.setdefault(row["prompt"], set()).add(row["split"])
        assert row["split"] == split_of(row["prompt"])
    assert len(sides) < len(rows)  # some prompts do come up again
    assert all(len(side) == 1 for side in sides.values())


def test_shares_of_the_splits() -> None:
    rows = list(demonstrations(seed=3, count=4000))
    share = {
        split: sum(row["split"] == split for row in rows) / len(rows) for split in ("validation", "test")
    }
    # 0.1 with a standard error of 0.005, and more because short problems come up again
    assert share["validation"] == pytest.approx(0.1, abs=0.03)
    assert share["test"] == pytest.approx(0.1, abs=0.03)


def test_slips_of_demonstrations_have_the_stated_rates() -> None:
    rows = list(demonstrations(seed=7, count=6000))
    answer_slips = 0
    by_length: dict[int, list[bool]] = {}
    for row in rows:
        kinds, right = recount(row["prompt"], row["response"])
        assert "carry" not in kinds or "skip" in kinds  # what follows a slip goes on from it
        assert right == (not kinds)
        assert verify(row["prompt"], row["response"]) == right
        assert check_steps(row["prompt"], row["response"]) == right
        answer_slips += "answer" in kinds
        by_length.setdefault(len(parse_prompt(row["prompt"]).changes), []).append(right)
    # about 1000 rows of each length: a standard error of 0.016; and 6000 answers: 0.0022
    survival = 1 - ANSWER_SLIP_RATE
    for num_steps in range(1, MAX_STEPS + 1):
        survival *= 1 - SLIP_RATES[num_steps - 1]
        rights = by_length[num_steps]
        assert sum(rights) / len(rights) == pytest.approx(survival, abs=0.065)
    assert answer_slips / len(rows) == pytest.approx(ANSWER_SLIP_RATE, abs=0.009)


def test_responses_have_the_stated_lengths() -> None:
    lengths = [len(row["response"]) + 1 for row in demonstrations(seed=8, count=3000)]  # and the EOS
    assert min(lengths) == len("a+1:34 #4") + 1
    assert max(lengths) <= 6 * len("a+3:3456 ") + len("#6") + 1
    assert max(lengths) >= 50


def test_chosen_is_clean_and_rejected_is_not() -> None:
    rows = list(preferences(seed=9, count=4000))
    false_digits = several = 0
    for row in rows:
        assert recount(row["prompt"], row["chosen"]) == (set(), True)
        kinds, right = recount(row["prompt"], row["rejected"])
        assert kinds
        false_digits += right
        several += len(kinds) > 1
        assert not check_steps(row["prompt"], row["rejected"])
    # a standard error of 0.0063
    assert false_digits / len(rows) == pytest.approx(PAIR_KINDS["sloppy"], abs=0.026)
    assert several > 0.1 * len(rows)


def test_short_problems_come_often_among_the_pairs() -> None:
    short = [len(parse_prompt(row["prompt"]).changes) <= 2 for row in preferences(seed=9, count=4000)]
    assert sum(short) / len(short) == pytest.approx(SHORT_PAIR_SHARE, abs=0.032)


def test_prompts_are_different_and_as_many_as_asked() -> None:
    rows = list(prompts(seed=10, train=700, validation=150, test=50))
    assert len({row["prompt"] for row in rows}) == len(rows) == 900
    count = {split: sum(row["split"] == split for row in rows) for split in ("train", "validation", "test")}
    assert count == {"train": 700, "validation": 150, "test": 50}
    for row in rows:
        assert verify(row["prompt"], f"#{row['answer']}")
        assert not verify(row["prompt"], f"#{(int(row['answer']) + 1) % 10}")


def test_more_prompts_than_there_are_is_refused() -> None:
    # 10 starts and 6 changes for each of up to 6 steps
    assert NUM_PROBLEMS == 10 * (6 + 36 + 216 + 1296 + 7776 + 46656)
    with pytest.raises(
        ValueError, match="test=30000 prompts asked of the arithmetic task, which has about 55986"
    ):
        prompts(seed=1, train=10, validation=10, test=30_000)


def test_the_texts_use_only_characters_of_the_tiny_model() -> None:
    rows = [*demonstrations(seed=11, count=500), *preferences(seed=11, count=500)]
    text = "".join(value for row in rows for key, value in row.items() if key != "split")
    assert set(text) <= set(CHARACTERS)
