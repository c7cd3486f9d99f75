"""Rates of devices: peak rates from the makers' data sheets, and this machine's CPU by a short measurement."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from vantage.attempts.machine import available_cpus

TERA, GIGA = 1e12, 1e9
MATMUL_SHARE = 0.4
"""Share of a GPU's peak that whole passes reach: 0.42 to 0.56 with everything tuned (Korthikanti et al., arXiv 2205.05198,
table 5), 0.46 for PaLM (arXiv 2204.02311, table 3). An assumption: no GPU was measured for it."""
BANDWIDTH_SHARE = 0.7
"""Share of a GPU's memory bandwidth that reading weights and KV cache reaches. An assumption, as above."""
CPU_SHARE = 0.4
"""Share of a CPU's rate that whole passes reach. The rate is that of a single product or operation, measured alone. The share
was fitted to the stages of the quickstart in docs/estimate, and checked there on another model."""
FORWARD_HOST_SECONDS = 2.2e-4
"""Seconds that Python and PyTorch take to start the operations of one layer's forward pass, whatever its size; measured
on the CPU of docs/estimate. A GPU computes meanwhile, so the longer of the two times counts; on a CPU both count."""
TRAINING_HOST_SECONDS = 7.5e-4
"""Seconds as above, for a forward and backward pass."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU, or the CPU of a machine."""

    name: str
    memory: float
    """Bytes."""
    float32: float
    """FLOP/s of matrix products in float32, without TF32, which PyTorch leaves off."""
    bfloat16: float
    """FLOP/s of dense matrix products in bfloat16 with sums in float32."""
    bandwidth: float
    """Bytes/s of its memory."""
    link: float
    """Bytes/s, one way, to another GPU of the node."""
    network: float
    """Bytes/s, one way, to a GPU of another node: an assumption, since the network is bought separately."""
    source: str
    matmul_share: float = MATMUL_SHARE
    bandwidth_share: float = BANDWIDTH_SHARE
    is_cpu: bool = False

    def flops(self, *, is_bfloat16: bool) -> float:
        """Return the FLOP/s that the estimate assumes."""
        return self.matmul_share * (self.bfloat16 if is_bfloat16 else self.float32)

    @property
    def bytes_per_second(self) -> float:
        """Bytes/s that the estimate assumes."""
        return self.bandwidth_share * self.bandwidth


GPUS: Mapping[str, Device] = {
    "h100": Device(
        name="H100 SXM",
        memory=80 * GIGA,
        float32=67 * TERA,
        bfloat16=989.4 * TERA,
        bandwidth=3350 * GIGA,
        link=450 * GIGA,
        network=50 * GIGA,
        source="NVIDIA H100 data sheet",
    ),
    "h200": Device(
        name="H200 SXM",
        memory=141 * GIGA,
        float32=67 * TERA,
        bfloat16=989.4 * TERA,
        bandwidth=4800 * GIGA,
        link=450 * GIGA,
        network=50 * GIGA,
        source="NVIDIA H200 data sheet",
    ),
    "a100": Device(
        name="A100 80GB SXM",
        memory=80 * GIGA,
        float32=19.5 * TERA,
        bfloat16=312 * TERA,
        bandwidth=2039 * GIGA,
        link=300 * GIGA,
        network=25 * GIGA,
        source="NVIDIA A100 data sheet",
    ),
    "l40s": Device(
        name="L40S",
        memory=48 * GIGA,
        float32=91.6 * TERA,
        bfloat16=362.05 * TERA,
        bandwidth=864 * GIGA,
        link=32 * GIGA,
        network=12.5 * GIGA,
        source="NVIDIA L40S data sheet",
    ),
    "4090": Device(
        name="GeForce RTX 4090",
        memory=24 * GIGA,
        float32=82.6 * TERA,
        bfloat16=165.2 * TERA,
        bandwidth=1008 * GIGA,
        link=32 * GIGA,
        network=12.5 * GIGA,
        source="NVIDIA Ada GPU architecture, appendix A",
    ),
}
"""Name on the command line → device. The bfloat16 rates are for dense matrices; data sheets also print twice as much,
for sparse ones."""

CPU = "cpu"
WIDEST = 2048
"""Widest matrix product that is measured; wider ones have the same rate."""
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
DEVICE_NAMES = (*GPUS, CPU)


def device_named(name: str, *, width: int) -> Device:
    """Return a device by its name on the command line.

    Args:
        width: width of the model, which matters on the CPU: narrow matrix products are slower than wide ones.

    Raises:
        ValueError: there is no such device.
    """
    if name == CPU:
        return measured_cpu(width=width)
    if name not in GPUS:
        raise ValueError(f"--gpu={name} is not known; use one of {', '.join(DEVICE_NAMES)}")
    return GPUS[name]


def measured_cpu(*, width: int) -> Device:
    """Return the CPU of this machine: the rates of one thread, times the CPUs that this process may use.

    Bfloat16 counts as float32: a CPU without matrix instructions for it is not faster.

    Raises:
        ValueError: the CPU could not be measured.
    """
    environment = {**os.environ, **dict.fromkeys(_THREAD_VARIABLES, "1")}
    command = [sys.executable, "-m", "vantage.estimates.cpu_rate", str(min(width, WIDEST))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise ValueError(f"--gpu=cpu: this machine's CPU could not be measured ({last}); name a GPU")
    rates, cpus = json.loads(done.stdout), available_cpus()
    return Device(
        name=f"CPU, {cpus} threads" if cpus > 1 else "CPU, 1 thread",
        memory=float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        float32=rates["flops"] * cpus,
        bfloat16=rates["flops"] * cpus,
        bandwidth=rates["bandwidth"] * cpus,
        link=1 * GIGA,
        network=1 * GIGA,
        source="measured now",
        matmul_share=CPU_SHARE,
        bandwidth_share=CPU_SHARE,
        is_cpu=True,
    )
