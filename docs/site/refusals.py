"""Write the reference of all refusals: what is not accepted, and the remedy, from the messages in the code."""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

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


def pages() -> dict[str, str]:
    """Return path in the site → text of the page."""
    return {REFUSALS_PAGE: "\n".join(_page()) + "\n"}


def refusals(folder: str) -> dict[str, list[tuple[str, str]]]:
    """Return module → (what is refused, remedy) of each message in the folder, in the order of the code."""
    found: dict[str, list[tuple[str, str]]] = {}
    for file in sorted((ROOT / folder).rglob("*.py")):
        messages = dict.fromkeys(_messages(ast.parse(file.read_text(encoding="utf-8"))))
        if messages:
            found[file.relative_to(ROOT).as_posix()] = [_divided(each) for each in messages]
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


def _messages(tree: ast.AST) -> Iterator[str]:
    """Yield the message of each error that is raised, and of each ``Problem`` of a recipe, in the order of the code."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in functions:
        named = _texts_by_name(function)
        for node in _own_nodes(function):
            message = _message(node, named)
            if re.search(r"[a-z]+ [a-z]+", re.sub(r"\{.*?\}", "", message)):
                yield " ".join(message.split())


def _own_nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function, without those of the functions in it."""
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop(0)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
            waiting[:0] = ast.iter_child_nodes(node)


def _texts_by_name(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, str]:
    """Return variable → the text that the function gives it; of several texts the last one."""
    assigned = (node for node in _own_nodes(function) if isinstance(node, ast.Assign))
    return {
        target.id: text
        for node in assigned
        for target in node.targets
        if isinstance(target, ast.Name) and (text := _text(node.value))
    }


def _message(node: ast.AST, named: dict[str, str]) -> str:
    """Return the message of one ``raise`` or ``Problem(…)``; empty if the node is neither, or its text is elsewhere."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        return _text(node.exc.args[0], named) if _last_name(node.exc.func) in REFUSING else ""
    if isinstance(node, ast.Call) and _last_name(node.func) == "Problem" and len(node.args) > 1:
        message = "; ".join(filter(None, (_text(each, named) for each in node.args[1:3])))
        field = _path(node.args[0])
        return f"{field}: {message}" if message and field else message
    return ""


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


def _text(node: ast.expr, named: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return a message as a template: constants as they are, other parts by their code's last name in braces. ``named``: variable →
    its text."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Name(id=name):
            return named.get(name, "")
        case ast.JoinedStr(values=values):
            return "".join(_text(each) for each in values)
        case ast.FormattedValue(value=value):
            return f"{{{_name(value)}}}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left, named) + _text(right, named)
    return ""


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
    """Divide a message into what is refused and the remedy, which follows the last semicolon."""
    refused, _, remedy = message.rpartition("; ")
    return (refused, remedy) if refused else (message, "")


def _cell(text: str) -> str:
    """Return a message as a cell: signs that Markdown reads are shown as they are."""
    return re.sub(r"([\\`*_{}\[\]|])", r"\\\1", text).replace("<", "&lt;")
