"""A dataset on the hub is loaded by the library itself, from a hub on loopback: configurations, splits, prefixes, one commit."""

import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import HfFileSystem, constants

from tests.support.fake_hub import FakeHub, fake_hub
from tests.tasks.test_prepare_data import prepare
from vantage.schemas.recipe.inputs import Data, Load, Split
from vantage.schemas.recipe.sources import HubDataset
from vantage.schemas.records.job import StageResult
from vantage.tasks.data.hub_datasets import load_rows
from vantage.tasks.data.hub_files import UnreachableHub
from vantage.tasks.data.inspection import UnknownData, inspect_file
from vantage.tasks.data.row_faults import Fault, UnreadableFile
from vantage.tasks.data.rows import read_rows
from vantage.tasks.data.splits import SPLITS
from vantage.tasks.prepare_data import UnusableData

COMMIT = "0123456789" * 4
DRAW = random.Random(5)
SUMS = [
    {"prompt": f"{n} + 1?", "response": f"{n + 1}", "made": {"by": ["a", None], "at": n / 7}}
    for n in range(60)
]
LONG = [{"prompt": f"{n}?", "response": DRAW.randbytes(2000).hex()} for n in range(5000)]
ODD = [{"prompt": f"{n}", "response": f"r{n}", "extra": n if n else "odd"} for n in range(40)]
CARD = """---
configs:
- config_name: {default}
  data_files:
  - {{split: train, path: "{default}/train-*"}}
  - {{split: test, path: "{default}/test-*"}}
- config_name: other
  data_files: [{{split: train, path: "other/*"}}]
{more}---
"""


def parquet(rows: list[dict[str, Any]], row_group_size: int | None = None) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=row_group_size)
    return file.getvalue()


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def card(default: str = "main", more: str = "") -> bytes:
    return CARD.format(default=default, more=more).encode()


REPOSITORIES = {
    "org/sums": {
        "README.md": card(),
        "main/train-00000-of-00002.parquet": parquet(SUMS[:40], 7),
        "main/train-00001-of-00002.parquet": parquet(SUMS[40:50]),
        "main/test-00000-of-00001.parquet": parquet(SUMS[50:]),
        "other/all.parquet": parquet(SUMS[:10]),
    },
    "org/long": {
        "README.md": b"No configurations",
        "data/train.parquet": parquet(LONG, 250),
        "data/test.parquet": parquet(LONG[:2]),
    },
    "org/text": {
        "README.md": card("lines"),
        "lines/train-0.jsonl": lines(ODD),
        "lines/train-1.jsonl": lines(LONG),
        "lines/test-0.jsonl": lines(ODD[:3]),
        "other/more.jsonl": lines(ODD[:5]),
    },
    "org/table": {"train.csv": b"prompt,response\n0001,NA\n2,b\n"},
    "org/tabs": {"train.tsv": b"prompt\tresponse\n1\t2\n"},
    "org/elsewhere": {
        "README.md": b"---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n"
        b"    path: hf://datasets/org/long@main/data/train.parquet\n---\n",
        "train.parquet": parquet(SUMS),
    },
    "org/branch": {
        "README.md": b"---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n"
        b"    path: hf://datasets/org/branch@main/train.parquet\n---\n",
        "train.parquet": parquet(SUMS),
    },
    "org/pictures": {"train/a.png": b"\x89PNG", "train/b.png": b"\x89PNG"},
    "org/script": {"script.py": b"raise SystemExit('it ran')\n", "data/train.parquet": parquet(SUMS)},
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Yield a hub on loopback with ``REPOSITORIES``, and an empty cache."""
    with fake_hub(REPOSITORIES, COMMIT) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.address)
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
        HfFileSystem.clear_instance_cache()
        yield hub
        HfFileSystem.clear_instance_cache()


def loaded(name: str, split: str = "train", **more: Any) -> list[Any]:
    return list(load_rows(HubDataset(f"org/{name}", COMMIT), Load(split=split, **more)).rows)


def prepared(folder: Path, name: str, **load: Any) -> tuple[StageResult, list[dict[str, Any]]]:
    data = Data(
        source=f"hub:org/{name}@{COMMIT}",
        load=Load(**load),
        split=Split(validation=4, test=4),
        max_dropped=0.5,
    )
    result, output = prepare(folder, "demonstrations", data)
    return result, [row for side in SPLITS for row in read_rows(output, side)]


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("config", "split", "rows"),
    [("main", "train", SUMS[:50]), ("main", "test", SUMS[50:]), ("other", "train", SUMS[:10])],
)
def test_one_split_of_one_configuration_is_read(
    hub: FakeHub, config: str, split: str, rows: list[dict[str, Any]], streaming: bool
) -> None:
    assert loaded("sums", split, config=config, streaming=streaming) == rows
    others = {name for name in REPOSITORIES["org/sums"] if not name.startswith(f"{config}/{split}")} - {
        "README.md"
    }
    if config == "main":
        assert not others & hub.sent.keys(), "files that are not asked for"


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_the_rows_are_those_of_the_library(hub: FakeHub, tmp_path: Path, streaming: bool) -> None:
    """The library's `load_dataset` writes an Arrow copy of every split and reads that; Vantage reads the files."""
    theirs = datasets.load_dataset(
        "org/sums", "main", split="train", revision=COMMIT, cache_dir=str(tmp_path / "theirs")
    )
    assert loaded("sums", config="main", streaming=streaming) == theirs.to_list()


@pytest.mark.parametrize("streaming", [False, True])
def test_text_is_read_row_by_row(hub: FakeHub, streaming: bool) -> None:
    """The library would make texts of all numbers in the column, because of one odd value, or guess the types of cells."""
    assert loaded("text", config="lines", streaming=streaming, max_rows=40) == ODD
    rows = list(load_rows(HubDataset("org/table", COMMIT), Load(split="train", streaming=streaming)).rows)
    assert rows == [{"prompt": "0001", "response": "NA"}, {"prompt": "2", "response": "b"}]


@pytest.mark.parametrize(
    ("name", "ending", "load"),
    [("long", "train.parquet", {}), ("text", "train-1.jsonl", {"config": "lines"})],
)
def test_a_streamed_prefix_fetches_what_it_reads(
    hub: FakeHub, name: str, ending: str, load: dict[str, str]
) -> None:
    whole = next(len(each) for path, each in REPOSITORIES[f"org/{name}"].items() if path.endswith(ending))
    assert whole > 15_000_000
    wanted = LONG[:300] if name == "long" else [*ODD, *LONG[:260]]
    assert loaded(name, max_rows=300, **load) == wanted
    assert hub.bytes_sent(ending) == whole
    hub.sent.clear()
    assert loaded(name, streaming=True, max_rows=300, **load) == wanted
    assert 0 < hub.bytes_sent(ending) < 0.75 * whole  # blocks of 5 MiB, of which one is read ahead


STREAM = """
import sys
from vantage.schemas.recipe.inputs import Load
from vantage.schemas.recipe.sources import HubDataset
from vantage.tasks.data.hub_datasets import load_rows
rows = load_rows(HubDataset("org/long", sys.argv[1]), Load(split="train", streaming=True, max_rows=300)).rows
assert len(list(rows)) == 300
"""


@pytest.mark.slow
def test_a_process_that_streamed_a_prefix_ends(hub: FakeHub, tmp_path: Path) -> None:
    """With the library's own streaming, half of the processes that read a prefix aborted, and one in 16 never ended."""
    environment = os.environ | {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path)}
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", STREAM, COMMIT],
            capture_output=True,
            text=True,
            timeout=60,
            env=environment,
        )
        assert (done.returncode, "Fatal" in done.stderr) == (0, False), done.stderr


def test_a_stage_reads_nothing_twice_and_the_next_one_nothing_at_all(hub: FakeHub, tmp_path: Path) -> None:
    result, rows = prepared(tmp_path / "one", "sums", config="main", split="train")
    assert result.metrics["source_rows"] == 50
    assert sorted(row["prompt"] for row in rows) == sorted(row["prompt"] for row in SUMS[:50])
    assert hub.sent == {
        "README.md": len(card()),
        **{
            name: len(each)
            for name, each in REPOSITORIES["org/sums"].items()
            if name.startswith("main/train")
        },
    }
    hub.sent.clear()
    assert prepared(tmp_path / "two", "sums", config="main", split="train")[1] == rows
    assert hub.sent == {}
    streamed, same = prepared(tmp_path / "three", "sums", config="main", split="train", streaming=True)
    assert (streamed.metrics, same) == (result.metrics, rows)


@pytest.mark.parametrize(
    ("name", "load", "told"),
    [
        ("sums", {"config": "mian", "split": "train"}, r"'mian' not found. Available: \['main', 'other'\]"),
        ("sums", {"split": "train"}, r"Config name is missing.*\['main', 'other'\]"),
        ("sums", {"config": "main", "split": "dev"}, "there is no split 'dev'; there are test, train"),
        ("absent", {"split": "train"}, "'org/absent' doesn't exist on the Hub"),
        ("elsewhere", {"split": "train"}, "Data files don't belong to org/elsewhere"),
        (
            "branch",
            {"split": "train"},
            r"org/branch@main/train.parquet is no file of the dataset at this commit",
        ),
        ("pictures", {"split": "train"}, "of the format imagefolder, and parquet, arrow, json, csv are read"),
        ("tabs", {"split": "train"}, r"sets sep='\\t', which is not followed here; name its files"),
        ("script", {"split": "train"}, "Dataset scripts are no longer supported, but found script.py"),
    ],
)
def test_what_is_not_there_is_refused_with_what_there_is(
    hub: FakeHub, tmp_path: Path, name: str, load: dict[str, str], told: str
) -> None:
    with pytest.raises(UnusableData, match=told) as refused:
        prepared(tmp_path / "stage", name, **load)
    assert f"source='hub:org/{name}@{COMMIT}'" in str(refused.value)
    with pytest.raises(UnknownData, match=told):
        inspect_file(Path(f"hub:org/{name}@{COMMIT}"), None, Load.model_validate(load))


def test_another_commit_is_not_replaced_by_one_in_a_cache(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library takes the latest commit of its own cache where it reaches no hub."""
    datasets.load_dataset("org/sums", "main", split="train", revision=COMMIT)
    other = HubDataset("org/sums", COMMIT[::-1])
    for offline in (False, True):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", offline)
        with pytest.raises(UnreachableHub, match="check the network, the name, load.config and load.split"):
            load_rows(other, Load(split="train", config="main"))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_that_goes_away_is_no_shorter_dataset(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    monkeypatch.setattr(
        "huggingface_hub.utils._http.time.sleep", lambda seconds: None
    )  # before it asks again
    rows = load_rows(HubDataset("org/long", COMMIT), Load(split="train", streaming=streaming)).rows
    hub.is_gone = True
    with pytest.raises(UnreachableHub, match="could not be loaded"):
        list(rows)


@pytest.mark.parametrize("name", ["broken.parquet", "broken.jsonl"])
def test_broken_files_cost_what_is_broken(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    content = {"broken.parquet": b"PAR1 no parquet PAR1", "broken.jsonl": b'{"prompt": "a"}\n{"prompt": \n'}[
        name
    ]
    monkeypatch.setattr(hub, "repositories", {"org/broken": {f"train/{name}": content}})
    if name.endswith(".parquet"):
        with pytest.raises((UnreachableHub, UnreadableFile), match="Parquet|arrow|Invalid"):
            loaded("broken")
    else:
        first, second = loaded("broken")
        assert first == {"prompt": "a"}
        assert isinstance(second, Fault)


def test_an_inspection_streams_what_it_reads_and_writes_the_entry_of_a_recipe(hub: FakeHub) -> None:
    source = Path(f"hub:org/sums@{COMMIT}")
    found, _ = inspect_file(source, None, Load(split="train", config="main", max_rows=30, streaming=True))
    assert (found.content, found.num_rows) == ("demonstrations", 30)
    assert (
        f"source: {source}\n    load:\n      split: train\n      config: main\n      max_rows: 30\n"
        in found.recipe
    )
    with pytest.raises(UnknownData, match=r"is a dataset, which has splits; add --split NAME"):
        inspect_file(source, None)
    with pytest.raises(
        UnknownData, match=r"names no commit of a dataset; write hub:ORGANISATION/NAME@COMMIT"
    ):
        inspect_file(Path("hub:org/sums@main"), None, Load(split="train"))
    with pytest.raises(UnknownData, match=r"--split=train is about hub:.* and rows.jsonl is no such dataset"):
        inspect_file(Path("rows.jsonl"), None, Load(split="train"))
