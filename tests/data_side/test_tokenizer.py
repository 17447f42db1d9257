"""A tokenizer from a file, a folder, or by its name; what is no tokenizer, is said in one line."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from lightning_3d.data.tokenizer import load_tokenizer
from lightning_3d.errors import ConfigError

BPE = Path(__file__).parent.parent / "data/tokenizer_bpe512"
TEXTS = ["In the beginning", "", "God created the heaven"]


def test_ids_back_to_back() -> None:
    """Empty texts are left out; the tokenizer's own special tokens and truncation are not applied."""
    tokenizer, plain = load_tokenizer(str(BPE)), Tokenizer.from_file(str(BPE / "tokenizer.json"))
    expected = [plain.encode(text).ids for text in TEXTS if text]
    ids, lengths = tokenizer.encode(TEXTS, append_eos=False)
    assert (ids.tolist(), lengths) == ([*expected[0], *expected[1]], [*map(len, expected)])
    ids, lengths = tokenizer.encode(TEXTS, append_eos=True)
    assert (ids.tolist(), lengths) == ([*expected[0], 0, *expected[1], 0], [len(each) + 1 for each in expected])
    assert tokenizer.encode([""], append_eos=True)[0].tolist() == []
    assert (tokenizer.vocab_size, tokenizer.eos_token_id) == (512, 0)


def test_the_same_from_file_and_folder(tmp_path: Path) -> None:
    shutil.copy(BPE / "tokenizer.json", tmp_path / "tokenizer.json")
    alone = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert alone.eos_token_id is None  # nothing beside it names one
    assert load_tokenizer(str(tmp_path), "<|endoftext|>").eos_token_id == 0
    assert alone.digest() == load_tokenizer(str(BPE)).digest()
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "<|endoftext|>"}}')
    assert load_tokenizer(str(tmp_path)).eos_token_id == 0


@pytest.mark.parametrize("content", ["[1]", "{", ""])
def test_broken_configuration(tmp_path: Path, content: str) -> None:
    shutil.copy(BPE / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer: .*tokenizer_config\.json is not a JSON object"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["nowhere.json", "./nowhere", "no/such/folder", ""])
def test_what_cannot_be_a_name(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"tokenizer: .* does not exist: name a tokenizer\.json, a folder with a tokenizer, or one on the"
    ):
        load_tokenizer(name)


def command(tmp_path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run `prepare` without a network, with a cache of its own."""
    (tmp_path / "a.txt").write_text("In the beginning")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    line = [sys.executable, "-m", "lightning_3d", "prepare", "--output", "out", *arguments]
    return subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)


def test_by_name(tmp_path: Path) -> None:
    """As the hub's cache keeps it; worker processes need not look again."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "home/hub/models--some--tokenizer"
    shutil.copytree(BPE, repository / "snapshots" / revision)
    (repository / "snapshots" / revision / "config.json").write_text('{"model_type": "llama"}')
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(revision)
    done = command(tmp_path, "a.txt", "a.txt", "--tokenizer", "some/tokenizer")
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out/nanoset.json").read_text())
    assert (summary["tokenizer"], summary["vocab_size"], summary["eos_token_id"]) == ("some/tokenizer", 512, 0)
    ids = Tokenizer.from_file(str(BPE / "tokenizer.json")).encode("In the beginning").ids
    assert (tmp_path / "out/00000_unshuffled.ds").read_bytes() == b"".join(token.to_bytes(2, "little") for token in [*ids, 0])
    assert (tmp_path / "out/00000_unshuffled.ds.metadata").read_text().startswith("some/tokenizer|2\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("a.txt", "--tokenizer", "some/tokenizer"),
            "tokenizer: some/tokenizer is no file or folder, and no fast tokenizer that can be had",
        ),
        (("some/data", "--tokenizer", str(BPE)), "inputs: some/data is neither a file nor a data set that can be reached: Couldn't reach"),
        (("--tokenizer", str(BPE)), "the following arguments are required: inputs"),
        (("a.txt",), "the following arguments are required: tokenizer"),
        (("a.txt", "--tokenizer", str(BPE), "--strict=perhaps"), "strict"),
        (("a.txt", "--tokenizer", str(BPE), "--shard_nbytes", "many"), "shard_nbytes"),
    ],
)
def test_one_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = command(tmp_path, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
