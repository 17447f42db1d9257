"""Stopped at any moment, by a kill or by a full disk, and given again: what is finished is kept, and the bytes are the same."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from lightning_3d.data.prepare import prepare
from lightning_3d.data.prepare.resume import Output
from lightning_3d.errors import ConfigError

HERE = Path(__file__).parent
BPE = str(HERE.parent / "data/tokenizer_bpe512")
SHARDS = 24


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*_unshuffled.ds*")}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some 24 shards of 40,000 bytes, and what they become."""
    folder = tmp_path_factory.mktemp("corpus")
    line = "In the beginning God created the heaven and the earth. "
    with (folder / "in.jsonl").open("w") as file:
        for number in range(1000):
            file.write(json.dumps({"text": f"{number} {line * (number % 37)}"}) + "\n")
    size = (folder / "in.jsonl").stat().st_size
    (folder / "options").write_text(f"--shard_nbytes {-(-size // SHARDS)} --validation_fraction 0.2")
    run(folder, "whole").wait()
    assert len(list((folder / "whole/train").glob("*.ds"))) == SHARDS
    return folder


def run(folder: Path, output: str, *options: str, **settings: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "lightning_3d", "prepare", "in.jsonl", "--tokenizer", BPE, "--output", output, *options]
    command += (folder / "options").read_text().split()
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings)  # type: ignore[call-overload]


def wait_for(process: "subprocess.Popen[str]", condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("group", [False, True], ids=["parent", "all"])
@pytest.mark.parametrize("notes", [0, 1, 9, SHARDS - 1])
def test_killed_at_work(corpus: Path, tmp_path: Path, notes: int, group: bool) -> None:
    """The parent alone, or its workers, too; those that are left end by themselves."""
    partial = tmp_path / "out/train.partial"
    process = run(corpus, str(tmp_path / "out"), "--num_workers", "2", start_new_session=True)
    wait_for(process, lambda: partial.exists() and len(list(partial.glob("finished/*.json"))) >= notes)
    (os.killpg if group else os.kill)(process.pid, signal.SIGKILL)
    process.communicate()
    wait_until_gone(process.pid)
    assert not (tmp_path / "out/train").exists()
    done = {path.stem for path in partial.glob("finished/*.json")}
    kept = {name: when for name, when in times(partial).items() if name[:5] in done}
    assert len(kept) == 3 * len(done) >= 3 * notes
    again = run(corpus, str(tmp_path / "out"), "--num_workers", "2")
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 0
    assert f"documents: {json.loads((corpus / 'whole/train/nanoset.json').read_text())['documents']}" in output
    assert contents(tmp_path / "out") == contents(corpus / "whole")
    now = times(tmp_path / "out/train")
    assert {name: now[name] for name in kept} == kept
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["train", "validation"]


def wait_until_gone(group: int) -> None:
    """Wait until no process of the group is left, as workers see that their parent is gone."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.02)
    raise AssertionError("workers outlive their parent")


def test_killed_at_every_step(tmp_path: Path) -> None:
    """Before every file and folder that is made, renamed or removed."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2, "c": 3, "end": 4}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    records = [{"text": "a b c " * (n % 5) + "b " * n, "other": "c a " * (n + 1)} for n in range(10)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    command = [sys.executable, str(HERE / "killed_at_every_step.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 80


def test_one_worker_killed(corpus: Path, tmp_path: Path) -> None:
    """As the kernel does where memory runs out: the work ends with one line, and goes on."""
    partial = tmp_path / "out/train.partial"
    process = run(corpus, str(tmp_path / "out"), "--num_workers", "2")
    wait_for(process, lambda: partial.exists() and len(list(partial.glob("finished/*.json"))) >= 3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    worker = next(child for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes())
    os.kill(int(worker), signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    expected = "error: num_workers: a process was killed by signal 9, as when memory runs out: give fewer, and the same command goes on"
    assert expected in errors.splitlines()[-1]
    assert not list((tmp_path / "out").rglob("*.tmp"))
    assert run(corpus, str(tmp_path / "out")).wait() == 0
    assert contents(tmp_path / "out") == contents(corpus / "whole")


def test_interrupted(corpus: Path, tmp_path: Path) -> None:
    partial = tmp_path / "out/train.partial"
    process = run(corpus, str(tmp_path / "out"), "--num_workers", "2", start_new_session=True)
    wait_for(process, lambda: partial.exists() and len(list(partial.glob("finished/*.json"))) >= 3)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors.count("Traceback") <= 1  # the parent's own, not one of each worker
    assert not list((tmp_path / "out").rglob("*.tmp"))
    assert run(corpus, str(tmp_path / "out")).wait() == 0
    assert contents(tmp_path / "out") == contents(corpus / "whole")


def test_files_may_not_be_that_large(corpus: Path, tmp_path: Path) -> None:
    """What a quota does: one line; what was finished is kept."""
    sizes = sorted(path.stat().st_size for path in (corpus / "whole/train").glob("*.ds"))
    limit = (sizes[-3], sizes[-3])
    process = run(corpus, str(tmp_path / "out"), preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    message = "File too large: make room, and the same command goes on with the shards that are not finished"
    assert errors.splitlines()[-1].startswith(f"error: output: {tmp_path}/out/train")
    assert errors.splitlines()[-1].endswith(message)
    assert "Traceback" not in errors
    kept = times(tmp_path / "out/train.partial")
    assert kept
    assert not list((tmp_path / "out").rglob("*.tmp"))
    assert run(corpus, str(tmp_path / "out")).wait() == 0
    assert contents(tmp_path / "out") == contents(corpus / "whole")
    done = times(tmp_path / "out/train")
    assert sum(done[name] == when for name, when in kept.items()) > 0


SMALL_DISK = """
mkdir disk && mount -t tmpfs -o size=120k tmpfs disk || exit 77
"$@" && exit 1
ls disk/out/train.partial/finished/*.json > /dev/null || exit 2
mount -o remount,size=9m disk && "$@" && cp -r disk/out out
"""


def test_disk_full(corpus: Path, tmp_path: Path) -> None:
    """A disk of 120 KiB in a name space of its own, and then a larger one."""
    arguments = ["-m", "lightning_3d", "prepare", str(corpus / "in.jsonl"), "--tokenizer", BPE, "--output", "disk/out"]
    arguments += (corpus / "options").read_text().split()
    if not shutil.which("unshare"):
        pytest.skip("no unshare")
    shell = ["unshare", "-rm", "sh", "-c", SMALL_DISK, "sh", sys.executable, *arguments]
    done = subprocess.run(shell, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip("no file system may be mounted here")
    assert done.returncode == 0, done.stderr
    assert "error: output: disk/out/train" in done.stderr
    assert ": No space left on device: make room, and the same command goes on" in done.stderr
    assert "Traceback" not in done.stderr
    mine, whole = contents(tmp_path / "out"), contents(corpus / "whole")
    different = {name for name in whole if mine.get(name) != whole[name]}
    assert different == {"train/nanoset.json", "validation/nanoset.json"}  # the input has another path here


def test_two_at_once(corpus: Path, tmp_path: Path) -> None:
    output = Output({"train": tmp_path / "out"})
    with output.reserved(), pytest.raises(ConfigError, match=r"output: another process is writing .*out\.partial: wait for it"):
        prepare([str(corpus / "in.jsonl")], BPE, str(tmp_path / "out"), progress=False)
    assert prepare([str(corpus / "in.jsonl")], BPE, str(tmp_path / "out"), progress=False)["train"]["documents"] == 1000


def test_a_partial_folder_of_somebody_else(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial/thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"output: .*out\.partial holds files that `prepare` did not write: remove it, or choose"):
        prepare([str(corpus / "in.jsonl")], BPE, str(tmp_path / "out"), progress=False)


def test_only_what_changed_is_made_again(tmp_path: Path) -> None:
    """Stopped by a bad line and mended, a file is read again, others are not; other settings begin anew; a harmed shard is made again."""
    paths = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_text(json.dumps({"text": f"document {number}"}) + "\n" + ("{\n" if number == 2 else ""))
    inputs, out = [str(path) for path in paths], tmp_path / "out"
    settings = {"shard_nbytes": 20, "num_workers": 1, "progress": False, "strict": True}

    def fails() -> dict[str, int]:
        with pytest.raises(ConfigError, match=r"2\.jsonl, line 2: not JSON"):
            prepare(inputs, BPE, str(out), **settings)  # type: ignore[arg-type]
        return times(tmp_path / "out.partial")

    first = fails()
    assert {name[:5] for name in first} == {"00000", "00001", "00002"}  # each holds the end of a file and the beginning of the next
    assert fails() == first
    paths[0].write_text(json.dumps({"text": "document A"}) + "\n")
    second = fails()
    assert {name[:5] for name in first if second[name] != first[name]} == {"00000", "00001"}
    (tmp_path / "out.partial/00002_unshuffled.ds").write_bytes(b"")
    third = fails()
    assert {name[:5] for name in second if third[name] != second[name]} == {"00002"}
    settings["text_field"] = "body"
    with pytest.raises(ConfigError, match=r"0\.jsonl, line 1: no text"):
        prepare(inputs, BPE, str(out), **settings)  # type: ignore[arg-type]
    assert times(tmp_path / "out.partial") == {}
