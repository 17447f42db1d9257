"""Memory does not grow with the data, nor start-up with its size."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("memory.py")


def measure(what: str, folder: Path) -> dict[str, float]:
    output = subprocess.run([sys.executable, "-W", "ignore", SCRIPT, what, folder], check=True, capture_output=True, text=True, timeout=240)
    return json.loads(output.stdout)


@pytest.mark.timeout(300)
def test_a_blend_of_a_billion_samples(tmp_path: Path) -> None:
    seen = measure("blend", tmp_path)
    assert seen["seconds"] < 1
    assert seen["mib"] < 50
    assert seen["workers"] == 4
    assert seen["worker_mib"] < 50


@pytest.mark.timeout(300)
def test_thousands_of_batches_from_thousands_of_shards(tmp_path: Path) -> None:
    seen = measure("shards", tmp_path)
    assert seen["batches"] >= 5000
    assert seen["last_mib"] < seen["first_mib"] + 5
