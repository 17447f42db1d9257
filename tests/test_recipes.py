"""Every recipe runs: two steps at toy size, on CPU processes, with its own layout as far as two ranks an axis go."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DATA = ROOT / "tests" / "data" / "nanoset_datatrove"
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))

SLOW = ("llama_70b", "llama_8b", "llama_1b", "tiny_llama")  # 8, 4 and 4 ranks; the last is what `make train` and the README's commands run
TOY = {
    "model.llama.vocab_size": 512,
    "model.llama.hidden_size": 32,
    "model.llama.intermediate_size": 64,
    "model.llama.num_hidden_layers": 2,
    "model.llama.num_attention_heads": 4,
    "model.llama.num_key_value_heads": 2,
    "model.llama.head_dim": 8,
    "model.optim.lr_warmup_steps": 1,
    "data.dataset_folder": DATA,
    "data.validation_folder": DATA,
    "data.validation_samples": 8,
    "data.sequence_length": 32,
    "data.micro_batch_size": 1,
    "data.batch_accumulation_per_replica": 2,
    "data.num_workers": 0,
    "trainer.accelerator": "cpu",
    "trainer.num_nodes": 1,
    "trainer.max_steps": 2,
    "trainer.val_check_interval": 2,
    "trainer.num_sanity_val_steps": 0,
    "trainer.log_every_n_steps": 1,
}


def layout(recipe: Path) -> dict[str, int]:
    """At most two ranks on each axis, and a second replica where the recipe shards over dp."""
    strategy = yaml.safe_load(recipe.read_text())["trainer"]["strategy"]
    if isinstance(strategy, str):
        strategy = yaml.safe_load((recipe.parent / strategy).read_text())
    tp, pp = (min(2, strategy.get(axis, 1)) for axis in ("tp", "pp"))
    dp = 1 if tp * pp > 1 and strategy.get("data_parallel", "ddp") == "ddp" else 2
    return {"trainer.strategy.dp": dp, "trainer.strategy.tp": tp, "trainer.strategy.pp": pp, "trainer.devices": dp * tp * pp}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "recipe",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if path.stem in SLOW else []) for path in RECIPES],
)
def test_recipe_trains(recipe: Path, tmp_path: Path) -> None:
    options = [text for key, value in (TOY | layout(recipe)).items() for text in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "lightning_3d", "fit", "--config", str(recipe), "--trainer.default_root_dir", str(tmp_path), *options]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=350)
    assert run.returncode == 0, run.stderr
    assert re.search(r"step 2/2 \| lm_loss [56]\.\d+ .*\| grad_norm [\d.]+ \| tokens_per_sec", run.stdout)
    assert re.search(r"val_lm_loss +[56]\.\d+ -> ", run.stdout)
    assert [path.name for path in tmp_path.glob("runs/*/checkpoints/*")] == ["step-2"]
    assert list(tmp_path.rglob("events.out.tfevents.*")), "TensorBoard logs"
