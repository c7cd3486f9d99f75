"""Texts for the end of a run: comparisons, the folders of its models, and how to load one."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.commands.own_commands import python
from flows.runs.record import SUCCEEDED, RunRecord, StageRecord
from schemas.kind import MODELS
from schemas.kinds import KINDS
from schemas.recipe.evaluations import PolicyEvaluation
from schemas.steps import merging_step
from storage.storage import Storage


def comparison(stage: StageRecord) -> str:
    """``accuracy 0.911 against 0.600 (+0.311 ± 0.012); greedy 0.996 against 1.000`` for an evaluation, else empty.

    Of two judges, one after the other; of a model that judges pairs, ``win rate 0.540 (orders disagree 0.210)``.
    """
    found = [_comparison_by(stage.metrics, name) for name in ("accuracy", "score")]
    return "  ".join(text for text in (*found, _preference(stage.metrics)) if text)


def _preference(metrics: Mapping[str, float | None]) -> str:
    """What a model says of pairs: its win rate has a name of its own where it is the second judge."""
    if "order_disagreement" not in metrics:
        return ""
    rate = metrics.get("preference_win_rate", metrics.get("win_rate"))
    disagree = metrics["order_disagreement"]
    return f"win rate {_three_decimals(rate)} (orders disagree {_three_decimals(disagree)})"


def _comparison_by(metrics: Mapping[str, float | None], name: str) -> str:
    if metrics.get(name) is None or metrics.get(f"baseline_{name}") is None:
        return ""
    text = _compared(metrics, name, f"baseline_{name}")
    gain, error = metrics.get(f"{name}_gain"), metrics.get(f"{name}_gain_standard_error")
    if gain is not None:
        text += f" ({gain:+.3f}{f' ± {error:.3f}' if error is not None else ''})"
    if metrics.get(f"greedy_{name}") is not None:
        text += f"; greedy {_compared(metrics, f'greedy_{name}', f'baseline_greedy_{name}')[len(name) + 8 :]}"
    return text


def _compared(metrics: Mapping[str, float | None], name: str, baseline: str) -> str:
    ours, theirs = metrics.get(name), metrics.get(baseline)
    return f"{name} {_three_decimals(ours)} against {_three_decimals(theirs)}"


def _three_decimals(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"


def samples_heading(record: RunRecord, step: str) -> str:
    """The heading of an evaluation's samples."""
    stage = record.recipe.stages.get(step)
    if not isinstance(stage, PolicyEvaluation):
        return step
    return f"{step}: {stage.baseline} (baseline) and {stage.candidate} (candidate) on test prompts, with their judgements"


def model_folders(record: RunRecord, storage: Storage) -> dict[str, Path]:
    """Stage → folder of its model, in the order of the recipe; without the imported model, and without those that this
    machine has not fetched."""
    folders = {
        name: storage.local_folder(stage.digest)
        for name, stage in record.stages.items()
        if name in record.recipe.stages
        and stage.digest is not None
        and stage.status in SUCCEEDED
        and KINDS[record.recipe.stages[name].kind].makes in MODELS
    }
    return {name: folder for name, folder in folders.items() if folder is not None}


def policy_to_load(record: RunRecord) -> str | None:
    """The stage whose policy the snippet loads: a published one, else the last; None if there is no policy."""
    made = [
        name
        for name, stage in record.stages.items()
        if name in record.recipe.stages
        and stage.status in SUCCEEDED
        and KINDS[record.recipe.stages[name].kind].makes == "policy"
    ]
    published = [publication.stage for publication in record.recipe.publish if publication.stage in made]
    return next(iter(published or reversed(made)), None)


def loading_snippet(
    folder: Path,
    *,
    prompt: str,
    max_new_tokens: int,
    chat: bool,
    base: Path | None = None,
    stop: Sequence[str] = (),
) -> list[str]:
    """Lines for a shell that load the policy and generate one response; they work in any folder.

    ``base``: what the adapters in the folder stand on; None: it holds a whole model. ``stop``: the recipe's stop strings,
    which transformers keeps in the text.
    """
    text = "prompt"
    if chat:
        message = '[{"role": "user", "content": prompt}]'
        text = f"tokenizer.apply_chat_template({message}, add_generation_prompt=True, tokenize=False)"
    stops = f", stop_strings={list(stop)!r}, tokenizer=tokenizer" if stop else ""
    special = ", add_special_tokens=False" if chat else ""
    return [
        f"{python()} - <<'END'",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        *(["from peft import PeftModel"] if base else []),
        f"folder = {str(folder)!r}",
        f"prompt = {prompt!r}",
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        f"model = AutoModelForCausalLM.from_pretrained({'folder' if base is None else repr(str(base))})",
        *(["model = PeftModel.from_pretrained(model, folder)"] if base else []),
        f'inputs = tokenizer({text}, return_tensors="pt"{special})',
        f"output = model.generate(**inputs, max_new_tokens={max_new_tokens}, do_sample=False{stops})",
        "print(tokenizer.decode(output[0], skip_special_tokens=True))",
        "END",
    ]


def has_chat_template(folder: Path) -> bool:
    """Whether a saved tokenizer has a chat template, from its files."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        return '"chat_template"' in (folder / "tokenizer_config.json").read_text(encoding="utf-8")
    except OSError:
        return False


def first_prompt(record: RunRecord) -> str:
    """A prompt from an evaluation's samples, for the snippet."""
    samples: Sequence[Mapping[str, Any]] = next(
        (stage.samples for stage in record.stages.values() if stage.samples), ()
    )
    return str(samples[0].get("prompt", "Hello")) if samples else "Hello"


def snippet_for(record: RunRecord, storage: Storage) -> list[str]:
    """Lines that load the run's policy; empty if there is none on this machine."""
    name = policy_to_load(record)
    folders = model_folders(record, storage)
    folder = _merged_folder(record, storage, name) or folders.get(name or "")
    if folder is None:
        return []
    base = folder / "base.json"  # of adapters (models.adapters)
    beneath = json.loads(base.read_text(encoding="utf-8"))["base"] if base.is_file() else None
    base_folder = storage.local_folder(beneath) if beneath else None
    if beneath and base_folder is None:
        return []
    chat = record.recipe.model.chat
    return loading_snippet(
        folder,
        prompt=first_prompt(record),
        max_new_tokens=record.recipe.generation.max_response_tokens,
        chat=has_chat_template(folder) if chat is None else chat,
        base=base_folder,
        stop=record.recipe.generation.stop,
    )


def _merged_folder(record: RunRecord, storage: Storage, stage: str | None) -> Path | None:
    """The whole model that was made of a stage's adapters, if it was."""
    merged = record.stages.get(merging_step(stage or ""))
    return storage.local_folder(merged.digest) if merged is not None and merged.digest else None
