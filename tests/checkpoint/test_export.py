"""A run's checkpoint as a Hugging Face folder: transformers computes from it what we compute."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks_init_from import fit
from ranks_resume import Layout
from safetensors.torch import load_file
from tokenizers import Tokenizer

from lightning_3d.__main__ import main
from lightning_3d.checkpoint import step_folder
from lightning_3d.checkpoint.export import export
from lightning_3d.checkpoint.weights import CheckpointWeights
from lightning_3d.errors import ConfigError, DamagedCheckpointError
from lightning_3d.generate import Source
from lightning_3d.model.config import LlamaConfig
from lightning_3d.model.hf import to_hf_name
from lightning_3d.testing import RankPool

DATA = Path(__file__).parents[1] / "data"
NANOSET, TOKENIZER = DATA / "nanoset_datatrove", DATA / "tokenizer_bpe512"
SCALING = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
LLAMA = LlamaConfig(
    vocab_size=515,
    hidden_size=32,
    intermediate_size=45,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rope_scaling=SCALING,
    attention_bias=True,
    initializer_range=0.1,
)


@pytest.fixture(scope="module")
def run(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """Checkpoints of steps 2 and 4, and the weights of step 4."""
    folder = tmp_path_factory.mktemp("run")
    ranks = pool.run(fit, 2, (Layout(tp=2), {"llama": LLAMA}, str(NANOSET), str(folder)))
    return folder, ranks[0]["end"]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def test_transformers_computes_the_same(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Logits, and the tokenizer, which the files of the run's data name."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, weights = run
    out = tmp_path / "out"
    assert main(["export", str(folder), str(out)]) == 0
    assert capsys.readouterr().out == f"{folder}/step-4 -> {out}, with the tokenizer {TOKENIZER}/tokenizer.json\n"
    theirs = AutoModelForCausalLM.from_pretrained(out)
    assert theirs.dtype == torch.float32
    state = theirs.state_dict()
    assert state.keys() == {to_hf_name(name) for name in weights}
    assert all(torch.equal(state[to_hf_name(name)], weight) for name, weight in weights.items())
    ids = torch.randint(0, 515, (2, 50), generator=torch.Generator().manual_seed(1))
    ours = Source.open(str(folder)).load("cpu")
    with torch.inference_mode():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)
    text = "In the beginning God created"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer(text)["input_ids"] == Source.open(str(folder)).encode(text, None)
    assert (theirs.generation_config.eos_token_id, theirs.generation_config.bos_token_id) == (tokenizer.eos_token_id, None)


def test_shards_and_dtypes(run: Any, tmp_path: Path) -> None:
    """Small files in the model's order, listed in an index; anyone may read them who may read the folder."""
    folder, weights = run
    limit, out = 20_000, tmp_path / "out"
    export(str(step_folder(folder, 4)), str(out), dtype="bfloat16", max_shard_nbytes=limit)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(out.glob("*.safetensors"))
    assert set(index["weight_map"].values()) == {path.name for path in files}
    assert files[-1].name == f"model-{len(files):05}-of-{len(files):05}.safetensors"
    ours, nbytes = {}, 0
    for path in files:
        held = load_file(path)
        assert all(index["weight_map"][name] == path.name for name in held)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= limit
        assert path.stat().st_mode & 0o777 == out.stat().st_mode & 0o666
        ours |= held
        nbytes += sum(tensor.nbytes for tensor in held.values())
    assert index["metadata"]["total_size"] == nbytes == 2 * LLAMA.num_parameters
    assert ours.keys() == {to_hf_name(name) for name in weights}
    assert all(torch.equal(ours[to_hf_name(name)], weight.bfloat16()) for name, weight in weights.items())
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_memory_is_that_of_a_shard(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never more than a shard is read at once, and none of the optimizer's state."""
    asked: list[int] = []
    read = CheckpointWeights.read_into

    def counting(self: CheckpointWeights, targets: dict[str, torch.Tensor]) -> None:
        asked.append(sum(tensor.nbytes for tensor in targets.values()))
        read(self, targets)

    monkeypatch.setattr(CheckpointWeights, "read_into", counting)
    export(str(run[0]), str(tmp_path / "out"), max_shard_nbytes=100_000)
    assert max(asked) <= 100_000
    assert sum(asked) == 4 * LLAMA.num_parameters


def test_only_a_whole_folder_is_there(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWeights, "read_into", fails)
        with pytest.raises(OSError, match="the disk is gone"):
            export(str(run[0]), str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == [".out.unfinished"]
    (tmp_path / "out").mkdir()
    export(str(run[0]), str(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names


def test_a_tokenizer_is_given_or_not_known(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    checkpoint = shutil.copytree(step_folder(run[0], 4), tmp_path / "step-4")
    monkeypatch.setattr(CheckpointWeights, "tokenizer", None)
    export(str(checkpoint), str(tmp_path / "without"))
    assert "without a tokenizer, since the run names none that is here: give --tokenizer" in capsys.readouterr().out
    assert not list((tmp_path / "without").glob("tokenizer*"))
    assert json.loads((tmp_path / "without" / "config.json").read_text())["eos_token_id"] is None
    alone = tmp_path / "bpe.json"
    shutil.copy(TOKENIZER / "tokenizer.json", alone)
    export(str(checkpoint), str(tmp_path / "with"), tokenizer=str(alone))
    from transformers import AutoTokenizer

    assert (
        AutoTokenizer.from_pretrained(tmp_path / "with").decode(AutoTokenizer.from_pretrained(TOKENIZER)("God said")["input_ids"])
        == "God said"
    )


def test_what_cannot_be_exported_is_one_line(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run[0]
    with pytest.raises(ConfigError, match=r"is no whole sharded checkpoint and holds none: name a folder step-N, or one that holds"):
        export(str(tmp_path), str(tmp_path / "out"))
    (tmp_path / "step-1").write_bytes(b"a file of Lightning's")
    for path in (tmp_path, tmp_path / "step-1"):
        with pytest.raises(ConfigError, match=r"step-1 is a checkpoint in one file, as other strategies write it: name one that was"):
            export(str(path), str(tmp_path / "out"))
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    with pytest.raises(ConfigError, match=r"^output: .*there is there already: name a new folder, or remove it$"):
        export(str(folder), str(tmp_path / "there"))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5))
        with pytest.raises(ConfigError, match=r"^output: .* needs 222,592 bytes, but its disk has 5 left: make room, or name another$"):
            export(str(folder), str(tmp_path / "out"))
    big = Tokenizer.from_file(str(TOKENIZER / "tokenizer.json"))
    big.add_tokens([f"<{number}>" for number in range(4)])
    big.save(str(tmp_path / "big.json"))
    with pytest.raises(ConfigError, match=r"^tokenizer: .*big\.json has 516 ids, but the model's vocab_size is 515: name its own$"):
        export(str(folder), str(tmp_path / "out"), tokenizer=str(tmp_path / "big.json"))
    assert not (tmp_path / "out").exists()


def test_damage_is_found(run: Any, tmp_path: Path) -> None:
    checkpoint = shutil.copytree(step_folder(run[0], 4), tmp_path / "step-4")
    shard = checkpoint / "__0_0.distcp"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1000] + bytes([whole[-1000] ^ 1]) + whole[-999:])
    with pytest.raises(DamagedCheckpointError, match=r"step-4 is damaged: __0_0\.distcp is not what was written"):
        export(str(checkpoint), str(tmp_path / "out"))
    shard.write_bytes(whole[:-1])
    with pytest.raises(DamagedCheckpointError, match=r"step-4 is damaged: __0_0\.distcp has "):
        export(str(checkpoint), str(tmp_path / "out"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"llama": None}, "holds no shape of a Llama among its hyper-parameters"),
        ({"vocab_size": 400}, r"holds embed_tokens.weight as \(515, 32\), by its hyper-parameters it is \(400, 32\)"),
        ({"num_hidden_layers": 4}, "holds layers.3.input_layernorm.weight not, by its hyper-parameters it is"),
        ({"tie_word_embeddings": True}, "holds lm_head.weight, which a Llama lacks"),
    ],
)
def test_another_model_is_refused(change: dict[str, Any], message: str, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = CheckpointWeights(run[0]).settings
    settings["llama"] = None if "llama" in change else settings["llama"] | change
    monkeypatch.setattr(CheckpointWeights, "settings", settings)
    with pytest.raises(ConfigError, match=message):
        CheckpointWeights(run[0])
