"""What `prepare` writes, to the byte, whoever does the work; what it leaves alone, and what it says about bad input."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from lightning_3d.data.nanoset import Nanoset
from lightning_3d.data.prepare import command as module
from lightning_3d.data.prepare import prepare
from lightning_3d.errors import ConfigError

FILES = Path(__file__).parent.parent / "data"
BPE = str(FILES / "tokenizer_bpe512")


@pytest.fixture
def words(tmp_path: Path) -> str:
    """A tokenizer of whole words: a=1, b=2, c=3, end=4."""
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "a": 1, "b": 2, "c": 3, "end": 4}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.save(str(tmp_path / "words.json"))
    return str(tmp_path / "words.json")


def texts(folder: Path, *documents: str) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in enumerate(documents):
        (folder / f"{number}.txt").write_text(text)
    return [str(folder / f"{number}.txt") for number in range(len(documents))]


def jsonl(path: Path, *documents: str, field: str = "text") -> str:
    path.write_text("".join(json.dumps({"id": number, field: text}) + "\n" for number, text in enumerate(documents)))
    return str(path)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*.ds*"))}


def test_golden_bytes(words: str, tmp_path: Path) -> None:
    """The truncation that the tokenizer was saved with is not meant for documents; an empty document is dropped."""
    golden = {
        "00000_unshuffled.ds": bytes.fromhex("0100 0200 0300 0400 0200 0400 0300 0300 0100 0100 0400"),
        "00000_unshuffled.ds.index": b"".join(number.to_bytes(8, "little") for number in (4, 6, 11)),
        "00000_unshuffled.ds.metadata": f"{words}|2\n11\n11.0 T".encode(),
    }
    documents = ("a b c", "b", "", "c c a a")
    for name, inputs in (("text", texts(tmp_path / "in", *documents)), ("jsonl", [jsonl(tmp_path / "in.jsonl", *documents)])):
        summary = prepare(inputs, words, str(tmp_path / name), eos_token="end", progress=False)
        assert contents(tmp_path / name) == golden
        assert summary["train"] == json.loads((tmp_path / name / "nanoset.json").read_text())
        figures = {key: summary["train"][key] for key in ("documents", "tokens", "dropped", "vocab_size", "eos_token_id")}
        assert figures == {"documents": 3, "tokens": 11, "dropped": {"empty": 1}, "vocab_size": 5, "eos_token_id": 4}
        assert summary["train"]["read"] == {"nbytes": sum(os.path.getsize(path) for path in inputs), "documents": 4}
    without = prepare(
        [jsonl(tmp_path / "in.jsonl", "a b", "c", field="body")], words, str(tmp_path / "o"), append_eos=False, text_field="body"
    )
    assert without["train"]["tokens"] == 3
    assert Nanoset(tmp_path / "o", 2).windows(np.array([0])).tolist() == [[1, 2, 3]]
    assert Nanoset(tmp_path / "o", 2).vocab_size == 5


def test_same_bytes_on_any_number_of_processes(tmp_path: Path) -> None:
    """Shards of 1,000 bytes cut in the middle of lines; together they hold what the tokenizer gives for each line."""
    documents = [f"Document {number}. " + "In the beginning. " * (number % 7) for number in range(100)]
    inputs = [jsonl(tmp_path / "in.jsonl", *documents), *texts(tmp_path / "in", "And more.", "And yet more.")]
    for num_workers in (1, 2):
        prepare(inputs, BPE, str(tmp_path / f"{num_workers}"), shard_nbytes=1000, num_workers=num_workers, progress=False)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    nanoset = Nanoset(tmp_path / "1", 8)
    assert len(nanoset.shards) > 5
    tokenizer = Tokenizer.from_file(f"{BPE}/tokenizer.json")
    expected = [[*tokenizer.encode(text).ids, 0] for text in [*documents, "And more.", "And yet more."]]
    read = np.concatenate([shard.tokens() for shard in nanoset.shards])
    assert read.tolist() == [token for ids in expected for token in ids]
    assert nanoset.num_documents == 102


def test_wide_vocabulary(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "a": 1, "end": 65_536}, unk_token="?"))
    tokenizer.save(str(tmp_path / "wide.json"))
    prepare(texts(tmp_path / "in", "a"), str(tmp_path / "wide.json"), str(tmp_path / "out"), eos_token="end", progress=False)
    assert contents(tmp_path / "out")["00000_unshuffled.ds"] == bytes.fromhex("01000000 00000100")


def test_held_out_documents(tmp_path: Path) -> None:
    """About the fraction asked for; the same whatever stands around them; duplicates on one side."""
    documents = [f"document {number}" for number in range(400)]

    def held_out(name: str, *documents: str) -> set[bytes]:
        prepare([jsonl(tmp_path / f"{name}.jsonl", *documents)], BPE, str(tmp_path / name), validation_fraction=0.1, progress=False)
        shards = {split: Nanoset(tmp_path / name / split, 4).shards[0] for split in ("train", "validation")}
        parts = {
            split: {ids.tobytes() for ids in np.split(shard.tokens(), shard.document_ends().astype(np.int64))}
            for split, shard in shards.items()
        }
        assert parts["train"] & parts["validation"] == {b""}  # after the last end
        return parts["validation"] - {b""}

    first = held_out("first", *documents)
    assert 25 <= len(first) <= 55
    assert held_out("second", *documents[::-1], *documents[:50]) == first


def test_used_again_it_does_nothing(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, output = texts(tmp_path / "in", "a b c", "c b a"), tmp_path / "out"
    settings: dict[str, Any] = {"eos_token": "end", "progress": False}
    first = prepare(inputs, words, str(output), **settings)
    times = {path: path.stat().st_mtime_ns for path in output.iterdir()}

    def refuse(*_: Any) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(module.Job, "write_shard", refuse)
    assert prepare(inputs, words, str(output), **settings) == first
    assert {path: path.stat().st_mtime_ns for path in output.iterdir()} == times


def test_made_from_something_else(words: str, tmp_path: Path) -> None:
    inputs, output = texts(tmp_path / "in", "a b c"), tmp_path / "out"
    settings: dict[str, Any] = {"eos_token": "end", "progress": False}
    prepare(inputs, words, str(output), **settings)
    texts(tmp_path / "in", "a b c a")
    with pytest.raises(
        ConfigError, match=r"output: .*out was made with other inputs, eos_token_id: choose another folder, or set overwrite"
    ):
        prepare(inputs, words, str(output), append_eos=False, progress=False)
    assert prepare(inputs, words, str(output), overwrite=True, **settings)["train"]["tokens"] == 5
    assert Nanoset(output, 4).num_tokens == 5
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"output: .*mine holds files that `prepare` did not write"):
        prepare(inputs, words, str(tmp_path / "mine"), overwrite=True, **settings)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_stopped_in_the_middle_nothing_looks_whole(words: str, tmp_path: Path, num_workers: int) -> None:
    path = Path(jsonl(tmp_path / "in.jsonl", *["a b c"] * 20))
    path.write_text(path.read_text() + '{"body": 1}\n')
    settings: dict[str, Any] = {"eos_token": "end", "progress": False, "shard_nbytes": 50, "num_workers": num_workers, "strict": True}
    with pytest.raises(ConfigError, match=r'inputs: .*in\.jsonl, line 21: no text \(no text in "text"\): mend it'):
        prepare([str(path)], words, str(tmp_path / "out"), **settings)
    assert not (tmp_path / "out").exists()
    jsonl(path, *["a b c"] * 20)
    assert prepare([str(path)], words, str(tmp_path / "out"), **settings)["train"]["tokens"] == 80
    assert not (tmp_path / "out.partial").exists()


def test_output_that_cannot_be_written(words: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file/out", Path("/proc/out")):
        with pytest.raises(
            ConfigError, match=r"output: .*(Not a directory|No such file or directory): choose a folder that can be written"
        ):
            prepare(texts(tmp_path / "in", "a"), words, str(output), eos_token="end", progress=False)
    with pytest.raises(ConfigError, match=r"output: .*file is not a folder: choose another"):
        prepare(texts(tmp_path / "in", "a"), words, str(tmp_path / "file"), eos_token="end", progress=False)


def test_progress(words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prepare(texts(tmp_path / "in", "a b c", "c b a"), words, str(tmp_path / "out"), eos_token="end")
    assert re.search(r"^tokenising .* 100% [\d,]+ documents/s [\d,]+ tokens/s 0:00:\d\d 0:00:00", capfd.readouterr().err)


def test_patterns(words: str, tmp_path: Path) -> None:
    texts(tmp_path / "in", "a", "b", "c")
    inputs = [str(tmp_path / "in/1.txt"), str(tmp_path / "**/*.txt")]
    prepare(inputs, words, str(tmp_path / "out"), append_eos=False, progress=False)
    assert Nanoset(tmp_path / "out", 2).windows(np.array([0])).tolist() == [[2, 1, 3]]  # each file once


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"inputs": ["/nowhere/*.txt"]}, r"inputs: /nowhere/\*\.txt names no file"),
        ({"tokenizer": "/nowhere"}, r"tokenizer: /nowhere does not exist"),
        ({"tokenizer": __file__}, r"tokenizer: .*test_prepare\.py is not a tokenizer of the `tokenizers` library"),
        ({"tokenizer": str(FILES)}, r"tokenizer: .*data holds neither a tokenizer\.json nor a fast `transformers` tokenizer"),
        (
            {"eos_token": None},
            r"eos_token: .*words\.json names no end-of-document token: name one of its tokens, or set append_eos to false",
        ),
        ({"eos_token": "<eos>"}, r"eos_token: .*words\.json has no token '<eos>'"),
        ({"validation_fraction": 1.0}, r"validation_fraction is 1\.0: give a share from 0 up to"),
        ({"validation_fraction": 1e-9}, r"inputs: no document is left for .*validation: give more text, or another validation_fraction"),
        ({"shard_nbytes": 0}, r"shard_nbytes is 0"),
        ({"shard_nbytes": -5}, r"shard_nbytes is -5"),
        ({"num_workers": 0}, r"num_workers is 0: give at least 1"),
        ({"num_workers": -1}, r"num_workers is -1"),
        ({"validation_fraction": -0.1}, r"validation_fraction is -0\.1"),
        ({"inputs": []}, r"inputs: none given: name text"),
        (
            {"inputs": ["{tmp}/latin.txt"]},
            r"inputs: no document is left for .*out \(.*latin\.txt, byte 3: not UTF-8 \(unexpected end of data\)\): give files with text",
        ),
        ({"inputs": ["{tmp}/empty.txt"]}, r"inputs: no document is left for .*out: give files with text"),
        (
            {"inputs": ["{tmp}/list.jsonl"], "strict": True},
            r"inputs: .*list\.jsonl, line 1: no text \(not an object\): mend it, or set str",
        ),
    ],
)
def test_bad_input(words: str, tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    (tmp_path / "latin.txt").write_bytes("caf\u00e9".encode("latin-1"))
    (tmp_path / "empty.txt").touch()
    (tmp_path / "list.jsonl").write_text("[1]\n")
    settings: dict[str, Any] = {"inputs": texts(tmp_path / "in", "a b"), "tokenizer": words, "eos_token": "end", **keys}
    settings["inputs"] = [name.replace("{tmp}", str(tmp_path)) for name in settings["inputs"]]
    with pytest.raises(ConfigError, match=message):
        prepare(output=str(tmp_path / "out"), progress=False, **settings)


def test_tokenizer_of_transformers(tmp_path: Path) -> None:
    """A folder of a slow format that `transformers` alone can read: GPT-2's vocabulary and merges."""
    (tmp_path / "gpt2").mkdir()
    tokenizer = Tokenizer.from_file(f"{BPE}/tokenizer.json")
    tokenizer.model.save(str(tmp_path / "gpt2"))
    (tmp_path / "gpt2/tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}))
    inputs = texts(tmp_path / "in", "In the beginning God created the heaven and the earth.")
    for name, path in (("a", BPE), ("b", str(tmp_path / "gpt2"))):
        prepare(inputs, path, str(tmp_path / name), progress=False)
    assert contents(tmp_path / "a")["00000_unshuffled.ds"] == contents(tmp_path / "b")["00000_unshuffled.ds"]
