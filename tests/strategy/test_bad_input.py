"""What cannot work is refused with one line that names the keys, the values and the fix, before any process starts where possible."""

import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from ranks_gpt import Data
from ranks_refusals import Lengths, LocalNames, NoContext, NoLoss, NoPlan, Padded, Plain, Undrawn, built, llama, other_trainers, strategies

from lightning_3d.errors import ConfigError
from lightning_3d.strategy import ThreeDStrategy
from lightning_3d.testing import RankPool


def trainer(devices: int, options: dict[str, Any] | None = None, **strategy: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=ThreeDStrategy(**strategy), **quiet, **(options or {}))


@pytest.mark.parametrize(
    ("devices", "strategy", "message"),
    [
        (
            4,
            {"dp": 3},
            "dp=3 x tp=1 x pp=1 = 3, but there are 4 processes (devices x num_nodes): set trainer.devices to 3, or change dp, tp or pp",
        ),
        (
            4,
            {"dp": 2, "tp": 2, "pp": 2},
            "dp=2 x tp=2 x pp=2 = 8, but there are 4 processes (devices x num_nodes): set trainer.devices to 8",
        ),
        (4, {"pp": 3}, "tp=1 x pp=3 = 3 does not divide the 4 processes: change devices, tp or pp"),
        (1, {"tp": 2}, "tp=2 x pp=1 = 2 does not divide the 1 processes"),
        (4, {"dp": 0}, "dp=0 must be a whole number of at least 1, or 'auto'"),
        (4, {"tp": -1}, "tp=-1 must be a whole number of at least 1"),
        (4, {"cp": 0}, "cp=0 must be a whole number of at least 1"),
        (4, {"cp": 3}, "tp=1 x pp=1 x cp=3 = 3 does not divide the 4 processes: change devices, tp, pp or cp"),
        (
            4,
            {"dp": 2, "tp": 2, "cp": 2},
            "dp=2 x tp=2 x pp=1 x cp=2 = 8, but there are 4 processes (devices x num_nodes): set trainer.devices to 8, or change dp, tp,",
        ),
        (6, {"data_parallel": "hsdp", "dp_replicate": 4}, "dp_replicate=4 does not divide dp=6: choose a divisor of dp"),
    ],
    ids=str,
)
def test_sizes(devices: int, strategy: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        trainer(devices, **strategy)


def test_strategies_that_cannot_be(pool: RankPool) -> None:
    (messages,) = pool.run(strategies, 1)
    modes = "choose from ['ddp', 'zero2', 'fsdp', 'hsdp']; hsdp needs dp_replicate >= 2, the others 1"
    engines = "['afab', '1f1b', 'interleaved_1f1b', 'looped_bfs', 'zero_bubble', 'zbv', 'dualpipe_v']"
    halves = "which runs backwards in two halves, does not work in torch"
    whole = "['afab', '1f1b', 'interleaved_1f1b', 'looped_bfs']"
    assert messages == [
        f"ConfigError: pp_engine='zigzag' is unknown: choose from {engines}, or name a .csv file",
        f"ConfigError: data_parallel='zero3' with dp_replicate=1: {modes}",
        f"ConfigError: data_parallel='hsdp' with dp_replicate=1: {modes}",
        f"ConfigError: data_parallel='ddp' with dp_replicate=2: {modes}",
        "ConfigError: virtual_stages=2 with pp_engine=1f1b and pp=2: 1f1b needs 1; "
        "2 suits interleaved_1f1b, looped_bfs, zero_bubble, zbv, dualpipe_v",
        "ConfigError: virtual_stages=1 with pp_engine=interleaved_1f1b and pp=2: interleaved_1f1b needs 2 or more; "
        "1 suits afab, 1f1b, zero_bubble",
        "ConfigError: virtual_stages=3 with pp_engine=zbv and pp=2: zbv needs 2; 3 suits interleaved_1f1b, looped_bfs, zero_bubble",
        "ConfigError: virtual_stages=2 with pp=1: there is no pipeline; leave it out, or set pp to 2 or more",
        "ConfigError: batch_accumulation_per_replica=2 is too small for pp_engine=1f1b with pp=4: set it to 4 or more or choose afab",
        "ConfigError: batch_accumulation_per_replica=5 does not suit interleaved_1f1b with pp=2: use a multiple of 2",
        "ConfigError: batch_accumulation_per_replica=3 is too small for pp_engine=dualpipe_v with pp=2: set it to 4 or more or choose afab",
        "ConfigError: cp_method='zigzag' is unknown: choose from ['ring', 'allgather', 'ulysses']",
        "ConfigError: cp_method=ulysses has no effect with cp=1: set cp to 2 or more, or leave cp_method out",
        f"ConfigError: recompute=selective with pp_engine=zbv, {halves}: leave recompute out, or choose pp_engine from {whole}",
        f"ConfigError: compile=True with pp_engine=zero_bubble, {halves}: leave compile out, or choose pp_engine from {whole}",
    ]


INTERLEAVED = {"pp": 2, "pp_engine": "interleaved_1f1b", "virtual_stages": 2}


@pytest.mark.parametrize(
    ("module", "data", "strategy", "message"),
    [
        (llama(), Lengths(16), {"tp": 4}, "num_attention_heads=6 is not divisible by tp=4: choose tp from [1, 2, 3, 6]"),
        (llama(num_key_value_heads=1), Lengths(16), {"tp": 2}, "num_key_value_heads=1 is not divisible by tp=2: choose tp from [1]"),
        (
            llama(),
            Lengths(15),
            {"tp": 2, "sequence_parallel": True},
            "sequence_length=15 is not divisible by tp=2, as sequence_parallel: true",
        ),
        (llama(), Lengths(16), {"pp": 4}, "pp x virtual_stages = 4 stages, but num_hidden_layers=3: each stage needs at least one layer"),
        (llama(), Lengths(16), INTERLEAVED, "pp x virtual_stages = 4 stages, but num_hidden_layers=3"),
        (
            llama([2, 2]),
            Lengths(16),
            {"pp": 2},
            "model.stage_layers=[2, 2] must name at least one layer for each of 2 stages (pp x virtual_stages)",
        ),
        (llama([3]), Lengths(16), {"pp": 2}, "model.stage_layers=[3] must name at least one layer for each of 2 stages"),
        (llama([3, 0]), Lengths(16), {"pp": 2}, "model.stage_layers=[3, 0] must name at least one layer for each of 2 stages"),
        (
            llama(),
            Lengths(16, 2),
            {"pp": 4},
            "batch_accumulation_per_replica=2 is too small for pp_engine=1f1b with pp=4: set it to 4 or more",
        ),
        (
            llama(),
            Lengths(16, 5),
            INTERLEAVED,
            "batch_accumulation_per_replica=5 does not suit interleaved_1f1b with pp=2: use a multiple of 2",
        ),
        (
            llama(),
            Lengths(18),
            {"cp": 2},
            "sequence_length=18 is not divisible by 2 x cp = 4, as two chunks of it on each of cp=2 ranks need: change one",
        ),
        (
            llama(),
            Lengths(8),
            {"cp": 2, "tp": 3, "sequence_parallel": True},
            "sequence_length=8 is not divisible by cp x tp = 6, as sequence_parallel: true needs: change one",
        ),
        (
            llama(),
            Lengths(16),
            {"cp": 4, "cp_method": "ulysses"},
            "num_attention_heads=6 / tp=1 is not divisible by cp=4, as cp_method: ulysses needs: choose another cp, or cp_method: ring",
        ),
        (
            llama(),
            Lengths(16),
            {"cp": 2, "tp": 2, "cp_method": "ulysses"},
            "num_attention_heads=6 / tp=2 is not divisible by cp=2",
        ),
        (
            llama(num_key_value_heads=3),
            Lengths(16),
            {"cp": 2, "cp_method": "ulysses"},
            "num_key_value_heads=3 / tp=1 is not divisible by cp=2",
        ),
        (NoContext(), Data(), {"cp": 2}, "cp=2: NoContext does not say how its attention reaches tokens on other ranks: define apply"),
        (Plain(), Data(), {"cp": 2}, "cp=2: Plain does not say how its attention reaches tokens on other ranks: derive it from"),
        (NoPlan(), Data(), {"tp": 2}, "tp=2: NoPlan has no tensor_parallel_plan and no parallelize_stage(): define one, or set tp=1"),
        (Plain(), Data(), {"data_parallel": "fsdp"}, "data_parallel=fsdp has no effect on Plain, which is no PipelineMixin: leave it out"),
        (Plain(), Data(), {"sequence_parallel": True}, "sequence_parallel=True has no effect on Plain, which is no PipelineMixin"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_module_against_layout(module: Any, data: Any, strategy: dict, message: str) -> None:
    """Before any process is started, and before the weights are drawn."""
    refusing = trainer(strategy.get("tp", 1) * strategy.get("pp", 1) * strategy.get("cp", 1), **strategy)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        refusing.fit(module, datamodule=data)
    assert refusing.strategy.launcher.procs == []
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("module", "strategy", "message"),
    [
        (
            Plain(),
            {"pp": 2},
            "pp=2: Plain does not say what its stages are: derive it from PipelineMixin and define build_stage() and pipeline_loss()",
        ),
        (
            Plain(),
            {"tp": 2},
            "tp=2: Plain does not say how it is cut: derive it from PipelineMixin and give it a tensor_parallel_plan, define",
        ),
        (NoLoss(), {"pp": 2}, "NoLoss must define pipeline_loss(), as PipelineMixin needs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_module_without_what_it_must_define(module: Any, strategy: dict, message: str) -> None:
    refusing = trainer(2, **strategy)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        refusing.fit(module, datamodule=Data())
    assert refusing.strategy.launcher.procs == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is there")
def test_flash_attention_without_cuda() -> None:
    with pytest.raises(ConfigError, match=r"^attn_implementation: flash_attn needs a CUDA device and none is available; choose .*sdpa"):
        trainer(1).fit(llama(attn_implementation="flash_attn"), datamodule=Lengths(16))


def test_float16_with_a_loss_scaler() -> None:
    """The scale would come after the schedule's backward."""
    with pytest.raises(ValueError, match=r"16-mixed") as error:
        trainer(1, {"precision": "16-mixed"})
    assert "\n" not in str(error.value)


def test_asynchronous_checkpoint_io() -> None:
    with pytest.raises(ConfigError, match=r"^plugins: AsyncCheckpointIO has no effect on sharded checkpoints: leave it out"):
        trainer(1, {"plugins": [AsyncCheckpointIO()]})


def test_parameters_that_nothing_draws(pool: RankPool) -> None:
    (message,) = pool.run(built, 1, (Undrawn, (1, 1, 1), {}))
    assert message.startswith("ConfigError: Scale at 'scale' owns ['factor'] but has no reset_parameters(): define it")


def test_padding_in_a_cut_embedding(pool: RankPool) -> None:
    for message in pool.run(built, 2, (Padded, (1, 2, 1), {})):
        assert message == "ConfigError: padding_idx=3 of an embedding that is cut over tp is not supported: leave it out"


def test_names_that_depend_on_the_number_of_stages(pool: RankPool) -> None:
    strategy = {key: value for key, value in INTERLEAVED.items() if key != "pp"}
    for message in pool.run(built, 2, (LocalNames, (1, 1, 2), strategy)):
        assert message.startswith("ConfigError: stages [")
        assert "lie on one rank and both have ['h.0.attn.k.bias', " in message
        assert "layers by their number in the model" in message


def test_one_module_under_two_layouts(pool: RankPool) -> None:
    other = "the weights of this module were built by a Trainer with another strategy: make a new module and load a checkpoint into it"
    for one, two, three, same in pool.run(other_trainers, 2):
        assert one.startswith("ConfigError: the module was built for Layout(dims=ParallelDims(pp=2, dp=1, cp=1, tp=1")
        assert two == three == f"ConfigError: {other}"
        assert same == "accepted"
