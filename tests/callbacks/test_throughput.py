from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_3d.callbacks import Throughput
from lightning_3d.callbacks import throughput as module
from lightning_3d.callbacks.throughput import sequence_length
from lightning_3d.model.config import LlamaConfig
from lightning_3d.strategy import ThreeDStrategy
from tests.callbacks.conftest import ROWS, SEQUENCE, Line, loader

TOKENS = ROWS * SEQUENCE


class Clock(Callback):
    """A clock that moves 1 s in each training step, 100 s in validation and in saving, and 30 s more in the first step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(module, "perf_counter", lambda: self.now_s)

    def on_before_backward(self, trainer: Trainer, *args: Any) -> None:
        self.now_s += 31.0 if trainer.global_step == 0 else 1.0

    def on_validation_epoch_end(self, *args: Any) -> None:
        self.now_s += 100.0

    def on_save_checkpoint(self, *args: Any) -> None:
        self.now_s += 100.0


def test_speed_leaves_out_first_step_validation_and_checkpoints(fit, monkeypatch, tmp_path) -> None:
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
    clock = Clock(monkeypatch)
    _, recorder = fit(Throughput(), clock, saver, batches=6, val_check_interval=2, enable_checkpointing=True)
    assert clock.now_s > 700  # it did validate and save
    assert "tokens_per_sec" not in recorder.steps[0]
    for step in recorder.steps[1:]:
        assert step["tokens_per_sec"] == pytest.approx(TOKENS)
        assert step["tokens_per_sec_per_gpu"] == pytest.approx(TOKENS)
        assert step["time_per_iteration_ms"] == pytest.approx(1000)


def test_counts_tokens_steps_and_learning_rates(fit) -> None:
    _, recorder = fit(Throughput())
    assert [step["consumed_tokens"] for step in recorder.steps] == [TOKENS * n for n in (1, 2, 3, 4)]
    assert {step["global_batch_size"] for step in recorder.steps} == {TOKENS}
    assert [step["lr"] for step in recorder.steps] == pytest.approx([0.1 / n for n in (1, 2, 3, 4)])


def test_a_step_is_an_optimizer_step(fit, monkeypatch) -> None:
    Clock(monkeypatch)
    _, recorder = fit(Throughput(), Clock(monkeypatch), accumulate_grad_batches=2, batches=6)
    last = recorder.steps[-1]
    assert last["global_batch_size"] == 2 * TOKENS
    assert last["consumed_tokens"] == 6 * TOKENS
    assert last["time_per_iteration_ms"] == pytest.approx(2000)
    assert last["tokens_per_sec"] == pytest.approx(TOKENS)


def test_window_spans_the_steps_between_logs(fit, monkeypatch) -> None:
    _, recorder = fit(Throughput(), Clock(monkeypatch), log_every_n_steps=3, batches=6)
    assert [i for i, step in enumerate(recorder.steps) if step.get("consumed_tokens") == 3 * TOKENS] == [2, 3, 4]
    assert recorder.steps[-1]["tokens_per_sec"] == pytest.approx(TOKENS)


def test_consumed_tokens_go_on_after_a_resume(fit, tmp_path) -> None:
    saver = ModelCheckpoint(tmp_path, filename="two", every_n_train_steps=2)
    fit(Throughput(), saver, max_steps=2, max_epochs=None, enable_checkpointing=True)
    _, recorder = fit(Throughput(), max_steps=4, max_epochs=None, ckpt_path=tmp_path / "two.ckpt")
    assert [step["consumed_tokens"] for step in recorder.steps] == [TOKENS * 3, TOKENS * 4]


def test_consumed_tokens_stay_exact() -> None:
    logged: dict[str, torch.Tensor] = {}
    model = Line()
    model.log = lambda name, value, **kwargs: logged.__setitem__(name, value)  # type: ignore[method-assign, assignment]
    Throughput._log(model, {"consumed_tokens": 2**40 + 1})
    assert int(logged["consumed_tokens"]) == 2**40 + 1


@pytest.mark.parametrize(("attention", "share"), [("full", 1.0), ("causal", 0.5)])
def test_flops_of_a_llama_follow_the_named_convention(fit, monkeypatch, attention, share) -> None:
    config = LlamaConfig(
        vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2
    )
    model = Line()
    model.llama = config
    _, recorder = fit(Throughput(attention), Clock(monkeypatch), model=model)
    weights = 3 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32) + 100 * 16
    per_token = 6 * weights + share * 3 * 12 * 16 * SEQUENCE
    assert recorder.steps[-1]["model_tflops_per_gpu"] == pytest.approx(per_token * TOKENS / 1e12)


def test_mfu_is_absent_unless_the_peak_is_known(fit, monkeypatch) -> None:
    _, without = fit(Throughput(), Clock(monkeypatch))
    _, given = fit(Throughput(flops_per_token=1e9, peak_flops_per_s=1e12), Clock(monkeypatch))
    assert "mfu" not in without.steps[-1]
    assert without.steps[-1]["model_tflops_per_gpu"] == pytest.approx(6 * 2 * TOKENS / 1e12)
    assert given.steps[-1]["mfu"] == pytest.approx(1e9 * TOKENS / 1e12)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("X1", None),
    ],
)
def test_peak_is_found_by_the_devices_name(monkeypatch, name, peak) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert module.peak_flops_per_s(torch.device("cuda", 0)) == peak


def test_the_data_module_knows_the_global_batch(tmp_path) -> None:
    class Data(LightningDataModule):
        global_batch_tokens = 12345

        def train_dataloader(self) -> Any:
            return loader(1)

    class Model(Line):
        validation_step = LightningModule.validation_step

    off: dict[str, Any] = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    trainer = Trainer(accelerator="cpu", max_steps=1, callbacks=[Throughput()], log_every_n_steps=1, default_root_dir=tmp_path, **off)
    trainer.fit(Model(), datamodule=Data())
    assert trainer.callback_metrics["global_batch_size"] == 12345


def test_tokens_are_those_of_all_replicas(fit) -> None:
    class Replicated(SingleDeviceStrategy):
        distributed_sampler_kwargs = {"num_replicas": 4, "rank": 1}

    _, recorder = fit(Throughput(), strategy=Replicated(device=torch.device("cpu")))
    assert recorder.steps[0]["global_batch_size"] == 4 * TOKENS


def test_a_batch_without_input_ids_counts_its_first_tensor() -> None:
    assert sequence_length(Trainer(accelerator="cpu", devices=1), [torch.zeros(3, 5), torch.zeros(3)]) == 5


def test_a_part_of_each_sequence_counts_as_the_whole() -> None:
    trainer = Trainer(accelerator="cpu", devices=2, strategy=ThreeDStrategy(cp=2))
    batch = {"input_ids": torch.zeros(3, 6), "sequence_ids": torch.zeros(3, 6)}
    assert sequence_length(trainer, batch) == 12
    assert sequence_length(trainer, {"input_ids": torch.zeros(3, 6)}) == 6
