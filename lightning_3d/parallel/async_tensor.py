"""Asynchronous tensor parallelism: products and collectives in parts, so that one part is sent while another is multiplied.

torch has it, for CUDA: a pass of inductor's makes one operation of an all-gather and the products of what it gathered (q, k and v share
one, gate and up another), and one of a product and the reduce-scatter of it. The operations read and write the other ranks' memory
directly, so all ranks of tp must reach each other's: those of one node, or of one NVLink domain.

The pass looks for what torch's own collectives trace to, and finds the four of a block's forward because ``gather_sequence`` and
``scatter_sequence`` (parallel/tensor.py) trace to the same. Of the backward's it finds the two all-gathers; the two reduce-scatters there
send a sum of several products, which torch does not take apart. Nor does it find linears with a bias, those in float8 at the all-gathers,
what is outside blocks, or, in validation, the all-gathers of several sequences. Not measured on a GPU.

Source: Wang et al. 2023 (Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning Models);
torch/_inductor/fx_passes/micro_pipeline_tp.py.
"""

import warnings
from typing import Any

import torch
import torch.distributed as dist

from lightning_3d.errors import ConfigError
from lightning_3d.parallel.compiled import Compile


def check_async_tensor_parallel(tp: int, *, sequence_parallel: bool, mode: Compile, device: torch.device) -> None:
    """Refuse what torch's pass does not run with.

    Raises:
        ConfigError: one rank, a whole hidden state on each rank, blocks that inductor does not compile, or no CUDA device.
    """
    lacks = {
        f"tp={tp}: set tp to 2 or more": tp < 2,
        f"sequence_parallel={sequence_parallel}: set sequence_parallel to true": not sequence_parallel,
        f"compile={mode}: set compile to true": mode not in (True, "inductor"),
        f"a device of type {device.type}: run on CUDA devices": device.type != "cuda",
    }
    for lack, is_so in lacks.items():
        if is_so:
            raise ConfigError(f"async_tensor_parallel=True cannot be with {lack}, or leave async_tensor_parallel out")


def fusing(group: dist.ProcessGroup) -> dict[str, Any]:
    """Settings of torch.compile that take the collectives of a group into products.

    A graph for each size of a microbatch: the pass loses its way where sizes are left open, in validation or for another length.
    """
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 says that nobody need call it, but its pass asks whether one did
        enable_symm_mem_for_group(group.group_name)
    return {"dynamic": False, "options": {"_micro_pipeline_tp": True}}
