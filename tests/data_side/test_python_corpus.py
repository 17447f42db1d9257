"""The corpus of `make train`: real text, whole, and made once."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from lightning_3d.data.nanoset import Nanoset

SCRIPT = Path(__file__).parents[2] / "recipes/python_corpus.py"


def run(output: Path) -> str:
    return subprocess.run([sys.executable, SCRIPT, "--output", output], capture_output=True, text=True, check=True, timeout=120).stdout


def test_python_corpus(tmp_path: Path) -> None:
    assert "train 1," in run(tmp_path)
    train, validation = (Nanoset(tmp_path / split, 256) for split in ("train", "validation"))
    assert train.num_tokens > 1_000_000
    assert 0.005 < validation.num_tokens / train.num_tokens < 0.15
    assert train.vocab_size == 2048
    text = Tokenizer.from_file(str(tmp_path / "tokenizer/tokenizer.json")).decode(train.windows(np.arange(300)).flatten().tolist())
    assert "import " in text
    assert "def " in text
    times = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert "is there already" in run(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == times
