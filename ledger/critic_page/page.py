"""The page about a run's critics: one HTML file that needs nothing else."""

from collections.abc import Sequence
from html import escape

from ledger.critic_page.plots import Plot, diagnosis_plots, drift_plots
from ledger.critic_page.tables import Table, diagnosis_tables, drift_table, summary
from schemas.records.critic_advice import Advice, advice_on_drift, advice_on_pretraining
from schemas.records.critic_diagnosis import CriticDrift, PretrainedCritic
from schemas.safe_text import POLICY, safe_text

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --card: #8881; --good: #2e9e5b; --note: #2f80c8; --warning: #c98a00;
  --bad: #d64545; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.25rem; margin-top: 2.5rem; } h3 { font-size: 1rem; margin: 0 0 .25rem; }
p { max-width: 46rem; margin: .25rem 0 .75rem; }
.advice { border-left: .4rem solid var(--note); background: var(--card); padding: .6rem 1rem; margin: .5rem 0;
  max-width: 60rem; overflow-wrap: anywhere; }
.advice.good { border-color: var(--good); } .advice.warning { border-color: var(--warning); }
.advice.bad { border-color: var(--bad); } .advice.first { font-size: 1.1rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(21rem, 100%), 1fr)); gap: 1rem; margin: 1rem 0; }
figure { margin: 0; padding: .75rem; border: 1px solid var(--line); border-radius: .5rem; }
figcaption { font-weight: 600; } svg { width: 100%; height: auto; display: block; }
section.table { margin: 1.5rem 0; } .scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .25rem .75rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { font-weight: 600; } .text { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }
"""


def critic_page(
    title: str, pretrained: Sequence[PretrainedCritic], drifts: Sequence[CriticDrift] = ()
) -> str:
    """The page of some critics: what to do, plots, tables."""
    parts = [part for critic in pretrained for part in _of_pretrained(critic)]
    parts += [part for drift in drifts for part in _of_drift(drift)]
    shown = _text(title)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"{POLICY}"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{shown}</title><style>{_STYLE}</style></head><body>\n<h1>{shown}</h1>\n"
        "<p>A critic predicts, at each token of a response, the return that is still to come. A policy that learns from a bad "
        "critic learns from noise. This page says how good the critic is, where it is not, and what to do.</p>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _of_pretrained(critic: PretrainedCritic) -> list[str]:
    plots, tables = diagnosis_plots(critic.diagnosis), diagnosis_tables(critic.diagnosis)
    heading = f"{critic.step}: the pretrained critic"
    return _section(heading, summary(critic.diagnosis), advice_on_pretraining(critic), plots, tables)


def _of_drift(drift: CriticDrift) -> list[str]:
    heading = f"{drift.step}: the critic during policy optimisation"
    so_far = " so far" if drift.is_running else ""
    text = f"{len(drift.points):,} iterations{so_far}."
    return _section(heading, text, advice_on_drift(drift), drift_plots(drift), [drift_table(drift)])


def _section(
    heading: str, text: str, advice: Sequence[Advice], plots: Sequence[Plot], tables: Sequence[Table]
) -> list[str]:
    return [
        f"<h2>{_text(heading)}</h2>\n<p>{_text(text)}</p>",
        *(
            f'<div class="advice {each.level}{" first" if not place else ""}">{_text(each.text)}</div>'
            for place, each in enumerate(advice)
        ),
        '<div class="plots">',
        *(f"<figure><figcaption>{_text(plot.title)}</figcaption>{plot.svg}</figure>" for plot in plots),
        "</div>",
        *map(_table, tables),
    ]


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        opening = [
            f'<{tag} class="text">' if place < table.left else f"<{tag}>" for place in range(len(cells))
        ]
        return (
            "<tr>"
            + "".join(f"{start}{_text(cell)}</{tag}>" for start, cell in zip(opening, cells, strict=True))
            + "</tr>"
        )

    body = "\n".join(row(cells, "td") for cells in table.rows)
    return (
        f'<section class="table"><h3>{_text(table.title)}</h3><p>{_text(table.good)}</p><div class="scroll"><table>'
        f"<thead>{row(table.headings, 'th')}</thead><tbody>{body}</tbody></table></div></section>"
    )


def _text(text: str) -> str:
    """Text of stages, prompts among it, which may hold anything; never for an attribute."""
    return escape(safe_text(text), quote=False)
