"""A real corpus that every Python installation carries, as Nanosets: the standard library's sources and Python's help topics.

    python recipes/python_corpus.py     3 s on 2 cores; used again it does nothing

Writes data/python_corpus/{corpus.jsonl, tokenizer/, train/, validation/}: 4 MB of text, a byte-level BPE tokenizer of 2,048 ids
trained on it, and 1.3 M tokens, a twentieth of the documents held out. Files are taken in the order of a hash of their names, so
that the same installation gives the same corpus, and one that is not sorted by topic.
"""

import argparse
import hashlib
import json
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lightning_3d.data.nanoset import SUMMARY
from lightning_3d.data.prepare import prepare

EOS = "<|endoftext|>"
CORPUS_NBYTES = 4_000_000
VOCAB_SIZE = 2048
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib2to3", "pydoc_data"}


def documents() -> Iterator[str]:
    """Yield the help topics, then the library's modules; what is not UTF-8 in a few of them is left out."""
    yield from (topics[name] for name in sorted(topics))
    library = Path(sysconfig.get_path("stdlib"))
    names = (path.relative_to(library) for path in library.rglob("*.py"))
    chosen = [name for name in names if not LEFT_OUT.intersection(name.parts)]
    for name in sorted(chosen, key=lambda name: hashlib.sha256(name.as_posix().encode()).digest()):
        yield (library / name).read_text(encoding="utf-8", errors="ignore")


def write_corpus(path: Path) -> None:
    """Write documents as .jsonl until there are CORPUS_NBYTES of text."""
    partial = path.with_name(path.name + ".partial")
    size = 0
    with partial.open("w", encoding="utf-8") as file:
        for text in documents():
            file.write(json.dumps({"text": text}) + "\n")
            size += len(text.encode())
            if size >= CORPUS_NBYTES:
                break
    partial.rename(path)


def train_tokenizer(corpus: Path, folder: Path) -> None:
    """Train a byte-level BPE tokenizer and name its end-of-document token where `transformers` looks for it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=[EOS], initial_alphabet=alphabet, show_progress=False)
    with corpus.open(encoding="utf-8") as file:
        tokenizer.train_from_iterator((json.loads(line)["text"] for line in file), trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Make what is not there yet."""
    parser = argparse.ArgumentParser(description="Make Nanosets of the text that this Python installation carries.")
    parser.add_argument("--output", type=Path, default=Path("data/python_corpus"), help="folder to write (default: %(default)s)")
    output = parser.parse_args().output
    if all((output / split / SUMMARY).is_file() for split in ("train", "validation")):
        print(f"{output} is there already")
        return
    began = time.monotonic()
    output.mkdir(parents=True, exist_ok=True)
    write_corpus(output / "corpus.jsonl")
    train_tokenizer(output / "corpus.jsonl", output / "tokenizer")
    summaries = prepare(
        [str(output / "corpus.jsonl")],
        str(output / "tokenizer"),
        str(output),
        validation_fraction=0.05,
        shard_nbytes=1 << 20,
        overwrite=True,
    )
    counts = ", ".join(f"{split} {summary['tokens']:,} tokens" for split, summary in summaries.items())
    print(f"{output}: {counts}, in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
