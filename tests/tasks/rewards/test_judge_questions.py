"""Answers of a judge give scores where they have exactly one value under each name, within the scale."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vantage.schemas.recipe.served_scores import JudgeServer
from vantage.tasks.rewards.judge_questions import Unreadable, questions, read_number, read_preference
from vantage.tasks.rewards.judge_scores import of_both_orders

SCALE = (1.0, 10.0)


def judge(**fields: Any) -> JudgeServer:
    return JudgeServer(url="http://127.0.0.1:1/v1", model="m", **fields)


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("score: 7", 7.0),
        ("Score: 7.", 7.0),
        ("**Score**: 7.5", 7.5),
        ("score = 3\n", 3.0),
        ('{"score": 10}', 10.0),
        ('{"score": "4", "why": "3 faults"}', 4.0),
        ("It has 3 faults.\nScore: 7/10", 7.0),
        ("score: 7 / 10", 7.0),
        ("score: 7 out of 10", 7.0),
        ("score: 7.0\nThe score: 7", 7.0),
        ("<think>score: 2, no, score: 3?</think>score: 9", 9.0),
        ("score: +1", 1.0),
        ("score: 7, since it is short", 7.0),
        ("**Score:** 7", 7.0),
        ("score：7", 7.0),
        ("score: 7 points", 7.0),
        ("score: 7 (it is short)", 7.0),
        ("score: 7 – it is short", 7.0),
        ("score: 7 because 3 words are wrong", 7.0),
        ("score: 7. The response has 3 faults", 7.0),
        ("score: 7\r\nclear: 8", 7.0),
        ("score: 7, clear: 8; short: 2", 7.0),
        ("score: 7 **clear:** 8", 7.0),
        ("score: 7 | clear: 8", 7.0),
        ('{"score":7,"clear":8}', 7.0),
        ("<thinking>score: 2</thinking>\nscore: 9", 9.0),
    ],
)
def test_a_number_is_read_however_it_is_written(answer: str, number: float) -> None:
    assert read_number(answer, "score", SCALE) == number


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "it gives no readable score"),
        ("7", "no readable"),
        ("score: seven", "no readable"),
        ("score:", "no readable"),
        ("score: 7-8", "no readable"),
        ("score: 7–8", "no readable"),
        ("score: 7 or 8", "no readable"),
        ("score: 7 to 8", "no readable"),
        ("score: 7/100", "no readable"),
        ("score: 7/10000", "no readable"),
        ("score: 70%", "no readable"),
        ("score: 7 out of 20", "no readable"),
        ("score: 1e3", "no readable"),
        ("score: 7.5.1", "no readable"),
        ("score: 7…", "no readable"),
        *(
            (f"score: 7{rest}", "no readable")
            for rest in (
                ",5",
                ", 8",
                "; 8",
                "—8",
                "−8",
                "\u20118",
                "~8",
                " 8",
                " → 8",
                " and a half",
                " ½",
                " 1/2",
                "^2",
                "*2",
                " * 2",
                " + 1",
                "..8",
                " up to 9",
                " till 9",
                " percent",
                " k",
                " of 20",
                " (out of 5)",
                " (or 8)",
                ", or 8",
                " maybe 8",
                " & 8",
                " = 70%",
                "'000",
            )
        ),
        ("<think>perhaps score: 3", "its thinking has no end"),
        ("<think>one</think>score: 2\n<think>score: 3", "its thinking has no end"),
        ("myscore: 7", "no readable"),
        ("scores: 7", "no readable"),
        ("score: 7\nscore: 8", "it gives score twice, as 7 and as 8"),
        ("score: 7\nscore: eight", "no readable"),
        ("score: 11", "score is 11, and the scale is 1 to 10"),
        ("score: 0.99", "score is 0.99"),
        ("score: -7", "score is -7"),
        ("score: nan", "no readable"),
        ("score: 7<think>hm</think>", "no readable"),
    ],
)
def test_what_is_not_one_number_on_the_scale_is_unreadable(answer: str, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        read_number(answer, "score", SCALE)


BETWEEN = (
    *(" to 8", " or 8", " up to 9", " maybe 8", " of 20", " out of 100", " percent", " stars", " and a half"),
    *(", or rather 8,", ". No, 8.", ". No, it is 8.", "; maybe 8;", ". I mean 8.", " (well, 8)"),
)


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("follows", ["", " clear: 3", " very clear: 3"])
def test_another_name_on_the_line_hides_no_unit_and_no_second_number(between: str, follows: str) -> None:
    names = ("score", "clear", "very_clear")
    with pytest.raises(Unreadable, match="no readable score"):
        read_number(f"score: 7{between}{follows}", "score", SCALE, names=names)


@pytest.mark.parametrize(
    "between", [" or B", " over B", " and B", ", no, B,", ". No: B.", ", or rather a tie,"]
)
@pytest.mark.parametrize("follows", ["", " clear: A", " very clear: A"])
def test_another_name_on_the_line_hides_no_second_preference(between: str, follows: str) -> None:
    with pytest.raises(Unreadable, match="no readable score"):
        read_preference(f"score: A{between}{follows}", "score", names=("score", "clear", "very_clear"))


def test_scores_on_one_line_are_read_with_points_and_names_of_several_words() -> None:
    names = ("score", "very_clear", "short")
    text = "score: 7 very clear: 8/10 **short**: 2 points reason: it has 3 faults"
    assert [read_number(text, name, SCALE, names=names) for name in names] == [7.0, 8.0, 2.0]
    assert read_number("score: 7 points very clear: 8", "score", SCALE, names=names) == 7.0


@given(st.integers(-99, 99), st.integers(0, 99), st.sampled_from(["right", "right_answer", "answer"]))
def test_each_name_has_its_own_number(one: int, other: int, name: str) -> None:
    numbers = {"right": float(one), "right_answer": other / 4, "answer": float(one - other)}
    text = "\n".join(f"{each}: {number:g}" for each, number in numbers.items())
    assert read_number(text, name, (-200.0, 200.0)) == numbers[name]


@pytest.mark.parametrize(
    ("answer", "preference"),
    [
        ("score: A", 1.0),
        ("score: b.", 0.0),
        ("Score: tie", 0.5),
        ("**score**: Response A", 1.0),
        ("A good one.\nscore: B", 0.0),
        ("score: a tie", 0.5),
        ("score: B because A is wrong", 0.0),
        ("score: A, since B is wrong", 1.0),
        ("score: A. It gives a number", 1.0),
        ("score: a\nclear: b", 1.0),
        ('{"score": "A", "clear": "B"}', 1.0),
    ],
)
def test_a_preference_is_read(answer: str, preference: float) -> None:
    assert read_preference(answer, "score") == preference


@pytest.mark.parametrize(
    "answer",
    [
        *("A", "score: C", "score: A\nscore: B", "score: A or B", "score: A/B", "score: both", "score: AB"),
        *(
            "score: A > B",
            "score: A, B",
            "score: A-B",
            "score: A|B",
            "score: A nor B",
            "score: A vs. B",
            "score: A is wrong",
        ),
        *("score: tie (A)", "score: a, b", "score: A = B", "score: A+B", "<think>score: A"),
    ],
)
def test_what_prefers_no_response_is_unreadable(answer: str) -> None:
    with pytest.raises(Unreadable):
        read_preference(answer, "score")


@pytest.mark.parametrize(
    ("first", "second", "score"),
    [(1.0, 0.0, 1.0), (0.0, 1.0, 0.0), (1.0, 1.0, 0.5), (0.0, 0.0, 0.5), (0.5, 0.0, 0.75), (0.5, 0.5, 0.5)],
)
def test_both_orders_count_equally(first: float, second: float, score: float) -> None:
    """The first question shows the response first, and the second question shows it second."""
    assert of_both_orders([{"score": first}, {"score": second}]) == {"score": score}


def test_a_longer_name_in_words_is_another_score() -> None:
    """An answer that leaves ``kind`` out gives ``very kind`` alone."""
    names = ("kind", "very_kind")
    with pytest.raises(Unreadable, match="no readable kind"):
        read_number("very kind: 3", "kind", SCALE, names=names)
    for opposite in ("not kind", "un-kind", "Non-kind", "non kind", "NOT_kind"):
        with pytest.raises(Unreadable, match="no readable kind"):
            read_number(f"{opposite}: 3", "kind", SCALE)
        assert read_number(f"{opposite}: 3\nkind: 4", "kind", SCALE) == 4.0
    for same in ("-kind", "- kind", "My score for kind", "knot: 1 kind", "1-kind"):
        assert read_number(f"{same}: 3", "kind", SCALE) == 3.0
    both = "Very kind: 3\nkind: 4"
    assert [read_number(both, name, SCALE, names=names) for name in names] == [4.0, 3.0]
    with pytest.raises(Unreadable, match="no readable kind"):
        read_preference("very kind: A", "kind", names=names)


@pytest.mark.parametrize(
    "answer",
    ["*" * 10**5 + "score", "score: " + "7" * 10**5, "score: 7" + " " * 10**5 + "x", "score: 7 " + "a_" * 10**5, "score: 7" + "*" * 10**5 + "x"],
)  # fmt: skip
@pytest.mark.timeout(20)
def test_an_answer_of_any_length_is_read_in_linear_time(answer: str) -> None:
    with pytest.raises(Unreadable):
        read_number(answer, "score", SCALE)


def test_texts_are_put_into_their_places_once() -> None:
    asked = judge(prompt="{prompt}|{response}|{answer}|{other}|{criteria}", scale=(0.0, 1.0))
    (body,) = questions(asked, "{response}", "{answer} {prompt}", "42")
    text = body["messages"][0]["content"]
    assert text == "{response}|{answer} {prompt}|42|{other}|- score (0 to 1): how good the response is\n"


def test_the_recipe_can_add_to_a_request_and_leave_the_temperature_to_the_server() -> None:
    (body,) = questions(judge(temperature=None, request={"seed": 3}, max_answer_tokens=9), "p", "r", None)
    assert body.keys() == {"seed", "model", "max_tokens", "messages"}
    assert (body["seed"], body["max_tokens"]) == (3, 9)
