"""Aliases stay right when they are moved in unintended ways: other conditions, edited records, tags by hand, two people at once."""

import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.flows.publishing.test_moving_aliases import Place
from tests.support.orchestrated import Witness
from vantage.cli.main import app
from vantage.flows.publishing import moving_aliases
from vantage.flows.publishing.moving_aliases import publish_again
from vantage.ledger.operations import MoveAlias, Publish
from vantage.runs.approving import answer
from vantage.runs.record import RunRecord
from vantage.runs.run import read_runs
from vantage.runs.workspace import RunError

pytestmark = pytest.mark.slow

TWO_ENTRIES = (
    "publish=[{stage: sft, registered_model: small, alias: champion, approve: true}, "
    "{stage: sft, registered_model: small, alias: tried}]"
)
TWO_NAMES = "publish=[{stage: sft, registered_model: small}, {stage: sft, registered_model: small-too}]"
CLOSED = "stages.sft.gate={metric: test_nll, at_most: 0.1, on_fail: continue}"
SECRET = "hunter2-hunter2"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Yield a place in which two runs have published versions 1 and 2; the alias points to 2."""
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("MLFLOW_TRACKING_URI", raising=False)
        found = Place(tmp_path_factory.mktemp("odd"))
        for seed in (1, 2):
            found.run(f"seed={seed}")
        yield found


def publish_it(
    place: Place, record: RunRecord, *, model: str | None = None, alias: str | None = None
) -> dict[str, str]:
    return dict(publish_again(place.workspace, record.run_id, Witness(), model=model, alias=alias))


def moved(place: Place, record: RunRecord) -> list[object]:
    """Return the movements of aliases in the run's outbox."""
    told = place.operations(record.run_id)
    return [each for each in told if isinstance(each, Publish | MoveAlias) and each.alias]


def test_an_alias_keeps_its_own_conditions_whatever_else_the_recipe_publishes(place: Place) -> None:
    before = place.champion
    record = place.run("seed=3", TWO_ENTRIES)
    assert publish_it(place, record, alias="champion") == {"small@champion": "waiting_approval"}
    assert place.champion == before, "nobody has approved of it"
    with pytest.raises(
        RunError, match="publishes small under champion, tried, which differ in after, approve"
    ):
        publish_it(place, record, alias="another")
    version = max(int(each.version) for each in place.client.search_model_versions("name = 'small'"))
    with pytest.raises(RunError, match="must not get champion: nobody has approved of it"):
        place.back(to=str(version))
    answer(place.workspace, record.run_id, "publish:small", approved=True, by=None, reason="it reads well")
    assert publish_it(place, record, alias="champion") == {"small@champion": "published"}
    assert place.back() == f"{version} → {before}"


def test_an_alias_for_all_names_of_a_stage(place: Place) -> None:
    record = place.run("seed=4", TWO_NAMES)
    assert publish_it(place, record, alias="tried") == {
        "small@tried": "published",
        "small-too@tried": "published",
    }


@pytest.mark.parametrize(
    "alias", ["", "Champion", "v1", "latest", "cha mpion", "champión", "-a", "a" * 64, "a\n"]
)
def test_what_is_no_alias_is_one_sentence(place: Place, alias: str) -> None:
    shown = CliRunner().invoke(
        app, ["publish", "1", "--alias", alias, "--workspace", place.workspace.address]
    )
    assert (shown.exit_code, shown.stderr.count("\n")) == (65, 1), shown.output
    assert "is no alias: one has at most 63 lower-case letters, digits and hyphens" in shown.stderr
    assert "pydantic" not in shown.stderr


@pytest.mark.parametrize("to", ["", "abc", "-1", "1.0", "01", "٣", "9" * 30, "1\n"])
def test_what_is_no_version_moves_nothing(place: Place, to: str) -> None:
    before = place.champion
    with pytest.raises(RunError, match="is no version, which is a number such as 3"):
        place.back(to=to)
    assert place.champion == before


def test_an_alias_that_somebody_else_moves_meanwhile_stays_there(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = place.champion
    told = [moved(place, record) for record in read_runs(place.workspace)]

    def somebody_is_faster(*_: object) -> None:
        place.client.set_registered_model_alias("small", "champion", "3")

    with monkeypatch.context() as patched:
        patched.setattr(moving_aliases, "_require_intact_copy", somebody_is_faster)
        with pytest.raises(RunError, match=f"was moved from version {before} to 3 meanwhile"):
            place.back(to="1")
    assert place.champion == "3"
    place.client.set_registered_model_alias("small", "champion", before)
    assert told == [moved(place, record) for record in read_runs(place.workspace)]


def test_from_a_version_that_was_made_by_hand_there_is_a_way_back(place: Place) -> None:
    before = place.champion
    by_hand = place.client.create_model_version("small", "file:///nowhere").version
    place.client.set_registered_model_alias("small", "champion", by_hand)
    with pytest.raises(RunError, match=f"version {by_hand} of small was not published by Vantage"):
        place.back()
    assert place.back(to=before) == f"{by_hand} → {before}"
    place.client.delete_model_version("small", by_hand)
    with pytest.raises(RunError, match=f"no registered model small with the version {by_hand}"):
        place.back(to=str(by_hand))


@pytest.mark.parametrize("tag", ["vantage.stage", "vantage.stage_key", "vantage.run_id", "vantage.digest"])
def test_a_version_without_one_of_our_tags_is_not_ours(place: Place, tag: str) -> None:
    kept = place.client.get_model_version("small", "1").tags[tag]
    place.client.delete_model_version_tag("small", "1", tag)
    try:
        with pytest.raises(RunError, match="version 1 of small was not published by Vantage"):
            place.back(to="1")
    finally:
        place.client.set_model_version_tag("small", "1", tag, kept)


@pytest.mark.parametrize("time", ["tomorrow", None, [], 1.5])
def test_a_movement_that_was_written_by_hand_counts_as_none(place: Place, time: object) -> None:
    written = {"version": "1", "time": time, "run_id": "", "by": "eve", "reason": ""}
    place.client.set_registered_model_tag("small", "vantage.alias.champion", json.dumps(written))
    other = "1" if place.champion == "2" else "2"
    before = place.champion
    assert place.back(to=other) == f"{before} → {other}"


def test_a_verdict_that_was_edited_in_the_record_moves_no_alias(place: Place) -> None:
    before = place.champion
    record = place.run("seed=5", CLOSED)
    path = place.workspace.folder(record.run_id) / "run.json"
    content = json.loads(path.read_bytes())
    content["stages"]["sft"]["verdicts"][0]["passed"] = True
    path.write_text(json.dumps(content))
    version = max(int(each.version) for each in place.client.search_model_versions("name = 'small'"))
    said = f"the record of run {record.run_id} differs from its artifacts: sft: the verdict is recorded as"
    with pytest.raises(RunError, match=said):
        publish_it(place, record)
    with pytest.raises(RunError, match=said):
        place.back(to=str(version))
    assert (place.champion, moved(place, record)) == (before, [])


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda stages: stages.pop("sft"), "the run's record has no sft; run the recipe again"),
        (
            lambda stages: stages["sft"].update(stage_key="../../x"),
            "the store has it no longer; `vantage resume",
        ),
        (
            lambda stages: stages["sft"].update(digest="../../x"),
            "the store has it no longer; `vantage resume",
        ),
    ],
    ids=["no stage", "no key", "no digest"],
)
def test_a_record_that_lacks_what_it_publishes(
    place: Place, change: Callable[[dict[str, Any]], object], said: str
) -> None:
    before = place.champion
    record = place.run("seed=7", CLOSED.replace("0.1", "0.9"))
    path = place.workspace.folder(record.run_id) / "run.json"
    kept = path.read_bytes()
    content = json.loads(kept)
    change(content["stages"])
    path.write_text(json.dumps(content))
    words = ["publish", record.run_id, "--workspace", place.workspace.address]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code in (65, 78), shown.output
    assert said in shown.output
    if "sft" not in content["stages"]:
        [version] = [
            each.version
            for each in place.client.search_model_versions("name = 'small'")
            if each.tags["vantage.run_id"] == record.run_id
        ]
        place.client.set_registered_model_alias("small", "champion", before)
        with pytest.raises(RunError, match=f"has not published sft as version {version} of small"):
            place.back(to=str(version))
    place.client.set_registered_model_alias("small", "champion", before)
    path.write_bytes(kept)


def test_of_several_models_none_is_published_if_one_is_damaged(place: Place) -> None:
    more = "publish=[{stage: sft, registered_model: small, alias: tried}, {stage: more, registered_model: more, alias: tried}]"
    record = place.run("seed=6", "stages.more={kind: sft, data: demonstrations, learning_rate: 0.5}", more)
    told = len(moved(place, record))
    shutil.rmtree(place.workspace.store / "objects" / str(record.stages["more"].digest))
    with pytest.raises(RunError, match="the artifact of more is not intact: .*`vantage resume"):
        publish_it(place, record)
    assert len(moved(place, record)) == told


def test_a_secret_in_a_reason_is_not_printed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", SECRET)
    other = "1" if place.champion == "2" else "2"
    for version, more in ((other, []), (place.champion, ["--json"])):
        words = ["rollback", "small@champion", "--to", version, "--workspace", place.workspace.address]
        shown = CliRunner().invoke(app, [*words, "--reason", f"it knew\n{SECRET}", *more])
        assert shown.exit_code == 0, shown.output
        assert SECRET not in shown.output
        assert "it knew ***" in shown.output
