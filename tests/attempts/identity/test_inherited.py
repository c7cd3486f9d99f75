"""Variables of other programs do not reach our processes; what a user sets for them does."""

import os
import subprocess
import sys

import pytest

from vantage.attempts.identity.inherited import forget_foreign_variables, not_for_stages, not_inherited

FOREIGN = {
    **{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29500"},
    **{"TORCHELASTIC_RUN_ID": "a", "SLURM_PROCID": "3", "SLURM_NTASKS": "8", "OMPI_COMM_WORLD_RANK": "1"},
    **{"PMI_RANK": "1", "ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "1"},
    **{"USE_TORCH": "0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "TORCHDYNAMO_DISABLE": "1"},
    **{"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "PYTHONINSPECT": "1", "PYTHONWARNINGS": "error"},
    **{"PREFECT_DEFAULT_RESULT_STORAGE_BLOCK": "s3/none", "PREFECT_RESULTS_PERSIST_BY_DEFAULT": "true"},
    **{"PREFECT_TASKS_DEFAULT_RETRIES": "3", "PREFECT_FLOWS_DEFAULT_RETRIES": "3"},
    **{
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": "sqlite+aiosqlite:////none/x.db",
        "PREFECT_API_DATABASE_PASSWORD": "p",
    },
}
OWN = {
    **{
        "CUDA_VISIBLE_DEVICES": "1",
        "OMP_NUM_THREADS": "2",
        "HF_HOME": "/h",
        "NCCL_DEBUG": "INFO",
        "TZ": "UTC",
    },
    **{"AWS_ACCESS_KEY_ID": "a", "HTTPS_PROXY": "http://p:1", "PYTHONPATH": "/p", "PYTHONHASHSEED": "0"},
    **{"PREFECT_API_URL": "http://h/api", "MLFLOW_TRACKING_URI": "http://h", "PYTHONWARNINGS": "default"},
    **{"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30", "RAY_ADDRESS": "auto", "VANTAGE_CACHE": "/c", "LANG": "C"},
    **{"RANKING": "no rank", "WORLD": "no size", "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
}


def test_logins_of_servers_are_not_for_stages() -> None:
    kept = {"HF_TOKEN": "t", "AWS_SECRET_ACCESS_KEY": "s", "OPENLINEAGE_URL": "http://host"}
    logins = {"OPENLINEAGE_API_KEY": "key", "PREFECT_API_KEY": "key", "MLFLOW_TRACKING_PASSWORD": "word"}
    assert set(not_for_stages(kept | logins)) == set(logins)


def test_what_another_program_set_is_left_out_and_all_else_is_kept() -> None:
    assert set(not_inherited(FOREIGN)) == set(FOREIGN)
    assert not_inherited(OWN) == []


def test_a_process_forgets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process removes these variables from its own environment."""
    for name, value in {**OWN, **FOREIGN}.items():
        monkeypatch.setenv(name, value)
    forget_foreign_variables()
    assert set(FOREIGN) & set(os.environ) == set()
    assert set(OWN) - {"PYTHONWARNINGS"} <= set(os.environ)


def test_under_warnings_as_errors_a_warning_of_a_library_ends_nothing_and_no_child_hears_of_it() -> None:
    code = (
        "import sys, warnings; from vantage.attempts.identity.inherited import forget_foreign_variables as forget\n"
        "forget(); warnings.warn('old'); from multiprocessing.util import _args_from_interpreter_flags as flags\n"
        "print([flag for flag in flags() if flag.startswith('-W')])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("[]\n", "", 0)


def test_optimised_python_is_refused_by_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from vantage.cli.main import main; main()", "--help"],
        env={**os.environ, "PYTHONOPTIMIZE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 65
    assert done.stderr.startswith("vantage: PYTHONOPTIMIZE")
