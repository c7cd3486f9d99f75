"""Nothing in a model's folder that an attacker made runs, whatever its name and place."""

import io
import json
import os
import pickle
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from jinja2.exceptions import TemplateError

from vantage.models.builtin import build_builtin
from vantage.models.chat_template import render_turns
from vantage.models.folder_check import UnsafeModel
from vantage.models.folders import load_policy, load_tokenizer
from vantage.models.source_folders import copy_model, import_model
from vantage.models.template_trial import BrokenTemplate, try_chat_template

CANARY = "VANTAGE_TEST_CANARY"


class Payload:
    """Unpickled, it leaves a file and says so in the environment."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return exec, (f"import os; open({str(self.path)!r}, 'w').close(); os.environ[{CANARY!r}] = 'ran'",)


@pytest.fixture
def canary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of a file that only a payload makes."""
    monkeypatch.delenv(CANARY, raising=False)
    return tmp_path / "the payload ran"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    build_builtin("tiny", folder, seed=1)
    return folder


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def torch_file(value: object) -> bytes:
    data = io.BytesIO()
    torch.save(value, data)
    return data.getvalue()


def all_ways_in(folder: Path, tmp_path: Path) -> list[str]:
    """Return the refusal of each way by which a model's folder enters; fails on one that takes it."""
    ways = {
        "import": lambda: import_model(str(folder), tmp_path / "imported", seed=1),
        "registered": lambda: copy_model(folder, tmp_path / "copied"),
        "stage": lambda: load_policy(folder),
    }
    said = []
    for name, way in ways.items():
        with pytest.raises(UnsafeModel) as refusal:
            way()
        said.append(str(refusal.value))
        assert not (tmp_path / "imported").exists(), name
        assert not (tmp_path / "copied").exists(), name
    return said


def test_the_payload_of_these_tests_is_alive(canary: Path) -> None:
    pickle.loads(pickle.dumps(Payload(canary)))
    assert canary.exists()
    assert os.environ.pop(CANARY) == "ran"


@pytest.mark.parametrize(
    "name",
    ["pytorch_model.bin", "model.safetensors", "training_args.bin", "tokenizer.json", "vocab.txt", "a/b/x.PT",
     "config.json", "model-00001-of-00002.safetensors", "special_tokens_map.json", "tokenizer.model", "README"],
)  # fmt: skip
@pytest.mark.parametrize("form", ["pickle", "zip"])
def test_a_pickle_runs_nowhere_under_any_name(
    folder: Path, tmp_path: Path, canary: Path, name: str, form: str
) -> None:
    data = pickle.dumps(Payload(canary)) if form == "pickle" else torch_file(Payload(canary))
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(data)
    all_ways_in(folder, tmp_path)
    assert not canary.exists()


@pytest.mark.parametrize(
    "file",
    ["config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json", "x.json"],
)
@pytest.mark.parametrize(
    "changes",
    [
        {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", None], "AutoConfig": "evil.Config"}},
        {"auto_map": "evil--evil.Config"},
        {"nested": {"deep": [{"auto_map": {}}]}},
        {"attn_implementation": "evil/kernel"},
        {"_attn_implementation": {"": "evil/kernel@main"}},
        {"experts_implementation": "evil/kernel:f"},
    ],
)
def test_what_asks_for_code_is_refused_and_not_run(
    folder: Path, tmp_path: Path, canary: Path, file: str, changes: dict[str, object]
) -> None:
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w').close()\n")
    if not (folder / file).exists():
        (folder / file).write_text("{}")
    edit(folder / file, **changes)
    assert all("asks for code of its own" in said for said in all_ways_in(folder, tmp_path))
    with pytest.raises(UnsafeModel, match="asks for code of its own"):
        load_tokenizer(folder)
    assert not canary.exists()


def test_python_files_beside_a_plain_model_are_neither_run_nor_copied(
    folder: Path, tmp_path: Path, canary: Path
) -> None:
    for name in ("modeling_llama.py", "tokenization_llama.py", "custom_generate/generate.py", "conftest.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"open({str(canary)!r}, 'w').close()\n")
    import_model(str(folder), tmp_path / "imported", seed=1)
    load_policy(folder)
    assert not canary.exists()
    assert list((tmp_path / "imported").rglob("*.py")) == []
    assert "modeling_llama" not in sys.modules


def test_an_adapters_folder_is_checked_before_it_is_read(folder: Path, tmp_path: Path, canary: Path) -> None:
    from vantage.models.adapters import read_adapters

    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
    (adapter / "adapter_model.bin").write_bytes(torch_file(Payload(canary)))
    model = load_policy(folder)
    with pytest.raises(UnsafeModel, match="is a pickle"):
        read_adapters(model, adapter, trainable=False)
    (adapter / "adapter_model.bin").unlink()
    (adapter / "adapter_model.safetensors").write_bytes(pickle.dumps(Payload(canary)))
    with pytest.raises(UnsafeModel):
        read_adapters(model, adapter, trainable=False)
    (adapter / "adapter_model.safetensors").unlink()
    edit(adapter / "adapter_config.json", auto_map={"AutoModel": "evil.Model"})
    with pytest.raises(UnsafeModel, match="asks for code of its own"):
        read_adapters(model, adapter, trainable=False)
    assert not canary.exists()


def test_a_link_that_is_put_in_after_the_check_is_found_in_the_copy(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the check of a folder and the copy of its files, a file is replaced by a link to one of the user's."""
    from vantage.models import source_folders

    secret = tmp_path / "id_ed25519"
    secret.write_text("a private key")
    check = source_folders.check_folder

    def check_and_swap(path: Path) -> object:
        found = check(path)
        (path / "tokenizer.json").unlink()
        (path / "tokenizer.json").symlink_to(secret)
        return found

    monkeypatch.setattr(source_folders, "check_folder", check_and_swap)
    with pytest.raises((ValueError, OSError)):
        import_model(str(folder), tmp_path / "imported", seed=1)
    made = [path for path in (tmp_path / "imported").rglob("*") if path.is_file()]
    assert all(b"a private key" not in path.read_bytes() for path in made)


# Chat templates: Jinja's sandbox, and what it does not keep out

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
    "{{ namespace.__init__.__globals__['__builtins__'].open('CANARY', 'w') }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ (messages|attr('__class__')).__mro__ }}",
    "{{ '%s'|format(messages.__class__.__base__.__subclasses__()) }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ '{0.__class__}'.format_map({'0': 1}) }}",
    "{% set x = messages.append.__self__.__class__.__base__.__subclasses__() %}{{ x }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch CANARY') }}",
]


@pytest.mark.parametrize("escape", ESCAPES)
def test_a_template_does_not_leave_the_sandbox(folder: Path, canary: Path, escape: str) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}" + escape.replace("CANARY", str(canary))
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(folder)
    leaked = ""
    with suppress(TemplateError, TypeError, AttributeError, LookupError):  # refused, each in its way
        leaked = render_turns(tokenizer, "hello").removeprefix("hello")
    assert "class" not in leaked and "root:" not in leaked and "builtin" not in leaked, leaked
    assert not canary.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "bomb",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 10 ** (10 ** 9) }}",
    ],
)
def test_a_template_without_end_is_ended_before_any_stage_uses_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, bomb: str
) -> None:
    monkeypatch.setattr("vantage.models.template_trial.SECONDS", 1.5)
    (folder / "chat_template.jinja").write_text(bomb)
    with pytest.raises(BrokenTemplate):
        try_chat_template(load_tokenizer(folder))


def test_a_hard_link_to_a_users_file_is_copied_and_never_changed(folder: Path, tmp_path: Path) -> None:
    """What Vantage seals becomes read-only: never a file that has another name somewhere else."""
    other = tmp_path / "a users file"
    shutil.copy(folder / "config.json", other)
    (folder / "config.json").unlink()
    os.link(other, folder / "config.json")
    mode = other.stat().st_mode
    import_model(str(folder), tmp_path / "imported", seed=1)
    assert other.stat().st_mode == mode
    assert (tmp_path / "imported" / "config.json").stat().st_nlink == 1
