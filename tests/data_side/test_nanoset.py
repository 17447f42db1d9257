"""Files of another tool and of ours, windows over them, and what is said about files that are not whole."""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lightning_3d.data.nanoset import IGNORE, Nanoset
from lightning_3d.data.shards import Shard, ShardWriter, token_nbytes_for
from lightning_3d.errors import ConfigError

FILES = Path(__file__).parent.parent / "data"
EXPECTED = json.loads((FILES / "nanoset_expected.json").read_text())


@pytest.mark.parametrize("name", EXPECTED)
def test_files_of_datatrove(name: str) -> None:
    shard, expected = Shard.open(FILES / name), EXPECTED[name]
    tokens = shard.tokens()
    assert (shard.num_tokens, shard.num_documents) == (expected["tokens"], expected["documents"])
    assert shard.document_ends()[:5].tolist() == expected["first_document_ends"]
    assert tokens[:16].tolist() == expected["first_tokens"]
    assert tokens[-4:].tolist() == expected["last_tokens"]
    assert int(tokens.sum(dtype=np.int64)) == expected["sum"]
    assert shard.tokenizer == "tokenizer_bpe512/tokenizer.json"


def test_windows_over_files_of_datatrove() -> None:
    """71 windows of 1,025 tokens, one of them over the border of the two files."""
    nanoset = Nanoset(FILES / "nanoset_datatrove", 1024)
    parts = [np.fromfile(FILES / f"nanoset_datatrove/0000{number}_unshuffled.ds", "<u2") for number in (0, 1)]
    tokens = np.concatenate(parts).astype(np.int64)
    assert (nanoset.num_tokens, nanoset.num_documents, len(nanoset)) == (72055, 232, 71)
    border = len(parts[0]) // 1024
    for sample in (0, border, 69):
        assert np.array_equal(nanoset.windows(np.array([sample]))[0], tokens[sample * 1024 : sample * 1024 + 1025])
    wide = Nanoset(FILES / "nanoset_datatrove_u32", 1024)
    assert np.array_equal(wide.windows(np.arange(8)), nanoset.windows(np.arange(8)))


def write(folder: Path, documents: list[list[list[int]]], token_nbytes: int = 2) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, texts in enumerate(documents):
        with ShardWriter(folder / f"{number:05d}_unshuffled.ds", "tok", token_nbytes) as shard:
            for ids in texts:
                shard.append(np.array(ids))
    return folder


def test_golden_bytes(tmp_path: Path) -> None:
    write(tmp_path, [[[1, 2, 3, 4], [2, 4], [3, 3, 1, 1, 4]]])
    path = tmp_path / "00000_unshuffled.ds"
    assert path.read_bytes() == bytes.fromhex("0100 0200 0300 0400 0200 0400 0300 0300 0100 0100 0400")
    assert path.with_name(path.name + ".index").read_bytes() == b"".join(n.to_bytes(8, "little") for n in (4, 6, 11))
    assert path.with_name(path.name + ".metadata").read_bytes() == b"tok|2\n11\n11.0 T"


@pytest.mark.parametrize(("tokens", "text"), [(0, "0.0 T"), (999, "999.0 T"), (8596, "8.6 kT"), (35164, "35.2 kT"), (999_960, "1.0 MT")])
def test_count_for_people(tmp_path: Path, tokens: int, text: str) -> None:
    write(tmp_path, [[[7] * tokens]])
    assert (tmp_path / "00000_unshuffled.ds.metadata").read_text() == f"tok|2\n{tokens}\n{text}"


def test_files_of_ours_are_those_of_datatrove(tmp_path: Path) -> None:
    """Written again from what was read, every file has the bytes that datatrove wrote."""
    for name in EXPECTED:
        shard = Shard.open(FILES / name)
        path = tmp_path / Path(name).name
        with ShardWriter(path, shard.tokenizer, shard.token_nbytes) as copy:
            for begin, end in zip([0, *shard.document_ends()[:-1].tolist()], shard.document_ends().tolist(), strict=True):
                copy.append(shard.tokens()[begin:end])
        for suffix in ("", ".index", ".metadata"):
            assert (tmp_path / (path.name + suffix)).read_bytes() == Path(f"{FILES / name}{suffix}").read_bytes()


def test_width_by_vocabulary() -> None:
    assert [token_nbytes_for(size) for size in (2, 65_536, 65_537, 200_000)] == [2, 2, 4, 4]


@given(st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=4), st.integers(1, 12))
def test_every_token_is_a_target_once(tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]], sequence_length: int) -> None:
    """Over any files and documents, empty ones too: all targets together are all tokens but the first, in order."""
    total = sum(map(sum, lengths))
    assume(total > sequence_length)
    tokens = iter(range(total))
    documents = [[[next(tokens) for _ in range(length)] for length in texts] for texts in lengths]
    nanoset = Nanoset(write(tmp_path_factory.mktemp("set"), documents), sequence_length)
    windows = nanoset.windows(np.arange(len(nanoset)))
    inputs, targets = windows[:, :-1].flatten(), windows[:, 1:].flatten()
    assert targets[targets != IGNORE].tolist() == list(range(1, total))
    assert (inputs[targets != IGNORE] + 1 == targets[targets != IGNORE]).all()
    assert (nanoset.windows(np.array([len(nanoset), len(nanoset) + 5]))[:, 1:] == IGNORE).all()


def test_pickled_without_the_data() -> None:
    nanoset = Nanoset(FILES / "nanoset_datatrove", 512)
    window, positions = nanoset.windows(np.array([80])), nanoset.positions(np.array([80]))
    data = pickle.dumps(nanoset)
    assert len(data) < 2000
    assert np.array_equal(pickle.loads(data).windows(np.array([80])), window)
    assert np.array_equal(pickle.loads(data).positions(np.array([80])), positions)


def test_fingerprint_goes_by_content(tmp_path: Path) -> None:
    original = Nanoset(FILES / "nanoset_datatrove", 512).fingerprint()
    moved = shutil.copytree(FILES / "nanoset_datatrove", tmp_path / "moved")
    assert Nanoset(moved, 128).fingerprint() == original
    path = moved / "00001_unshuffled.ds"
    path.write_bytes(path.read_bytes()[:-2] + b"\x01\x00")
    assert Nanoset(moved, 512).fingerprint() != original


def drop(suffix: str) -> Callable[[Path], object]:
    return lambda folder: (folder / f"00000_unshuffled.ds{suffix}").unlink()


def put(suffix: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / f"00000_unshuffled.ds{suffix}").write_bytes(content)


def remove_all(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def nest(folder: Path) -> None:
    remove_all(folder)
    write(folder / "train", [[[1, 2, 3]]])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (shutil.rmtree, r"set is not a folder: name one that `python -m lightning_3d prepare` or datatrove wrote"),
        (remove_all, r"set is empty: prepare the data again"),
        (lambda folder: (remove_all(folder), (folder / "a.txt").touch()), r"set holds no \.ds files, but a\.txt: it is not a Nanoset"),
        (nest, r"set holds no \.ds files itself, but train/ does: name .*set/train"),
        (
            put("", b"\1\0" * 5),
            r"00000_unshuffled\.ds has 10 bytes, but its index ends at 6 tokens of 2 bytes = 12 bytes: one of them is trunc",
        ),
        (put(".index", b"\4\0\0\0\0\0\0\0"), r"has 12 bytes, but its index ends at 4 tokens of 2 bytes = 8 bytes"),
        (put(".index", b"\4\0\0"), r"ds\.index has 3 bytes, not a multiple of 8: it is truncated"),
        (drop(".index"), r"ds\.index is missing: 00000_unshuffled\.ds is not a whole Nanoset file"),
        (drop(".metadata"), r"ds\.metadata is missing, so that the width of the tokens is not known"),
        (put(".metadata", b"tok\n6\n6.0 T"), r'ds\.metadata begins with "tok", not with "tokenizer\|2" or "tokenizer\|4"'),
        (put(".metadata", b"tok|8\n6\n6.0 T"), r'ds\.metadata begins with "tok\|8"'),
        (put(".metadata", b"tok|4\n6\n6.0 T"), r"has 12 bytes, but its index ends at 6 tokens of 4 bytes = 24 bytes"),
        (
            lambda folder: shutil.copytree(write(folder.parent / "other", [[], [[5]]], 4), folder, dirs_exist_ok=True),
            r"set mixes tokens of 2 bytes \(00002_unshuffled\.ds\) and of 4 bytes \(00001_unshuffled\.ds\): keep them in separate folders",
        ),
        (
            put(".metadata", b"other|2\n6\n6.0 T"),
            r"set mixes tokens of other \(00000_unshuffled\.ds\) and of tok \(00002_unshuffled\.ds\): keep them in separate folders$",
        ),
        (lambda folder: write(folder, [[], [], []]), r"sequence_length 4 needs windows of 5 tokens, but .*set holds 0 in all"),
    ],
)
def test_harmed_folders(tmp_path: Path, harm: Callable[[Path], object], message: str) -> None:
    folder = write(tmp_path / "set", [[[1, 2], [3, 4, 5, 6]], [], [[7, 8, 9]]])
    assert Nanoset(folder, 4).num_tokens == 9
    harm(folder)
    with pytest.raises(ConfigError, match=message):
        Nanoset(folder, 4)


def test_one_window_is_enough(tmp_path: Path) -> None:
    folder = write(tmp_path, [[[1, 2], [3]], [[4, 5]]])
    assert Nanoset(folder, 4).windows(np.array([0])).tolist() == [[1, 2, 3, 4, 5]]
    with pytest.raises(ConfigError, match=r"sequence_length 5 needs windows of 6 tokens, but .* holds 5 in all"):
        Nanoset(folder, 5)
