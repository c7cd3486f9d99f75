"""Write the page's tables, in Markdown."""

from typing import Any

from docs.critic_boundary.study.arms import MEAN, OTHERS, WHITE_EARLY
from docs.critic_boundary.study.critics import FRESH, ORACLE, PRETRAINED, REWARD_MODEL
from docs.critic_boundary.study.tables import LEARNED, MEASURES, keys_of

Row = dict[str, Any]
MEASURE_NAMES = {
    "explained_variance": "explained variance",
    "explained_mse": "with bias",
    "explained_weighted": "gradient-weighted, last block",
    "whole_weighted": "gradient-weighted, all parameters",
}
SHOWN = (
    ("the batch's mean return", "baseline", MEAN, None),
    ("no baseline", "baseline", "none", None),
    ("the mean of the prompt's 3 other responses", "baseline", OTHERS, None),
    ("constant −0.75", "constant", "none", -0.75),
    ("constant −0.25", "constant", "none", -0.25),
    ("constant +0.5", "constant", "none", 0.5),
    ("reward model", "critic", REWARD_MODEL, None),
    ("after 4 updates", "critic", "stopped at 4", None),
    ("after 8 updates", "critic", "stopped at 8", None),
    ("after 64 updates", "critic", "stopped at 64", None),
    ("pretrained, 256 updates", "critic", PRETRAINED, None),
    ("new head on the policy's trunk", "critic", FRESH, None),
    ("oracle", "critic", ORACLE, None),
    ("pretrained − 0.75", "shifted", PRETRAINED, -0.75),
    ("pretrained + 0.5", "shifted", PRETRAINED, 0.5),
    ("oracle − 0.75", "shifted", ORACLE, -0.75),
    ("half of the pretrained", "scaled", PRETRAINED, 0.5),
    ("twice the pretrained", "scaled", PRETRAINED, 2.0),
    ("half of the oracle", "scaled", ORACLE, 0.5),
    ("twice the oracle", "scaled", ORACLE, 2.0),
    ("oracle + white noise, to 0.3", "white noise", ORACLE, 0.3),
    ("oracle + white noise, to 0", "white noise", ORACLE, 0.0),
    ("oracle + noise per response, to 0", "response noise", ORACLE, 0.0),
    ("oracle + noise per prompt, to 0", "prompt noise", ORACLE, 0.0),
    ("oracle + white noise, to −1", "white noise", ORACLE, -1.0),
)
HEADLINE = (
    ("pretrained critic", "critic", PRETRAINED, None),
    ("the best critic that we could make, an oracle", "critic", ORACLE, None),
    ("constant −0.75", "constant", "none", -0.75),
    ("constant +0.5", "constant", "none", 0.5),
    ("reward model as critic", "critic", REWARD_MODEL, None),
)
SWITCHED = (
    ("reward model", REWARD_MODEL, None),
    ("pretrained", PRETRAINED, None),
    ("pretrained + white noise, to 0", PRETRAINED, 0.0),
    ("oracle", ORACLE, None),
    ("oracle + white noise, to 0.15", ORACLE, 0.15),
    ("oracle + white noise, to 0", ORACLE, 0.0),
)
BY_PART = (
    ("reward model", "critic", REWARD_MODEL),
    ("pretrained", "critic", PRETRAINED),
    ("oracle", "critic", ORACLE),
    ("oracle, noisy from 40 tokens left on", WHITE_EARLY, ORACLE),
)


def summary(tables: dict[str, list[Row]]) -> str:
    """Return all tables: means over seeds ± half of the 95 % interval."""
    return "\n\n".join(
        [
            headline(tables["all_parameters"]),
            baselines(tables["arms"]),
            whole(tables["all_parameters"]),
            agreement(tables["agreement"]),
            agreement(tables["agreement_all_parameters"]),
            crossings(tables["crossings"]),
            switches(tables["arms"]),
            parts(tables["tokens_left"]),
            f"Tokens: {described(tables['tokens'][0])}",
        ]
    )


def headline(table: list[Row]) -> str:
    """Return what explained variance lets one expect of the gradient's variance, and what it is, of all parameters."""
    found = {keys_of(row): row for row in table}
    lines = [
        "| baseline | explained variance | 1 − explained variance | variance of the gradient over the batch mean's |",
        "|---|---|---|---|",
    ]
    for label, *key in HEADLINE:
        row = found.get((key[0], key[1], key[2]))
        if row is not None:
            expected = 1 - row["explained_variance"]
            known, ratio = shown(row, "explained_variance"), shown(row, "whole_ratio")
            lines.append(f"| {label} | {known} | {expected:.2f} | **{ratio}** |")
    return "\n".join(lines)


def baselines(arms: list[Row]) -> str:
    """Return each shown baseline by the three measures, with its ratio of variances."""
    found = {(row["family"], row["critic"], row["x"]): row for row in arms}
    lines = [
        "| baseline | explained variance | with bias | gradient-weighted | variance ratio |",
        "|---|---|---|---|---|",
    ]
    for label, *key in SHOWN:
        row = found.get((key[0], key[1], key[2]))
        if row is not None:
            cells = (shown(row, name) for name in (*MEASURES, "variance_ratio"))
            lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def whole(table: list[Row]) -> str:
    """Return the ratio of the gradient of all parameters, beside that of the last block on the same rollouts."""
    found = {(row["family"], row["critic"], row["x"]): row for row in table}
    lines = [
        "| baseline | explained variance | gradient-weighted, all parameters | variance ratio, all parameters | "
        "last block, same rollouts | rollouts |",
        "|---|---|---|---|---|---|",
    ]
    for label, *key in SHOWN[1:]:
        row = found.get((key[0], key[1], key[2]))
        if row is not None:
            names = ("explained_variance", "whole_weighted", "whole_ratio", "part_of_whole_ratio")
            cells = (shown(row, name) for name in names)
            lines.append(f"| {label} | {' | '.join(cells)} | {row['rollouts']} |")
    return "\n".join(lines)


def agreement(table: list[Row]) -> str:
    """Return how well each measure foretells the ratio."""
    lines = [
        "| measure | on the right side of 1 | mean distance of 1 − measure from the ratio | baselines |",
        "|---|---|---|---|",
    ]
    for row in table:
        name = MEASURE_NAMES[row["measure"]]
        cells = f"{shown(row, 'right_side')} | {shown(row, 'distance')} | {row['arms']:.0f}"
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def crossings(table: list[Row]) -> str:
    """Return where each curve passes a ratio of 1."""
    lines = [
        "| curve | measure at a ratio of 1 | seeds that pass 1 | ratios from | to |",
        "|---|---|---|---|---|",
    ]
    for row in table:
        if row["curve"] != LEARNED and row["measure"] != MEASURES[0]:
            continue
        name = "over training" if row["curve"] == LEARNED else f"{row['critic']}, {row['curve']}"
        passed = "none"
        if row["crossing"] is not None:
            half = "" if row["crossing_high"] is None else f" ± {row['crossing_high'] - row['crossing']:.2f}"
            passed = f"{row['crossing']:.2f}{half}".replace("-", "−")
        lines.append(
            f"| {name}, {MEASURE_NAMES[row['measure']]} | {passed} | {row['seeds_that_cross']} of {row['seeds']} | "
            f"{row['smallest_ratio']:.2f} | {row['largest_ratio']:.2f} |"
        )
    return "\n".join(lines)


def switches(arms: list[Row]) -> str:
    """Return the critic alone, with EVPO's switch and with the smooth form: advantages and gradients."""
    found = {(row["family"], row["critic"], row["x"]): row for row in arms}
    lines = [
        "| critic | advantages' variance, alone | switched | blended | gradient's, alone | switched | blended |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, critic, x in SWITCHED:
        alone = found.get(("critic" if x is None else "white noise", critic, x))
        if alone is None:
            continue
        rows = [alone, *(found[family, critic, x] for family in ("switched", "blended"))]
        cells = [f"{1 - row['explained_variance']:.2f}{half(row, 'explained_variance')}" for row in rows]
        cells += [shown(row, "variance_ratio") for row in rows]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parts(table: list[Row]) -> str:
    """Return the table of critics by tokens left."""
    found = {(row["family"], row["critic"], row["tokens_left"]): row for row in table}
    lines = [
        "| critic | tokens left from | explained variance | gradient-weighted | variance ratio |",
        "|---|---|---|---|---|",
    ]
    for label, family, critic in BY_PART:
        for left in dict.fromkeys(row["tokens_left"] for row in table):
            row = found.get((family, critic, left))
            if row is not None:
                names = ("explained_variance", "explained_weighted", "variance_ratio")
                lines.append(f"| {label} | {left} | {' | '.join(shown(row, name) for name in names)} |")
    return "\n".join(lines)


def described(row: Row) -> str:
    """Return what the rollouts are like, in one line."""
    names = [name for name in row if name != "of" and name != "seeds" and not name.endswith("_half")]
    return ", ".join(f"{name} {shown(row, name)}" for name in names)


def shown(row: Row, name: str) -> str:
    """Return a mean with half of its interval, two decimals; a dash where nothing was measured."""
    return "–" if row[name] is None else f"{row[name]:.2f}{half(row, name)}".replace("-", "−")


def half(row: Row, name: str) -> str:
    """Return ± half of the interval, where there is one."""
    return "" if row[f"{name}_half"] is None else f" ± {row[f'{name}_half']:.2f}"
