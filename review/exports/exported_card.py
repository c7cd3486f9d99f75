"""Write the card of an exported model: what it is, how to use it, and what serves it."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vantage.attempts.identity.shown import describe
from vantage.ledger.entries import RunEntry
from vantage.ledger.model_card import card_sections, in_markdown, parents_table, written_by
from vantage.runs.named_models import PROVENANCE_FILE, NamedModel
from vantage.schemas.records.sampling import ModelOpened

_TASKS = {"policy": "text-generation", "reward_model": "text-classification"}


@dataclass(frozen=True)
class MadeBy:
    """The run that made a model which another run has reused from the store."""

    run_id: str
    stage: str


def model_card(
    model: NamedModel,
    opened: ModelOpened | None,
    *,
    folder: Path,
    entry: RunEntry | None = None,
    made_by: MadeBy | None = None,
) -> str:
    """Return Markdown with the front matter of a model card.

    Args:
        opened: the sampling settings of a policy; None: a reward model.
        folder: where the model will be, for the commands.
        entry: the run that made or reused the model; None: the run is not in this workspace.
        made_by: the run that made the model, if ``entry`` is another run.
    """
    origin = model.origin
    assert origin is not None, "made by a run"
    front = [
        "---",
        "library_name: transformers",
        f"pipeline_tag: {_TASKS[model.kind]}",
        "tags: [vantage]",
        *_license_of(model, entry),
        "---",
    ]
    maker = made_by or MadeBy(origin.run_id, origin.stage)
    found = (
        "" if made_by is None else f", and found in the store by `{origin.stage}` of run `{origin.run_id}`"
    )
    made = (
        f"Made by the stage `{maker.stage}` of run `{maker.run_id}`{found} (recipe `{origin.recipe}`) with Vantage. "
        f"`{PROVENANCE_FILE}` has its digest, what it was made of, and the sha256 of its files."
    )
    parts = [
        *front,
        "",
        f"# {origin.recipe}: {origin.stage}",
        "",
        made,
        "",
        written_by(),
        "",
        *(_reward_use(folder) if opened is None else _policy_use(model, opened, folder)),
        *_card(model, entry),
        *_made_with(model),
    ]
    return "\n".join(parts) + "\n"


def _license_of(model: NamedModel, entry: RunEntry | None) -> list[str]:
    """Return the licence in the form of the front matter, if the recipe names one for this model."""
    origin = model.origin
    named = entry.licenses.get(origin.stage) if origin is not None and entry is not None else None
    return [] if named is None else [f"license_name: {json.dumps(named)}", "license: other"]


def _policy_use(model: NamedModel, opened: ModelOpened, folder: Path) -> list[str]:
    place = shlex.quote(str(folder))
    tokens = model.generation.max_response_tokens
    if opened.uses_chat:
        form = "Prompts are a user's turn in the tokenizer's chat template."
        path = "chat/completions"
        question: dict[str, Any] = {"messages": [{"role": "user", "content": "PROMPT"}]}
    else:
        form = (
            "Prompts are plain text: this model was trained without a chat template, so ask `/v1/completions` and not "
            "`/v1/chat/completions`."
        )
        path, question = "completions", {"prompt": "PROMPT"}
    if opened.uses_chat and opened.writes_date:
        form += f" The template writes today's date; in training it was always {model.date}."
    strings = model.generation.stop
    stopping = {"stop": list(strings)} if strings else {}
    body = json.dumps({"model": str(folder), **question, "max_tokens": tokens, **stopping})
    stops = ", ".join(f"`{token}`" for token in opened.stop_tokens)
    return [
        "## Use",
        "",
        f"{form} It was trained and measured with temperature {model.generation.temperature:g} over the whole vocabulary "
        f"(no top-k, no top-p), responses of at most {tokens} tokens, which end at {stops}. `generation_config.json` says "
        "the same to servers; `transformers serve` takes the length from the request alone.",
        *_stop_strings(strings),
        "",
        "```",
        "pip install 'transformers[serving]'",
        f"transformers serve {place}      # or: vllm serve {place}",
        f"curl http://localhost:8000/v1/{path} -H 'Content-Type: application/json' \\",
        f"  -d {shlex.quote(body)}",
        "",
        f"mlflow models serve -m {place} --env-manager local --port 5001",
        "curl http://localhost:5001/invocations -H 'Content-Type: application/json' \\",
        '  -d \'{"inputs": ["PROMPT"], "params": {"do_sample": false}}\'      # greedy',
        "```",
        "",
        *(
            [
                "MLflow puts no chat template around a prompt: give it the rendered one "
                "(`tokenizer.apply_chat_template`).",
                "",
            ]
            if opened.uses_chat
            else []
        ),
    ]


def _stop_strings(strings: Sequence[str]) -> list[str]:
    if not strings:
        return []
    quoted = ", ".join(f"`{json.dumps(text, ensure_ascii=False)}`" for text in strings)
    return [
        "",
        f"Responses also ended at the first of these texts, which verifiers and judges did not see: {quoted}. They stand in the "
        "request (`stop`): `generation_config.json` has none, since with them transformers' `generate` and pipelines, MLflow's "
        "among them, need a tokenizer that they are not given, and vLLM does not read them there. "
        "`model.generate(..., stop_strings=[...], tokenizer=tokenizer)` stops there too, and keeps the text.",
    ]


def _reward_use(folder: Path) -> list[str]:
    return [
        "## Use",
        "",
        "A reward model: `AutoModelForSequenceClassification` with one label. The score of a response is the logit at the "
        "last token of prompt and response, less the `score_shift` in `scalar.json`.",
        "",
        "```python",
        "from transformers import AutoModelForSequenceClassification, AutoTokenizer",
        f"model = AutoModelForSequenceClassification.from_pretrained({str(folder)!r})",
        f"tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})",
        "```",
        "",
    ]


def _card(model: NamedModel, entry: RunEntry | None) -> list[str]:
    """Return the lines that are also on MLflow's page of the model; without the run's record, the known metrics and
    gates."""
    origin = model.origin
    assert origin is not None, "made by a run"
    if entry is not None and origin.stage in entry.stages:
        made_of = parents_table(entry.stages[origin.stage], {})
        sections = card_sections(entry, origin.stage, {}) | ({"Parents": made_of} if made_of else {})
        check = f"- check it back to the data: `vantage audit {origin.run_id}/{origin.stage}`, or `vantage audit` on this folder"
        return in_markdown({**sections, "Check": [check]}, level=2)
    rows = [f"| {name} | {value:.4g} |" for name, value in origin.metrics.items() if value is not None]
    gates = [f"- gate {verdict}" for verdict in origin.verdicts]
    if not rows and not gates:
        return []
    return ["## Measured", "", *(["| metric | value |", "|---|---|", *rows, ""] if rows else []), *gates]


def _made_with(model: NamedModel) -> list[str]:
    """Return code and machine, in a line; all of it is in ``vantage.json``."""
    assert model.origin is not None, "made by a run"
    text = describe(model.origin.provenance)
    return ["", "## Made with", "", text] if text else []
