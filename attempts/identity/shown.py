"""Show in one line the code and the machine of a computation: version, revision, libraries, machine and image."""

from collections.abc import Mapping

_DIGITS = 12


def describe(provenance: Mapping[str, str]) -> str:
    """Return ``vantage 0.2.0, revision 1a2b… (changed), Python 3.11.7, torch 2.13.0 · 2 CPUs AMD EPYC, 23.5 GiB · image unknown``.

    Empty if the provenance was recorded by a version that did not record these facts.
    """
    if "package" not in provenance:
        return ""
    known = {part: provenance.get(part, "unknown") for part in _PARTS}
    code = [f"vantage {known['version']}"]
    if known["revision"] == "unknown":
        code.append(f"package {known['package'][:_DIGITS]}")
    else:
        changed = {"yes": " with changes", "no": ""}.get(known["dirty"], " (changes unknown)")
        code.append(f"revision {known['revision'][:_DIGITS]}{changed}")
    code += [f"Python {known['python']}", f"torch {known['torch']}"]
    gpus = [] if known["gpus"] == "none" else [known["gpus"]]
    machine = [*gpus, f"{known['cpus']} CPUs {known['cpu']}", known["memory"]]
    parts = [", ".join(code), ", ".join(machine), known["system"]]
    image = [] if known["image"] == "unknown" else [f"image {known['image']}"]
    ranks = [f"ranks: {provenance['ranks']}"] if "ranks" in provenance else []
    return " · ".join([*parts, *ranks, *image])


_PARTS = (
    "version", "package", "revision", "dirty", "python", "torch", "cpu", "cpus", "memory", "gpus", "system", "image",
)  # fmt: skip
