"""List texts, overrides and paths that a recipe's loader has to refuse, each with the message of its refusal."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vantage.schemas.problems import RecipeError

HEAD = (
    'recipe: x\nmodel: {source: "builtin:tiny"}\ndata: {d: {source: "builtin:arithmetic/demonstrations"}}\n'
)
TAIL = "stages: {s: {kind: sft, data: d}}\n"
WHOLE = HEAD + TAIL
"""A recipe that loads."""


def _model(source: str) -> bytes:
    return WHOLE.replace('"builtin:tiny"', source).encode()


def _data(source: str) -> bytes:
    return WHOLE.replace('"builtin:arithmetic/demonstrations"', source).encode()


def _verifier(source: str) -> bytes:
    return (WHOLE + f"verifiers: {{v: {{source: {source}}}}}\n").encode()


def _seed(value: str) -> bytes:
    return (WHOLE + f"seed: {value}\n").encode()


LONG = "a" * 300

TEXTS: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "is empty"),
    "line ends of CR": (b"a: 1\rb: [\r\rc: ]}\r", ":4: is not YAML"),
    "a tab after line ends of CR": (b"a:\r  b: 1\r\tc: 2\r", ":3: the line is indented with a tab"),
    "U+2028 before a mistake": ("a: 1\u2028b: [\u2028\u2028 ]}".encode(), ":4: is not YAML"),
    "U+2029 before a control character": ("a: 1\u2029\u2029b: \x07".encode(), ":3: holds the control character 0x07"),
    "NEL before a mistake": ("a: 1\x85b: }".encode(), ":2: is not YAML"),
    "NUL after line ends of CR": (b"a: 1\rb: \0", ":2: holds a NUL byte"),
    "Latin-1 after line ends of CR": (b"a: 1\r\rb: \xfc", ":3: byte 0xfc is not UTF-8"),
    "an escape beyond Unicode": (b'recipe: "\\UFFFFFFFF"', ":1: is not YAML: OverflowError"),
    "an escape just beyond Unicode": (b'recipe: "\\U00110000"', ":1: is not YAML: ValueError"),
    "half a surrogate pair in a value": (_model('"a\\uD800"'), "model.source: holds U+D800, which no text has"),
    "half a surrogate pair in a key": ((WHOLE + '"\\uDFFF": 1').encode(), "holds U+DFFF, which no text has"),
    "NUL in a model's path": (_model('"a\\0b"'), "model.source: holds U+0000"),
    "NUL in a data file's path": (_data('"a\\0.json"'), "data.d.source: holds U+0000"),
    "NUL in a verifier's path": (_verifier('"a\\0.py"'), "verifiers.v.source: holds U+0000"),
    "another version of YAML": (b"%YAML 9.0\n---\n" + WHOLE.encode(), ":1: is not YAML"),
    "a version of many digits": (b"%YAML 1." + b"9" * 5000 + b"\n---\n" + WHOLE.encode(), ":1: is not YAML: ValueError"),
    "a directive that nobody knows": (b"%TAG ! b:\n%TAG ! c:\n---\n" + WHOLE.encode(), ":2: is not YAML"),
    "a long name of a model": (_model(LONG), "model.source: 'aaa"),
    "a long path of a model": (_model("a/" * 5000), "model.source: 'a/a"),
    "a long name of a GGUF file": (_model(f'"gguf:{LONG}"'), "model.source: 'gguf:aaa"),
    "a long name of a data file": (_data(f"{LONG}.json"), "data.d.source: 'aaa"),
    "a long name of a verifier": (_verifier(f"{LONG}.py"), "verifiers.v.source: 'aaa"),
    "the home of nobody": (_data("~nobody-at-all/x.json"), "data.d.source: '~nobody-at-all/x.json' cannot be looked up"),
    "a ring of links as a model": (_model("ring"), "model.source: 'ring' cannot be looked up"),
    "a ring of links as data": (_data("ring.json"), "data.d.source: 'ring.json' cannot be looked up"),
    "a pipe as data": (_data("pipe.json"), "data.d.source: there is no file"),
    "a device as data": (_data("zero.json"), "data.d.source: 'zero.json' is not in a known format"),
    "a folder as data": (_data("folder.json"), "data.d.source: there is no file"),
    "a bomb of aliases": (b"a: &a [x, x]\n" + b"b: &b [*a, *a]\n" * 500, ":1: a: &a is an anchor"),
    "deep lists": (b"a: " + b"[" * 100_000, "is nested deeper than"),
    "deep mappings": (b"".join(b" " * i + b"a:\n" for i in range(600)), "is nested deeper than"),
    "deep keys": (b"? " * 5000, "is nested deeper than"),
    "a whole number of many digits": (_seed("9" * 5000), "seed: '999"),
    "a whole number beyond 64 bits": (_seed("9" * 20), "seed: 99999999999999999999 must be below 4294967296"),
    "no number": (_seed(".nan"), "seed: .nan is not a finite number"),
    "an endless number": (_seed("1e999"), "seed: '1e999' is out of range"),
    "a key twice": (_seed("1\nseed: 2"), "seed: occurs twice"),
    "a key of several words": ((WHOLE + "[a]: 1\n").encode(), "a key is not a single word"),
    "a list": (b"- 1\n", "is not a mapping"),
    "a number": (b"1\n", "is not a mapping"),
}  # fmt: skip
"""What it is → the bytes of a recipe's file, and a part of what is said of it."""

OVERRIDES: dict[str, str] = {
    "": "is not an override",
    "=": "is not an override",
    "a..b=1": "is not an override",
    "seed": "is not an override",
    "x" * 5000 + "=1": "there is no field",
    "a." * 5000 + "b=1": "is a key of 5001 parts",
    "publish." + "9" * 5000 + "=1": "which has no item '999",
    "publish.²=1": "which has no item '²'",
    "stages.s.data=\0": "holds the control character 0x00",
    "recipe=\ud800": "holds the control character 0xd800",
    "\ud800=1": "is no text",
    'model.source="a\\0b"': "holds U+0000",
    'model.source="\\UFFFFFFFF"': "is not YAML: OverflowError",
    f"model.source={LONG}": "cannot be looked up (File name too long)",
    "recipe=a\u2028b\nc": "is not a valid name",
    "stages.s.kind=[]": "stages.s.kind",
    "stages.s={kind: {}}": "stages.s.kind",
    "stages=[]": "must be a mapping",
    "data.d=3": "must be a mapping",
    "stages.s.learning_rate=" + "9" * 5000: "is out of range",
    "stages.s.batch_size=99999999999999999999": "must be at most",
    "stages.s.epochs=.inf": "is not a finite number",
    "verifiers={v: {source: 'builtin:exact_match', extract: '" + "(" * 20_000 + "'}}": "verifiers.v.extract",
    "verifiers={v: {source: 'builtin:exact_match', extract: 'a{99999999999999999999}(b)'}}": "verifiers.v.extract",
    "stages.s=!!python/name:os.system x": "is a tag",
    "stages.s=[": "is not YAML",
    "stages.s=--- a\n--- b": "holds several documents",
}
"""``KEY=VALUE`` → a part of what is said of it."""

PATHS: dict[str, str] = {
    ".": "is not a file",
    "/": "is not a file",
    "/dev/zero": "is not a file",
    "/dev/null": "is not a file",
    "pipe.json": "is not a file",
    "ring": "cannot be looked up",
    "/proc/self/mem": "cannot be read: Input/output error",
    "x\0y": "cannot be looked up",
    "\ud800.yaml": "cannot be looked up",
    LONG: "cannot be looked up (File name too long)",
    f"{LONG}.yaml": "cannot be looked up (File name too long)",
    "a/" * 5000: "cannot be looked up (File name too long)",
    "none.yaml": "there is no such file",
    "none": "is neither a file nor a built-in recipe",
}
"""What is named as a recipe or sweep → a part of what is said of it."""


def lay_out(folder: Path) -> None:
    """Put what the cases name into a folder."""
    (folder / "folder.json").mkdir()
    os.mkfifo(folder / "pipe.json")
    (folder / "zero.json").symlink_to("/dev/zero")
    (folder / "ring").symlink_to("ring")
    (folder / "ring.json").symlink_to("ring2.json")
    (folder / "ring2.json").symlink_to("ring.json")


def refuses(load: Callable[[], object]) -> str:
    """Return the message with which a loader refuses its input; any other exception is raised.

    Fails where it refuses nothing, or says it in more lines than it has problems, or in no UTF-8.
    """
    with pytest.raises(RecipeError) as caught:
        load()
    said = str(caught.value)
    assert caught.value.problems
    assert len(said.splitlines()) == len(caught.value.problems)
    said.encode()
    return said
