"""Turn pydantic's errors into problems of a recipe: the field, the value, the rule, the remedy."""

import itertools
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from vantage.schemas.frozen import BrokenRules, Frozen
from vantage.schemas.loading.meant import list_meant, mapping_meant, name_meant, number_meant, size_meant
from vantage.schemas.problems import (
    MAX_PROBLEMS,
    Path,
    Problem,
    names_field,
    quote,
    suggest,
)
from vantage.schemas.recipe.fields import NEW
from vantage.schemas.recipe.sources import bare_stage_of_run
from vantage.schemas.recipe.terms import RewardTerm, class_of

_NAME_REMEDY = "start with a lower-case letter; lower-case letters, {} follow"
_MAX_ROUNDS = 8

Model = TypeVar("Model", bound=Frozen)


@dataclass(frozen=True)
class Validated(Generic[Model]):
    """The result of ``validated``."""

    value: Model | None
    """The value; None if none can be made, even without the invalid fields."""
    plain: Any
    """The input without ``omitted``."""
    problems: list[Problem]
    omitted: tuple[Path, ...]


def validated(model: type[Model], plain: Any) -> Validated[Model]:
    """Return ``plain`` as a ``model``, with all problems of its fields.

    pydantic does not check the rules of a class where one of its fields is invalid. So invalid fields are omitted and
    the rest is validated again. A rule's message about an omitted field is dropped.
    """
    problems: list[Problem] = []
    omitted: list[Path] = []
    for _ in range(_MAX_ROUNDS):
        try:
            return Validated(model.model_validate(plain, context=NEW), plain, problems, tuple(omitted))
        except ValidationError as error:
            errors = error.errors(include_url=False)[:MAX_PROBLEMS]
        found = field_problems(model, errors, plain)
        if omitted:
            rules = {problem.path for problem in field_problems(model, _rules_of(errors), plain)}
            found = [
                problem
                for problem in found
                if problem in problems
                or (problem.path in rules and not any(is_about(problem, path) for path in omitted))
            ]
        problems += (problem for problem in found if problem not in problems)
        leaves = [path for problem in found for path in _paths_to_omit(problem, plain)]
        # Omit fields before list items; an item is omitted with its whole list.
        leaves = [path for path in leaves if not isinstance(path[-1], int)] or [
            tuple(itertools.takewhile(lambda part: not isinstance(part, int), path)) for path in leaves
        ]
        if not leaves:
            break
        omitted += leaves
        plain = _without(plain, leaves)
    return Validated(None, plain, problems, tuple(omitted))


def is_about(problem: Problem, path: Path) -> bool:
    """Return whether a rule's problem is at ``path``, or is above it and names the field in its message."""
    below = path[: len(problem.path)] == problem.path
    return below and (len(path) == len(problem.path) or names_field(problem.message, path[-1]))


def _rules_of(errors: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    return [error for error in errors if error["type"] == "value_error"]


def _paths_to_omit(problem: Problem, plain: Any) -> list[Path]:
    """Return fields to omit so that the problem does not come again: the field itself, or those that a rule names."""
    path = problem.path
    value = _value_at(plain, path)
    if isinstance(value, dict):
        named = [key for key in value if re.search(rf"\b{re.escape(str(key))}\b(?!\.)", problem.message)]
        if named:
            return [(*path, key) for key in named]
    owner = _value_at(plain, path[:-1])
    written = path and (isinstance(owner, list) or (isinstance(owner, dict) and path[-1] in owner))
    return [path] if written else []


def _value_at(plain: Any, path: Path) -> Any:
    for part in path:
        plain = _part_of(plain, part)
    return plain


def _without(plain: Any, paths: Sequence[Path]) -> Any:
    """Return a copy of plain values without some fields."""
    if isinstance(plain, list):
        return [_without(item, [path[1:] for path in paths if path[0] == i]) for i, item in enumerate(plain)]
    if not isinstance(plain, dict):
        return plain
    gone = {path[0] for path in paths if len(path) == 1}
    return {
        key: _without(value, [path[1:] for path in paths if path[0] == key])
        for key, value in plain.items()
        if key not in gone
    }


def field_problems(model: type[BaseModel], errors: Sequence[ErrorDetails], plain: Any) -> list[Problem]:
    """Return the problems of each path that pydantic refused; ``plain`` is its input."""
    by_path: dict[Path, list[ErrorDetails]] = {}
    for error in errors:
        if error["type"] == "too_short" and len(error["input"]) >= error["ctx"]["min_length"]:
            continue  # pydantic counts valid items only, and has refused the others already
        by_path.setdefault(_written_path(error, plain), []).append(error)
    return [problem for path, found in by_path.items() for problem in _problems(model, path, found, plain)]


def _written_path(error: ErrorDetails, plain: Any) -> Path:
    """Return pydantic's location without the parts that only exist in types: union members, tags, the list around one gate."""
    path: list[str | int] = []
    value = plain
    for part in error["loc"]:
        inside = isinstance(value, dict) and part in value
        if inside or (isinstance(value, list) and isinstance(part, int)):
            value = value[part]
            path.append(part)
        elif error["type"] == "missing" and part == error["loc"][-1] and isinstance(value, dict):
            path.append(part)
    return tuple(path)


def _problems(
    model: type[BaseModel], path: Path, errors: Sequence[ErrorDetails], plain: Any
) -> Iterator[Problem]:
    broken = errors[0].get("ctx", {}).get("error")
    if isinstance(broken, ValueError):
        for message in broken.messages if isinstance(broken, BrokenRules) else [str(broken)]:
            said, _, remedy = message.partition("; ")
            yield Problem(path, said, remedy)
    else:
        yield _problem(model, path, errors, plain)


def _problem(model: type[BaseModel], path: Path, errors: Sequence[ErrorDetails], plain: Any) -> Problem:
    error = errors[0]
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return Problem(path, "is required", _example(path))
    if kind == "extra_forbidden":
        return _unknown_field(model, path, plain)
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        return _stage_kind(model, path, error)
    if kind == "string_pattern_mismatch":
        stage = bare_stage_of_run(str(error["input"]))
        if stage is not None:
            remedy = f"write source: {stage.named} under model or models.NAME, and name that model here"
            return Problem(path, f"{quote(stage.named)} is a stage of another run, and no name", remedy)
        return _wrong_form(path, str(error["input"]), context["pattern"])
    if kind == "literal_error":
        return Problem(
            path, f"{quote(error['input'])} is not known", suggest(str(error["input"]), _choices(context))
        )
    rules = " or ".join(dict.fromkeys(_rule(each) for each in errors))
    # An address with its secret may be written where only names belong.
    if path[:1] == ("notify",):
        return Problem(path, f"what is written here must be {rules}", "")
    return Problem(path, f"{quote(error['input'])} must be {rules}", _remedy_for_type(error))


def _rule(error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    match error["type"]:
        case "greater_than":
            return f"above {_format_number(context['gt'])}"
        case "greater_than_equal":
            return f"at least {_format_number(context['ge'])}"
        case "less_than":
            return f"below {_format_number(context['lt'])}"
        case "less_than_equal":
            return f"at most {_format_number(context['le'])}"
        case "int_type" | "int_from_float" | "int_parsing":
            return "a whole number"
        case "float_type" | "float_parsing":
            return "a number"
        case "finite_number":
            return "a finite number"
        case "bool_type" | "bool_parsing":
            return "true or false"
        case "string_type":
            return "text"
        case "dict_type" | "model_type" | "model_attributes_type":
            return "a mapping (field: value)"
        case "tuple_type" | "list_type":
            return "a list"
        case "too_short":
            return f"{context['min_length']} or more in number"
        case "too_long":
            return f"{context['max_length']} or fewer in number"
        case "literal_error":
            return " or ".join(map(quote, _choices(context)))
        case _:
            return f"otherwise ({error['msg']})"


def _format_number(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:g}"


def _remedy_for_type(error: ErrorDetails) -> str:
    given = error["input"]
    if error["type"] == "string_type" and isinstance(given, list | dict):
        return f"write one value, without {'brackets' if isinstance(given, list) else 'braces'}"
    if error["type"] == "string_type" and given is not None:
        return "put quotes around it"
    if error["type"].startswith(("int", "float")) and isinstance(given, str):
        number = number_meant(given)
        return "write the number without quotes or units" + (f": {number}" if number else "")
    if error["type"] in ("tuple_type", "list_type"):
        return "begin the entry with `- `" if isinstance(given, dict) else list_meant(error["loc"], given)
    if error["type"] in ("dict_type", "model_type", "model_attributes_type"):
        return mapping_meant(given)
    return ""


def _joints(pattern: str) -> str:
    """Return the characters that a name of this pattern may have besides letters, in words."""
    allowed = pattern.partition("]")[2].partition("]")[0]
    joints = [
        word for sign, word in (("_", "underscores"), ("-", "hyphens")) if sign in allowed.partition("0-9")[2]
    ]
    *first, last = ["digits", *joints]
    return f"{', '.join(first)} and {last}" if first else last


def _choices(context: dict[str, Any]) -> list[str]:
    return [word.strip("' ") for word in str(context["expected"]).replace(" or ", ",").split(",")]


def _wrong_form(path: Path, given: str, pattern: str) -> Problem:
    """Return the problem of a text that does not match its pattern, with a similar name that does, if there is one."""
    if pattern.endswith("(Mi|Gi|Ti)$"):
        remedy = f"write a whole number and Mi, Gi or Ti{size_meant(given)}"
        return Problem(path, f"{quote(given)} is not a size", remedy)
    remedy = (
        _NAME_REMEDY.format(_joints(pattern))
        if pattern.startswith("^[a-z]")
        else f"use letters, digits, '.', '_' and '-' (pattern {pattern})"
    )
    near = name_meant(given, pattern) if pattern.startswith("^[a-z]") else ""
    return Problem(path, f"{quote(given)} is not a valid name", remedy + (f", as in {near}" if near else ""))


def _example(path: Path) -> str:
    if path[-1] == "recipe":
        return "give the recipe a name, for example `recipe: quickstart`"
    return f"add `{path[-1]}: …`"


def _stage_kind(model: type[BaseModel], path: Path, error: ErrorDetails) -> Problem:
    kinds = [_kind_of(stage) for stage in _stage_models(model)]
    if error["type"] == "union_tag_not_found":
        return Problem((*path, "kind"), "is required", f"use one of: {', '.join(kinds)}")
    tag = str(error.get("ctx", {})["tag"])
    return Problem((*path, "kind"), f"{quote(tag)} is not a kind of stage", suggest(tag, kinds))


_ITEM: dict[Any, tuple[str, ...]] = {dict: ("NAME",), tuple: ("NUMBER",)}
"""Type of a field with several items → how messages name an item."""


def _unknown_field(root: type[BaseModel], path: Path, plain: Any) -> Problem:
    """Return an unknown field, with a suggestion: the nearest field here, one level below, or in other kinds of stage."""
    word = str(path[-1])
    model = _model_at(root, path[:-1], plain)
    known = list(model.model_fields) if model else []
    message = f"there is no field {quote(word)} here"
    for name in known:
        inner = next(_models_in(model.model_fields[name].annotation), None) if model else None
        if inner and inner is not model and word in inner.model_fields and word not in ("source", "kind"):
            item = _ITEM.get(get_origin(model.model_fields[name].annotation), ()) if model else ()
            return Problem(
                path, message, f"it belongs into {'.'.join(map(str, (*path[:-1], name, *item, word)))}"
            )
    owners = [_kind_of(stage) for stage in _stage_models(root) if word in stage.model_fields]
    if len(path) == 3 and path[0] == "stages" and model and owners:
        message = f"a stage of kind {_kind_of(model)} has no {quote(word)}"
        return Problem(path, message, f"it is a field of {' and '.join(owners)}")
    return Problem(path, message, suggest(word, known))


def _model_at(root: type[BaseModel], path: Path, plain: Any) -> type[BaseModel] | None:
    """Return the class that reads the mapping at ``path``."""
    annotation: Any = root
    value = plain
    for part in path:
        model = _model_of(annotation, value)
        if isinstance(part, int):
            annotation = _item_type(annotation)
        elif model is not None:
            field = model.model_fields.get(part)
            annotation = field.annotation if field else None
        else:
            annotation = _item_type(annotation)
        value = _part_of(value, part)
    return _model_of(annotation, value)


def _part_of(value: Any, part: str | int) -> Any:
    if isinstance(value, dict):
        return value.get(part)
    return value[part] if isinstance(value, list) and isinstance(part, int) and part < len(value) else None


def _model_of(annotation: Any, value: Any) -> type[BaseModel] | None:
    """Return the model class in an annotation; in a union, the one of the value's kind."""
    if get_origin(annotation) in (dict,) or (get_origin(annotation) is tuple and isinstance(value, list)):
        return None
    models = list(_models_in(annotation))
    if len(models) > 1 and issubclass(models[0], RewardTerm):
        return class_of(value)
    if len(models) > 1 and isinstance(value, dict):
        models = [model for model in models if _kind_of(model) == value.get("kind")]
    return models[0] if models else None


def _item_type(annotation: Any) -> Any:
    """Return the type of a mapping's values or of a tuple's items."""
    arguments = get_args(annotation)
    if get_origin(annotation) is dict:
        return arguments[1]
    if get_origin(annotation) is tuple:
        return arguments[0]
    if get_origin(annotation) is Annotated:
        return _item_type(arguments[0])
    return annotation


def _union_members(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        return _union_members(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return list(get_args(annotation))
    return [annotation]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    for member in _union_members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            yield member
        elif get_origin(member) in (dict, tuple, Annotated):
            yield from _models_in(_item_type(member))


def _stage_models(root: type[BaseModel]) -> list[type[BaseModel]]:
    """Return the kinds of stage in a recipe; a sweep has none."""
    stages = root.model_fields.get("stages")
    return list(_models_in(stages.annotation)) if stages else []


def _kind_of(model: type[BaseModel]) -> str:
    field = model.model_fields.get("kind")
    if field is None or get_origin(field.annotation) is not Literal:
        return ""
    return str(get_args(field.annotation)[0])
