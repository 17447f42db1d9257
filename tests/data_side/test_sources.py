"""Every way that text arrives gives the same tokens, and what is wrong in it is counted and named, by file and line."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from lightning_3d.data.nanoset import Nanoset
from lightning_3d.data.prepare import prepare
from lightning_3d.data.prepare.records import Bad, LineCounter
from lightning_3d.data.prepare.sources import cut_into_shards, find_sources
from lightning_3d.errors import ConfigError

BPE = str(Path(__file__).parent.parent / "data/tokenizer_bpe512")
DOCUMENTS = [f"Document {number}: " + "in the beginning, caf\u00e9. " * (number % 5) for number in range(60)]


def lines(documents: list[str]) -> bytes:
    return "".join(json.dumps({"n": n, "text": text}, ensure_ascii=False) + "\n" for n, text in enumerate(documents)).encode()


def zst(data: bytes) -> bytes:
    return bytes(pa.compress(data, codec="zstd", asbytes=True))


def write_jsonl(path: Path) -> str:
    path.write_bytes(lines(DOCUMENTS))
    return str(path)


def write_gz(path: Path) -> str:
    """Two members, as `cat a.gz b.gz` makes them."""
    path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(lines(DOCUMENTS[:25])) + gzip.compress(lines(DOCUMENTS[25:])))
    return str(path.with_suffix(".jsonl.gz"))


def write_zst(path: Path) -> str:
    path.with_suffix(".jsonl.zst").write_bytes(zst(lines(DOCUMENTS[:25])) + zst(lines(DOCUMENTS[25:])))
    return str(path.with_suffix(".jsonl.zst"))


def write_parquet(path: Path) -> str:
    table = pa.table({"n": list(range(60)), "text": DOCUMENTS})
    parquet.write_table(table, path.with_suffix(".parquet"), row_group_size=7)
    return str(path.with_suffix(".parquet"))


def write_saved(path: Path) -> str:
    Dataset.from_dict({"n": list(range(60)), "text": DOCUMENTS}).save_to_disk(path.with_suffix(""))
    return str(path.with_suffix(""))


def write_saved_dict(path: Path) -> str:
    splits = {"test": Dataset.from_dict({"text": ["not this"]}), "train": Dataset.from_dict({"text": DOCUMENTS})}
    DatasetDict(splits).save_to_disk(path.with_suffix(""))
    return str(path.with_suffix(""))


def write_indexed(path: Path) -> str:
    """A selection of rows, which the library keeps as an index into all of them."""
    Dataset.from_dict({"text": ["not this", *DOCUMENTS[::-1]]}).select(range(60, 0, -1)).save_to_disk(path.with_suffix(""))
    return str(path.with_suffix(""))


def write_folder(path: Path) -> str:
    """A folder as `load_dataset` reads it."""
    path.with_suffix("").mkdir()
    for number in range(3):
        (path.with_suffix("") / f"part-{number}.jsonl").write_bytes(lines(DOCUMENTS[number * 20 : number * 20 + 20]))
    return str(path.with_suffix(""))


def write_pattern(path: Path) -> str:
    """One file of each kind; the pattern takes them in the order of their names."""
    (path.parent / "a.jsonl").write_bytes(lines(DOCUMENTS[:20]))
    (path.parent / "b.jsonl.gz").write_bytes(gzip.compress(lines(DOCUMENTS[20:40])))
    (path.parent / "c.jsonl.zst").write_bytes(zst(lines(DOCUMENTS[40:50])))
    parquet.write_table(pa.table({"text": DOCUMENTS[50:58]}), path.parent / "d.parquet")
    Dataset.from_dict({"text": DOCUMENTS[58:59]}).save_to_disk(path.parent / "e")
    (path.parent / "f.text").write_text(DOCUMENTS[59], encoding="utf-8")
    return str(path.parent / "*")


def tokens(folder: Path) -> list[int]:
    return np.concatenate([shard.tokens() for shard in Nanoset(folder, 8).shards]).tolist()


WRITERS = [
    write_jsonl,
    write_gz,
    write_zst,
    write_parquet,
    write_saved,
    write_saved_dict,
    write_indexed,
    write_folder,
    write_pattern,
]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__[6:])
def test_every_format_gives_the_same_tokens(tmp_path: Path, write: Any) -> None:
    """In one shard and in many, cut as far as the format allows."""
    (tmp_path / "in").mkdir()
    expected = prepare([write_jsonl(tmp_path / "expected.jsonl")], BPE, str(tmp_path / "expected"), progress=False)["train"]
    source = write(tmp_path / "in/data.jsonl")
    counts = {}
    for name, shard_nbytes in (("whole", 1 << 20), ("cut", 400)):
        out = prepare([source], BPE, str(tmp_path / name), shard_nbytes=shard_nbytes, num_workers=1, progress=False)["train"]
        assert tokens(tmp_path / name) == tokens(tmp_path / "expected")
        assert (out["documents"], out["read"]["documents"], out["dropped"]) == (60, 60, {})
        assert out["tokens"] == expected["tokens"]
        assert write in (write_saved, write_saved_dict, write_indexed, write_folder, write_pattern) or (
            out["read"]["nbytes"] == Path(source).stat().st_size
        )
        counts[name] = len(Nanoset(tmp_path / name, 8).shards)
    assert counts["whole"] == (3 if write is write_folder else 1)  # the size of what is streamed is not known
    assert counts["cut"] == {write_gz: 1, write_zst: 1, write_folder: 3}.get(write, counts["cut"])
    assert write in (write_gz, write_zst, write_folder) or counts["cut"] > 3


def test_split_and_configuration(tmp_path: Path) -> None:
    source = write_saved_dict(tmp_path / "data.jsonl")
    assert prepare([source], BPE, str(tmp_path / "out"), split="test", progress=False)["train"]["documents"] == 1
    with pytest.raises(ConfigError, match=r"split: .*data has no 'dev', but test, train: name one of them"):
        prepare([source], BPE, str(tmp_path / "no"), split="dev", progress=False)
    folder = write_folder(tmp_path / "folder.jsonl")
    with pytest.raises(ConfigError, match=r"split: .*folder has no 'dev': Bad split: dev\. Available splits: \['train'\]"):
        prepare([folder], BPE, str(tmp_path / "no"), split="dev", progress=False)
    with pytest.raises(ConfigError, match=r"inputs: .*folder is neither a file nor a data set that can be reached: .*'second' not found"):
        prepare([folder], BPE, str(tmp_path / "no"), dataset_config="second", progress=False)


def test_a_change_of_any_format_is_noticed(tmp_path: Path) -> None:
    for write in (write_jsonl, write_parquet, write_saved, write_folder):
        folder = tmp_path / write.__name__
        folder.mkdir()
        source = write(folder / "data.jsonl")
        before = [source.stamp() for source in find_sources([source])]
        assert before == [source.stamp() for source in find_sources([source])]
        if write is write_folder:
            (Path(source) / "part-1.jsonl").write_bytes(lines(["new"]))
        elif write is write_saved:
            Dataset.from_dict({"text": ["new"]}).save_to_disk(source)
        else:
            Path(source).write_bytes(b"new")
        assert before != [source.stamp() for source in find_sources([source])], write


def test_text_as_it_is(tmp_path: Path) -> None:
    """Line ends and spaces stay; a byte order mark is not text; compressed text is text."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo \n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"three"))
    (tmp_path / "c.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "four"}\n\n  \n{"text": "five"}')
    found = [item[0] for source in find_sources([str(tmp_path / "*")]) for piece in source.pieces(10) for item in piece.read("text")]
    assert found == ["one\r\ntwo \n", "three", "four", "five"]


BAD_LINES = {
    b'{"text": "caf\xe9"}': ("not_utf8", "not UTF-8 (invalid continuation byte at byte 13 of the line)"),
    b'{"text": "half": }': ("not_json", "not JSON (Expecting ',' delimiter: line 1 column 16 (char 15))"),
    b'{"body": "none"}': ("no_text", 'no text (no text in "text")'),
    b'{"text": null}': ("no_text", 'no text (no text in "text")'),
    b"[1, 2]": ("no_text", "no text (not an object)"),
    b'{"text": "half \\ud800"}': ("not_utf8", "not UTF-8 (half a surrogate pair)"),
    b"[" * 100_000: ("not_json", "not JSON (maximum recursion depth exceeded while decoding a JSON array from a unicode string)"),
}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_bad_lines_are_counted_and_named(tmp_path: Path, num_workers: int) -> None:
    """Wherever in the file the piece begins in which they stand."""
    good = [line + b"\n" for line in lines(DOCUMENTS[1:]).splitlines()]
    content, where = [], []
    for number, bad in enumerate(BAD_LINES):
        content += [*good[number * 5 : number * 5 + 5], b"\n", bad + b"\n"]
        where.append(len(content))
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join(content))
    out = prepare([str(path)], BPE, str(tmp_path / "out"), shard_nbytes=300, num_workers=num_workers, progress=False)["train"]
    assert out["bad_records"] == [f"{path}, line {line}: {text}" for line, (_, text) in zip(where, BAD_LINES.values(), strict=True)]
    assert out["dropped"] == dict(Counter(kind for kind, _ in BAD_LINES.values()))
    assert (out["documents"], out["read"]["documents"], out["read"]["nbytes"]) == (35, 42, path.stat().st_size)
    with pytest.raises(ConfigError, match=rf"strict: .*out was made without 7 records, the first of them .*in\.jsonl, line {where[0]}:"):
        prepare([str(path)], BPE, str(tmp_path / "out"), shard_nbytes=300, strict=True, progress=False)
    with pytest.raises(ConfigError, match=rf"inputs: .*in\.jsonl, line {where[0]}: not UTF-8 .*: mend it, or set strict to false"):
        prepare([str(path)], BPE, str(tmp_path / "strict"), strict=True, progress=False)


def test_only_the_first_twenty_are_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(lines(DOCUMENTS) + b"{}\n" * 100)
    out = prepare([str(path)], BPE, str(tmp_path / "out"), shard_nbytes=500, progress=False)["train"]
    assert out["dropped"] == {"no_text": 100}
    assert out["bad_records"] == [f'{path}, line {line}: no text (no text in "text")' for line in range(61, 81)]


def broken(tmp_path: Path, name: str, data: bytes, count: int = 1) -> dict[str, Any]:
    """Prepare a file beside a good one."""
    (tmp_path / "good.jsonl").write_bytes(lines(["good"]))
    (tmp_path / name).write_bytes(data)
    out = prepare([str(tmp_path / name), str(tmp_path / "good.jsonl")], BPE, str(tmp_path / "out"), progress=False)["train"]
    with pytest.raises(ConfigError, match=r"inputs: .*: broken file .*: mend it, or set strict to false"):
        prepare([str(tmp_path / name), str(tmp_path / "good.jsonl")], BPE, str(tmp_path / "strict"), strict=True, progress=False)
    assert out["dropped"] == {"broken_file": count}
    return out


def test_broken_gz(tmp_path: Path) -> None:
    """What stands before the break is kept."""
    out = broken(tmp_path, "in.jsonl.gz", gzip.compress(lines(DOCUMENTS))[:-8])
    assert out["documents"] == 61
    place = f"{tmp_path}/in.jsonl.gz, line 61: broken file "
    assert out["bad_records"] == [place + "(Compressed file ended before the end-of-stream marker was reached)"]


@pytest.mark.parametrize("data", [b"", b"no gzip", gzip.compress(lines(DOCUMENTS))[:20]])
def test_hardly_a_gz(tmp_path: Path, data: bytes) -> None:
    if data:
        assert broken(tmp_path, "in.jsonl.gz", data)["bad_records"][0].startswith(f"{tmp_path}/in.jsonl.gz, line 1: broken file (")
    else:
        (tmp_path / "in.jsonl.gz").touch()
        with pytest.raises(ConfigError, match="no document is left"):
            prepare([str(tmp_path / "in.jsonl.gz")], BPE, str(tmp_path / "out"), progress=False)


def test_broken_zst(tmp_path: Path) -> None:
    """What arrow had unpacked is kept."""
    first = zst(lines(DOCUMENTS * 600))
    out = broken(tmp_path, "in.jsonl.zst", first + zst(lines(DOCUMENTS))[:-30])
    assert 20_000 < out["documents"] <= 36_001
    assert out["bad_records"] == [f"{tmp_path}/in.jsonl.zst, line {out['documents']}: broken file (Truncated compressed stream)"]
    assert out["tokens"] > 400_000


def test_broken_text(tmp_path: Path) -> None:
    out = broken(tmp_path, "in.txt.gz", gzip.compress(b"text")[:-3])
    assert out["bad_records"][0].startswith(f"{tmp_path}/in.txt.gz, byte 0: broken file (")


def test_broken_parquet(tmp_path: Path) -> None:
    """Without its end nothing is known of it; with a broken row group, the others are."""
    sound = Path(write_parquet(tmp_path / "sound.jsonl")).read_bytes()
    out = broken(tmp_path, "in.parquet", sound[:-20])
    assert out["documents"] == 1
    assert out["bad_records"][0].startswith(f"{tmp_path}/in.parquet, row 1: broken file (Parquet magic bytes not found")


def test_broken_row_group(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "sound.jsonl")
    data = bytearray(Path(path).read_bytes())
    chunk = parquet.read_metadata(path).row_group(3).column(1)
    data[chunk.dictionary_page_offset : chunk.dictionary_page_offset + 40] = b"\xff" * 40
    out = broken(tmp_path, "in.parquet", bytes(data), count=7)
    assert (out["documents"], out["read"]["documents"]) == (60 - 7 + 1, 61)
    assert out["bad_records"][0].startswith(f"{tmp_path}/in.parquet, row 22: broken file (")


def test_bad_values_of_a_table(tmp_path: Path) -> None:
    """Null, bytes that are not UTF-8 in a column of text; a table without the column."""
    raw = pa.array([b"good", None, b"caf\xe9", b"also good"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 4, raw.buffers())  # arrow does not look
    parquet.write_table(pa.table({"text": text}), tmp_path / "a.parquet")
    parquet.write_table(pa.table({"body": ["x"] * 5, "n": [1] * 5}), tmp_path / "b.parquet", row_group_size=2)
    parquet.write_table(pa.table({"text": [1, 2]}), tmp_path / "c.parquet")
    Dataset.from_dict({"body": ["x"] * 3}).save_to_disk(tmp_path / "d")
    out = prepare([str(tmp_path / "?*")], BPE, str(tmp_path / "out"), progress=False)["train"]
    assert (out["documents"], out["read"]["documents"], out["dropped"]) == (2, 14, {"not_utf8": 1, "no_text": 11})
    assert out["bad_records"] == [
        f"{tmp_path}/a.parquet, row 2: no text (the column holds NoneType)",
        f"{tmp_path}/a.parquet, row 3: not UTF-8 (bytes that are not text)",
        f'{tmp_path}/b.parquet, row 1: no text (no column "text")',
        f"{tmp_path}/c.parquet, row 1: no text (the column holds int)",
        f"{tmp_path}/c.parquet, row 2: no text (the column holds int)",
        f'{tmp_path}/d, row 1: no text (no column "text")',
    ]


def test_broken_file_of_a_stream(tmp_path: Path) -> None:
    folder = Path(write_folder(tmp_path / "folder.jsonl"))
    (folder / "part-1.jsonl").write_bytes(lines(DOCUMENTS[:3]) + b'{"text": \n')
    out = prepare([str(folder)], BPE, str(tmp_path / "out"), progress=False)["train"]
    assert out["dropped"] == {"broken_file": 1}
    assert 40 <= out["documents"] <= 43
    assert out["bad_records"][0].startswith(f"{folder} (train, file 2), row ")


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = find_sources([write_jsonl(tmp_path / "in.jsonl")])[0]
    [piece] = source.pieces(1 << 20)
    (tmp_path / "in.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"inputs: .*in\.jsonl cannot be read: No such file or directory"):
        list(piece.read("text"))


@pytest.mark.parametrize("name", ["books/none*.jsonl", "./none", "none.txt", "a/b/c", "none.jsonl.zst", "none.parquet"])
def test_names_of_nothing(name: str) -> None:
    """None of these can be a name on the hub, so none is asked for there."""
    with pytest.raises(ConfigError, match=r"inputs: .* names no file: give text, \.jsonl or \.parquet files"):
        find_sources([name])


@given(st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"")), max_size=12), st.integers(1, 30), st.booleans())
def test_lines_are_read_once_wherever_a_file_is_cut(
    tmp_path_factory: pytest.TempPathFactory, content: list[bytes], nbytes: int, end: bool
) -> None:
    """Good, bad and empty lines, each once and with its number."""
    path = tmp_path_factory.mktemp("cut") / "in.jsonl"
    path.write_bytes(b"\n".join(content) + (b"\n" if end else b""))
    found = [item[0] for shard in cut_into_shards(find_sources([str(path)]), nbytes) for piece in shard for item in piece.read("t")]
    counter = LineCounter()
    numbers = [bad.number + counter.before(bad.path, bad.since) for bad in found if isinstance(bad, Bad)]
    assert numbers == [number for number, line in enumerate(content, 1) if line.strip()]
