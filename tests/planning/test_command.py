"""The command: what it prints, and what it refuses; in one process."""

from pathlib import Path
from typing import Any

import pytest

from lightning_3d.__main__ import main

ROOT = Path(__file__).parent.parent.parent


def plan(capsys: Any, *args: str, recipe: str = "llama_8b") -> tuple[int, str, str]:
    status = main(["plan", "--config", str(ROOT / "recipes" / f"{recipe}.yaml"), *args])
    out = capsys.readouterr()
    return status, out.out, out.err


def test_a_recipe_that_fits(capsys) -> None:
    status, out, _ = plan(capsys)
    assert status == 0
    assert "8,030,261,248 parameters" in out
    assert "251,003,904" in out, "of them on a rank: tp=8 x fsdp over 4"
    assert "verdict     fits" in out


def test_sixteen_thousand_ranks_and_what_to_change(capsys) -> None:
    options = ["--world-size", "16384", "--trainer.strategy.pp", "4", "--trainer.strategy.data_parallel", "ddp"]
    status, out, _ = plan(capsys, "--gpu", "a100-40gb", "--data.micro_batch_size", "8", *options)
    assert status == 0
    assert "dp=512 x tp=8 x pp=4" in out
    assert "verdict     does not fit" in out
    assert "GiB too many, most of them" in out
    assert "\nchange      " in out


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--gpu", "h1000"], ["gpu='h1000'", "h100-80gb", "mi300x-192gb"]),
        (["--memory_gib", "-1"], ["memory_gib=-1"]),
        (["--trainer.strategy.tpp", "3"], ["tpp"]),
        (
            ["--trainer.strategy.tp", "3", "--trainer.strategy.pp", "64", "--data.batch_accumulation_per_replica", "4"],
            [
                "does not divide the 32 processes",
                "too small for pp_engine=1f1b",
                "num_attention_heads=32",
                "num_key_value_heads=8",
                "64 stages",
            ],
        ),
        (["--trainer.precision", "16-mixed"], ["precision='16-mixed'", "bf16-mixed"]),
        (["--trainer.strategy", "ddp"], ["trainer.strategy=ddp", "ThreeDStrategy"]),
    ],
)
def test_what_is_refused(capsys, args: list[str], parts: list[str]) -> None:
    status, _, err = plan(capsys, *args)
    assert status == 2
    assert [part for part in parts if part not in err] == []
