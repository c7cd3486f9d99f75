"""Write a CycloneDX bill of materials of an artifact: its environment, and its data and models.

The same artifact always has the same bill: the serial number is computed from the content, and no time is written.
"""

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.dependency import Dependency
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from vantage.schemas.kind import ArtifactKind
from vantage.schemas.records.environment import Environment, Installed

_NAMESPACE = uuid.UUID("6d2f6f0c-6d0c-5b64-9d2c-6a1f2b6b8f6e")
"""Namespace of the serial numbers."""
_MODELS: frozenset[ArtifactKind] = frozenset({"policy", "reward_model", "value_model"})
_PREFIX = "vantage"


@dataclass(frozen=True)
class Material:
    """An artifact in a bill."""

    name: str
    """``RECIPE/STAGE``."""
    kind: ArtifactKind
    digest: str
    parents: frozenset[str]
    """Content digests of its inputs."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Further facts about the artifact, as properties."""
    license: str = ""
    """Licence in the recipe; empty: the recipe names none."""


def bill_of_materials(made: Material, inputs: Iterable[Material], environment: Environment) -> str:
    """Return the bill as CycloneDX 1.6 in JSON.

    Args:
        made: the artifact.
        inputs: its inputs at any depth.
        environment: what was installed for its computation.
    """
    subject = _component(made)
    libraries = [_library(each) for each in environment.installed]
    platform = [
        Component(
            name=environment.implementation,
            version=environment.python,
            type=ComponentType.PLATFORM,
            bom_ref=f"{_PREFIX}:python",
        ),
        Component(
            name=f"{environment.system}, {environment.machine}",
            type=ComponentType.OPERATING_SYSTEM,
            bom_ref=f"{_PREFIX}:system",
        ),
    ]
    materials = {each.digest: each for each in inputs if each.digest != made.digest}
    components = {digest: _component(each) for digest, each in materials.items()}
    needs_nothing = [*libraries, *platform]
    bill = Bom(
        components=[*components.values(), *needs_nothing],
        metadata=BomMetaData(component=subject),
        # All at once: a library that registers each one searches all earlier ones
        dependencies=[
            _depends(subject, [*_known(made, components), *needs_nothing]),
            *[_depends(components[digest], _known(each, components)) for digest, each in materials.items()],
            *[_depends(each, []) for each in needs_nothing],
        ],
    )
    return _without_chance(JsonV1Dot6(bill).output_as_string())


def _without_chance(text: str) -> str:
    """Return the bill with a serial number made from its content, and without the present time, which the library inserts."""
    plain = json.loads(text)
    plain["metadata"].pop("timestamp", None)
    plain.pop("serialNumber", None)
    content = json.dumps(plain, sort_keys=True)
    plain["serialNumber"] = f"urn:uuid:{uuid.uuid5(_NAMESPACE, content)}"
    return json.dumps(plain, indent=2, ensure_ascii=False, sort_keys=True) + "\n"


def _depends(component: Component, on: Iterable[Component]) -> Dependency:
    return Dependency(component.bom_ref, [Dependency(each.bom_ref) for each in on])


def _known(material: Material, components: Mapping[str, Component]) -> list[Component]:
    return [components[digest] for digest in sorted(material.parents) if digest in components]


def _component(material: Material) -> Component:
    """Return the component of a model; everything else is data."""
    is_model = material.kind in _MODELS
    return Component(
        name=material.name,
        version=material.digest[:12],
        type=ComponentType.MACHINE_LEARNING_MODEL if is_model else ComponentType.DATA,
        bom_ref=f"{_PREFIX}:{material.digest}",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=material.digest)],
        licenses=[LicenseFactory().make_from_string(material.license)] if material.license else [],
        properties=[
            Property(name=f"{_PREFIX}:{name}", value=value)
            for name, value in ({"kind": material.kind} | dict(material.facts)).items()
        ],
    )


@cache
def _library(installed: Installed) -> Component:
    purl = PackageURL(type="pypi", name=installed.name, version=installed.version)
    licences = [LicenseFactory().make_from_string(installed.license)] if installed.license else []
    return Component(
        name=installed.name,
        version=installed.version,
        type=ComponentType.LIBRARY,
        bom_ref=purl.to_string(),
        purl=purl,
        licenses=licences,
    )
