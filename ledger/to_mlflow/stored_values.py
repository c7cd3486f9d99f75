"""Convert values from MLflow's database to texts and numbers, since SQLite takes any value in any column."""

from collections.abc import Mapping

from vantage.ledger.expected.runs import Row, row_of


def text(value: object) -> str:
    """Return a value as text: empty for None; bytes and numbers in a form that no text of ours has."""
    return value if isinstance(value, str) else "" if value is None else str(value)


def texts(values: Mapping[object, object] | Mapping[str, str] | None) -> dict[str, str]:
    """Return names and values as texts."""
    return {text(name): text(value) for name, value in (values or {}).items()}


def stored_row(name: object, value: object, time: object, step: object) -> Row:
    """Return a row of a metric.

    Raises:
        ValueError: its value is no number, or its time or step is no whole number.
    """
    if not isinstance(value, int | float):
        raise ValueError(
            f"metric {text(name)[:60]} has the value {_shown(value)}, which is no number; correct that row, or restore MLflow's database"
        )
    return row_of(text(name), float(value), _whole(name, "time", time), _whole(name, "step", step))


def _whole(name: object, what: str, value: object) -> int:
    if not isinstance(value, int):
        raise ValueError(
            f"metric {text(name)[:60]} has the {what} {_shown(value)}, which is no whole number; correct that row, or restore MLflow's database"
        )
    return value


def _shown(value: object) -> str:
    return repr(value)[:60]
