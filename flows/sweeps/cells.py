"""A sweep's runs, side by side on one machine: each is the pipeline of ``vantage run``."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from flows import pipeline
from flows.attempts.stage_life import StageLife
from flows.machine import Machine
from schemas.sweep import Cell

Drive = Callable[[Cell, Callable[[StageLife, set[str]], Awaitable[None]]], Awaitable[None]]
"""Opens a cell's run, has its stages ordered by what it is given, and closes the run. The set is of the steps whose
artifact is in the store."""


async def run_cells(
    cells: Sequence[Cell],
    drive: Drive,
    *,
    machine: Machine,
    at_once: int,
    shared: Callable[[Cell], set[str]],
) -> None:
    """Drive all cells: the first one alone until what the cells share is made, then ``at_once`` at a time.

    Stages of all cells are admitted by one ``machine``. More cells than it can hold would only queue their long
    stages before the others' short ones, and no cell would end before nearly all do.
    """
    slots = asyncio.Semaphore(at_once)
    shared_is_over = asyncio.Event()

    async def run_cell(cell: Cell) -> None:
        waited_for = shared(cell)

        def ended(step: str) -> None:
            waited_for.discard(step)
            if not waited_for:
                shared_is_over.set()

        async def order(life: StageLife, in_store: set[str]) -> None:
            await pipeline.order(life, pipeline.Place(machine, in_store, ended))

        async with slots:
            try:
                await drive(cell, order)
            finally:
                shared_is_over.set()

    async with asyncio.TaskGroup() as side_by_side:
        side_by_side.create_task(run_cell(cells[0]))
        await shared_is_over.wait()
        for cell in cells[1:]:
            side_by_side.create_task(run_cell(cell))
