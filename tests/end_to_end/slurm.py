"""A SLURM of two virtual nodes on this host, for whoever runs the tests: its daemons, their files and their ports are this test's own."""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "scontrol", "squeue", "scancel")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
MISSING = [name for name in (*DAEMONS, *COMMANDS) if shutil.which(name, path=PATH) is None]

CONFIG = """
ClusterName=virtual
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=DEFAULT CPUs=8 Gres=gpu:8
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1}
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2}
PartitionName=DEFAULT Nodes=node1,node2 State=UP
PartitionName=low Default=YES PriorityTier=1 GraceTime=60
PartitionName=at_once PriorityTier=1 GraceTime=0
PartitionName=high PriorityTier=2
"""


class Slurm:
    """The daemons, in the foreground as children of this process; `close` ends them and what they run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        for name in ("munge", "state"):
            (folder / name).mkdir(parents=True)
        for path in (folder, folder / "munge"):
            path.chmod(0o755)  # munged's clients must reach its socket
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        port, port1, port2 = free_ports(3)
        config = folder / "slurm.conf"
        config.write_text(
            CONFIG.format(
                folder=folder, host=socket.gethostname().split(".")[0], user=getpass.getuser(), port=port, port1=port1, port2=port2
            )
        )
        for number in range(8):  # GPUs that are files: SLURM only counts them
            (folder / f"gpu{number}").touch()
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
        # node1 has no address here; in a cluster it has, and then Lightning finds it.
        self.environment = os.environ | {"SLURM_CONF": str(config), "PATH": PATH, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        folder = self.folder
        self._run("munged", "--foreground", "--force", *(f"--{name}-file={folder}/munge/{name}" for name in ("key", "pid", "log", "seed")),
                  f"--socket={folder}/munge/socket")  # fmt: skip
        wait_until((folder / "munge" / "socket").exists, 10, self.log)
        self._run("slurmctld", "-D", "-c")
        for node in ("node1", "node2"):
            self._run("slurmd", "-D", "-N", node)
        wait_until(lambda: self("sinfo", "-h", "-o", "%t %D").strip() == "idle 2", 30, self.log)

    def _run(self, name: str, *arguments: str) -> None:
        command = [shutil.which(name, path=PATH) or name, *arguments]
        with (self.folder / "daemons.log").open("a") as log:
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log, start_new_session=True))

    def log(self) -> str:
        return (self.folder / "daemons.log").read_text()[-8000:]

    def __call__(self, *command: str, folder: Path | None = None) -> str:
        """What a command of SLURM prints."""
        done = subprocess.run(command, cwd=folder or self.folder, env=self.environment, capture_output=True, text=True, timeout=60)
        return done.stdout

    def state(self, job: str) -> tuple[str, int]:
        """(PENDING, RUNNING, COMPLETED, ...; how often it was queued again)."""
        fields = dict(field.split("=", 1) for field in self("scontrol", "show", "job", job).split() if "=" in field)
        return fields["JobState"], int(fields["Restarts"])

    def wait(self, job: str, state: str, timeout_s: float) -> None:
        wait_until(lambda: self.state(job)[0] == state, timeout_s, lambda: f"job {job} is {self.state(job)}\n{self.log()}")

    def close(self) -> None:
        try:
            with suppress(OSError, subprocess.SubprocessError, AssertionError):
                self("scancel", "--user", getpass.getuser())
                wait_until(lambda: not self("squeue", "-h").strip(), 40, str)
        finally:
            self._end_daemons()

    def _end_daemons(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and any(daemon.poll() is None for daemon in self._daemons):
            time.sleep(0.05)
        for daemon in self._daemons:
            daemon.kill()


def wait_until(condition: Callable[[], bool], timeout_s: float, explain: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
