"""The variables of the environment that Vantage's processes do not inherit.

Everything else is inherited: logins, ``CUDA_VISIBLE_DEVICES``, ``OMP_…``, ``NCCL_…``, ``HF_HOME``, ``TZ``, ``LANG``, a
proxy. The listed variables belong to other programs, and would make stages fail, wait for each other, or compute
something else.
"""

import os
import sys
import warnings
from collections.abc import Mapping

from vantage.schemas.safe_text import server_secrets

OF_LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE", "NNODES"),
)
"""The rank of a process among others, as torchrun and similar launchers set it: a stage of one process would take
itself for one of many. Stages of several ranks get their own values."""
OF_LAUNCHERS_PREFIXES = (
    *("TORCHELASTIC_", "TORCH_ELASTIC_", "PET_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "MV2_", "FLUX_"),
    *("ACCELERATE_", "FSDP_", "DEEPSPEED_", "MEGATRON_LM_", "SM_", "XLA_", "PJRT_"),
)
CHANGING_RESULTS = (
    *("USE_TORCH", "USE_TF", "USE_JAX", "USE_FLAX", "USE_HUB_KERNELS", "DISABLE_KERNEL_MAPPING"),
    *("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "NVIDIA_TF32_OVERRIDE", "PYTORCH_JIT", "TORCH_COMPILE_DISABLE"),
    *("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTORCH_NO_CUDA_MEMORY_CACHING"),
    *("HF_ENABLE_PARALLEL_LOADING", "HF_ALLOW_CODE_EVAL", "HF_DEACTIVATE_ASYNC_LOAD", "PYTHONINSPECT"),
)
"""Switches of torch and transformers that a recipe's digest does not know (``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD`` allows
pickles), and one of Python that makes a child wait for input at its end."""
CHANGING_RESULTS_PREFIXES = ("TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE_", "TORCH_DISTRIBUTED_")
OF_PREFECT = (
    *(
        "PREFECT_DEFAULT_RESULT_STORAGE_BLOCK",
        "PREFECT_DEFAULT_WORK_POOL_NAME",
        "PREFECT_LOGGING_SETTINGS_PATH",
    ),
    *("PREFECT_SERVER_API_BASE_PATH", "PREFECT_TASK_DEFAULT_RETRIES", "PREFECT_FLOW_DEFAULT_RETRIES"),
    *("PREFECT_TASK_DEFAULT_RETRY_DELAY_SECONDS", "PREFECT_FLOW_DEFAULT_RETRY_DELAY_SECONDS"),
)
OF_PREFECT_PREFIXES = (
    *("PREFECT_RESULTS_", "PREFECT_TASKS_", "PREFECT_FLOWS_DEFAULT_", "PREFECT_DEPLOYMENTS_", "PREFECT__"),
    *("PREFECT_SERVER_DATABASE_", "PREFECT_API_DATABASE_"),
)
"""Settings by which another project's flows retry and keep results: Vantage retries stages by its own rules, and
Prefect keeps none of their results. And the database of another server: our own is in the workspace, where `resume`
looks for its flow runs."""

NAMES = frozenset({*OF_LAUNCHERS, *CHANGING_RESULTS, *OF_PREFECT})
PREFIXES = (*OF_LAUNCHERS_PREFIXES, *CHANGING_RESULTS_PREFIXES, *OF_PREFECT_PREFIXES)


LOGINS = ("OPENLINEAGE_API_KEY",)
"""Logins of the recording process, besides those of Prefect and MLflow."""


def not_for_stages(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the logins that neither a stage nor a model's process needs."""
    return [*server_secrets(environment), *(name for name in LOGINS if name in environment)]


def not_inherited(environment: Mapping[str, str]) -> list[str]:
    """Return the names of the variables that our processes must not inherit."""
    names = [name for name in environment if name in NAMES or name.startswith(PREFIXES)]
    return [*names, *(["PYTHONWARNINGS"] if "error" in environment.get("PYTHONWARNINGS", "") else [])]


def forget_foreign_variables() -> None:
    """Remove the variables that must not be inherited from the environment of this process, and so from that of its
    children.

    Under ``PYTHONWARNINGS=error`` a library's remark on a later version of another one would end a run: such warnings
    are ignored again, in this process and in those of multiprocessing, which get its options.
    """
    for name in not_inherited(os.environ):
        del os.environ[name]
    if any(option.startswith("error") for option in sys.warnoptions):
        sys.warnoptions[:] = [option for option in sys.warnoptions if not option.startswith("error")]
        warnings.resetwarnings()
        warnings.simplefilter("ignore")
