"""``vantage data inspect``: show the content of a file of data, its faults, and its entry in a recipe."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vantage.cli.app import AsJson, Verbose
from vantage.cli.helpful_command import HelpfulCommand
from vantage.cli.output import explained, print_json

if TYPE_CHECKING:
    from rich.console import Console

    from vantage.schemas.recipe.inputs import Content, Load
    from vantage.schemas.records.inspection import FileInspection, Quantiles, ShownRow
    from vantage.schemas.records.sampling import RenderedRow

data_app = typer.Typer(no_args_is_help=True, help="Inspect data files.")

MEASURED_ROWS = 500
"""Number of usable rows whose tokens are counted."""
_PIECE = 1200
"""Number of characters that are shown of a piece of a row."""
_NO_RESPONSE: Sequence[Any] = (None,)
_SHOWN_FAULTS = 5
_WITHOUT_MODEL = {"user": "User", "assistant": "Assistant", "system": "System", "tool": "Tool"}


@data_app.command("inspect", cls=HelpfulCommand)
def inspect(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="JSON, JSON lines, CSV, Parquet or Arrow; texts also packed (.gz, .bz2, .xz, .zst); or hub:ORGANISATION/NAME@COMMIT/FILE, "
            "or hub:ORGANISATION/NAME@COMMIT with --split.",
        ),
    ],
    content: Annotated[
        str | None,
        typer.Option(
            "--content",
            metavar="KIND",
            help="Format: demonstrations, preferences, rankings, labelled_responses or prompts. Default: found from the rows.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="SOURCE",
            help="Count tokens and show rows as this model reads them; written as a recipe's model.source.",
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", metavar="NAME", help="The split to read of a dataset on the hub."),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            "--config", metavar="NAME", help="The configuration (subset) to read of a dataset on the hub."
        ),
    ] = None,
    max_rows: Annotated[
        int | None,
        typer.Option("--max-rows", min=1, help="Read only the first rows of a dataset on the hub."),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", min=0, max=100, help="Number of rows to show.")] = 5,
    as_json: AsJson = False,
    verbose: Verbose = False,
) -> None:
    """Show the format of a file, rows with what is trained on in colour, lengths, problems, and its entry in a recipe."""
    with explained(verbose):
        from vantage.runs.console import open_console
        from vantage.tasks.data.inspection import inspect_file

        try:
            found, first = inspect_file(file, _content(content), _load(split, config, max_rows))
        except FileNotFoundError:
            raise ValueError(f"{file}: there is no such file; correct the path") from None
        chosen = first[:: max(1, len(first) // rows)][:rows] if rows else []
        if model is None:
            found = found.model_copy(update={"shown": tuple(_plain(number, row) for number, row in chosen)})
        else:
            found = _with_tokens(found, model, first[:MEASURED_ROWS], chosen)
        if as_json:
            print_json(found.model_dump(mode="json"))
        else:
            _show(open_console(), file, found)


def _content(named: str | None) -> "Content | None":
    from typing import get_args

    from vantage.schemas.recipe.inputs import Content

    if named is not None and named not in get_args(Content):
        raise ValueError(
            f"--content={named} is no content of rows; use one of: {', '.join(get_args(Content))}"
        )
    return named  # type: ignore[return-value]


def _load(split: str | None, config: str | None, max_rows: int | None) -> "Load | None":
    """Return the rows of a dataset on the hub to read; rows are streamed, so that only these are fetched."""
    from vantage.schemas.recipe.inputs import CONFIG_PATTERN, SPLIT_PATTERN, Load

    if split is None:
        for flag, value in (("--config", config), ("--max-rows", max_rows)):
            if value is not None:
                raise ValueError(
                    f"{flag}={value} is about one split of a dataset on the hub; add --split NAME"
                )
        return None
    for flag, value, pattern, what in (
        ("--split", split, SPLIT_PATTERN, "split"),
        ("--config", config, CONFIG_PATTERN, "configuration"),
    ):
        if value is not None and not re.fullmatch(pattern, value):
            raise ValueError(f"{flag}={value!r} is no name of a {what}; it matches {pattern}")
    return Load(split=split, config=config, max_rows=max_rows, streaming=True)


def _with_tokens(
    found: "FileInspection",
    model: str,
    measured: Sequence[tuple[int, Mapping[str, Any]]],
    chosen: Sequence[tuple[int, Mapping[str, Any]]],
) -> "FileInspection":
    """Return the inspection with lengths and rows in the model's tokens."""
    from vantage.attempts.launchers.sampling_process import open_model
    from vantage.schemas.records.inspection import ShownRow
    from vantage.schemas.records.sampling import OpenModel, RenderRequest, RowToRender
    from vantage.tasks.data.inspection import quantiles, turns_of_responses

    wanted = {number for number, _ in chosen}
    pairs = [
        (
            number,
            RowToRender(
                prompt=row["prompt"], messages=_turns(row), response=response, is_shown=number in wanted
            ),
        )
        for number, row in measured
        for response in turns_of_responses(row) or _NO_RESPONSE
    ]
    if not pairs:
        return found
    with open_model(OpenModel(source=model)) as process:
        try:
            process.opened()
            rendered = process.render(RenderRequest(rows=tuple(row for _, row in pairs))).rows
        except ValueError as error:
            raise ValueError(str(error) if model in str(error) else f"--model={model}: {error}") from None
    faults: dict[int, str] = {}
    for (number, _), each in zip(pairs, rendered, strict=True):
        if each.fault is not None:
            faults.setdefault(number, each.fault)
    shown = [
        ShownRow(row=number, parts=each.parts, num_tokens=each.prompt_tokens + each.response_tokens)
        for (number, _), each in zip(pairs, rendered, strict=True)
        if number in wanted and each.fault is None
    ]
    read = [each for each in rendered if each.fault is None]
    has_responses = found.response_characters is not None and read
    return found.model_copy(
        update={
            "prompt_tokens": quantiles([each.prompt_tokens for each in read]) if read else None,
            "response_tokens": quantiles([each.response_tokens for each in read]) if has_responses else None,
            "num_unlike": len(faults),
            "first_unlike": tuple(
                f"row {number}: {fault}" for number, fault in islice(faults.items(), _SHOWN_FAULTS)
            ),
            "unwritten": _unwritten([number for number, _ in pairs], rendered),
            "special_tokens": _special_tokens([number for number, _ in pairs], rendered),
            "shown": tuple(shown),
        }
    )


def _special_tokens(numbers: Sequence[int], rendered: "Sequence[RenderedRow]") -> dict[str, tuple[int, int]]:
    """Return special token → (occurrences, rows with it); several responses share a row's prompt."""
    of_row: dict[int, Counter[str]] = {}
    for number, each in zip(numbers, rendered, strict=True):
        found = of_row.setdefault(number, Counter(each.special_in_prompt))
        found.update(each.special_in_response)
    times = sum(of_row.values(), Counter[str]())
    return {token: (times[token], sum(token in found for found in of_row.values())) for token in times}


def _unwritten(numbers: Sequence[int], rendered: "Sequence[RenderedRow]") -> dict[str, int]:
    """Return part that the chat template does not write → number of rows with this part."""
    found = {
        (number, part) for number, each in zip(numbers, rendered, strict=True) for part in each.unwritten
    }
    return dict(Counter(part for _, part in sorted(found)))


def _turns(row: Mapping[str, Any]) -> Any:
    return None if row["messages"] is None else tuple(row["messages"])


def _plain(number: int, row: Mapping[str, Any]) -> "ShownRow":
    """Return the row without a model: each turn with its role."""
    from vantage.schemas.conversations import extras_of
    from vantage.schemas.records.inspection import ShownRow
    from vantage.tasks.data.inspection import turns_of_responses

    turns = row["messages"] or [{"role": "user", "content": row["prompt"], "extra": None}]
    parts: list[tuple[str, bool]] = []
    for turn in turns:
        parts += [
            (f"{_WITHOUT_MODEL[turn['role']]}: ", False),
            (f"{turn['content']}\n", turn["role"] == "assistant" and extras_of(turn).get("weight") != 0),
        ]
    for response in turns_of_responses(row):
        extra = f" {response['extra']}" if response["extra"] else ""
        parts += [("Assistant: ", False), (f"{response['content']}{extra}\n", True)]
    return ShownRow(row=number, parts=tuple(parts))


def _show(console: "Console", file: Path, found: "FileInspection") -> None:
    from rich.text import Text

    from vantage.schemas.safe_text import safe_text

    also = f" (can be read as {' and '.join(found.also)}, too)" if found.also else ""
    console.print(
        Text.assemble((str(file), "bold"), f": {found.content}: {found.format}{also}"), soft_wrap=True
    )
    for shown in found.shown:
        tokens = "" if shown.num_tokens is None else f", {shown.num_tokens:,} tokens"
        console.print(Text(f"\nrow {shown.row}{tokens}", style="dim"))
        console.print(_coloured(shown), soft_wrap=True, highlight=False)
    if found.shown:
        console.print(
            Text.assemble(
                "\nGreen is the text of the assistant: its tokens are learnt or judged.", style="dim"
            )
        )
    console.print()
    for line in _lines(found):
        console.print(Text(line), soft_wrap=True)
    for problem in found.first_problems:
        console.print(Text(f"    {problem}", style="yellow"), soft_wrap=True)
    for unlike in found.first_unlike:
        console.print(Text(f"    {safe_text(unlike)}", style="yellow"), soft_wrap=True)
    for content, why in found.nearly.items():
        console.print(Text(f"no {content}  {safe_text(why)}", style="yellow"), soft_wrap=True)
    if found.unread:
        console.print(Text(f"not read  {', '.join(map(safe_text, found.unread))}"), soft_wrap=True)
    console.print(Text("\nFor a recipe:", style="bold"))
    console.print(Text(found.recipe.rstrip()), soft_wrap=True)


def _coloured(shown: "ShownRow") -> Any:
    from rich.text import Text

    from vantage.schemas.safe_text import safe_text

    text = Text()
    for part, is_learnt in shown.parts:
        cut = part if len(part) <= _PIECE else f"{part[: _PIECE // 2]} […] {part[-_PIECE // 2 :]}"
        text.append(safe_text(cut), style="green" if is_learnt else "dim")
    return text


def _lines(found: "FileInspection") -> list[str]:
    from vantage.schemas.safe_text import safe_text

    lines = [
        f"rows      {found.num_rows:,}, of which {found.num_usable:,} can be used; {found.num_prompts:,} different prompts"
        + (
            f"; {found.num_conversations:,} with a system message or several turns"
            if found.num_conversations
            else ""
        ),
        f"prompts   {_lengths(found.prompt_characters, 'characters')}",
    ]
    if found.prompt_tokens is not None:
        lines.append(f"          {_lengths(found.prompt_tokens, 'tokens')} (the first {MEASURED_ROWS} rows)")
    if found.response_characters is not None:
        lines.append(f"responses {_lengths(found.response_characters, 'characters')}")
    if found.response_tokens is not None:
        lines.append(f"          {_lengths(found.response_tokens, 'tokens')}")
    scripts = [f"{name} {share:.0%}" for name, share in found.scripts.items() if share >= 0.005]
    lines.append(f"scripts   {', '.join(scripts) or 'no letters'}")
    if found.special_tokens:
        spelled = [
            f"{token} {times:,} times in {rows:,} {'row' if rows == 1 else 'rows'}"
            for token, (times, rows) in found.special_tokens.items()
        ]
        lines.append(f"special   tokens that the text spells out: {', '.join(map(safe_text, spelled))}")
    for part, rows in found.unwritten.items():
        lines.append(
            f"not read  {part} in {rows:,} {'row' if rows == 1 else 'rows'}: the model has no chat template that writes them"
        )
    problems = [f"{count:,} x {reason}" for reason, count in found.problems.items()]
    if found.num_unlike:
        problems.append(
            f"{found.num_unlike:,} of the first {min(MEASURED_ROWS, found.num_usable):,} rows do not fit the model's chat template"
        )
    lines.append(f"problems  {'; '.join(problems) or 'none'}")
    return lines


def _lengths(lengths: "Quantiles", unit: str) -> str:
    return f"{lengths.least:,} to {lengths.most:,} {unit}, median {lengths.median:,}, 95th percentile {lengths.most_95:,}"
