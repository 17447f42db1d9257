"""Processes that torchrun or SLURM's srun has started: how many, and which of them this is, before there is a Trainer."""

import os

from lightning_3d.errors import ConfigError


def rank() -> int:
    """This process's; 0 where nobody has started others yet."""
    return int(next((os.environ[name] for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID") if name in os.environ), 0))


def processes() -> tuple[int, int] | None:
    """(processes on each node, nodes); None where neither torchrun nor srun has started this one.

    Raises:
        ConfigError: what SLURM says does not fit together.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:  # also inside SLURM, where srun starts one torchrun a node
        return int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    if "SLURM_NTASKS" not in os.environ or os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive"):
        return None  # the same as Lightning's SLURMEnvironment.detect()
    tasks, nodes = int(os.environ["SLURM_NTASKS"]), int(os.environ.get("SLURM_NNODES", "1"))
    if tasks == 1:
        return 1, 1
    if "SLURM_STEP_ID" not in os.environ:
        raise ConfigError(
            f"SLURM_NTASKS={tasks}, but srun did not start this process, which would wait for the others: put srun before the command"
        )
    each = os.environ.get("SLURM_NTASKS_PER_NODE")  # of sbatch, if srun was given none
    if tasks % nodes or each != str(tasks // nodes):
        raise ConfigError(
            f"SLURM_NTASKS={tasks} on SLURM_NNODES={nodes} with SLURM_NTASKS_PER_NODE={each}: ask for as many on each node, as with "
            f"srun --nodes={nodes} --ntasks-per-node={max(1, tasks // nodes)}"
        )
    return tasks // nodes, nodes
