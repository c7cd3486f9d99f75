"""Have the fork server of a process that imports this module load no libraries of stages (``bare_forkserver``)."""

from multiprocessing import forkserver

_preload = forkserver.set_forkserver_preload


def _preload_bare(modules_names: list[str]) -> None:  # by the name that it replaces
    _preload(["tests.support.bare_forkserver"])


forkserver.set_forkserver_preload = _preload_bare
