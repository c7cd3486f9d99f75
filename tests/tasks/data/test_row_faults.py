"""The beginning of a row is shown in characters that a terminal has, and is cut where it is too long."""

from vantage.tasks.data.row_faults import _SHOWN_CHARACTERS, shown


def test_a_row_is_cut_after_the_most_characters() -> None:
    whole = "é" * _SHOWN_CHARACTERS
    assert shown(whole) == shown(whole.encode()) == whole
    assert shown(f"{whole}x") == shown(f"{whole}x".encode()) == f"{whole}…"


def test_bytes_that_are_no_text_are_written_out_and_space_is_one_blank() -> None:
    assert shown(b'{"a":\t\xff}\r\n') == '{"a": \\xff}'
