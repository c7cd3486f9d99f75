"""A sweep's runs, side by side on one machine: each is the pipeline of ``vantage run``."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from flows.machine import Machine
from schemas.recipe.recipe import ResolvedRecipe
from schemas.sweep import Cell

Drive = Callable[[Cell[ResolvedRecipe], Machine, Callable[[str], None]], Awaitable[None]]
"""Opens a cell's run on a machine, has its steps ordered, and closes the run; calls back for each step that is over."""


async def run_cells(
    cells: Sequence[Cell[ResolvedRecipe]],
    drive: Drive,
    *,
    machine: Machine,
    at_once: int,
    shared: Callable[[Cell[ResolvedRecipe]], set[str]],
) -> None:
    """Drive all cells: the first one alone until what the cells share is made, then ``at_once`` at a time.

    Stages of all cells are admitted by one ``machine``. More cells than it can hold would only queue their long
    stages before the others' short ones, and no cell would end before nearly all do.
    """
    slots = asyncio.Semaphore(at_once)
    shared_is_over = asyncio.Event()

    async def run_cell(cell: Cell[ResolvedRecipe]) -> None:
        waited_for = shared(cell)

        def ended(step: str) -> None:
            waited_for.discard(step)
            if not waited_for:
                shared_is_over.set()

        async with slots:
            try:
                await drive(cell, machine, ended)
            finally:
                shared_is_over.set()

    async with asyncio.TaskGroup() as side_by_side:
        side_by_side.create_task(run_cell(cells[0]))
        await shared_is_over.wait()
        for cell in cells[1:]:
            side_by_side.create_task(run_cell(cell))
