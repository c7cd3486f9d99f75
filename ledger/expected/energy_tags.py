"""The energy of an attempt as tags of its stage's run."""

from vantage.schemas.records.energy import Energy


def energy_tags(energy: Energy | None) -> dict[str, str]:
    """Return tag → joules, for measured energies."""
    found = {} if energy is None else energy.model_dump(exclude_none=True)
    return {f"vantage.energy.{name}": f"{joules:.1f}" for name, joules in found.items()}
