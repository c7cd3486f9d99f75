"""No secret and no control code passes through the stream."""

import io

from vantage.attempts.launchers.safe_stream import SafeStream


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_every_text_is_cleaned_and_callers_hear_of_their_own() -> None:
    written = Terminal()
    stream = SafeStream(written, lambda text: text.replace("secret", "***"))
    assert stream.write("a secret\n") == len("a secret\n")
    stream.writelines(["one\n", "secret\n"])
    assert written.getvalue() == "a ***\none\n***\n"
    assert stream.getvalue() == written.getvalue(), "all else is the stream's own"


def test_control_codes_are_escaped_and_a_terminal_is_none() -> None:
    written = Terminal()
    stream = SafeStream(written)
    stream.write("a\x1b[2Jb")
    assert "\x1b" not in written.getvalue()
    assert not stream.isatty(), "else a caller would write control codes"
