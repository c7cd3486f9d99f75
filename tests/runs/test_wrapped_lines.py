"""Lines on a narrow terminal break between words, as by hand and by Python's textwrap; paths stay whole."""

import io
import textwrap
from random import Random

import pytest
from rich.console import Console
from rich.text import Text

from vantage.runs.wrapped_lines import print_line, print_whole, wrapped


def console(width: int, *, is_terminal: bool = True) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=is_terminal, color_system=None)


def printed(shown: Console) -> str:
    assert isinstance(shown.file, io.StringIO)
    return shown.file.getvalue()


@pytest.mark.parametrize("width", [20, 33, 80])
def test_lines_are_those_of_textwrap(width: int) -> None:
    random = Random(width)
    for _ in range(200):
        words = ["x" * random.randint(1, 12) for _ in range(random.randint(1, 40))]
        expected = textwrap.wrap(" ".join(words), width, subsequent_indent="    ", break_long_words=False)
        assert [line.plain for line in wrapped(Text(" ".join(words)), width, hanging=4)] == expected


def test_a_path_has_a_line_of_its_own_and_wide_letters_count_twice() -> None:
    path = "/a/very/long/path/of/somebody"
    lines = wrapped(Text(f"the log is in {path} (12 kB)"), 20, hanging=2)
    assert [line.plain for line in lines] == ["the log is in", f"  {path}", "  (12 kB)"]
    assert [line.plain for line in wrapped(Text("中文 中文 中文"), 9, hanging=0)] == ["中文 中文", "中文"]
    assert [line.plain for line in wrapped(Text("  indented\n\nthird"), 40)] == ["  indented", "", "third"]


def test_styles_stay_with_their_words() -> None:
    text = Text.assemble("plain ", ("bold words", "bold"), " plain")
    first, second = wrapped(text, 11, hanging=0)
    assert (first.plain, second.plain) == ("plain bold", "words plain")
    assert [(first.plain[span.start : span.end], span.style) for span in first.spans] == [("bold", "bold")]
    assert [(second.plain[span.start : span.end], span.style) for span in second.spans] == [("words", "bold")]


def test_a_file_gets_whole_lines_and_a_command_is_never_broken() -> None:
    text = "a line that is longer than the width of the console"
    for is_terminal, lines in ((False, 1), (True, 4)):
        shown = console(20, is_terminal=is_terminal)
        print_line(shown, Text(text))
        assert len(printed(shown).splitlines()) == lines
    shown = console(20)
    print_whole(shown, "  ask     ", "vantage sample 0001-quickstart-1c2d3e")
    print_whole(shown, "  log     ", "a/b")
    assert printed(shown).splitlines() == [
        "  ask",
        "    vantage sample 0001-quickstart-1c2d3e",
        "  log     a/b",
    ]


def test_a_path_that_has_no_room_at_its_indentation_moves_to_the_left() -> None:
    path = "/home/somebody/projects/arithmetic/.vantage/runs/0001-quickstart-1c2d3e/logs/sft.log"
    for width, indent in ((120, 25), (len(path) + 3, 3), (len(path), 0), (40, 4)):
        lines = [line.plain for line in wrapped(Text(f"run again {path}"), width, hanging=25)]
        expected = [f"run again {path}"] if width == 120 else ["run again", " " * indent + path]
        assert lines == expected
