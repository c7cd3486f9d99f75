"""Start each worker of Ray's nodes (``ray_cluster``) as a fork of a process that has loaded torch and what Ray imports.

Ray insists on the end of this file's name.
"""

import argparse
import runpy
import sys

from tests.support.stand_in import stand_for


def main() -> None:
    """Set the worker's environment variables, as Ray's own script of this name does, and run Ray's default worker."""
    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.utils import update_envs
    from ray._private.workers import default_worker

    arguments = argparse.ArgumentParser(allow_abbrev=False)
    arguments.add_argument("--serialized-runtime-env-context", default="{}")
    arguments.add_argument("--language")
    given, left = arguments.parse_known_args()
    context = RuntimeEnvContext.deserialize(given.serialized_runtime_env_context)  # type: ignore[no-untyped-call]
    update_envs(context.env_vars)
    sys.argv = [str(default_worker.__file__), *(each for each in left if each != __file__)]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    stand_for("tests.support.ray_setup_worker", sys.argv[1:])
