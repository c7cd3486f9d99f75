"""The end of a run as a person reads it: what came of it, where its models lie, how one is loaded, where to look."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.commands.own_commands import python
from flows.runs.run import GOOD, RunRecord, StageRecord
from schemas.kinds import KINDS, MODELS
from schemas.recipe.stages import PolicyEvaluation


def comparison(stage: StageRecord) -> str:
    """``accuracy 0.911 against 0.600 (+0.311 ± 0.012); greedy 0.996 against 1.000`` of an evaluation, else nothing."""
    metrics = stage.metrics
    for name in ("accuracy", "score"):
        if metrics.get(name) is not None and metrics.get(f"baseline_{name}") is not None:
            told = _against(metrics, name, f"baseline_{name}")
            gain, error = metrics.get(f"{name}_gain"), metrics.get(f"{name}_gain_standard_error")
            if gain is not None:
                told += f" ({gain:+.3f}{f' ± {error:.3f}' if error is not None else ''})"
            if metrics.get(f"greedy_{name}") is not None:
                told += f"; greedy {_against(metrics, f'greedy_{name}', f'baseline_greedy_{name}')[len(name) + 8 :]}"
            return told
    return ""


def _against(metrics: Mapping[str, float | None], name: str, baseline: str) -> str:
    ours, theirs = metrics.get(name), metrics.get(baseline)
    return f"{name} {_three(ours)} against {_three(theirs)}"


def _three(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"


def samples_heading(record: RunRecord, step: str) -> str:
    """Whose responses an evaluation's samples are."""
    stage = record.recipe.stages.get(step)
    if not isinstance(stage, PolicyEvaluation):
        return step
    return f"{step}: {stage.baseline} (baseline) and {stage.candidate} (candidate) on test prompts, with their judgements"


def model_folders(record: RunRecord, store: Path) -> dict[str, Path]:
    """Stage → folder of the model that it made, in the order of the recipe; the imported model is left out."""
    return {
        name: store / "objects" / stage.digest
        for name, stage in record.stages.items()
        if name in record.recipe.stages
        and stage.digest is not None
        and stage.status in GOOD
        and KINDS[record.recipe.stages[name].kind].makes in MODELS
    }


def shown_policy(record: RunRecord) -> str | None:
    """The stage whose policy is worth loading: one that is published, else the last that made one; None without any."""
    made = [
        name
        for name, stage in record.stages.items()
        if name in record.recipe.stages
        and stage.status in GOOD
        and KINDS[record.recipe.stages[name].kind].makes == "policy"
    ]
    published = [publication.stage for publication in record.recipe.publish if publication.stage in made]
    return next(iter(published or reversed(made)), None)


def loading_snippet(folder: Path, *, prompt: str, max_new_tokens: int, chat: bool) -> list[str]:
    """Lines for a shell that load the policy and let it answer once; they work as they stand, in any folder."""
    text = "prompt"
    if chat:
        message = '[{"role": "user", "content": prompt}]'
        text = f"tokenizer.apply_chat_template({message}, add_generation_prompt=True, tokenize=False)"
    special = ", add_special_tokens=False" if chat else ""
    return [
        f"{python()} - <<'END'",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f"folder = {str(folder)!r}",
        f"prompt = {prompt!r}",
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        "model = AutoModelForCausalLM.from_pretrained(folder)",
        f'inputs = tokenizer({text}, return_tensors="pt"{special})',
        f"output = model.generate(**inputs, max_new_tokens={max_new_tokens}, do_sample=False)",
        "print(tokenizer.decode(output[0], skip_special_tokens=True))",
        "END",
    ]


def has_chat_template(folder: Path) -> bool:
    """Whether a saved tokenizer wraps messages, told by its files alone."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return '"chat_template"' in (folder / "tokenizer_config.json").read_text(encoding="utf-8")
    except OSError:
        return False


def first_prompt(record: RunRecord) -> str:
    """A prompt of an evaluation's samples to try the model on."""
    samples: Sequence[Mapping[str, Any]] = next(
        (stage.samples for stage in record.stages.values() if stage.samples), ()
    )
    return str(samples[0].get("prompt", "Hello")) if samples else "Hello"


def snippet_for(record: RunRecord, store: Path) -> list[str]:
    """Lines that load the policy worth loading; none where the run made none."""
    name = shown_policy(record)
    if name is None:
        return []
    folder = model_folders(record, store)[name]
    chat = record.recipe.model.chat
    return loading_snippet(
        folder,
        prompt=first_prompt(record),
        max_new_tokens=record.recipe.generation.max_response_tokens,
        chat=has_chat_template(folder) if chat is None else chat,
    )
