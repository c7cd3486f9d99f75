"""The page about a run's critics: one HTML file that needs nothing else."""

from collections.abc import Sequence

from vantage.ledger.critic_page.diagnosis_plots import diagnosis_plots, drift_plots
from vantage.ledger.critic_page.tables import diagnosis_tables, drift_table, summary
from vantage.ledger.pages.elements import Table, figures, page, safe, table
from vantage.ledger.pages.svg_plots import Plot
from vantage.schemas.records.critic_advice import Advice, advice_on_drift, advice_on_pretraining
from vantage.schemas.records.critic_diagnosis import CriticDrift, PretrainedCritic

INTRODUCTION = (
    "A critic predicts, at each token of a response, the return that is still to come. A policy that learns from a bad critic "
    "learns from noise. This page says how good the critic is, where it is not, and what to do."
)


def critic_page(
    title: str, pretrained: Sequence[PretrainedCritic], drifts: Sequence[CriticDrift] = ()
) -> str:
    """Return the page about critics: advice, plots and tables."""
    parts = [part for critic in pretrained for part in _of_pretrained(critic)]
    parts += [part for drift in drifts for part in _of_drift(drift)]
    return page(title, "\n".join([f"<p>{INTRODUCTION}</p>", *parts]))


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
        f"<h2>{safe(heading)}</h2>\n<p>{safe(text)}</p>",
        *(
            f'<div class="advice {each.level}{" first" if not place else ""}">{safe(each.text)}</div>'
            for place, each in enumerate(advice)
        ),
        figures(plots),
        *map(table, tables),
    ]
