"""TensorBoard itself reads its event files: every point appears once, whatever was killed when."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from vantage.ledger.destinations.delivery import Delivery, Destinations, send_earlier_runs
from vantage.ledger.destinations.tensorboard import EventFiles
from vantage.ledger.journal import Entry
from vantage.ledger.outbox import Outbox
from vantage.ledger.run_ledger import Ledger
from vantage.ledger.tracking import check_configured
from vantage.schemas.records.artifacts import PolicyCheckpoint

RUN = "0001-small-abcdef"
DIGEST = "d" * 64
ARTIFACT = PolicyCheckpoint(
    uri=f"objects/{DIGEST}",
    digest=DIGEST,
    stage_key="b" * 64,
    parents={},
    metrics={"test_nll": 0.25},
    tokenizer_digest="c" * 64,
)


def begin(ledger: Ledger) -> None:
    ledger.open_run(RUN, "small", {"seed": 1})
    ledger.open_stage("sft", kind="sft", stage_key="b" * 64, attempt=1, params={}, inputs={})


def rows(ledger: Ledger, *steps: int, worse: float = 0.0) -> None:
    entries = [Entry(step, 1_700_000_000 + step / 4, {"loss": 1 / (step + 1) + worse}) for step in steps]
    ledger.send_metrics("sft", entries)


def finish(ledger: Ledger) -> None:
    ledger.finish_stage("sft", "completed", artifact=ARTIFACT)
    ledger.finish_run("completed")


def points(folder: Path, stage: str | None, metric: str) -> list[tuple[int, float, float]]:
    """Return step, time and value of each point, as TensorBoard shows them."""
    shown = EventAccumulator(str(folder / RUN / stage if stage else folder / RUN))
    shown.Reload()
    return [(each.step, each.wall_time, each.value) for each in shown.Scalars(metric)]


EXPECTED = [(step, 1_700_000_000 + step / 4, pytest.approx(1 / (step + 1))) for step in range(5)]


def test_a_run_is_written_while_mlflow_is_away(
    ledger: Callable[[], Ledger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second process resumes it, and measures two steps again."""
    monkeypatch.setenv("VANTAGE_TENSORBOARD", str(tmp_path / "curves"))
    first = ledger()
    begin(first)
    rows(first, 0, 1, 2)
    first.close(60)
    second = ledger()
    begin(second)
    rows(second, 1, 2, 3, 4, worse=9.0)
    finish(second)
    second.record_reuse("sft", kind="sft", stage_key="b" * 64, params={}, inputs={}, artifact=ARTIFACT)
    second.close(60)
    loss = points(tmp_path / "curves", "sft", "loss")
    assert loss[:3] == EXPECTED[:3]
    assert [(step, round(value, 4)) for step, _, value in loss[3:]] == [(3, 9.25), (4, 9.2)]
    assert [(step, value) for step, _, value in points(tmp_path / "curves", "sft", "test_nll")] == [(0, 0.25)]
    assert [value for _, _, value in points(tmp_path / "curves", None, "sft.test_nll")] == [0.25]
    files = list((tmp_path / "curves").rglob("events.*"))
    assert len(files) == 2
    for path in files:
        first, *_ = EventFileLoader(str(path)).Load()
        assert first.file_version == "brain.Event:2"


def test_a_file_that_a_kill_has_cut_is_completed_to_the_same_bytes(
    ledger: Callable[[], Ledger], tmp_path: Path
) -> None:
    told = ledger()
    begin(told)
    rows(told, 0, 1, 2)
    rows(told, 3, 4)
    finish(told)
    folder = tmp_path / "runs" / RUN / "ledger"
    place = EventFiles(tmp_path / "curves")
    Delivery(place, Outbox(folder)).send()
    [file] = (tmp_path / "curves" / RUN / "sft").iterdir()
    whole = file.read_bytes()
    assert points(tmp_path / "curves", "sft", "loss") == EXPECTED
    for end in range(0, len(whole) + 1, 7):
        file.write_bytes(whole[:end])
        (folder / "sent-tensorboard.json").unlink()
        Delivery(place, Outbox(folder)).send()
        assert file.read_bytes() == whole
    file.write_bytes(b"\0" * len(whole) + b"more")
    (folder / "sent-tensorboard.json").write_text("{")
    Delivery(place, Outbox(folder)).send()
    assert points(tmp_path / "curves", "sft", "loss") == EXPECTED


def test_earlier_runs_are_written_once_and_a_damaged_one_stops_no_other(
    ledger: Callable[[], Ledger], tmp_path: Path
) -> None:
    told = ledger()
    begin(told)
    rows(told, 0, 1, 2, 3, 4)
    damaged = tmp_path / "runs" / "0000-small-aaaaaa" / "ledger"
    damaged.mkdir(parents=True)
    (damaged / "outbox.jsonl").write_text('{"operation": "finish_run", "time": 1, "outcome": "failed"}\n')
    place = EventFiles(tmp_path / "curves")
    send_earlier_runs(place, tmp_path / "runs", skip=None)
    assert points(tmp_path / "curves", "sft", "loss") == EXPECTED
    [file] = (tmp_path / "curves" / RUN / "sft").iterdir()
    file.unlink()
    send_earlier_runs(place, tmp_path / "runs", skip=None)
    assert not file.exists(), "nothing is new, so nothing is read again"


def test_a_folder_that_cannot_be_written_stops_nothing(
    ledger: Callable[[], Ledger],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "curves").write_text("a file")
    monkeypatch.setenv("VANTAGE_TENSORBOARD", str(tmp_path / "curves"))
    told = ledger()
    begin(told)
    rows(told, 0)
    told.close(60)
    [line] = [each.getMessage() for each in caplog.records]
    assert line.startswith(f"tensorboard ({tmp_path / 'curves'}) did not take the records of this run")


def test_without_the_setting_no_thread_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VANTAGE_TENSORBOARD", raising=False)
    destinations = Destinations(tmp_path)
    destinations.notify(Outbox(tmp_path / "runs" / RUN / "ledger"))
    destinations.close(0.0)
    assert destinations._thread is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("s3://team/curves", "is no folder of this machine; name one"),
        (__file__, "is a file; name a folder, or unset it"),
    ],
    ids=["a bucket", "a file"],
)
def test_a_place_that_cannot_be_is_refused_before_the_run(
    monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    monkeypatch.setenv("VANTAGE_TENSORBOARD", value)
    with pytest.raises(ValueError, match=message):
        check_configured()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VANTAGE_TENSORBOARD", str(tmp_path))
    monkeypatch.setattr("vantage.ledger.destination_settings.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'vantage-rlhf\[tensorboard\]'"):
        check_configured()
