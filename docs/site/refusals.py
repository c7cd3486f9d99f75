"""Write the reference of all refusals: what is not accepted, and the remedy, from the messages in the code."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from docs.site.texts_in_code import Function, Values, given_values, nodes_with_values

REFUSALS_PAGE = "reference/refusals.md"

ROOT = Path(__file__).parents[2]
READ = {
    "schemas": "Recipes, sweeps and data",
    "attempts": "Sources and machines",
    "models": "Models and tokenizers",
    "tasks": "Stages",
    "storage": "Workspaces",
    "ledger": "MLflow",
    "runs": "Runs and names",
    "signing": "Keys and signatures",
    "estimates": "Estimates",
    "review": "Audits, reports and exports",
    "flows": "Prefect and publishing",
    "cli": "The command line",
}
"""Folder → heading of its refusals, in the order in which a user meets them."""
REFUSING = {
    "ValueError",
    "RecipeError",
    "RunError",
    "DriftError",
    "SweepError",
    "PublishingError",
    "BadParameter",
    "UsageError",
}
"""The errors that are printed to a user; others are faults of Vantage."""
OR = ", or: "
"""Between the texts of which a message has one."""
SUGGESTED = "the message names a similar name, or those that can be used"
"""The remedy of ``vantage.schemas.problems.suggest``."""
REASONS = {
    "models/folder_check.py": "fetch or write it again",
    "models/gguf_header.py": "fetch it again",
    "tasks/data/": "correct the rows, or raise max_dropped to train without those rows",
    "storage/": "run the same recipe again, which makes it anew",
}
"""Modules whose texts are reasons within other messages → the remedy with which those messages end."""


def pages() -> dict[str, str]:
    """Return path in the site → text of the page."""
    return {REFUSALS_PAGE: "\n".join(_page()) + "\n"}


@cache
def refusals(folder: str) -> dict[str, list[tuple[str, str]]]:
    """Return module → (what is refused, remedy) of each message in the folder, in the order of the code."""
    found: dict[str, list[tuple[str, str]]] = {}
    for file in sorted((ROOT / folder).rglob("*.py")):
        messages = dict.fromkeys(_messages(ast.parse(file.read_text(encoding="utf-8"))))
        name = file.relative_to(ROOT).as_posix()
        otherwise = next((remedy for begin, remedy in REASONS.items() if name.startswith(begin)), "")
        if messages:
            divided = map(_divided, messages)
            found[name] = [(refused, remedy or otherwise) for refused, remedy in divided]
    return found


def _page() -> Iterator[str]:
    yield from (
        "# Refusals and their remedies",
        "",
        "All messages with which Vantage refuses input. A part in braces, such as `{name}`, is replaced by the value. To find a message,",
        "search this page for its words between the values. A refusal ends with exit code 65 (2 for the command line), before anything is",
        "computed or written, where that can be known beforehand.",
    )
    for folder, heading in READ.items():
        modules = refusals(folder)
        if not modules:
            continue
        yield from ("", f"## {heading}", "", "| refused | remedy |", "|---|---|")
        for messages in modules.values():
            for refused, remedy in messages:
                yield f"| {_cell(refused)} | {_cell(remedy) if remedy else 'as the message describes'} |"


def _messages(tree: ast.Module) -> Iterator[str]:
    """Yield the message of each error that is raised, and of each ``Problem`` of a recipe, in the order of the code."""
    constants = given_values(tree.body)
    functions = [node for node in ast.walk(tree) if isinstance(node, Function)]
    for function in functions:
        for node, values in nodes_with_values(function, constants):
            for message in _messages_of(node, values):
                if re.search(r"[a-z]+ [a-z]+", re.sub(r"\{.*?\}", "", message)):
                    yield " ".join(message.split())


def _messages_of(node: ast.AST, values: Values) -> Iterator[str]:
    """Yield each message that one ``raise`` or ``Problem(…)`` may have; none if the node is neither, or its text is elsewhere."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        if _last_name(node.exc.func) in REFUSING:
            yield from _texts(node.exc.args[0], values)
    elif isinstance(node, ast.Call) and _last_name(node.func) == "Problem" and len(node.args) > 1:
        field = _path(node.args[0])
        remedies = OR.join(_texts(node.args[2], values)) if len(node.args) > 2 else ""
        for said in _texts(node.args[1], values):
            message = "; ".join(filter(None, (said, remedies)))
            yield f"{field}: {message}" if field else message


def _last_name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _path(node: ast.expr) -> str:
    """Return the path of a field as a template; empty if it is given as one value."""
    if not isinstance(node, ast.Tuple):
        return ""
    parts = (each.value if isinstance(each, ast.Starred) else each for each in node.elts)
    return ".".join(
        str(each.value) if isinstance(each, ast.Constant) else f"{{{_name(each)}}}" for each in parts
    )


def _texts(node: ast.expr, values: Values) -> list[str]:
    """Return the texts that an expression may have, each as a template: constants as they are, other parts by their code's last
    name in braces."""
    match node:
        case ast.Constant(value=str(text)):
            found = [text]
        case ast.Name(id=name):
            found = [text for value in values.get(name, ()) for text in _texts(value, {})]
        case ast.JoinedStr(values=parts):
            found = ["".join(_part(each) for each in parts)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            found = [a + b for a in _texts(left, values) or [""] for b in _texts(right, values) or [""]]
        case ast.IfExp(body=body, orelse=orelse):
            found = [*_texts(body, values), *_texts(orelse, values)]
        case ast.BoolOp(op=ast.Or(), values=choices):
            found = [text for each in choices for text in _texts(each, values)]
        case ast.Call(func=ast.Name(id="suggest")):
            found = [SUGGESTED]
        case _:
            found = []
    return list(dict.fromkeys(filter(None, found)))


def _part(node: ast.expr) -> str:
    """Return one part of an f-string."""
    return f"{{{_name(node.value)}}}" if isinstance(node, ast.FormattedValue) else "".join(_texts(node, {}))


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(attr=name):
            return name
        case ast.Call(args=[first, *_]):
            return _name(first)
        case ast.Call(func=function):
            return _name(function)
        case ast.Subscript(value=value):
            return _name(value)
        case ast.Constant(value=value):
            return str(value)
    return "value"


def _divided(message: str) -> tuple[str, str]:
    """Divide a message into what is refused and the remedy: what follows the last semicolon, or the rule that a value must fulfil."""
    refused, _, remedy = message.rpartition("; ")
    if refused:
        return refused, remedy
    value, must, rule = message.partition(" must be ")
    return (value, must.strip() + " " + rule) if must and "sha256" not in value else (message, "")


def _cell(text: str) -> str:
    """Return a message as a cell: signs that Markdown reads are shown as they are."""
    return re.sub(r"([\\`*_{}\[\]|])", r"\\\1", text).replace("<", "&lt;")
