"""`inspect`: the numbers and the text that it shows, as a person sees them."""

import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lightning_3d.data.inspect as inspect_module
from lightning_3d.__main__ import main
from lightning_3d.data.inspect import pieces, sample_lengths
from lightning_3d.data.nanoset import Nanoset
from lightning_3d.data.shards import Shard, ShardWriter

DATA = Path(__file__).parent.parent / "data"
TOKENIZER = str(DATA / "tokenizer_bpe512")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Documents of 1, 2, 3, 4, 0 and 100 tokens in two files, whose token t is t; the last document ends with 109."""
    return write(tmp_path / "set", [[1, 2, 3], [4, 0, 100]])


def write(folder: Path, lengths: list[list[int]], tokenizer: str = "none") -> Path:
    folder.mkdir(parents=True)
    begin = 0
    for number, documents in enumerate(lengths):
        with ShardWriter(folder / f"{number:05d}_unshuffled.ds", tokenizer, 4) as shard:
            for length in documents:
                shard.append(np.arange(begin, begin + length))
                begin += length
    return folder


def show(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What the command prints, with the frame and runs of spaces taken away."""
    assert main(["inspect", *args]) == 0
    lines = capsys.readouterr().out.splitlines()
    return "\n".join(" ".join(line.strip("│").split()) for line in lines)


def test_facts_and_histogram(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = show(capsys, str(folder))
    assert "files 2: 00000_unshuffled.ds to 00001_unshuffled.ds" in shown
    assert "documents 6\ntokens 110\n" in shown
    assert "bytes 488: 4 a token and 8 a document" in shown  # 110 x 4 + 6 x 8
    assert "tokenizer none (not found here)" in shown
    assert "vocabulary not known; the largest id seen is 109" in shown
    assert "mean 18.3, shortest 0, 10 % 0, median 2, 90 % 52, 99 % 95, longest 100" in " ".join(shown.split("\n"))
    bars = [re.sub("[^0-9,.% -]", "", line).split() for line in shown.split("\n") if line.endswith("%") and "document" not in line]
    assert bars == [
        ["0", "1", "0.0%"],
        ["1", "1", "0.9%"],
        ["2-3", "2", "4.5%"],
        ["4-7", "1", "3.6%"],
        ["8-15", "0", "0.0%"],
        ["16-31", "0", "0.0%"],
        ["32-63", "0", "0.0%"],
        ["64-127", "1", "90.9%"],
    ]
    assert "give its path with --tokenizer to see text" in " ".join(shown.split("\n"))


def test_text_with_borders(capsys: pytest.CaptureFixture[str]) -> None:
    """The first 1,444 tokens, which hold three documents, and part of the first 30, with the tokenizer that the files name."""
    shown = show(capsys, str(DATA / "nanoset_datatrove_u32"), "--sequence_length", "8595", "--samples", "5")
    assert "tokenizer tokenizer_bpe512/tokenizer.json (found)" in shown
    assert "end of document id 0 <|endoftext|>, the last of 100.0% of the first 29" in shown
    assert shown.count("tokens 0 to 8,595") == 1  # there is one such place
    assert shown.count("▌") == 29
    assert shown.count("<|endoftext|>") == 1 + 28  # that of the last document is the token left out
    assert "▌Ge1:1 In the beginning" in shown


def test_ids_without_a_tokenizer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = show(capsys, str(folder), "--sequence_length", "109", "--samples", "1")
    assert "▌0\n▌1 2\n▌3 4 5\n▌6 7 8 9\n▌10 11" in shown  # an empty document shows nothing


def test_seed_and_samples(capsys: pytest.CaptureFixture[str]) -> None:
    def places(*args: str) -> list[str]:
        return re.findall("tokens ([0-9,]+ to [0-9,]+)", show(capsys, str(DATA / "nanoset_datatrove"), *args))

    assert len(places()) == 3
    assert places() == places("--seed", "0") != places("--seed", "1")
    assert len(places("--samples", "7")) == 7
    assert places("--samples", "0") == []


@given(
    lengths=st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=4).filter(lambda files: sum(map(sum, files)) > 1),
    data=st.data(),
)
def test_pieces_are_the_window(tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]], data: st.DataObject) -> None:
    folder = write(tmp_path_factory.mktemp("pieces") / "set", lengths)
    total = sum(map(sum, lengths))
    begin = data.draw(st.integers(0, total - 1))
    window = data.draw(st.integers(1, total))
    found = list(pieces(Nanoset(folder, 1).shards, begin, window))
    assert [token for ids, _ in found for token in ids.tolist()] == list(range(begin, min(begin + window, total)))
    starts = {sum(flat[:number]) for flat in [[length for file in lengths for length in file]] for number, n in enumerate(flat) if n}
    assert [whole for _, whole in found] == [int(ids[0]) in starts for ids, _ in found]
    assert all(int(ids[0]) in starts for ids, _ in found[1:])


def test_an_even_sample_of_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 of 100 documents in runs of 4: from the first to the last, over the files' borders."""
    lengths = list(range(100))
    shards = Nanoset(write(tmp_path / "set", [lengths[:30], lengths[30:98], lengths[98:]]), 1).shards
    assert sample_lengths(shards).tolist() == lengths
    monkeypatch.setattr(inspect_module, "LIMIT", 16)
    monkeypatch.setattr(inspect_module, "BLOCKS", 4)
    assert sample_lengths(shards).tolist() == [0, 1, 2, 3, *range(32, 36), *range(64, 68), 96, 97]  # a run ends with its file


def test_a_huge_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """10^8 documents of 10 tokens in a sparse file: under a second of CPU time, and it says that it did not read all."""
    documents, tokens = 10**8, 10**9
    path = tmp_path / "00000_unshuffled.ds"
    for name, nbytes in ((path, 2 * tokens), (tmp_path / "00000_unshuffled.ds.index", 8 * documents)):
        with name.open("wb") as file:
            file.truncate(nbytes)
    with (tmp_path / "00000_unshuffled.ds.index").open("r+b") as file:
        file.seek(-8, 2)
        file.write(np.uint64(tokens).tobytes())
    path.with_name(path.name + ".metadata").write_text("none|2\n1000000000\n1.0 GT")
    assert Shard.open(path).num_documents == documents
    show(capsys, str(DATA / "nanoset_datatrove"))  # what is imported or compiled once
    begun = time.process_time()
    shown = show(capsys, str(tmp_path), "--samples", "0")
    assert time.process_time() - begun < 2
    assert "(of 1,048,576 documents, evenly taken from all 100,000,000)" in " ".join(shown.split("\n"))


def test_what_prepare_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Train and validation, each with the summary that `prepare` left, whatever is in it."""
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "{"word " * n}"}}\n' for n in range(40)) + "broken\n")
    out = str(tmp_path / "out")
    assert main(["prepare", str(tmp_path / "text.jsonl"), "--tokenizer", TOKENIZER, "--output", out, "--validation_fraction", "0.3"]) == 0
    capsys.readouterr()
    path = tmp_path / "out" / "validation" / "nanoset.json"
    path.write_text(path.read_text().replace("{", '{"something_new": {"here": 1234, "there": ["a", "b"], "nowhere": []},', 1))
    shown = show(capsys, out)
    assert [line.split()[1].rsplit("/", 1)[1] for line in shown.split("\n") if line.startswith("╭")] == ["train", "validation"]
    assert shown.count("vocabulary 512 ids, the largest seen is ") == 2
    assert shown.count("dropped empty 1, not_json 1\n") == 2
    assert shown.count("something new here 1,234, there a; b, nowhere none\n") == 1


def test_another_tokenizer_is_seen(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write(tmp_path / "other", [[600]])
    shown = " ".join(show(capsys, str(other), "--tokenizer", TOKENIZER).split("\n"))
    assert "has only 512: IT IS NOT THE TOKENIZER OF THESE FILES" in shown
    assert "IT IS NOT" not in show(capsys, str(folder), "--tokenizer", TOKENIZER)


def test_bad_folders(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "00001_unshuffled.ds.index").unlink()
    for args, message in [
        (["/nowhere"], "/nowhere is not a folder"),
        ([str(tmp_path / "empty")], "empty is empty"),
        ([str(broken)], "00001_unshuffled.ds.index is missing"),
        ([str(folder), "/nowhere"], "/nowhere is not a folder"),
        ([str(folder), "--tokenizer", "/nowhere"], "tokenizer: /nowhere does not exist"),
        ([str(folder), "--sequence_length", "500"], "sequence_length 500 needs windows of 501 tokens"),
        ([str(folder), "--sequence_length", "0"], "sequence_length is 0: give at least 1"),
        ([str(folder), "--samples", "-1"], "samples is -1"),
    ]:
        assert main(["inspect", *args]) == 2
        out, error = capsys.readouterr()
        assert message in error
        assert error.count("\n") == 1
        assert out == ""
