"""Files that describe a model to MLflow may come from anybody: no content of theirs can delay or end an audit."""

import json
import os
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
import yaml
from mlflow.models import Model

from vantage.review.audit.mlflow_descriptions import description_problems, example_problems
from vantage.review.audit.small_files import MAX_BYTES, NotRead, small_file, small_json, small_yaml

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghij", "bcdefghijk", strict=True)
)
"""YAML of less than a kilobyte with 9^11 texts in it."""


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def text(content: str) -> Callable[[Path], None]:
    return lambda path: (path.write_text(content), None)[1]


def nested(depth: int) -> list[object]:
    """Return lists within one another."""
    return [] if depth == 1 else [nested(depth - 1)]


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "aliases that expand": (text(BOMB), "it is no plain YAML: found an alias"),
    "an alias within itself": (text("a: &a [*a]"), "it is no plain YAML: found an alias"),
    "merged keys": (text("a: &a {b: 1}\nc: {<<: *a}"), "it is no plain YAML: found an alias"),
    "deep lists": (text("[" * 50_000), "it is no plain YAML: RecursionError"),
    "a tag": (text("!!python/object/apply:os.system [x]"), "it is no plain YAML: could not determine a constructor"),
    "a number of many digits": (text("a: " + "9" * 5000), "cannot be read (ValueError)"),
    "a day that there is not": (text("a: 2026-13-41"), "cannot be read (ValueError)"),
    "a pipe": (pipe, "it is no regular file"),
    "a device": (device, "it is no regular file"),
    "a huge file": (text("a" * (MAX_BYTES + 1)), "it is larger than 1,048,576 bytes"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    for name in ("MLmodel", "python_env.yaml"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "requirements.txt").write_text("")
    return tmp_path


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["MLmodel", "python_env.yaml"])
@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_description_is_a_finding(folder: Path, case: str, name: str) -> None:
    damage, found = HOSTILE[case]
    damage(folder / name)
    problems = list(description_problems(folder, folder, {}, kinds=["policy"]))
    assert len(problems) == 1
    assert found in problems[0]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("case", ["a pipe", "a device", "a huge file"])
def test_hostile_requirements_are_a_finding(folder: Path, case: str) -> None:
    damage, found = HOSTILE[case]
    damage(folder / "requirements.txt")
    assert found in next(description_problems(folder, folder, {}, kinds=["policy"]))


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (pipe, "it is no regular file"),
        (device, "it is no regular file"),
        (text("a" * (MAX_BYTES + 1)), "it is larger than"),
        (text("[" * (sys.getrecursionlimit() * 100)), "it is nested too deeply"),
        (text("{"), "cannot be read (JSONDecodeError)"),
    ],
)
def test_a_hostile_example_is_a_finding(folder: Path, damage: Callable[[Path], None], found: str) -> None:
    example = folder / "input_example.json"
    example.write_text("[]")
    damage(example)
    assert found in next(example_problems(folder))


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("a: &a [1]\nb: &b {c: 2.0}", {"a": [1], "b": {"c": 2.0}}),
        ("a: !!str 1\n'a': 2", {"a": 2}),
        ("{a: yes, b: 1_000, c: 0o17, d: ~, e: 2026-11-29}", {"a": True, "b": 1000, "c": "0o17", "d": None, "e": date(2026, 11, 29)}),
        ("[" * 40 + "]" * 40, nested(40)),
        ("[" * 60 + "]" * 60, nested(60)),
    ],
)  # fmt: skip
def test_a_plain_text_is_read(tmp_path: Path, content: str, value: object) -> None:
    file = tmp_path / "a"
    file.write_text(content)
    assert small_yaml(file) == value


@pytest.mark.parametrize(
    "content",
    [b"a:\tb", b"a: {b?c: 1}", b"a: b\t# c", b"a: >#\n  b\n", "a: b".encode("utf-16"), b"a: \xff"],
)
def test_a_text_that_mlflow_cannot_load_is_refused(tmp_path: Path, content: bytes) -> None:
    """PyYAML's loader in C accepts most of these; MLflow uses the one in Python, and opens the file as UTF-8."""
    file = tmp_path / "MLmodel"
    file.write_bytes(content)
    with pytest.raises((yaml.YAMLError, UnicodeDecodeError)):
        Model.load(str(file))
    with pytest.raises(ValueError):
        small_yaml(file)


@pytest.mark.parametrize("content", ["a: !", "a: {b:, c: d}", "\ufeffa: b"])
def test_a_text_has_the_value_that_mlflow_loads(tmp_path: Path, content: str) -> None:
    file = tmp_path / "MLmodel"
    file.write_text(content)
    with open(file) as opened:
        assert small_yaml(file) == yaml.safe_load(opened)


def test_what_publishing_writes_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a"
    value = {"a": [1, 2.5, None, True, "yes", "2026-11-28 01:02:03.4"], "b": {"c": [{"d": []}]}}
    file.write_text(yaml.safe_dump(value))
    assert small_yaml(file) == yaml.safe_load(file.read_bytes()) == value
    file.write_text(json.dumps(value))
    assert small_json(file) == value
    file.write_bytes(b"a" * MAX_BYTES)
    assert len(small_file(file)) == MAX_BYTES
    with pytest.raises(FileNotFoundError):
        small_file(tmp_path / "none")
    assert issubclass(NotRead, ValueError)
