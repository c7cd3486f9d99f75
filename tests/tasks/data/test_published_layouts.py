"""Layouts of published datasets are read, with invented words: who asks, which side is better, and what is refused with its remedy."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.tasks.data.test_inspection import lines
from vantage.schemas.recipe.inputs import Content, Data
from vantage.tasks.data.garbled_rows import GarbledRows
from vantage.tasks.data.inspection import UnknownData, inspect_file
from vantage.tasks.data.row_reader import RowReader

Row = dict[str, Any]


def asked(n: int) -> str:
    return f"ASK{n} of which colour is the sky?"


def good(n: int) -> str:
    return f"GOOD{n} it is blue."


def bad(n: int) -> str:
    return f"BAD{n} who knows."


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def assistant(text: str) -> Row:
    return {"role": "assistant", "content": text}


def in_turn(n: int) -> tuple[str, str]:
    """Return the answers; the good one is first in even rows."""
    return (bad(n), good(n)) if n % 2 else (good(n), bad(n))


def sides(n: int, first: str, second: str) -> Row:
    return dict(zip((first, second), in_turn(n), strict=True))


def transcript(*said: str) -> str:
    return "".join(f"\n\n{'Assistant' if i % 2 else 'Human'}: {words}" for i, words in enumerate(said))


def parts(text: str) -> list[Row]:
    return [{"type": "text", "text": text, "image": None, "mimeType": None}]


def arena(n: int) -> Row:
    texts = dict(zip("ab", in_turn(n), strict=True))
    turns = {
        f"conversation_{side}": [
            {"role": "user", "content": parts(asked(n))},
            {"role": "assistant", "content": parts(text)},
        ]
        for side, text in texts.items()
    }
    return {**turns, "winner": ("both_bad" if n % 5 == 4 else f"model_{'ab'[n % 2]}"), "language": "en"}


PREFERENCES: dict[str, Callable[[int], Row]] = {
    "trlx_hh": lambda n: {
        "prompt": transcript(asked(n)) + "\n\nAssistant:",
        "chosen": good(n),
        "rejected": bad(n),
    },
    "whole_transcripts_beside_the_prompt": lambda n: {
        "prompt": transcript(asked(n)) + "\n\nAssistant:",
        "chosen": transcript(asked(n), good(n)),
        "rejected": transcript(asked(n), bad(n)),
    },
    "json_in_texts": lambda n: {
        "prompt": asked(n),
        "chosen": json.dumps([user(asked(n)), assistant(good(n))]),
        "rejected": json.dumps([user(asked(n)), assistant(bad(n))]),
    },
    "python_in_texts": lambda n: {
        "prompt": asked(n),
        "chosen": str([user(asked(n)), assistant(good(n))]),
        "rejected": str([user(asked(n)), assistant(bad(n))]),
    },
    "arena": arena,
    "a_column_for_each_answer": lambda n: {
        "prompt": asked(n),
        **sides(n, "response_a", "response_b"),
        "winner_model_a": int(n % 5 != 4 and n % 2 == 0),
        "winner_model_b": int(n % 5 != 4 and n % 2 == 1),
        "winner_tie": int(n % 5 == 4),
    },
    "rounds_written_as_json": lambda n: {
        "prompt": json.dumps([asked(n)]),
        **{side: json.dumps([text]) for side, text in sides(n, "response_a", "response_b").items()},
        "winner_model_a": int(n % 5 != 4 and n % 2 == 0),
        "winner_model_b": int(n % 5 != 4 and n % 2 == 1),
        "winner_tie": int(n % 5 == 4),
    },
    "stack_exchange_paired": lambda n: {"question": asked(n), "response_j": good(n), "response_k": bad(n)},
    "stack_exchange_preferences": lambda n: {
        "question": asked(n),
        "answers": [{"text": text, "pm_score": 3 * ("GOOD" in text)} for text in in_turn(n)],
    },
    "helpsteer2_preferences": lambda n: {
        "prompt": asked(n),
        **sides(n, "response_1", "response_2"),
        "preference_strength": (2 if n % 2 else -1),
    },
    "names_of_columns_as_labels": lambda n: {
        "prompt": asked(n),
        **sides(n, "response_1", "response_2"),
        "preferred": ("tie" if n % 5 == 4 else f"response_{n % 2 + 1}"),
    },
    "capitals": lambda n: {
        "Prompt": asked(n),
        **sides(n, "Response A", "Response B"),
        "Preference": "AB"[n % 2],
    },
    "winner_and_loser": lambda n: {"prompt": asked(n), "winner": good(n), "loser": bad(n)},
    "position_of_the_best": lambda n: {"prompt": asked(n), "responses": list(in_turn(n)), "best": n % 2},
    "rewards_beside_each": lambda n: {
        "prompt": asked(n),
        "responses": [{"text": bad(n), "reward": -1}, {"text": good(n), "reward": 2.5}],
    },
    "equal_scores_are_ties": lambda n: {
        "prompt": asked(n),
        "responses": list(in_turn(n)),
        "scores": [1, 1] if n % 5 == 4 else [1 - n % 2, n % 2],
    },
}


@pytest.mark.parametrize("layout", PREFERENCES)
def test_pairs(tmp_path: Path, layout: str) -> None:
    """Preferences in this published layout are recognised and read."""
    path = lines(tmp_path / "rows.jsonl", [PREFERENCES[layout](n) for n in range(20)])
    found, rows = inspect_file(path, "preferences")
    assert len(rows) == (16 if found.problems else 20)
    for n, row in rows:
        assert (row["prompt"], row["chosen"].strip(), row["rejected"].strip()) == (asked(n), good(n), bad(n))
        assert row["messages"] is None
    entry = yaml.safe_load(found.recipe)["data"]["rows"]
    reader = RowReader(Data(**entry), "preferences", [])
    assert [reader.read(PREFERENCES[layout](n)) for n, _ in rows] == [row for _, row in rows]


def test_numbers_in_columns_of_one_pattern_are_read_from_csv(tmp_path: Path) -> None:
    rows = [PREFERENCES["rounds_written_as_json"](n) for n in range(20)]
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    found, made = inspect_file(tmp_path / "rows.csv", "preferences")
    assert found.columns["scores"] == "winner_model_[ab]" and len(made) == 16
    assert all((row["chosen"], row["rejected"]) == (good(n), bad(n)) for n, row in made)


def test_several_rounds_written_as_json_are_a_conversation(tmp_path: Path) -> None:
    """The layout is Chatbot Arena's; where the earlier answers differ, no pair is made."""

    def row(n: int) -> Row:
        first = ["Hello!", "Good day." if n == 7 else "Hello!"]
        texts = {
            side: json.dumps([first[i], text])
            for i, (side, text) in enumerate(zip("ab", in_turn(n), strict=True))
        }
        answers = {f"response_{side}": text for side, text in texts.items()}
        return {"prompt": json.dumps(["Hi.", asked(n)]), **answers, "winner": f"model_{'ab'[n % 2]}"}

    found, rows = inspect_file(lines(tmp_path / "rows.jsonl", [row(n) for n in range(20)]), "preferences")
    assert [n for n, _ in rows] == [n for n in range(20) if n != 7] and len(found.problems) == 1
    for n, made in rows:
        assert [(turn["role"], turn["content"]) for turn in made["messages"]] == [
            ("user", "Hi."), ("assistant", "Hello!"), ("user", asked(n)),
        ]  # fmt: skip
        assert (made["chosen"], made["rejected"]) == (good(n), bad(n))


DEMONSTRATIONS: dict[str, Callable[[int], Row]] = {
    "system_prompt": lambda n: {"system_prompt": "Be kind.", "question": asked(n), "response": good(n)},
    "system_beside_ours": lambda n: {"system": "Be kind.", "prompt": asked(n), "response": good(n)},
    "way_and_answer": lambda n: {"problem": asked(n), "answer": "7", "solution": good(n)},
    "rounds": lambda n: {"conversation": [{"human": asked(n), "assistant": good(n)}]},
    "inputs_and_outputs": lambda n: {"conversation": [{"input": asked(n), "output": good(n)}]},
    "json_in_a_text": lambda n: {"messages": json.dumps([user(asked(n)), assistant(good(n))])},
    "inputs_and_targets": lambda n: {"inputs": asked(n), "targets": good(n), "language": "en"},
    "chinese": lambda n: {"问题": asked(n), "回答": good(n)},
    "capitals": lambda n: {"Question": asked(n), "Answer": good(n)},
}


@pytest.mark.parametrize("layout", DEMONSTRATIONS)
def test_demonstrations(tmp_path: Path, layout: str) -> None:
    """Demonstrations in this published layout are recognised and read."""
    path = lines(tmp_path / "rows.jsonl", [DEMONSTRATIONS[layout](n) for n in range(20)])
    found, rows = inspect_file(path, "demonstrations")
    has_system = "system" in layout
    assert len(rows) == 20
    for n, row in rows:
        assert row["response"] == good(n)
        assert row["prompt"] == (f"System: Be kind.\n\nUser: {asked(n)}" if has_system else asked(n))
        assert (row["messages"] or [None])[0] == (
            {"role": "system", "content": "Be kind.", "extra": None} if has_system else None
        )
    assert ("system" in found.columns) == has_system


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [user("Q")], "solution": "7"},
        {"prompt": "Q", "ground_truth": 7},
        {"messages": [user("Q")], "ground_truth": "7", "dataset": "sums"},
        {"Problem": "Q", "Answer": 7, "Solution": "the way"},
    ],
)
def test_the_answer_beside_a_prompt_is_read(tmp_path: Path, row: Row) -> None:
    _, [(_, made)] = inspect_file(lines(tmp_path / "rows.jsonl", [row]), "prompts")
    assert made == {"prompt": "Q", "answer": "7", "messages": None}


def test_a_prompt_that_is_the_last_question_gets_the_turns_before_it() -> None:
    before = [user(asked(1)), assistant("Which sky?"), user("This one.")]
    for prompt in ("This one.", asked(1), before, before[:1]):
        row = {
            "prompt": prompt,
            "chosen": [*before, assistant(good(1))],
            "rejected": [*before, assistant(bad(1))],
        }
        made = dict(RowReader(Data(source="rows.jsonl"), "preferences", [row]).read(row))  # type: ignore[call-overload]
        assert made["prompt"] == f"User: {asked(1)}\n\nAssistant: Which sky?\n\nUser: This one.", prompt
        assert (made["chosen"], made["rejected"]) == (good(1), bad(1))


def test_turns_of_a_completion_follow_the_prompt() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look"}}]}
    row = {
        "prompt": [user(asked(1))],
        "completion": [call, {"role": "tool", "content": "blue"}, assistant(good(1))],
    }
    made = dict(RowReader(Data(source="rows.jsonl"), "demonstrations", [row]).read(row))  # type: ignore[call-overload]
    assert [turn["role"] for turn in made["messages"]] == ["user", "assistant", "tool"]
    assert made["response"] == good(1)


def test_conversations_that_part_earlier_make_no_pair(tmp_path: Path) -> None:
    """Such rows of Chatbot Arena and MT-Bench are recognised and reported, however many there are."""

    def row(n: int) -> Row:
        middle = {side: [assistant(f"{side} says"), user("more")] if n % 2 else [] for side in "ab"}
        texts = dict(zip("ab", in_turn(0), strict=True))
        talks = {
            f"conversation_{side}": [user(asked(n)), *middle[side], assistant(texts[side])] for side in "ab"
        }
        return {**talks, "winner": "model_a"}

    found, rows = inspect_file(lines(tmp_path / "rows.jsonl", [row(n) for n in range(20)]), "preferences")
    assert [n for n, _ in rows] == list(range(0, 20, 2))
    assert found.problems == {"two conversations that differ in more than their last answer": 10}
    with_prompt = {
        "prompt": asked(1),
        "chosen": [user(asked(1)), assistant("x"), user("y"), assistant(good(1))],
        "rejected": [user(asked(1)), assistant(bad(1))],
    }
    made = RowReader(Data(source="rows.jsonl"), "preferences", [with_prompt]).read(with_prompt)
    assert getattr(made, "reason", None) == "two conversations that differ in more than their last answer"


@pytest.mark.parametrize(
    ("first", "label"),
    [("response_a", 0), ("response_1", 0), ("response_a", True), ("response_a", -1), ("response_j", 0)],
)
def test_a_label_that_may_be_a_flag_is_not_guessed(tmp_path: Path, first: str, label: Any) -> None:
    second = {"response_a": "response_b", "response_1": "response_2", "response_j": "response_k"}[first]
    other = {0: 1, -1: 1}.get(label, False) if label is not True else False
    rows = [
        {"prompt": asked(n), **sides(n, first, second), "label": (label, other)[n % 2]} for n in range(10)
    ]
    path = lines(tmp_path / "rows.jsonl", rows)
    found, _ = inspect_file(path, None)
    assert (
        found.content == "prompts" and "say in labels which labels mean first" in found.nearly["preferences"]
    )
    with pytest.raises(UnknownData, match="say in labels which labels mean first"):
        inspect_file(path, "preferences")


def test_a_ranking_that_may_be_an_order_is_not_guessed(tmp_path: Path) -> None:
    row = {"prompt": asked(1), "responses": ["x", "y", "z"], "ranking": [2, 3, 1]}
    with pytest.raises(UnknownData, match="no known format of rankings"):
        inspect_file(lines(tmp_path / "rows.jsonl", [row]), "rankings")


@pytest.mark.parametrize(
    ("row", "content", "said"),
    [
        (
            lambda n: {"prompt": asked(n), "chosen": f"{asked(n)} {good(n)}", "rejected": f"{asked(n)} {bad(n)}"},
            "preferences",
            "begin with the text of 'prompt', which would be learnt as part of the response; cut it off",
        ),
        (
            lambda n: {"prompt": json.dumps([asked(n)]), "response_a": json.dumps([good(n)]), "winner_model_a": 1},
            "prompts",
            "the texts of 'prompt' are lists written as JSON; write the file with messages",
        ),
        (
            lambda n: {"prompt": json.dumps([asked(n)]), "response": good(n)},
            "demonstrations",
            "the texts of 'prompt' are lists written as JSON; write the file with messages",
        ),
    ],
)  # fmt: skip
def test_texts_that_would_be_learnt_wrongly_are_refused(
    tmp_path: Path, row: Callable[[int], Row], content: Content, said: str
) -> None:
    rows = [row(n) for n in range(10)]
    path = lines(tmp_path / "rows.jsonl", rows)
    for asked_for in (content, None):
        with pytest.raises(GarbledRows, match=said):
            inspect_file(path, asked_for)
    with pytest.raises(GarbledRows, match=said):
        RowReader(Data(source="rows.jsonl"), content, rows)


def test_messages_that_name_the_one_before_are_refused_with_what_to_write(tmp_path: Path) -> None:
    rows = [{"message_id": f"{n}", "parent_id": None, "text": asked(n), "role": "prompter"} for n in range(9)]
    with pytest.raises(UnknownData, match="each row is one message.*write a row for each conversation"):
        inspect_file(lines(tmp_path / "rows.jsonl", rows), None)


def test_a_list_as_numpy_prints_it_says_what_to_do(tmp_path: Path) -> None:
    """pandas writes such cells into CSV."""
    printed = "[{'content': 'Q', 'role': 'user'}\n {'content': 'A', 'role': 'assistant'}]"
    row = {"prompt": asked(1), "chosen": printed, "rejected": bad(1)}
    made = RowReader(Data(source="rows.jsonl"), "preferences", [row]).read(row)
    assert "write the file as .jsonl or .parquet" in str(made)


def test_an_answer_of_weight_0_is_not_learnt(tmp_path: Path) -> None:
    turns = [
        user(asked(1)),
        {**assistant(bad(1)), "weight": 0},
        user("Sure?"),
        {**assistant(good(1)), "weight": 1},
    ]
    reader = RowReader(Data(source="rows.jsonl"), "demonstrations", [{"messages": turns}])
    made = dict(reader.read({"messages": turns}))  # type: ignore[call-overload]
    assert [turn["extra"] for turn in made["messages"]] == [None, '{"weight": 0}', None]
    assert "weight 0, so nothing is learnt" in str(reader.read({"messages": turns[:2]}))
