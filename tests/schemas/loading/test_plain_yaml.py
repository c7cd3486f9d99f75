"""The strict reader of YAML gives plain values, and refuses the rest with the line."""

import pytest

from tests.support.every import every
from vantage.schemas.loading.plain_yaml import MAX_BYTES, decode, read
from vantage.schemas.problems import MAX_PROBLEMS, RecipeError


def refusal(text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        read(text)
    return str(caught.value)


@every(
    ("written", "value"),
    [
        ("1e-5", 1e-5),
        ("1E-5", 1e-5),
        ("1.5e+3", 1500.0),
        (".5", 0.5),
        ("-3", -3),
        ("+3", 3),
        ("017", 17),
        ("3.0", 3.0),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("on", "on"),
        ("null", None),
        ("~", None),
        ("", None),
        ("'1e-5'", "1e-5"),
        ('"null"', "null"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("hub:org/name@main", "hub:org/name@main"),
        ("国会 🦉", "国会 🦉"),
        ("[1, a, 2.5]", [1, "a", 2.5]),
    ],
)
def test_values(written: str, value: object) -> None:
    """This text is read as this value, of this type."""
    reading = read(f"a: {written}")
    assert reading.problems == []
    assert reading.value == {"a": value}
    assert type(reading.value["a"]) is type(value)


def test_keys_are_the_text_that_was_written() -> None:
    assert read("on: 1\nno: 2\n3: 4\nnull: 5").value == {"on": 1, "no": 2, "3": 4, "null": 5}


def test_each_key_and_item_has_its_line() -> None:
    lines = read("a: 1\nb:\n  c:\n    - 1\n    - d: 2\n").lines
    assert lines == {
        ("a",): 1,
        ("b",): 2,
        ("b", "c"): 3,
        ("b", "c", 0): 4,
        ("b", "c", 1): 5,
        ("b", "c", 1, "d"): 5,
    }


def test_everything_forbidden_is_found_in_one_reading() -> None:
    reading = read(
        "a: 1\nb: !!python/name:os.system x\na: 2\nc: &x 1\nd: *x\ne: .nan\nf: -.inf\ng: 1e999\n[h]: 1\n"
    )
    assert [str(problem) for problem in reading.problems] == [
        "2: b: tag:yaml.org,2002:python/name:os.system is a tag; a recipe holds plain values; remove the tag",
        "3: a: occurs twice, first in line 1; keep one of the two",
        "4: c: &x is an anchor; write the value where it is needed",
        "5: d: *x is an alias; write the value out",
        "6: e: .nan is not a finite number; write a number, or leave the field out",
        "7: f: -.inf is not a finite number; write a number, or leave the field out",
        "8: g: '1e999' is out of range; write a number of usual size",
        "9: a key is not a single word; quote text that starts with [, { or *",
    ]


def test_an_alias_bomb_is_not_expanded() -> None:
    lines = ["a0: &a0 [x, x]\n", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 200))]
    reading = read("".join(lines[:60]))
    assert len(reading.problems) == 60 + 2 * 59
    assert reading.value["a59"] == [None, None]
    assert len(refusal("".join(lines)).splitlines()) == MAX_PROBLEMS


@pytest.mark.parametrize("text", ["[" * 100_000, "{a: " * 100_000, "- " * 100_000])
def test_deep_nesting_is_refused_at_once(text: str) -> None:
    assert "1: " in refusal(text)
    assert "is nested deeper than 20; write it flat" in refusal(text)


def test_a_tab_is_called_a_tab() -> None:
    said = "3: the line is indented with a tab; YAML allows spaces only"
    assert refusal("stages:\n  sft:\n\tkind: sft\n") == said


def test_a_syntax_error_has_its_line() -> None:
    assert refusal("a: 1\nb: [1, 2\nc: 3\n").startswith("3: is not YAML: ")
    assert refusal("a: b: c").startswith(
        "1: is not YAML: mapping values are not allowed here; check brackets"
    )


@every(
    ("line", "said"),
    [
        ("{right: Is it right?, kind: no}", "holds ?"),
        ("[Is it right?]", "holds ?"),
        ("{right: @this}", "begins with @"),
        ("%this", "begins with %"),
    ],
)
def test_a_text_that_needs_quotes_is_named(line: str, said: str) -> None:
    assert (
        refusal(f"a: 1\nb: {line}\n")
        == f"2: is not YAML: a text without quotes {said}; put the text in quotes"
    )


def test_a_control_character_has_its_line() -> None:
    assert refusal("a: 1\nb: \x07\n") == "2: holds the control character 0x07; remove it"


def test_several_documents_are_refused() -> None:
    assert refusal("a: 1\n---\nb: 2\n") == "2: holds several documents; remove the `---` line"
    assert read("---\na: 1\n").value == {"a": 1}


def test_comments_alone_are_no_recipe() -> None:
    assert refusal("# nothing\n") == "holds comments only; a recipe starts with `recipe: NAME`"


@every(
    ("data", "said"),
    [
        (b"", "is empty; a recipe starts with `recipe: NAME`"),
        (b" \n\n", "is empty; a recipe starts with `recipe: NAME`"),
        (b"a: 1\nb: \xff\n", "2: byte 0xff is not UTF-8; save it as UTF-8 text"),
        (
            b"a: 1\nb: \0\n",
            "2: holds a NUL byte; save it as UTF-8 text (it may be UTF-16, or no text at all)",
        ),
        (
            "a: 1".encode("utf-16"),
            "1: holds a NUL byte; save it as UTF-8 text (it may be UTF-16, or no text at all)",
        ),
        (
            b"#" * (MAX_BYTES + 1),
            "is longer than 262144 bytes; a recipe is a short text; is this another file?",
        ),
    ],
)
def test_bytes_that_are_no_text(data: bytes, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        decode(data)
    assert str(caught.value) == said


def test_a_byte_order_mark_is_no_part_of_the_first_key() -> None:
    assert read(decode("\ufeffa: 1".encode())).value == {"a": 1}
