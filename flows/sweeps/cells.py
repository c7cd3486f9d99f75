"""Run the cells of a sweep side by side on one machine; each is a run of the pipeline."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from vantage.attempts.machine import Machine
from vantage.schemas.recipe.recipe import ResolvedRecipe
from vantage.schemas.sweep import Cell

RunCell = Callable[[Cell[ResolvedRecipe], Machine, Callable[[str], None]], Awaitable[None]]
"""Function that runs a cell on a machine, and calls back for each step that has ended."""


async def run_cells(
    cells: Sequence[Cell[ResolvedRecipe]],
    run_one: RunCell,
    *,
    machine: Machine,
    at_once: int,
    shared: Callable[[Cell[ResolvedRecipe]], set[str]],
) -> None:
    """Run all cells: first one cell alone until the shared steps have ended, then ``at_once`` at a time.

    All cells share one ``machine`` for their stages. With more cells than fit on it, long stages of some cells would
    queue before short stages of others, and most cells would end late.
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
                await run_one(cell, machine, ended)
            finally:
                shared_is_over.set()

    async with asyncio.TaskGroup() as side_by_side:
        side_by_side.create_task(run_cell(cells[0]))
        await shared_is_over.wait()
        for cell in cells[1:]:
            side_by_side.create_task(run_cell(cell))
