"""Show in one line what computed: version, revision, libraries, machine and image."""

from collections.abc import Mapping

_DIGITS = 12


def describe(provenance: Mapping[str, str]) -> str:
    """Return ``vantage 0.1.0, revision 1a2b… (changed), Python 3.11.7, torch 2.13.0 · 2 CPUs AMD EPYC, 23.5 GiB · image unknown``.

    Empty if the provenance was recorded by a version that did not record these facts.
    """
    if "package" not in provenance:
        return ""
    told = {part: provenance.get(part, "unknown") for part in _PARTS}
    code = [f"vantage {told['version']}"]
    if told["revision"] == "unknown":
        code.append(f"package {told['package'][:_DIGITS]}")
    else:
        changed = {"yes": " with changes", "no": ""}.get(told["dirty"], " (changes unknown)")
        code.append(f"revision {told['revision'][:_DIGITS]}{changed}")
    code += [f"Python {told['python']}", f"torch {told['torch']}"]
    gpus = [] if told["gpus"] == "none" else [told["gpus"]]
    machine = [*gpus, f"{told['cpus']} CPUs {told['cpu']}", told["memory"]]
    parts = [", ".join(code), ", ".join(machine), told["system"]]
    image = [] if told["image"] == "unknown" else [f"image {told['image']}"]
    ranks = [f"ranks: {provenance['ranks']}"] if "ranks" in provenance else []
    return " · ".join([*parts, *ranks, *image])


_PARTS = (
    "version", "package", "revision", "dirty", "python", "torch", "cpu", "cpus", "memory", "gpus", "system", "image",
)  # fmt: skip
