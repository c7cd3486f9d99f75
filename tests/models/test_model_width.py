"""The width of a model is known from its files alone."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from vantage.models.builtin import builtin_config
from vantage.models.model_width import UnknownWidth, hidden_size
from vantage.models.source_digest import BUILTIN_VERSIONS


@pytest.mark.parametrize("name", BUILTIN_VERSIONS)
def test_of_the_built_in_models(name: str) -> None:
    assert hidden_size(f"builtin:{name}") == builtin_config(name).hidden_size == 128


@pytest.mark.parametrize(
    "config, width",
    [
        ({"hidden_size": 576}, 576),
        ({"n_embd": 768}, 768),
        ({"d_model": 512}, 512),
        ({"text_config": {"hidden_size": 2048}}, 2048),
    ],
)
def test_of_a_folder(config: dict[str, object], width: int, tmp_path: Path) -> None:
    """The hidden size of a folder is read from its ``config.json``."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert hidden_size(str(tmp_path)) == width


@pytest.mark.parametrize(
    "content",
    ["{}", "[]", "not json", '{"hidden_size": "64"}', '{"hidden_size": 0}', '{"hidden_size": true}'],
)
def test_a_folder_that_does_not_say(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UnknownWidth, match="config.json"):
        hidden_size(str(tmp_path))


def test_a_folder_without_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(UnknownWidth, match="FileNotFoundError"):
        hidden_size(str(tmp_path))


def test_of_a_gguf_file(tmp_path: Path) -> None:
    """The hidden size of a GGUF file is read from its header."""
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(576)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert hidden_size(f"gguf:{path}") == 576


def test_a_gguf_file_without_a_width_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("llama.embedding_length", "576")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnknownWidth, match=r"model\.gguf does not say its embedding_length; fetch it again"):
        hidden_size(f"gguf:{path}")


def test_of_a_model_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    config = tmp_path / "config.json"
    config.write_text('{"hidden_size": 960}')
    asked = []

    def download(repository: str, name: str, *, revision: str) -> str:
        asked.append((repository, name, revision))
        return str(config)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert hidden_size(f"hub:org/name@{'a' * 40}") == 960
    assert asked == [("org/name", "config.json", "a" * 40)]

    def refuse(*_: object, **__: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(UnknownWidth, match="no route"):
        hidden_size(f"hub:org/name@{'a' * 40}")


def test_no_tensor_library_is_loaded_for_it() -> None:
    code = "import sys; from vantage.models.model_width import hidden_size; hidden_size('builtin:tiny'); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout == "False\n"
