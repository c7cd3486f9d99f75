"""``vantage init``: a commented recipe for a user's own model, files and hardware, from questions or flags."""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vantage.cli.app import Verbose
from vantage.cli.output import explained

if TYPE_CHECKING:
    from vantage.cli.data_columns import FoundColumns
    from vantage.cli.recipe_draft import Draft, Reward
    from vantage.schemas.recipe.inputs import Content
    from vantage.schemas.recipe.sources import Builtin

FILE_NAME = "recipe.yaml"
_UNFIT = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff]")
"""Characters that end a line of YAML or are not allowed in it."""
VERIFIER_NAME = "verifier.py"
TINY = "builtin:tiny"
BUILTIN = "builtin:arithmetic/{}"
FEW_ROWS = 1000
"""A file with fewer rows holds out a tenth of them instead of a twentieth."""
ONE_GPU_BYTES = 60e9
BYTES_PER_WEIGHT = 16
"""Bytes per trained weight: the weight, its gradient and AdamW's two moments in float32."""
MARK = "####"
"""GSM8K's mark before the final number."""

MARKED_VERIFIER = '''\
"""A response is right if it ends with the answer's number after ####."""


def verify(prompt: str, response: str, answer: str | None) -> bool:
    """Compare the texts after the last #### of both, without commas and spaces."""
    return answer is not None and "####" in response and _final(response) == _final(answer)


def _final(text: str) -> str:
    return text.rpartition("####")[2].replace(",", "").strip()
'''

Target = Annotated[
    Path,
    typer.Argument(
        metavar="[FILE|FOLDER]", help=f"Write the recipe to this file, or to {FILE_NAME} in this folder."
    ),
]
ModelFlag = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="SOURCE",
        help="The model: a Hugging Face folder, gguf:FILE, package:NAME or hub:org/name@revision.",
    ),
]
Demonstrations = Annotated[
    str | None, typer.Option("--demonstrations", metavar="FILE", help="Prompts with responses, for SFT.")
]
Preferences = Annotated[
    str | None,
    typer.Option("--preferences", metavar="FILE", help="Prompts with a chosen and a rejected response."),
]
PromptsFlag = Annotated[
    str | None,
    typer.Option("--prompts", metavar="FILE", help="Prompts, with reference answers if a verifier judges."),
]
RewardFlag = Annotated[
    str | None,
    typer.Option(
        "--reward",
        metavar="KIND",
        help="Kind of reward. model: a reward model and PPO; verifier: a rule and GRPO; none: DPO, or SFT alone.",
    ),
]
VerifierFlag = Annotated[
    str | None,
    typer.Option(
        "--verifier",
        metavar="FILE.py",
        help="A file with a function verify(prompt, response, answer). Default: exact match.",
    ),
]
LoraFlag = Annotated[
    bool | None,
    typer.Option(
        "--lora/--no-lora", help="Train adapters (LoRA) in place of all weights. Default: all weights."
    ),
]
GpusFlag = Annotated[
    int | None, typer.Option("--gpus", min=0, help="GPUs for each stage; default: this machine's.")
]
Name = Annotated[
    str | None, typer.Option("--name", help="The recipe's name; default: its file's or folder's.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; use flags and defaults.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]


@dataclass(frozen=True)
class Given:
    """Flags and answers; None: not given."""

    model: str | None
    demonstrations: str | None
    preferences: str | None
    prompts: str | None
    reward: str | None
    verifier: str | None
    lora: bool | None
    gpus: int | None


def init(
    target: Target = Path(FILE_NAME),
    model: ModelFlag = None,
    demonstrations: Demonstrations = None,
    preferences: Preferences = None,
    prompts: PromptsFlag = None,
    reward: RewardFlag = None,
    verifier: VerifierFlag = None,
    lora: LoraFlag = None,
    gpus: GpusFlag = None,
    name: Name = None,
    yes: Yes = False,
    force: Force = False,
    verbose: Verbose = False,
) -> None:
    """Write a recipe for your model, files and hardware; ask for what no flag gives."""
    with explained(verbose):
        file = _file_of(target)
        _check_place(file)
        if file.exists() and not force:
            raise ValueError(f"{file} exists and is not overwritten; name another file, or add --force")
        given = Given(model, demonstrations, preferences, prompts, reward, verifier, lora, gpus)
        if not yes and _is_terminal():
            given = _ask(given)
        draft, own_verifier = _draft(given, file, name)
        _write(draft, file, own_verifier=own_verifier, force=force)
        _say(draft, file, own_verifier=own_verifier)


def _file_of(target: Path) -> Path:
    target = target.expanduser()
    is_folder = target.is_dir() or target.suffix not in (".yaml", ".yml")
    return target / FILE_NAME if is_folder else target


def _check_place(file: Path) -> None:
    """Refuse a path that cannot appear in the recipe's first line, or whose folder is a file."""
    if unfit := _UNFIT.search(str(file)):
        raise ValueError(
            f"{str(file)!a} has the character {unfit[0]!a}, which a recipe cannot quote; name another file or folder"
        )
    above = next((each for each in file.parents if each.exists()), None)
    if above is not None and not above.is_dir():
        raise ValueError(f"{file} would be in {above}, which is no folder; name a folder, or a .yaml file")


# Questions


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _ask(given: Given) -> Given:
    """Ask for what no flag gives."""
    print("A file's path, or nothing where there is none. Ctrl-C ends without a recipe.")
    model = given.model or _answer(
        "Model (folder, gguf:FILE, package:NAME, hub:org/name@revision)", TINY, _check_model
    )
    demonstrations = given.demonstrations or _file("Demonstrations: prompts with responses", "demonstrations")
    preferences = given.preferences or _file("Preferences: a chosen and a rejected response", "preferences")
    guess = "model" if preferences or not demonstrations else "none"
    reward = given.reward or _answer("Reward (model, verifier, none)", guess, _check_reward)
    prompts, verifier = given.prompts, given.verifier
    if reward == "verifier":
        prompts = prompts or _file("Prompts with reference answers", "prompts", needs_answers=True)
        verifier = verifier or _answer("Verifier (a .py file, or nothing: exact match)", "", _check_verifier)
    lora = given.lora
    if lora is None:
        lora = _answer("Adapters (LoRA) in place of all weights (y, n)", "n", _check_yes) in ("y", "yes")
    gpus = given.gpus
    if gpus is None:
        gpus = int(_answer("GPUs for each stage", str(_gpus_here()), _check_count))
    files = (demonstrations or None, preferences or None, prompts or None)
    return Given(model, *files, reward, verifier or None, lora, gpus)


def _answer(question: str, default: str, check: Callable[[str], None]) -> str:
    """Ask until the answer can be used."""
    while True:
        answer = str(typer.prompt(question, default=default, show_default=bool(default))).strip()
        try:
            check(answer)
        except ValueError as error:
            print(f"  {error}")
        else:
            return answer


def _builtin(source: str) -> "Builtin | None":
    from vantage.schemas.recipe.sources import Builtin, file_source

    origin = file_source(source)
    return origin if isinstance(origin, Builtin) else None


def _file(question: str, content: "Content", *, needs_answers: bool = False) -> str:
    from vantage.cli.data_columns import check_builtin

    def check(answer: str) -> None:
        if answer and _builtin(answer):
            check_builtin(answer, content)
        elif answer:
            found = _read(answer, content, needs_answers=needs_answers)
            mapped = ", ".join(f"{ours} = {theirs!r}" for ours, theirs in found.columns.items())
            print(f"  {mapped or 'its columns are called like ours'}")

    return _answer(f"{question} (.json, .jsonl, .csv, .parquet)", "", check)


def _check_model(answer: str) -> None:
    from vantage.models.source_digest import parse_source

    parse_source(answer)


def _check_reward(answer: str) -> None:
    if answer not in ("model", "verifier", "none"):
        raise ValueError(f"--reward={answer} is none of model, verifier, none; use one of them")


def _check_verifier(answer: str) -> None:
    if answer and not (answer.endswith(".py") and Path(answer).expanduser().is_file()):
        raise ValueError(
            f"--verifier={answer} is no file of Python; give one, or leave it out for exact match"
        )


def _check_yes(answer: str) -> None:
    if answer not in ("y", "yes", "n", "no"):
        raise ValueError(f"{answer!r} is neither y nor n; answer one of them")


def _check_count(answer: str) -> None:
    if not answer.isdecimal():
        raise ValueError(f"{answer!r} is no number; 0 is the CPU")


# From what was given to a draft


def _draft(given: Given, file: Path, name: str | None) -> "tuple[Draft, bool]":
    """Return the recipe, and whether a verifier is written beside it."""
    from vantage.cli.data_columns import builtin_rows, check_builtin
    from vantage.cli.recipe_draft import DataDraft, Draft
    from vantage.cli.room import lengths_for, num_weights
    from vantage.schemas.recipe.verifiers import EXACT_MATCH

    has_files = any((given.demonstrations, given.preferences, given.prompts))
    reward = _reward_of(given)
    _check_model(given.model or TINY)
    _check_verifier(given.verifier or "")
    sources = _sources_of(given, reward, has_files=has_files)
    data: dict[str, DataDraft] = {}
    found = {}
    measured: list[Sequence[Mapping[str, Any]]] = []
    for content, source in sources.items():
        if source is None or (reward == "verifier" and content == "preferences"):
            continue
        if builtin := _builtin(source):
            check_builtin(source, content)
            data[content] = DataDraft(source, content)
            measured.append(builtin_rows(builtin.name, content))
            continue
        needs_answers = reward == "verifier" and content == "prompts" and given.verifier is None
        found[content] = _read(source, content, needs_answers=needs_answers)
        measured.append(found[content].rows)
        few = found[content].is_all and len(found[content].rows) < FEW_ROWS
        data[content] = DataDraft(
            _from_recipe(source, file),
            content,
            found[content].columns,
            found[content].labels,
            held_out=0.1 if few else 0.05,
        )
    shares = {each.held_out for each in data.values()}
    if len(shares) > 1:  # a recipe has one pair of shares
        data = {key: replace(each, held_out=max(shares)) for key, each in data.items()}
    own_verifier = (
        reward == "verifier"
        and given.verifier is None
        and "prompts" in found
        and _is_marked(found["prompts"])
    )
    prompts = _builtin(sources.get("prompts") or "")
    verifier = _verifier_of(given, file, own=own_verifier, prompts=prompts) or EXACT_MATCH
    prompt_tokens, response_tokens = lengths_for(given.model or TINY, measured) if has_files else (48, 72)
    gpus = _gpus_here() if given.gpus is None else given.gpus
    model = given.model or TINY
    return (
        Draft(
            name=_name_of(name, file),
            model=model if ":" in model else _from_recipe(model, file),
            reward=reward,
            data=data,
            verifier=verifier,
            max_prompt_tokens=prompt_tokens,
            max_response_tokens=response_tokens,
            has_lora=bool(given.lora),
            gpus=gpus,
            is_sharded=gpus > 1
            and not given.lora
            and (num_weights(model) or 0) * BYTES_PER_WEIGHT > ONE_GPU_BYTES,
        ),
        own_verifier,
    )


def _sources_of(given: Given, reward: "Reward", *, has_files: bool) -> "dict[Content, str | None]":
    """Return the source of each content; a demo has the built-in sources that its reward reads."""
    sources: dict[Content, str | None] = {
        "demonstrations": given.demonstrations,
        "preferences": given.preferences,
        "prompts": given.prompts,
    }
    if not has_files:
        wanted = (
            "demonstrations",
            *(("preferences",) if reward == "model" else ()),
            *(("prompts",) if reward != "none" else ()),
        )
        sources = {content: BUILTIN.format(content) for content in sources if content in wanted}
    _check_there_is_enough(sources, reward)
    if reward == "model" and not sources.get("prompts") and not sources.get("demonstrations"):
        sources["prompts"] = _prompts_in(sources["preferences"] or "")
    if reward == "none":
        sources.pop("prompts", None)
    return sources


def _reward_of(given: Given) -> "Reward":
    if given.reward is not None:
        _check_reward(given.reward)
        return given.reward  # type: ignore[return-value]  # checked
    if given.verifier is not None or (given.prompts and not given.preferences):
        return "verifier"
    return "model" if given.preferences or not given.demonstrations else "none"


def _check_there_is_enough(sources: "dict[Content, str | None]", reward: "Reward") -> None:
    if reward == "model" and not sources.get("preferences"):
        raise ValueError(
            "--reward=model learns from preferences; add --preferences FILE, or take --reward none"
        )
    if reward == "verifier" and not sources.get("prompts"):
        raise ValueError(
            "--reward=verifier needs prompts to sample; add --prompts FILE, with reference answers"
        )
    if reward == "none" and not (sources.get("preferences") or sources.get("demonstrations")):
        raise ValueError(
            "--reward=none learns from files; add --preferences FILE (DPO) or --demonstrations FILE (SFT)"
        )


def _read(source: str, content: "Content", *, needs_answers: bool = False) -> "FoundColumns":
    from vantage.cli.data_columns import find_columns

    return find_columns(Path(source).expanduser(), content, needs_answers=needs_answers)


def _is_marked(found: "FoundColumns") -> bool:
    return all(MARK in str(row["answer"]) for row in found.rows)


def _prompts_in(source: str) -> str:
    """Return the source of prompts for preferences: the file itself, or the built-in prompts beside built-in preferences."""
    builtin = _builtin(source)
    return source if builtin is None else f"builtin:{builtin.name}/prompts"


def _verifier_of(given: Given, file: Path, *, own: bool, prompts: "Builtin | None") -> str | None:
    if given.verifier is not None:
        return _from_recipe(given.verifier, file)
    if own:
        return VERIFIER_NAME
    return None if prompts is None else prompts.name  # data and verifier of a task have one name


def _from_recipe(path: str, file: Path) -> str:
    """Return a path in the form for the recipe: relative to its folder if it is inside, else absolute."""
    found, folder = Path(path).expanduser().resolve(), file.parent.resolve()
    return str(found.relative_to(folder)) if found.is_relative_to(folder) else str(found)


def _gpus_here() -> int:
    from vantage.attempts.machine import available_gpus

    return len(available_gpus())


def _name_of(name: str | None, file: Path) -> str:
    if name is not None:
        return name
    stem = file.stem if file.name != FILE_NAME else file.resolve().parent.name
    return re.sub(r"[^a-z0-9_-]+", "-", stem.lower()).lstrip("-_0123456789")[:63] or "recipe"


# The file


def _write(draft: "Draft", file: Path, *, own_verifier: bool, force: bool) -> None:
    """Write the recipe, after loading it as ``vantage plan`` does."""
    from vantage.cli.recipe_draft import recipe_text
    from vantage.schemas.loading.recipe_file import parse_recipe
    from vantage.storage.durable_files import make_folder, replace_file

    text = recipe_text(draft, file=os.path.relpath(file))
    make_folder(file.parent)
    if own_verifier:
        beside = file.with_name(VERIFIER_NAME)
        if beside.exists() and beside.read_text(encoding="utf-8") != MARKED_VERIFIER and not force:
            raise ValueError(
                f"{beside} exists and is not overwritten; use it with --verifier {beside}, or add --force"
            )
        replace_file(beside, MARKED_VERIFIER.encode())
    parse_recipe(text, name=str(file), folder=file.parent.resolve())
    replace_file(file, text.encode())


def _say(draft: "Draft", file: Path, *, own_verifier: bool) -> None:
    import shlex

    from vantage.runs.own_commands import program

    stages = {"model": "reward model, value pretraining, PPO", "verifier": "GRPO", "none": "DPO"}[
        draft.reward
    ]
    parts = ["SFT"] if draft.start == "sft" else []
    parts += [stages] if draft.last != "sft" else []
    print(f"{file}: {', '.join([*parts, *(['evaluation'] if draft.reward != 'none' else [])])}")
    for name, data in draft.data.items():
        mapped = ", ".join(f"{ours} = {theirs!r}" for ours, theirs in data.columns.items())
        print(f"  data.{name}: {data.source}{f'; {mapped}' if mapped else ''}")
    if own_verifier:
        print(f"  {file.with_name(VERIFIER_NAME)}: compares the texts after {MARK}")
    command, place = program("vantage"), shlex.quote(str(file))
    print(f"next:  {command} plan {place}\n       {command} run {place}")
