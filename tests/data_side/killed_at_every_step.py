"""Kill `prepare` by SIGKILL before each thing that it does to the file system, one after the other, and go on each time.

    python killed_at_every_step.py FOLDER

FOLDER holds in.jsonl and words.json. After each kill, a folder of the output is what it was before or whole, a shard with metadata is
whole, and after going on every byte is that of an undisturbed run. Prints the number of kills.
"""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from lightning_3d.data.nanoset import Nanoset
from lightning_3d.data.prepare import prepare
from lightning_3d.data.shards import Shard

STEPS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir"}


def run(folder: Path, output: Path, kill_at: int | None, field: str = "text", **settings: Any) -> int:
    """Run `prepare` in a process of its own; return its status, 0 if it was not killed."""
    pid = os.fork()
    if pid == 0:
        left = [kill_at]

        def count(event: str, args: tuple[Any, ...]) -> None:
            if event not in STEPS or not str(args[0]).startswith(str(output)) or (event == "open" and args[2] & os.O_ACCMODE == 0):
                return
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

        if kill_at is not None:
            sys.addaudithook(count)
        prepare(
            [str(folder / "in.jsonl")],
            str(folder / "words.json"),
            str(output),
            eos_token="end",
            validation_fraction=0.4,
            shard_nbytes=150,
            text_field=field,
            num_workers=1,
            progress=False,
            **settings,
        )
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file, and no folder without one."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


def main(folder: Path) -> None:
    """Begin with nothing there, and with a Nanoset that is to be replaced."""
    kills = 0
    before, after, output = folder / "before", folder / "after", folder / "out"
    for replace, shuffle in ((False, True), (True, False)):
        shutil.rmtree(after, ignore_errors=True)
        assert run(folder, after, None, shuffle=shuffle) == 0
        if replace:
            assert run(folder, before, None, field="other") == 0
        for step in range(1000):
            shutil.rmtree(output, ignore_errors=True)
            if replace:
                shutil.copytree(before, output)
            status = run(folder, output, step, shuffle=shuffle, overwrite=True)
            for path in output.rglob("*.metadata"):
                Shard.open(path.with_suffix(""))  # whole, wherever it stands
            for split in ("train", "validation"):
                if (output / split).exists():
                    Nanoset(output / split, 2)
                    assert contents(output / split) in [contents(each / split) for each in (before, after)], step
            assert run(folder, output, None, shuffle=shuffle, overwrite=True) == 0, step
            assert contents(output) == contents(after), step
            if status == 0:
                break
            assert status == signal.SIGKILL
            kills += 1
        assert status == 0
    print(kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
