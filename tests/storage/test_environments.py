"""Environments are stored once for each digest, in a folder and in a bucket."""

import hashlib
from pathlib import Path
from threading import Thread

import pytest

from tests.storage.places import Place
from vantage.schemas.records.environment import Environment, Installed
from vantage.storage.environments import DamagedEnvironment, keep_environment, read_environment
from vantage.storage.removed import Cause
from vantage.storage.storage import garbage_of
from vantage.storage.store import Store

pytestmark = pytest.mark.usefixtures("no_fsync")

ONE = Environment(
    python="3.11.7",
    implementation="CPython",
    system="Debian 12",
    machine="x86_64",
    installed=(Installed(name="torch", version="2.13.0", license="BSD-3-Clause"),),
)
OTHER = ONE.model_copy(update={"python": "3.12.1"})


def path_of(environment: Environment) -> str:
    return f"environments/{environment.digest}.json"


def test_what_is_kept_is_read_on_another_machine(place: Place) -> None:
    digest = keep_environment(place.open(), ONE)
    assert digest == hashlib.sha256(place.read(path_of(ONE))).hexdigest()
    assert read_environment(place.open(), digest) == ONE
    assert read_environment(place.open(), OTHER.digest) is None


def test_one_environment_is_one_file_however_often_it_is_kept(place: Place) -> None:
    for environment in (ONE, ONE, OTHER, ONE):
        keep_environment(place.open(), environment)
    assert {path for path in place.paths("environments") if path.endswith(".json")} == {
        path_of(ONE),
        path_of(OTHER),
    }
    assert len(place.paths("environments")) == 2, "nothing else is left there"


def test_it_is_kept_under_the_lock_of_its_digest(tmp_path: Path) -> None:
    """An environment is stored under the lock of its digest."""
    store = Store(tmp_path)
    keeping = Thread(target=keep_environment, args=(store, ONE))
    with store.object_lock(ONE.digest):
        keeping.start()
        keeping.join(0.2)
        assert keeping.is_alive() and read_environment(store, ONE.digest) is None
    keeping.join(10)
    assert read_environment(store, ONE.digest) == ONE


def test_a_damaged_one_is_never_used(place: Place) -> None:
    digest = keep_environment(place.open(), ONE)
    place.write(path_of(ONE), place.read(path_of(OTHER)) if keep_environment(place.open(), OTHER) else b"")
    with pytest.raises(
        DamagedEnvironment, match=f"environments/{digest}.json is damaged: its sha256 is {OTHER.digest[:12]}"
    ):
        read_environment(place.open(), digest)


def test_a_name_that_is_no_digest_is_refused(place: Place) -> None:
    with pytest.raises(ValueError, match="is not a sha256"):
        read_environment(place.open(), "../refs/x")


def test_it_is_nothing_to_be_collected(place: Place) -> None:
    """Garbage collection keeps environments."""
    keep_environment(place.open(), ONE)
    garbage = garbage_of(place.open(), Cause(when="now", why="a test", by="a test"))
    assert not list(garbage.leftovers())
    assert not garbage.objects()


def test_equal_environments_have_equal_digests_whatever_the_order_of_fields() -> None:
    again = Environment.model_validate(dict(reversed(ONE.model_dump().items())))
    assert again.digest == ONE.digest != OTHER.digest
