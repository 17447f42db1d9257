"""Starts ranks that can be killed, again and again, in a second each: imports once, and forks.

    python killable.py WORLD_SIZE

Each line of its input is a JSON list of arguments for `python -m lightning_3d`; it starts the ranks, with torchrun's variables, and writes
their process ids. When all have ended it writes their exit codes, and takes the next line.
"""

import json
import os
import socket
import sys

import double  # noqa: F401  (Lightning, the package, and float64)

from lightning_3d.__main__ import main
from lightning_3d.cli import CLI  # noqa: F401  (imported before the ranks are forked)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def be_rank(rank: int, world_size: int, port: int, arguments: list[str]) -> None:
    """In a child: never returns."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), "GROUP_WORLD_SIZE": "1"}
    os.environ["TORCHELASTIC_RUN_ID"] = "killable"
    os.dup2(2, 1)
    code = 1
    try:
        code = main(arguments)
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def serve(world_size: int) -> None:
    for line in sys.stdin:
        port, pids = free_port(), []
        for rank in range(world_size):
            pid = os.fork()
            if not pid:
                be_rank(rank, world_size, port, json.loads(line))
            pids.append(pid)
        print(json.dumps(pids), flush=True)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]), flush=True)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
