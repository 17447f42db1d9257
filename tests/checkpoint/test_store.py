"""Checkpoints in an object store: a real server that speaks S3, started here, and reached over HTTP by every rank."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import s3fs
import torch
from ranks_resume import STEPS, Layout, Run, fit
from safetensors.torch import load_file

from lightning_3d.checkpoint import at, clear_leftovers, latest_checkpoint, remove, step_folder, whole_steps
from lightning_3d.checkpoint.export import export
from lightning_3d.checkpoint.folder import begin, set_damaged_aside
from lightning_3d.checkpoint.manifest import damage
from lightning_3d.checkpoint.store import StorePath
from lightning_3d.errors import ConfigError
from lightning_3d.model.hf import to_hf_name
from lightning_3d.testing import RankPool

BUCKET = "checkpoints"
FILES = [".metadata", "__0_0.distcp", "__1_0.distcp", "manifest.json", "trainer.pt"]


@pytest.fixture(scope="module")
def s3() -> Iterator[s3fs.S3FileSystem]:
    """The server with an empty bucket; the environment says where it is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    environment = {
        "AWS_ENDPOINT_URL": address,
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL)
    with pytest.MonkeyPatch.context() as patch:
        for key, value in environment.items():
            patch.setenv(key, value)
        for _ in range(600):
            try:
                urlopen(address, timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        client = s3fs.S3FileSystem(use_listings_cache=False)
        client.mkdir(BUCKET)
        yield client
    server.terminate()
    server.wait()


@pytest.fixture(scope="module")
def ranks(s3: s3fs.S3FileSystem) -> Iterator[RankPool]:
    """Processes that know the server."""
    with RankPool() as pool:
        yield pool


@pytest.fixture(scope="module")
def saved(ranks: RankPool) -> tuple[Run, list[dict[str, Any]]]:
    """A run of two pipeline ranks that saves every third step."""
    run = Run(Layout(pp=2), f"s3://{BUCKET}/saved", checkpoint={"checkpoint_interval": 3})
    return run, ranks.run(fit, 2, (run,))


def names(s3: s3fs.S3FileSystem, folder: Any) -> list[str]:
    return sorted(name.rpartition("/")[2] for name in s3.find(str(folder)))


def flip(s3: s3fs.S3FileSystem, url: str) -> None:
    content = bytearray(s3.cat(url))
    content[len(content) // 2] ^= 1
    s3.pipe(url, bytes(content))


def test_a_run_saves_there(saved: tuple[Run, list[dict[str, Any]]], s3: s3fs.S3FileSystem) -> None:
    run, seen = saved
    assert whole_steps(run.folder) == [3, 6, 8]
    assert str(latest_checkpoint(run.folder)) == f"{run.folder}/step-8" == seen[0]["last"]
    assert str(latest_checkpoint(run.folder, before=f"{run.folder}/step-8")) == f"{run.folder}/step-6"
    assert names(s3, step_folder(run.folder, 6)) == FILES
    assert damage(step_folder(run.folder, 6)) is None


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(dp=2, mode="fsdp")], ids=str)
def test_resumes_from_there(
    layout: Layout, background: bool, saved: tuple[Run, list[dict[str, Any]]], ranks: RankPool, s3: s3fs.S3FileSystem
) -> None:
    """In the same layout bit by bit; older checkpoints are removed."""
    run, before = saved
    folder = f"s3://{BUCKET}/{layout}-{background}"
    again = replace(run, layout=replace(layout, background=background), folder=folder, resume=f"{run.folder}/step-3")
    after = ranks.run(fit, 2, (replace(again, checkpoint={"checkpoint_interval": 1, "keep_last": 2}),))
    whole = {key: value for rank in before for key, value in rank["final"].items()}
    for seen in after:
        assert seen["losses"] == pytest.approx(before[0]["losses"][3:], rel=0, abs=1e-10)
        for key, value in seen["final"].items():
            assert torch.allclose(value, whole[key], rtol=0, atol=0 if layout == run.layout else 1e-10)
    assert whole_steps(folder)[-2:] == [STEPS - 1, STEPS]
    assert len(whole_steps(folder)) <= 2 + background  # one may have been in the making when others were counted


def test_an_older_one_is_taken(saved: tuple[Run, list[dict[str, Any]]], ranks: RankPool, s3: s3fs.S3FileSystem) -> None:
    """In place of one with a flipped byte, which is found and named; its step is saved again."""
    root = f"s3://{BUCKET}/damaged"
    for step in (3, 6):
        s3.copy(f"{saved[0].folder}/step-{step}", f"{root}/step-{step}", recursive=True)
    flip(s3, f"{root}/step-6/__0_0.distcp")
    assert whole_steps(root) == [3, 6]
    assert damage(step_folder(root, 6)) == "__0_0.distcp is not what was written: its checksum is another"
    for seen in ranks.run(fit, 2, (replace(saved[0], folder=root, resume=f"{root}/step-6", resume_from_older=True),)):
        assert seen["first_step"] == 3
    assert whole_steps(root) == [3, 6, 8]
    assert damage(step_folder(root, 6)) is None


def test_a_part_is_no_checkpoint(saved: tuple[Run, list[dict[str, Any]]], s3: s3fs.S3FileSystem) -> None:
    """One that lacks an object or its manifest, or is set aside as damaged."""
    root = at(f"s3://{BUCKET}/parts")
    for step, name in ((3, "__1_0.distcp"), (6, "manifest.json")):
        s3.copy(f"{saved[0].folder}/step-{step}", f"{root}/step-{step}", recursive=True)
        assert whole_steps(root) == [step]
        s3.rm(f"{root}/step-{step}/{name}")
        assert whole_steps(root) == []
    s3.copy(f"{saved[0].folder}/step-8", f"{root}/step-8", recursive=True)
    assert set_damaged_aside(step_folder(root, 8)) == step_folder(root, 8)
    assert latest_checkpoint(root) is None
    assert names(s3, f"{root}/step-8") == [*FILES[:3], "manifest.json.damaged", "trainer.pt"]


def test_what_killed_runs_leave_is_cleared_away(saved: tuple[Run, list[dict[str, Any]]], s3: s3fs.S3FileSystem) -> None:
    """Killed in a save, and right after the manifest of another; what somebody else has put there stays."""
    root = at(f"s3://{BUCKET}/killed")
    s3.copy(f"{saved[0].folder}/step-3", f"{root}/step-3", recursive=True)
    s3.pipe(f"{root}/step-3/.unfinished", b"")
    s3.pipe(f"{begin(step_folder(root, 4))}/__7_0.distcp", b"half a shard")
    s3.pipe(f"{root}/step-100/notes", b"of somebody else")
    assert whole_steps(root) == [3]
    clear_leftovers(root)
    assert sorted(path.name for path in root.iterdir()) == ["step-100", "step-3"]
    assert names(s3, begin(step_folder(root, 3))) == [".unfinished"]
    remove(step_folder(root, 3))
    assert names(s3, root) == ["notes"]


def test_export(saved: tuple[Run, list[dict[str, Any]]], tmp_path: Path) -> None:
    export(saved[0].folder, str(tmp_path / "exported"))
    exported = load_file(tmp_path / "exported" / "model.safetensors")
    final = {to_hf_name(key): value for rank in saved[1] for key, value in rank["final"].items() if ":" not in key}
    assert exported.keys() == final.keys()
    assert all(torch.equal(exported[name], value) for name, value in final.items())


def test_a_store_that_is_not_there(ranks: RankPool) -> None:
    run = Run(Layout(pp=2), "s3://no-such-bucket/run", checkpoint={"checkpoint_interval": 100}, trainer={"max_steps": 1})
    for seen in ranks.run(fit, 2, (run,)):
        assert seen["error"].startswith("checkpoint s3://no-such-bucket/run/step-1 was not written: ")
        assert "bucket does not exist" in seen["error"]


def test_urls(tmp_path: Path) -> None:
    assert at(f"file://{tmp_path}") == at(str(tmp_path)) == tmp_path
    assert at("s3://bucket/run/") == StorePath("s3://bucket/run")
    with pytest.raises(ConfigError, match=r"nowhere://bucket: Protocol not known: nowhere"):
        whole_steps("nowhere://bucket")
