"""New databases are migrated once on a machine, and hold nothing of another workspace."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from vantage.storage.empty_databases import migrated_once
from vantage.storage.machine_cache import read_derived


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VANTAGE_CACHE", str(tmp_path / "cache"))


def migrate(database: Path, *, secret: str = "of this workspace") -> bool:
    """Do what a server does: make the tables if there are none, and write a row of its own; returns whether it made
    them.
    """
    with closing(sqlite3.connect(database)) as connection:
        made = not connection.execute("SELECT 1 FROM sqlite_master").fetchall()
        if made:
            connection.executescript(
                "CREATE TABLE alembic_version (version TEXT); INSERT INTO alembic_version VALUES ('v1');"
                "CREATE TABLE kinds (id INTEGER PRIMARY KEY, name TEXT); INSERT INTO kinds (name) VALUES ('a'), ('b');"
                'CREATE TABLE "runs of it" (name TEXT); CREATE INDEX by_name ON "runs of it" (name);'
            )
        connection.execute('INSERT INTO "runs of it" VALUES (?)', (secret,))
        connection.commit()
    return made


def rows(database: Path, table: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(f'SELECT * FROM "{table}"').fetchall()


def schema(database: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()


def test_the_second_database_has_the_tables_of_the_first_and_none_of_its_rows(tmp_path: Path) -> None:
    first, second = tmp_path / "first.db", tmp_path / "second.db"
    with migrated_once("server-1.db", first, rows_of=["kinds"]):
        assert migrate(first)
    with migrated_once("server-1.db", second, rows_of=["kinds"]):
        assert not migrate(second, secret="its own")
    assert schema(second) == schema(first)
    assert rows(second, "alembic_version") == [("v1",)]
    assert rows(second, "kinds") == [(1, "a"), (2, "b")]
    assert rows(second, "runs of it") == [("its own",)]
    assert rows(first, "runs of it") == [("of this workspace",)]
    kept = read_derived("server-1.db")
    assert kept is not None and b"of this workspace" not in kept, "nor in pages that are free"


def test_another_version_migrates_for_itself(tmp_path: Path) -> None:
    for name in ("server-1.db", "server-2.db"):
        with migrated_once(name, tmp_path / name, rows_of=[]):
            assert migrate(tmp_path / name)


def test_a_database_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    with migrated_once("server-1.db", tmp_path / "first.db", rows_of=[]):
        migrate(tmp_path / "first.db")
    used = tmp_path / "used.db"
    migrate(used, secret="of years")
    before = used.read_bytes()
    with migrated_once("server-1.db", used, rows_of=[]):
        assert used.read_bytes() == before
    assert read_derived("server-1.db") != before


def test_an_empty_file_is_filled_and_keeps_its_mode(tmp_path: Path) -> None:
    with migrated_once("server-1.db", tmp_path / "first.db", rows_of=[]):
        migrate(tmp_path / "first.db")
    private = tmp_path / "private.db"
    private.touch(mode=0o600)
    with migrated_once("server-1.db", private, rows_of=[]):
        assert not migrate(private)
    assert private.stat().st_mode & 0o777 == 0o600


def test_it_may_be_in_use_when_it_is_kept(tmp_path: Path) -> None:
    first, second = tmp_path / "first.db", tmp_path / "second.db"
    with migrated_once("server-1.db", first, rows_of=["kinds"]):
        migrate(first)
        writer = sqlite3.connect(first)
        writer.execute("PRAGMA journal_mode = wal")
        writer.execute("INSERT INTO kinds (name) VALUES ('not committed')")
    writer.close()
    with migrated_once("server-1.db", second, rows_of=["kinds"]):
        assert not migrate(second)
    assert rows(second, "kinds") == [(1, "a"), (2, "b")]


def test_a_kill_while_it_is_filled_leaves_it_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with migrated_once("server-1.db", tmp_path / "first.db", rows_of=[]):
        migrate(tmp_path / "first.db")

    def killed(new: Path, path: Path) -> None:
        raise KeyboardInterrupt

    database = tmp_path / "second.db"
    database.touch(mode=0o600)
    with monkeypatch.context() as patch:
        patch.setattr("vantage.storage.durable_files.os.replace", killed)
        with pytest.raises(KeyboardInterrupt), migrated_once("server-1.db", database, rows_of=[]):
            raise AssertionError("unreachable")
    assert database.read_bytes() == b""
    with migrated_once("server-1.db", database, rows_of=[]):
        assert not migrate(database)


@pytest.mark.parametrize("body", ["fails", "makes nothing", "makes no tables", "has no version"])
def test_what_was_not_migrated_is_not_kept(tmp_path: Path, body: str) -> None:
    database = tmp_path / "first.db"
    try:
        with migrated_once("server-1.db", database, rows_of=[]):
            if body == "fails":
                migrate(database)
                raise ConnectionError("it did not come up")
            if body == "makes no tables":
                sqlite3.connect(database).close()
            if body == "has no version":
                with closing(sqlite3.connect(database)) as connection:
                    connection.execute("CREATE TABLE alembic_version (version TEXT)")
    except ConnectionError:
        pass
    assert read_derived("server-1.db") is None


def test_without_a_database_nothing_is_done() -> None:
    with migrated_once("server-1.db", None, rows_of=[]):
        pass
    assert read_derived("server-1.db") is None
