"""``fit``, ``validate``, ``test``, ``predict`` and ``profile``: LightningCLI with this package's classes as defaults.

YAML names fragments by path, relative to the file that names them (`model: ../configs/model/llama_tiny.yaml`), and classes by
their last name (`class_path: GradNorm`) as long as that is unambiguous. `model:` and `data:` take LlamaModule's and
NanosetDataModule's options directly, or `class_path:` with any LightningModule or LightningDataModule.

Only the parser of the command at hand is built: LightningCLI builds all four, which takes a second.
"""

import argparse
import json
import logging
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

from lightning_3d import launched, synthetic_datamodule, text_datamodule  # noqa: F401  (classes are found by their last name once imported)
from lightning_3d.callbacks import Checkpoint
from lightning_3d.checkpoint import latest_checkpoint
from lightning_3d.errors import ConfigError
from lightning_3d.parallel.plan import full_numel, render
from lightning_3d.strategy import ThreeDStrategy
from lightning_3d.usage import OneLineErrors, one_line


class Parser(OneLineErrors, LightningArgumentParser):
    """The parser of one command."""


class Words(OneLineErrors, argparse.ArgumentParser):
    """The parser of what a command takes besides."""


class CLI(LightningCLI):
    """LightningCLI for one command."""

    def __init__(self, command: str, args: list[str]) -> None:
        self.command = command
        super().__init__(
            LightningModule,
            LightningDataModule,
            args=args,
            parser_class=Parser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            seed_everything_default=42,
            auto_configure_optimizers=False,
            save_config_kwargs={"overwrite": True},
        )

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The command at hand, and the arguments of the Trainer's method that are not options."""
        return {self.command: LightningCLI.subcommands()[self.command]}

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)  # LightningCLI's own warns when a program passes arguments on

    @override
    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_core_arguments_to_parser(parser)
        # Where the YAML has no class_path, its keys are those of these classes.
        defaults = {"trainer.strategy": "ThreeDStrategy", "model": "LlamaModule", "data": "NanosetDataModule"}
        parser.set_defaults({key: {"class_path": f"lightning_3d.{name}"} for key, name in defaults.items()})

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--print_plan", action="store_true", help="Print how each stage is split over the ranks, and start nothing.")

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        return super().instantiate_trainer(**joined_processes(self._get(self.config_init, "trainer.devices")), **kwargs)

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (ValueError, MisconfigurationException, ModuleNotFoundError) as error:
            raise ConfigError(one_line(str(error))) from error

    @override
    def after_instantiate_classes(self) -> None:
        if self._get(self.config, "print_plan"):
            print(plan_table(self.model, self.datamodule, self.trainer.strategy))
            raise SystemExit(0)
        options = self.config_init[self.command]
        if options.get("ckpt_path") in ("last", "auto"):
            options["ckpt_path"] = last_checkpoint(self.trainer, or_none=options["ckpt_path"] == "auto")


def joined_processes(devices: Any) -> dict[str, int]:
    """For ``trainer.devices: auto`` under torchrun or srun: the processes that it started, which may be others after each restart."""
    found = launched.processes()
    return {"devices": found[0], "num_nodes": found[1]} if found and devices == "auto" else {}


def plan_table(module: Any, datamodule: Any, strategy: Strategy) -> str:
    """The plan of every stage, as text.

    Raises:
        ConfigError: the module or the strategy has no plan, or the layout is not possible.
    """
    plan = getattr(module, "tensor_parallel_plan", ())
    if not plan or not isinstance(strategy, ThreeDStrategy):
        names = f"{type(module).__name__} under {type(strategy).__name__}"
        raise ConfigError(f"print_plan: {names} has no plan: it takes a module with a tensor_parallel_plan and ThreeDStrategy")
    strategy.check(module, datamodule)
    tables = []
    for index in range(strategy.num_stages):
        with torch.device("meta"):
            stage = module.build_stage(index, strategy.num_stages)
        table = render(stage, plan, tp=strategy.dims.tp, data_parallel=strategy.data_parallel, dp=strategy.dims.dp_cp)
        tables.append(f"stage {index} of {strategy.num_stages}, {full_numel(stage):,} parameters\n{table}")
    return "\n\n".join(tables)


def last_checkpoint(trainer: Trainer, *, or_none: bool = False) -> str | None:
    """The newest whole checkpoint of the run; still "last" where only Lightning's ModelCheckpoint writes some, which Lightning finds.

    If it turns out to be damaged when it is read, an older one is taken.

    Raises:
        ConfigError: there is none, and None is not wanted then.
    """
    folders = [callback.checkpoints_path for callback in trainer.checkpoint_callbacks if isinstance(callback, Checkpoint)]
    if not folders:
        return "last"
    latest = latest_checkpoint(folders[0])
    if isinstance(trainer.strategy, ThreeDStrategy):
        trainer.strategy.resume_from_older = True
    if latest is None and or_none:
        return None
    if latest is None:
        raise ConfigError(
            f"ckpt_path=last: there is no whole checkpoint in {folders[0]}: set ckpt_path to auto to begin anew then, or name a folder"
        )
    return str(latest)


def run(argv: list[str]) -> None:
    """Parse, build and run.

    Raises:
        ConfigError: an option, a key or a combination that cannot work.
    """
    quiet()
    argv = profiled(argv) if argv[0] == "profile" else argv
    try:
        CLI(argv[0], argv)
    except MisconfigurationException as error:
        raise ConfigError(one_line(str(error))) from error


def profiled(argv: list[str]) -> list[str]:
    """The arguments of ``fit`` for those of ``profile``: a few steps, with one callback, and nothing written but to ``--out``."""
    parser = Words("lightning_3d profile", description="Where the time of a step goes.", allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=3, help="steps to look at, after one that is left out")
    parser.add_argument("--out", default="profile", help="folder for a Chrome trace of each rank and profile.json")
    parser.epilog = "All options of fit are options too, --config RECIPE first of all."
    options, rest = parser.parse_known_args(argv[1:])
    if options.steps < 1:
        raise ConfigError(f"--steps {options.steps}: give 1 or more")
    callback = {"class_path": "lightning_3d.callbacks.profile.Profile", "init_args": {"steps": options.steps, "out": options.out}}
    settings = {"max_steps": options.steps + 1, "max_epochs": -1, "limit_val_batches": 0, "num_sanity_val_steps": 0, "logger": False}
    settings |= {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings |= {"callbacks": [callback], "default_root_dir": options.out}
    words = {f"--trainer.{key}": value if isinstance(value, str) else json.dumps(value) for key, value in settings.items()}
    return ["fit", *rest, *(word for option in words.items() for word in option)]


def quiet() -> None:
    """Leave the screen to what concerns the run: from Lightning warnings only, from this package what rank 0 has to say."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lightning_3d").setLevel(logging.WARNING if launched.rank() else logging.INFO)
    warnings.filterwarnings("ignore", message="The `srun` command is available")  # launched.py knows when it should have been used
    # Lightning 2.6 walks pytrees in a way that torch 2.13 deprecates; nothing that a user could mend.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
