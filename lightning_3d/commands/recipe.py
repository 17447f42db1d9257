"""A recipe as planning sees it: read by the parser that `fit` uses, without data, Trainer or processes.

Only the model is built, and it has no weights before a Trainer has it. Everything that does not go together is found before any of it
is reported, so that a layout is mended once.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_3d.cli import CLI
from lightning_3d.errors import ConfigError
from lightning_3d.mesh import ParallelDims
from lightning_3d.parallel.plan import check_plan
from lightning_3d.parallel.recompute import check_recompute
from lightning_3d.parallel.schedules import check_engine, stage_coords
from lightning_3d.parallel.stages import Layout
from lightning_3d.placement import head_tail
from lightning_3d.planning.setting import Setting

PRECISIONS = {"None": "32-true", "32": "32-true", "64": "64-true", "bf16": "bf16-mixed"}


class Reader(CLI):
    """LightningCLI that parses for `fit`, builds the model and stops there.

    Args:
        options: adds what the command has besides.
    """

    def __init__(self, args: list[str], options: Callable[[LightningArgumentParser], None] = lambda parser: None) -> None:
        self._options = options
        super().__init__("fit", ["fit", *args])

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        self._options(parser)

    @override
    def _set_seed(self) -> None:
        """Nothing is drawn."""

    @override
    def instantiate_classes(self) -> None:
        self.options = self.config["fit"]
        only_model = self.config.clone()
        trainer = only_model["fit"]["trainer"]
        for key in ("strategy", "callbacks", "logger", "profiler", "plugins"):
            trainer[key] = None
        only_model["fit"]["data"] = None
        self.model = self.parser.instantiate_classes(only_model)["fit"]["model"]
        llama = getattr(self.model, "llama", None)
        if llama is not None:  # the other function needs its package and a GPU, and takes the same memory
            self.model.llama = replace(llama, attn_implementation="sdpa")

    @override
    def after_instantiate_classes(self) -> None:
        """Nothing is run."""

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing is run."""


@dataclass(frozen=True)
class Recipe:
    """A recipe's model, and the setting of its run; ``world_size`` ranks."""

    model: Any
    setting: Setting
    world_size: int


def read_recipe(options: Namespace, model: Any, *, world_size: int | None = None, gpus_per_node: int = 8) -> Recipe:
    """What planning needs of parsed options.

    Args:
        options: of `fit`.
        model: that they name.
        world_size: number of ranks, instead of trainer.devices x num_nodes.
        gpus_per_node: ranks of a node.

    Raises:
        ConfigError: all that does not go together, in one line.
    """
    if not hasattr(model, "build_stage"):
        raise ConfigError(f"plan: {type(model).__name__} does not say what its stages are: derive it from PipelineMixin")
    strategy = _strategy(options)
    ranks = world_size or _ranks(options, gpus_per_node)
    found = Problems()
    sizes = {"dp": strategy["dp"], "tp": strategy["tp"], "pp": strategy["pp"], "cp": strategy["cp"], "replicate": strategy["dp_replicate"]}
    dims = found.of(lambda: ParallelDims.resolve(world_size=ranks, **sizes))
    found.of(lambda: check_recompute(strategy["recompute"]))
    data = _data(options)
    length = _longest(data)
    guess = dims or ParallelDims(pp=_whole(sizes["pp"]), dp=1, cp=_whole(sizes["cp"]), tp=_whole(sizes["tp"]))
    microbatches = found.of(lambda: _microbatches(strategy, data, guess, known=dims is not None)) or guess.pp
    coords = found.of(lambda: _stage_coords(strategy, guess, microbatches)) or tuple(range(guess.pp))
    _check_splits(found, model, strategy, guess, length)
    setting = found.of(lambda: _setting(options, model, _layout(strategy, guess, coords), microbatches, length, gpus_per_node))
    found.report()
    assert setting is not None
    return Recipe(model, setting, ranks)


def _stage_coords(strategy: Namespace, dims: ParallelDims, microbatches: int) -> tuple[int, ...]:
    engine, virtual = strategy["pp_engine"], strategy["virtual_stages"]
    check_engine(engine, pp=dims.pp, virtual_stages=virtual, microbatches=microbatches)
    return stage_coords(engine, dims.pp, virtual)


def _check_splits(found: "Problems", model: Any, strategy: Namespace, dims: ParallelDims, length: int) -> None:
    """Heads, layers and tokens against the axes."""
    if hasattr(model, "llama"):
        for key, size in (("num_attention_heads", model.llama.num_attention_heads), ("num_key_value_heads", model.llama.kv_heads)):
            rows = [row for row in model.tensor_parallel_plan if row.divides == key]
            found.of(lambda rows=rows, key=key, size=size: check_plan(rows, {key: size}, dims.tp))  # type: ignore[misc]
        found.of(lambda: model.stage_split(dims.pp * strategy["virtual_stages"]))
    if dims.cp > 1:
        found.of(lambda: head_tail(length, dims.cp, 0))
        found.of(lambda: model.check_context_parallel(dims, strategy["cp_method"] or "ring"))
    if strategy["sequence_parallel"] and length % (dims.cp * dims.tp):
        size = f"cp x tp = {dims.cp * dims.tp}" if dims.cp > 1 else f"tp={dims.tp}"
        found.add(f"sequence_length={length} is not divisible by {size}, as sequence_parallel: true needs: change one")
    if (strategy["dp_replicate"] > 1) != (strategy["data_parallel"] == "hsdp"):
        found.add(
            f"data_parallel={strategy['data_parallel']} with dp_replicate={strategy['dp_replicate']}: hsdp needs 2 or more, the others 1"
        )


def _layout(strategy: Namespace, dims: ParallelDims, coords: tuple[int, ...]) -> Layout:
    names = ("data_parallel", "sequence_parallel", "recompute", "compile", "cpu_offload")
    return Layout(dims, coords, **{name: strategy[name] for name in names}, cp_method=strategy["cp_method"] or "ring")


def _setting(options: Namespace, model: Any, layout: Layout, microbatches: int, length: int, gpus_per_node: int) -> Setting:
    data, trainer = _data(options), options["trainer"]
    return Setting(
        layout,
        _strategy(options)["pp_engine"],
        microbatches,
        data.get("micro_batch_size") or 1,
        length,
        PRECISIONS.get(str(trainer["precision"]), str(trainer["precision"])),
        bool(data.get("mask_documents")),
        num_norms=_norms(options),
        num_metrics=1 + bool(getattr(model, "z_loss_coefficient", 0)),
        on_cpu=trainer["accelerator"] == "cpu",
        gpus_per_node=gpus_per_node,
    )


def _data(options: Namespace) -> Namespace:
    return (options.get("data") or {}).get("init_args") or Namespace()


class Problems:
    """Collects what does not go together."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def add(self, problem: str) -> None:
        """One more."""
        self._found.append(problem)

    def of(self, check: Callable[[], Any]) -> Any:
        """The result of a check, or None and its error is kept."""
        try:
            return check()
        except ConfigError as error:
            self.add(str(error))
            return None

    def report(self) -> None:
        """Raise all of them.

        Raises:
            ConfigError: there are some.
        """
        if self._found:
            raise ConfigError("; ".join(dict.fromkeys(self._found)))


def _strategy(options: Namespace) -> Namespace:
    strategy = options["trainer"]["strategy"]
    name = strategy if isinstance(strategy, str) else strategy["class_path"]
    if not name.endswith("ThreeDStrategy"):
        raise ConfigError(f"plan: trainer.strategy={name}: only runs under ThreeDStrategy can be planned")
    return strategy["init_args"]


def _ranks(options: Namespace, gpus_per_node: int) -> int:
    devices, nodes = options["trainer"]["devices"], options["trainer"]["num_nodes"]
    if isinstance(devices, list):
        devices = len(devices)
    elif not str(devices).isdigit():  # auto
        devices = os.cpu_count() if options["trainer"]["accelerator"] == "cpu" else gpus_per_node
    return int(devices) * nodes


def _whole(size: Any) -> int:
    return size if isinstance(size, int) and size >= 1 else 1


def _longest(data: Namespace) -> int:
    """Tokens of a sequence, of the stage of the data with the longest ones."""
    stages = [stage.get("sequence_length") for stage in data.get("data_stages") or []]
    return max(filter(None, [data.get("sequence_length"), *stages]), default=2048)


def _microbatches(strategy: Namespace, data: Namespace, dims: ParallelDims, *, known: bool) -> int:
    samples, size = data.get("global_batch_samples"), data.get("micro_batch_size") or 1
    if samples and known:
        if samples % (size * dims.dp):
            raise ConfigError(
                f"data.global_batch_samples={samples} is not a multiple of micro_batch_size={size} x dp={dims.dp}: change one"
            )
        return int(samples // (size * dims.dp))
    return strategy["batch_accumulation_per_replica"] or data.get("batch_accumulation_per_replica") or (1 if data else dims.pp)


def _norms(options: Namespace) -> int:
    """Gradient norms of a step: clipping's, which GradNorm takes too, or GradNorm's own."""
    trainer = options["trainer"]
    callbacks = trainer["callbacks"] or []
    logs = any(str(callback.get("class_path", "")).endswith("GradNorm") for callback in (callbacks if isinstance(callbacks, list) else []))
    return int(bool(trainer["gradient_clip_val"] and trainer["gradient_clip_algorithm"] in (None, "norm")) or logs)
