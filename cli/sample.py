"""``vantage sample``: ask a policy of a run, a folder or a registered model; one model, or two side by side."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vantage.cli.app import DEFAULT_WORKSPACE, AsJson, Place, Verbose, complete_run
from vantage.cli.output import explained, print_json, workspace_at

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from vantage.attempts.launchers.sampling_process import SamplingProcess
    from vantage.runs.meanings import Command
    from vantage.runs.named_models import NamedModel
    from vantage.runs.workspace import Workspace
    from vantage.schemas.kind import ArtifactKind
    from vantage.schemas.recipe.rollout import Sampling
    from vantage.schemas.records.sampling import Answer, Answers, ModelOpened, SampleRequest, Turn

CHUNK = 32
"""Number of prompts in one request; their answers are printed before the next prompts are sampled."""

Named = Annotated[
    str,
    typer.Argument(
        metavar="RUN[/STAGE]|FOLDER|MODEL",
        help="A run (its published policy, else its last), a stage of it (or model, models.NAME of its recipe), a Hugging Face "
        "folder, a registered model of MLflow (NAME, NAME@ALIAS, NAME/VERSION), or a source as in a recipe (builtin:tiny, gguf:FILE …).",
        autocompletion=complete_run,
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PROMPT]...",
        help="Prompts. Without any: each line of standard input is one, or on a terminal a conversation begins.",
    ),
]
File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        metavar="FILE",
        help='JSON lines: {"prompt": …}, {"messages": [{"role": …, "content": …}]}, or text.',
    ),
]
Against = Annotated[
    str | None,
    typer.Option("--against", metavar="STAGE", help="Ask another stage of the run, or another model, too."),
]
Count = Annotated[int, typer.Option("--samples", "-n", min=1, help="Responses to each prompt.")]
Greedy = Annotated[
    bool, typer.Option("--greedy", help="Decode greedily: take the likeliest token each time.")
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", help="Sampling temperature above 0, in place of the recipe's."),
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", min=1, help="Most tokens of a response, in place of the recipe's."),
]
Seed = Annotated[
    int, typer.Option("--seed", min=0, help="The same seed, prompts and model give the same responses.")
]
System = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="A system prompt, for models with a chat template."),
]
Logprobs = Annotated[
    bool, typer.Option("--logprobs", help="Show the log-probability of each token, in nats.")
]
Engine = Annotated[
    Literal["loop", "vllm"],
    typer.Option(
        "--engine", help="Engine that samples, as rollout.engine of a recipe; vllm must be installed."
    ),
]
Url = Annotated[
    list[str] | None,
    typer.Option(
        "--url",
        metavar="ADDRESS",
        help="A server of vLLM that samples in place of this machine; repeat it for several, which share the prompts. Each serves "
        "the same model, and gets the policy's weights.",
    ),
]
ApiKeyVariable = Annotated[
    str | None,
    typer.Option(
        "--api-key-variable", metavar="NAME", help="Environment variable with the API key of the servers."
    ),
]
WeightsFolder = Annotated[
    Path | None,
    typer.Option(
        "--weights-folder",
        metavar="FOLDER",
        resolve_path=True,
        help="A folder for the weights, which the servers reach under the same absolute path; by default a temporary one, for "
        "servers on this machine.",
    ),
]


@dataclass(frozen=True)
class Opened:
    """A model that can be asked."""

    title: str
    model: "NamedModel"
    process: "SamplingProcess"
    described: "ModelOpened"


@dataclass(frozen=True)
class Settings:
    """Settings with which each prompt is sampled."""

    count: int
    seed: int
    greedy: bool
    temperature: float | None
    max_tokens: int | None
    system: str | None

    def request(self, conversations: "Sequence[Sequence[Turn]]", *, offset: int = 0) -> "SampleRequest":
        """Return the request for some conversations; ``offset``: number of earlier conversations."""
        from vantage.schemas.records.sampling import SampleRequest, Turn

        system = () if self.system is None else (Turn(role="system", content=self.system),)
        return SampleRequest(
            conversations=tuple((*system, *turns) for turns in conversations),
            count=self.count,
            seed=self.seed + offset,
            greedy=self.greedy,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
        )


def sample(
    named: Named,
    prompts: Prompts = None,
    file: File = None,
    against: Against = None,
    samples: Count = 1,
    greedy: Greedy = False,
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
    seed: Seed = 0,
    system: System = None,
    logprobs: Logprobs = False,
    engine: Engine = "loop",
    url: Url = None,
    api_key_variable: ApiKeyVariable = None,
    weights_folder: WeightsFolder = None,
    workspace: Place = DEFAULT_WORKSPACE,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Ask a policy, as its recipe samples from it: chat template, temperature, length and stop tokens."""
    with explained(verbose), ExitStack() as stack:
        if temperature is not None and not temperature > 0:
            raise ValueError(
                f"--temperature={temperature:g} must be above 0; --greedy takes the likeliest token"
            )
        settings = Settings(samples, seed, greedy, temperature, max_tokens, system)
        rollout = _rollout(engine, url, api_key_variable, weights_folder)
        if rollout.is_served and against is not None:
            raise ValueError(
                f"--against={against} asks a second model, and servers hold the weights of one at a time; leave --against or --url out"
            )
        asked = _asked(prompts or [], file)
        if asked is None and as_json:
            raise ValueError(
                "--json needs prompts; give them as arguments, with --file, or on standard input"
            )
        if asked is not None:
            asked = _not_empty(asked)  # a file that cannot be read is refused before a model is loaded
        place = workspace_at(workspace)
        names = [named] if against is None else [named, _beside(place, named, against)]
        models = _open_all(stack, place, names, against, settings, rollout)
        from vantage.runs.console import open_console

        console = open_console()
        if asked is None:
            _converse(console, models, settings, logprobs=logprobs)
        elif as_json:
            print_json(_all_as_json(models, settings, list(asked)))
        else:
            _answer_all(console, models, settings, asked, logprobs=logprobs)


def _rollout(
    engine: str, url: list[str] | None, api_key_variable: str | None, weights_folder: Path | None
) -> "Sampling":
    """Return the engine of the options; ``--url`` means vllm.

    Raises:
        ValueError: an option has a value that the recipe's field of the same name may not have, or is not read.
    """
    from vantage.schemas.loading.field_errors import validated
    from vantage.schemas.recipe.rollout import Sampling

    of_servers = {"--api-key-variable": api_key_variable, "--weights-folder": weights_folder}
    for option, value in of_servers.items():
        if value is not None and not url:
            raise ValueError(f"{option}={value} is about servers that sample; add --url ADDRESS")
    given = {
        "engine": "vllm" if url else engine,
        "url": url,
        "api_key_variable": api_key_variable,
        "weights_folder": None if weights_folder is None else str(weights_folder),
    }
    found = validated(Sampling, {name: value for name, value in given.items() if value})
    for problem in found.problems:
        match problem.path:
            case ("url", int(place)):
                raise ValueError(
                    f"--url={(url or [])[place]} is no address of a server; write http://HOST:PORT"
                )
            case ("api_key_variable",):
                raise ValueError(
                    f"--api-key-variable={api_key_variable} is no name of a variable; name the variable that holds the key"
                )
            case _:
                raise ValueError(f"--{problem}")
    assert found.value is not None, "without a problem there is a value"
    return found.value


def _open_all(
    stack: ExitStack,
    place: "Workspace",
    names: list[str],
    against: str | None,
    settings: Settings,
    rollout: "Sampling",
) -> list[Opened]:
    """Start a process for each model; they load at the same time."""
    from vantage.attempts.launchers.sampling_process import open_model
    from vantage.runs.named_models import open_named_model
    from vantage.schemas.records.sampling import OpenModel, generation_with

    kinds: tuple[ArtifactKind, ...] = ("policy",)
    found = [stack.enter_context(open_named_model(place, name, _accepted(), kinds=kinds)) for name in names]
    started = [
        stack.enter_context(
            open_model(
                OpenModel(
                    folder=model.folder,
                    base=model.base,
                    source=model.source,
                    generation=generation_with(
                        model.generation, temperature=settings.temperature, max_tokens=settings.max_tokens
                    ),
                    chat=model.chat,
                    date=model.date,
                    rollout=rollout,
                ),
                side_by_side=len(found),
            )
        )
        for model in found
    ]
    titles = [model.origin.stage if model.origin else model.label for model in found]
    if len(set(titles)) < len(titles):
        titles = [model.label for model in found]
    if against is None:
        titles = [""]
    return [
        Opened(title, model, process, process.opened())
        for title, model, process in zip(titles, found, started, strict=True)
    ]


def _beside(place: "Workspace", named: str, against: str) -> str:
    """Resolve ``--against sft``: a stage of the same run, if it has one of that name; otherwise a model by its name."""
    from vantage.runs.named_models import stage_beside

    return stage_beside(place, named, against, _accepted()) or against


def _accepted() -> "Command":
    from vantage.runs.meanings import MADE, Command, FolderNamed, SourceNamed

    return Command("sample", (*MADE, FolderNamed, SourceNamed))


# What is asked


def _asked(prompts: list[str], file: Path | None) -> "Iterator[tuple[Turn, ...]] | None":
    """Return the conversations of the arguments, the file, or standard input; None: ask on a terminal."""
    if prompts and file is not None:
        raise ValueError(f"there are prompts and --file {file}; give one of them")
    if file is not None:
        return _in_file(file)
    if prompts:
        return iter([_turns(text) for text in prompts])
    if sys.stdin.isatty():
        return None
    return (_turns(line.rstrip("\r\n")) for line in sys.stdin if line.strip())


def _turns(text: str, where: str = "the prompt") -> "tuple[Turn, ...]":
    from vantage.schemas.records.sampling import Turn

    return (Turn(role="user", content=_utf8(text, where)),)


def _utf8(text: str, where: str) -> str:
    """Return the text. Raises ValueError if it has bytes that are not UTF-8, or half of a character that was escaped in
    JSON."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{where}: is not UTF-8; correct it, or save it as UTF-8 text") from None
    return text


def _in_file(file: Path) -> "Iterator[tuple[Turn, ...]]":
    with file.open(encoding="utf-8", errors="surrogateescape") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _of_row(line, f"{file}:{number}")


def _of_row(line: str, where: str) -> "tuple[Turn, ...]":
    """Return the conversation of a line. Raises ValueError, which names what the line lacks."""
    from vantage.schemas.records.sampling import Turn

    text = _utf8(line, where)
    try:
        row = json.loads(text)
    except RecursionError:
        raise ValueError(f"{where}: is nested too deeply; correct the line") from None
    except ValueError as error:
        raise ValueError(f"{where}: is not JSON ({error}); correct the line") from None
    if isinstance(row, str):
        return _turns(row, where)
    if isinstance(row, dict) and isinstance(row.get("prompt"), str):
        return _turns(row["prompt"], where)
    if isinstance(row, dict) and isinstance(row.get("messages"), list) and row["messages"]:
        try:
            turns = tuple(Turn(role=each["role"], content=each["content"]) for each in row["messages"])
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"{where}: each of messages needs a role (system, user, assistant) and a text as content; correct the line"
            ) from None
        for turn in turns:
            _utf8(turn.content, where)
        return turns[:-1] if turns[-1].role == "assistant" and len(turns) > 1 else turns
    raise ValueError(f"{where}: has neither prompt (a text) nor messages (a list); correct the line")


def _not_empty(asked: "Iterator[tuple[Turn, ...]]") -> "Iterator[tuple[Turn, ...]]":
    """Return the conversations unchanged; raises ValueError if there is none, or if the first cannot be read."""
    first = next(asked, None)
    if first is None:
        raise ValueError(
            "there is no prompt; give one as an argument, a line on standard input, or --file FILE"
        )
    return chain([first], asked)


def _chunks(asked: "Iterator[tuple[Turn, ...]]") -> "Iterator[list[tuple[Turn, ...]]]":
    chunk: list[tuple[Turn, ...]] = []
    for turns in asked:
        chunk.append(turns)
        if len(chunk) == CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _ask(models: list[Opened], request: "SampleRequest") -> "list[tuple[Answers, ...]]":
    """Return the answers of each model; all compute at the same time."""
    for model in models:
        model.process.send(request)
    return [model.process.sampled().conversations for model in models]


# What is shown


def _answer_all(
    console: "Console",
    models: list[Opened],
    settings: Settings,
    asked: "Iterator[tuple[Turn, ...]]",
    *,
    logprobs: bool,
) -> None:
    done = 0
    for chunk in _chunks(asked):
        replies = _ask(models, settings.request(chunk, offset=done))
        for place, turns in enumerate(chunk):
            if done + place:
                console.print()
            _show_prompt(console, turns)
            for model, reply in zip(models, replies, strict=True):
                _show_answers(console, model, reply[place], logprobs=logprobs)
        done += len(chunk)
    if not done:
        raise ValueError(
            "there is no prompt; give one as an argument, a line on standard input, or --file FILE"
        )


def _show_prompt(console: "Console", turns: "Sequence[Turn]") -> None:
    from rich.text import Text

    for turn in turns:
        mark = ">" if turn.role == "user" else f"{turn.role}:"
        console.print(Text.assemble((f"{mark} ", "bold cyan"), (turn.content, "bold")), soft_wrap=True)


def _show_answers(console: "Console", model: Opened, reply: "Answers", *, logprobs: bool) -> None:
    from rich.text import Text

    limit = model.model.generation.max_prompt_tokens
    if reply.prompt_tokens > limit and model.model.origin is not None:
        console.print(
            Text(
                f"the prompt has {reply.prompt_tokens} tokens, more than the recipe's generation.max_prompt_tokens={limit}",
                style="yellow",
            ),
            soft_wrap=True,
        )
    for number, answer in enumerate(reply.answers, 1):
        label = " ".join(filter(None, [model.title, str(number) if len(reply.answers) > 1 else ""]))
        console.print(
            Text.assemble(
                (f"{label}: " if label else "", "bold green"),
                _tokens(answer) if logprobs else answer.text,
                *([] if answer.ended else [(f"  … cut off at {answer.num_tokens} tokens", "yellow")]),
            ),
            soft_wrap=True,
        )


def _tokens(answer: "Answer") -> "Text":
    """Return each token with its log-probability; unlikely tokens are coloured."""
    from rich.text import Text

    text = Text()
    for token, logprob in zip(answer.tokens, answer.logprobs, strict=True):
        style = "" if logprob > -0.7 else "yellow" if logprob > -2.3 else "red"  # ln 0.5, ln 0.1
        text.append(token.replace("\n", "\\n"), style)
        text.append(f" {logprob:.2f} ", "dim")
    return text.append(f" Σ {answer.logprob:.2f} nats", "dim")


def _all_as_json(models: list[Opened], settings: Settings, asked: "list[tuple[Turn, ...]]") -> dict[str, Any]:
    """Return the output of ``--json``."""
    shown: list[dict[str, Any]] = []
    for chunk in _chunks(iter(asked)):
        replies = _ask(models, settings.request(chunk, offset=len(shown)))
        for place, turns in enumerate(chunk):
            answers = [
                {"model": model.model.label, **answer.model_dump(mode="json")}
                for model, reply in zip(models, replies, strict=True)
                for answer in reply[place].answers
            ]
            messages = [turn.model_dump() for turn in turns]
            shown.append(
                {"messages": messages, "prompt_tokens": replies[0][place].prompt_tokens, "answers": answers}
            )
    return {"models": [_model_as_json(model, settings) for model in models], "prompts": shown}


def _model_as_json(opened: Opened, settings: Settings) -> dict[str, Any]:
    origin, generation = opened.model.origin, opened.model.generation
    return {
        "model": opened.model.label,
        "digest": None if origin is None else origin.digest,
        "chat": opened.described.uses_chat,
        "stop_tokens": opened.described.stop_tokens,
        "stop": generation.stop,
        "temperature": settings.temperature or generation.temperature,
        "max_tokens": settings.max_tokens or generation.max_response_tokens,
        "greedy": settings.greedy,
        "seed": settings.seed,
    }


# A conversation


def _converse(console: "Console", models: list[Opened], settings: Settings, *, logprobs: bool) -> None:
    """Ask each line from the terminal, until its end; earlier turns are kept if all models have a chat template."""
    from rich.text import Text

    from vantage.schemas.records.sampling import Turn

    keeps = len(models) == 1 and models[0].described.uses_chat
    labels = " and ".join(model.model.label for model in models)
    how = "/new forgets what was said" if keeps else "each line is a prompt of its own"
    console.print(Text(f"{labels}; {how}, Ctrl-D ends", style="dim"), soft_wrap=True)
    said: list[Turn] = []
    number = 0
    while (line := _read_line(console)) is not None:
        if line in ("/new", "/quit", "/exit"):
            if line != "/new":
                return
            said = []
            continue
        turns = [*(said if keeps else []), Turn(role="user", content=line)]
        try:
            replies = _ask(models, settings.request([turns], offset=number))
        except ValueError as error:  # for example, the line is too long: the conversation goes on
            console.print(Text(str(error), style="red"), soft_wrap=True)
            continue
        number += 1
        for model, reply in zip(models, replies, strict=True):
            _show_answers(console, model, reply[0], logprobs=logprobs)
        said = [*turns, Turn(role="assistant", content=replies[0][0].answers[0].text)]


def _read_line(console: "Console") -> str | None:
    """Return a line that is not empty; None at the end of input."""
    while True:
        try:
            line = console.input("[bold cyan]> [/]").strip()
        except EOFError:
            console.print()
            return None
        if line:
            return line
