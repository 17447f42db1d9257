"""What the environment says of the processes that others started."""

import pytest
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Trainer

from lightning_3d import ThreeDStrategy, launched
from lightning_3d.errors import ConfigError

NAMES = ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "SLURM_PROCID")
TASKS = {"SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2", "RANK": "9", "LOCAL_RANK": "1"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    for name in (*NAMES, *TASKS, "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)

    def put(variables: dict[str, str | None]) -> None:
        for name, value in variables.items():
            if value is not None:
                monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize(
    ("variables", "processes", "rank"),
    [
        ({}, None, 0),
        ({"LOCAL_RANK": "1"}, None, 1),  # Lightning's own launcher
        (TORCHRUN, (8, 2), 9),
        (TASKS, (4, 2), 5),
        (TASKS | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_NTASKS_PER_NODE": "1"} | TORCHRUN, (8, 2), 9),  # srun starts torchrun
        ({"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, (1, 1), 0),
        (TASKS | {"SLURM_JOB_NAME": "interactive", "SLURM_PROCID": "0"}, None, 0),
    ],
    ids=["nobody", "lightning", "torchrun", "srun", "torchrun-in-srun", "one-task", "interactive"],
)
def test_how_many_and_which(environment, variables: dict[str, str], processes: tuple[int, int] | None, rank: int) -> None:
    environment(variables)
    assert (launched.processes(), launched.rank()) == (processes, rank)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_STEP_ID": None}, "SLURM_NTASKS=8, but srun did not start this process, which would wait for the others: put srun before"),
        ({"SLURM_NTASKS_PER_NODE": None}, "with SLURM_NTASKS_PER_NODE=None: ask for .* srun --nodes=2 --ntasks-per-node=4"),
        ({"SLURM_NTASKS": "2"}, "SLURM_NTASKS=2 on SLURM_NNODES=2 with SLURM_NTASKS_PER_NODE=4: ask .* --nodes=2 --ntasks-per-node=1"),
        ({"SLURM_NTASKS": "7"}, "SLURM_NTASKS=7 on SLURM_NNODES=2"),
    ],
    ids=["no-srun", "not-per-node", "other-than-sbatch", "uneven"],
)
def test_what_slurm_says_does_not_fit(environment, changes: dict[str, str | None], message: str) -> None:
    environment(TASKS | changes)
    with pytest.raises(ConfigError, match=message):
        launched.processes()


def test_a_trainer_under_slurm(environment) -> None:
    """Refused where it is told of other processes; else it leaves it to the job's script to queue the job again."""
    environment(TASKS | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_ID": "1"})
    message = (
        r"trainer.devices=2 x num_nodes=4, but 4 processes were started on each of 2 nodes: set trainer.devices=4 and trainer.num_nodes=2"
    )
    with pytest.raises(ConfigError, match=message):
        Trainer(accelerator="cpu", devices=2, num_nodes=4, strategy=ThreeDStrategy(), logger=False)
    trainer = Trainer(accelerator="cpu", devices=4, num_nodes=2, strategy=ThreeDStrategy(tp=4), logger=False)
    assert isinstance(trainer.strategy, ThreeDStrategy)
    assert isinstance(trainer.strategy.cluster_environment, SLURMEnvironment)
    assert not trainer.strategy.cluster_environment.auto_requeue
    assert trainer.strategy.dims.dp == 2
