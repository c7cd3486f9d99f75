"""A recipe seldom comes back to a file that it has left, from its text until its stages are asked for.

The walk is that of a run of the quickstart, traced call by call. A **stop** is a call into our code with the recipe among
its arguments: the parsed text, its plain mapping, the partly valid recipe of the checks, or the recipe itself; the recipe's
own methods are no stops. A call from one place in the code counts once, since a loop over stages takes the same way for
each. Stops one after the other in one file are one **stay**, and a stay in a file that the recipe has left before is a
**return**.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import StringIO
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from tests.support.orchestrated import InProcess, Witness
from vantage.attempts.machine import check_resources
from vantage.flows.orchestrator import Orchestrator
from vantage.flows.shown_plan import planned
from vantage.ledger.run_ledger import Ledger
from vantage.runs.console import Screen
from vantage.runs.resolving import load_resolved
from vantage.runs.run import acquire_run
from vantage.runs.workspace import Workspace
from vantage.schemas.checks.partial_recipe import PartialRecipe
from vantage.schemas.loading.plain_yaml import Document
from vantage.schemas.recipe.recipe import Recipe
from vantage.signing.before_runs import check_signing

ROOT = Path(__file__).parents[1]

MOST_RETURNS = 12


def is_recipe(value: object) -> bool:
    """Return whether the value is a recipe in one of its forms."""
    if isinstance(value, Mapping):
        return "recipe" in value and "stages" in value
    return isinstance(value, Document | PartialRecipe | Recipe)


class Walk:
    """Records the files into which calls carry the recipe, in order."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._calls: set[tuple[object, int, object]] = set()
        self._ours: dict[str, str | None] = {}

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Trace the calls of this thread inside the block."""
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        code, caller = frame.f_code, frame.f_back
        if event != "call" or caller is None or (file := self._our_file(code.co_filename)) is None:
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        call = (caller.f_code, caller.f_lasti, code)
        arguments = (value for name, value in frame.f_locals.items() if name in names and name != "self")
        if call not in self._calls and any(map(is_recipe, arguments)):
            self._calls.add(call)
            self.files.append(file)

    def _our_file(self, name: str) -> str | None:
        """Return the path of a file of the product inside the checkout; None for any other code."""
        if name not in self._ours:
            path = Path(name).resolve()
            others = any(part in ("tests", "site-packages") for part in path.parts)
            ours = path.is_relative_to(ROOT) and path.is_file() and not others
            self._ours[name] = str(path.relative_to(ROOT)) if ours else None
        return self._ours[name]

    @property
    def stays(self) -> list[str]:
        """The file of each stay."""
        return [file for file, _ in groupby(self.files)]

    @property
    def returns(self) -> list[str]:
        """The file of each return."""
        return [file for number, file in enumerate(self.stays) if file in self.stays[:number]]


def test_a_recipe_seldom_comes_back_to_a_file(workspace: Workspace) -> None:
    walk = Walk()
    with ExitStack() as held:
        with walk.traced():
            resolved, chosen = load_resolved("quickstart")
            check_signing(resolved, workspace)
            run = held.enter_context(acquire_run(workspace, resolved, source="quickstart"))
            check_signing(run.record.recipe, workspace)
            planned(run, Screen(Console(file=StringIO(), width=200)), strict=False, chosen=chosen)
            orchestrator = Orchestrator(
                run,
                store=workspace.storage,
                ledger=Ledger(None, workspace.root, resolved.recipe),
                watcher=Witness(),
                stage_function="tests.support.fake_work.run_stage",
                launcher=InProcess(),
            )
            orchestrator.begin()
            check_resources(orchestrator.recipe)
        for step in orchestrator.inputs:
            with walk.traced():
                request = orchestrator.request(step)
            assert request is not None
            assert orchestrator.attempt(request).digest is not None, "the walk goes as far as the last stage"
    assert {"schemas/loading/validation.py", "runs/run.py", "attempts/jobs.py"} <= set(walk.stays)
    assert len(walk.returns) <= MOST_RETURNS, walk.returns
