"""``fit``, ``validate``, ``test`` and ``predict``: LightningCLI with this package's classes as defaults.

YAML names fragments by path, relative to the file that names them (`model: ../configs/model/llama_tiny.yaml`), and classes by
their last name (`class_path: GradNorm`) as long as that is unambiguous. `model:` and `data:` take LlamaModule's and
NanosetDataModule's options directly, or `class_path:` with any LightningModule or LightningDataModule.

Only the parser of the command at hand is built: LightningCLI builds all four, which takes a second.
"""

import logging
import os
import warnings
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

import lightning_3d.callbacks  # noqa: F401  (known by their last names from here on)
from lightning_3d.datamodule import NanosetDataModule
from lightning_3d.errors import ConfigError
from lightning_3d.module import LlamaModule
from lightning_3d.usage import OneLineErrors, one_line


class Parser(OneLineErrors, LightningArgumentParser):
    """The parser of one command."""


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
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (ValueError, MisconfigurationException) as error:
            raise ConfigError(one_line(str(error))) from error


def run(argv: list[str]) -> None:
    """Parse, build and run.

    Raises:
        ConfigError: an option, a key or a combination that cannot work.
    """
    quiet()
    try:
        CLI(argv[0], argv)
    except MisconfigurationException as error:
        raise ConfigError(one_line(str(error))) from error


def quiet() -> None:
    """Leave the screen to what concerns the run: from Lightning warnings only, from this package what rank 0 has to say."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    first = not int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
    logging.basicConfig(format="%(message)s")
    logging.getLogger("lightning_3d").setLevel(logging.INFO if first else logging.WARNING)
    # Lightning 2.6 walks pytrees in a way that torch 2.13 deprecates; nothing that a user could mend.
    warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
