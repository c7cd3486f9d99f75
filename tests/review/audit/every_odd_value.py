"""Store each odd value in each column of MLflow's database, one at a time, and audit the run: ``python -m`` this module FOLDER."""

import shutil
import sys
import traceback
from pathlib import Path

from tests.review.audit.conftest import SHORT_RECIPE, run_once, write_recipe
from tests.review.audit.tampering import Case
from tests.review.audit.test_mlflow_columns import documented
from tests.review.audit.test_odd_values import NOT_STORED, VALUES, fault
from vantage.runs.run import read_runs
from vantage.runs.workspace import Workspace


def main(folder: Path) -> int:
    """Print what is wrong, and return how often something was."""
    folder.mkdir(parents=True)
    workspace = Workspace(folder / "workspace")
    run_once(workspace, write_recipe(folder, SHORT_RECIPE))
    [record] = read_runs(workspace)
    database = workspace.root / "mlflow.db"
    shutil.copy(database, folder / "mlflow.db")
    faults = 0
    for column in documented().keys() - NOT_STORED:
        for kind in VALUES:
            shutil.copy(folder / "mlflow.db", database)
            try:
                said = fault(Case(workspace, record, folder), column, kind)
            except Exception:
                said = traceback.format_exc()
            if said:
                faults += 1
                print(f"{column}: {kind}: {said}", flush=True)
    return faults


if __name__ == "__main__":
    sys.exit(min(main(Path(sys.argv[1])), 1))
