"""Find the texts that the variables of a function may have at each place in its code, without running it."""

import ast
from collections.abc import Generator, Iterator, Mapping, Sequence

Function = ast.FunctionDef | ast.AsyncFunctionDef
Values = Mapping[str, tuple[ast.expr, ...]]
"""Variable → the expressions, one of which has given it its value."""
_ENDS = (ast.Raise, ast.Return, ast.Continue, ast.Break)
_BLOCKS = ("body", "orelse", "finalbody")


def nodes_with_values(function: Function, constants: Values) -> Iterator[tuple[ast.AST, Values]]:
    """Yield each node of a function with the values of its variables there; functions within it are left out.

    A later assignment replaces an earlier one; after a branch, a variable may have the value of either side. ``constants``: the values
    of the module's own variables.
    """
    yield from _block(function.body, constants)


def given_values(statements: Sequence[ast.stmt]) -> Values:
    """Return variable → the values that these statements give it, without the blocks in them."""
    found: Values = {}
    for statement in statements:
        found = {**found, **_given(statement)}
    return found


def _block(statements: Sequence[ast.stmt], values: Values) -> Generator[tuple[ast.AST, Values], None, Values]:
    for statement in statements:
        if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            values = yield from _statement(statement, values)
    return values


def _statement(statement: ast.stmt, values: Values) -> Generator[tuple[ast.AST, Values], None, Values]:
    yield statement, values
    for child in ast.iter_child_nodes(statement):
        if isinstance(child, ast.expr):
            yield from ((node, values) for node in ast.walk(child))
    values = {**values, **_given(statement)}
    blocks = list(_blocks(statement))
    if not blocks:
        return values
    after: list[Values] = [] if getattr(statement, "orelse", None) else [values]
    for block in blocks:
        end = yield from _block(block, values)
        if not isinstance(block[-1], _ENDS):
            after.append(end)
    return _merged(after)


def _blocks(statement: ast.stmt) -> Iterator[list[ast.stmt]]:
    parts = [statement, *getattr(statement, "handlers", ()), *getattr(statement, "cases", ())]
    for part in parts:
        yield from filter(None, (getattr(part, name, None) for name in _BLOCKS))


def _given(statement: ast.stmt) -> dict[str, tuple[ast.expr, ...]]:
    """Return variable → values that an assignment, or a loop over a written tuple of tuples, gives it."""
    pairs: list[tuple[ast.expr, ast.expr]] = []
    if isinstance(statement, ast.Assign):
        pairs = [(target, statement.value) for target in statement.targets]
    elif isinstance(statement, ast.For) and isinstance(statement.iter, ast.Tuple | ast.List):
        pairs = [(statement.target, value) for value in statement.iter.elts]
    found: dict[str, tuple[ast.expr, ...]] = {}
    for target, value in pairs:
        targets, values = ([target], [value])
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            targets, values = target.elts, value.elts
        for each, of in zip(targets, values, strict=False):
            if isinstance(each, ast.Name):
                found[each.id] = (*found.get(each.id, ()), of)
    return found


def _merged(branches: Sequence[Values]) -> Values:
    """Return variable → values of all branches, each once."""
    names = dict.fromkeys(name for values in branches for name in values)
    return {
        name: tuple(dict.fromkeys(value for values in branches for value in values.get(name, ())))
        for name in names
    }
