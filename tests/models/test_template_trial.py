"""Chat templates that do their worst are refused within bounded time and memory."""

import resource
import time
from pathlib import Path

import psutil
import pytest
from transformers import PreTrainedTokenizerBase

from vantage.models import template_trial
from vantage.models.builtin import build_builtin
from vantage.models.folders import load_tokenizer
from vantage.models.template_trial import BrokenTemplate, try_chat_template

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MANY = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
ENDS = "{% endfor %}" * 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tiny")
    build_builtin("tiny", folder, seed=0)
    return load_tokenizer(folder)


NO_TOOLS = "{% if tools or messages[0].role == 'system' %}{{ raise_exception('neither tools nor system') }}{% endif %}"


@pytest.mark.parametrize(
    "template",
    [
        None,
        CHATML,
        "{% if false %}{{ 10 ** x }}{% endif %}{{ messages[0].content }}",
        NO_TOOLS + CHATML,
    ],
    ids=["none", "ChatML", "an odd branch", "one that refuses conversations"],
)
def test_an_honest_template_passes_quickly(tokenizer: PreTrainedTokenizerBase, template: str | None) -> None:
    tokenizer.chat_template = template
    began = time.monotonic()
    try_chat_template(tokenizer)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ 10 ** (10 ** 9) }}", "is not rendered within 0.5 seconds"),
        (f"{MANY}{{% set x = 1 %}}{ENDS}", "is not rendered within 0.5 seconds"),
        ("{% set ns = namespace(x=3) %}{% for i in range(64) %}{% set ns.x = ns.x * ns.x %}{% endfor %}{{ ns.x }}",
         "is not rendered within 0.5 seconds|takes more than"),
        ("{{ 'a' * (10 ** 10) }}", "takes more than 512 MiB of memory"),
        ("{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
         "takes more than 512 MiB of memory"),
        ("{{ 'a' * 3000000 }}", "makes 3000000 characters of 1"),
        ("{{ messages[0].content * messages[0].content | length }}", "makes 324000000 characters of 18000|takes more"),
        ("{% if messages[0].content | length > 10000 %}{{ 10 ** (10 ** 9) }}{% endif %}", "is not rendered within 0.5 seconds"),
        ("{% if messages | length > 1 %}{{ 10 ** (10 ** 9) }}{% endif %}", "is not rendered within 0.5 seconds"),
        (f"{{% if messages | length == 3 %}}{MANY}{{% set x = 1 %}}{ENDS}{{% endif %}}", "is not rendered within 0.5 seconds"),
        (f"{{% if messages[0].role == 'system' %}}{MANY}{{% set x = 1 %}}{ENDS}{{% endif %}}", "is not rendered within 0.5 seconds"),
        (f"{{% if tools %}}{MANY}{{% set x = 1 %}}{ENDS}{{% endif %}}", "is not rendered within 0.5 seconds"),
        (f"{{% if messages[-1].tool_calls %}}{MANY}{{% set x = 1 %}}{ENDS}{{% endif %}}", "is not rendered within 0.5 seconds"),
        (f"{{% if messages[-1].reasoning_content %}}{MANY}{{% set x = 1 %}}{ENDS}{{% endif %}}", "is not rendered within 0.5 seconds"),
        ("{% if tools %}{{ 'a' * 3000000 }}{% endif %}", "makes 3000000 characters of"),
        ("{% if messages | length == 3 %}{{ 'a' * (10 ** 10) }}{% endif %}", "takes more than 512 MiB of memory"),
        ("{{ raise_exception('no user turns') }}", r"cannot be rendered \(TemplateError: no user turns\)"),
        ("{% if %}", r"cannot be rendered \(TemplateSyntaxError"),
        ("{{ messages.x.y }}", r"cannot be rendered \(UndefinedError"),
        ("{{ messages[0].content }}{{ ['a', 'b', 'c'] | random }}", "is rendered differently each time"),
        ("{{ messages[0].content }}{{ lipsum(n=1) }}", "is rendered differently each time|makes"),
        ("{{ ''.__class__.__mro__ }}", r"cannot be rendered \(SecurityError"),
    ],
)  # fmt: skip
def test_one_that_takes_too_much_or_fails_is_refused_with_the_remedy(
    tokenizer: PreTrainedTokenizerBase, template: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_trial, "SECONDS", 0.5 if "within 0.5" in told else 60.0)
    tokenizer.chat_template = template
    before, children = resource.getrlimit(resource.RLIMIT_AS), set(psutil.Process().children())
    with pytest.raises(
        BrokenTemplate, match=f"the model's chat template ({told}).*; set model.chat: false, or"
    ):
        try_chat_template(tokenizer)
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert set(psutil.Process().children()) <= children, "it was ended and waited for"


def test_the_import_tries_it_unless_the_recipe_says_that_there_is_no_chat(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vantage.schemas.recipe.inputs import Generation, Model
    from vantage.schemas.recipe.work import ImportModel
    from vantage.schemas.records.job import StageJob
    from vantage.tasks.import_model import run

    monkeypatch.setattr(template_trial, "SECONDS", 0.5)
    source = tmp_path / "source"
    build_builtin("tiny", source, seed=0)
    tokenizer.chat_template = "{{ 10 ** (10 ** 9) }}"
    tokenizer.save_pretrained(source)

    def job(chat: bool | None) -> StageJob:
        model = Model(source=str(source), chat=chat)
        folder = tmp_path / str(chat)
        (folder / "scratch").mkdir(parents=True)
        return StageJob(
            run_id="r", name="model", attempt=1, stage_key="0" * 64, seed=0, work=ImportModel(model=model),
            generation=Generation(), scratch=folder / "scratch", output=folder / "output",
        )  # fmt: skip

    for chat in (None, True):
        with pytest.raises(BrokenTemplate, match="is not rendered within 0.5 seconds"):
            run(job(chat))
    run(job(False))


def test_a_trial_whose_parent_was_killed_ends_by_itself(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel ends it, after so many seconds of a core."""
    monkeypatch.setattr(template_trial, "_CPU_SECONDS", 1)
    monkeypatch.setattr(template_trial, "SECONDS", 300.0)
    tokenizer.chat_template = f"{MANY}{{% set x = 1 %}}{ENDS}"
    with pytest.raises(BrokenTemplate, match="ends the process that renders it"):
        try_chat_template(tokenizer)
