"""``fit``, ``validate``, ``test`` and ``predict``: LightningCLI with this package's classes as defaults.

YAML names fragments by path, relative to the file that names them (`model: ../configs/model/llama_tiny.yaml`), and classes by
their last name (`class_path: GradNorm`) as long as that is unambiguous. `model:` and `data:` take LlamaModule's and
NanosetDataModule's options directly, or `class_path:` with any LightningModule or LightningDataModule.

Only the parser of the command at hand is built: LightningCLI builds all four, which takes a second.
"""

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

import lightning_3d.callbacks  # noqa: F401  (known by their last names from here on)
from lightning_3d.datamodule import NanosetDataModule
from lightning_3d.errors import ConfigError
from lightning_3d.module import LlamaModule
from lightning_3d.usage import OneLineErrors


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
    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_lightning_class_args(self.trainer_class, "trainer")
        # Of the two types the first one counts where the YAML has no class_path.
        parser.add_subclass_arguments((LlamaModule, LightningModule), "model", fail_untyped=False, required=True)
        parser.add_subclass_arguments((NanosetDataModule, LightningDataModule), "data", fail_untyped=False, required=False)
        parser.set_defaults({"trainer.strategy": {"class_path": "lightning_3d.ThreeDStrategy"}})


def run(argv: list[str]) -> None:
    """Parse, build and run.

    Raises:
        ConfigError: an option, a key or a combination that cannot work.
    """
    try:
        CLI(argv[0], argv)
    except MisconfigurationException as error:
        raise ConfigError(str(error)) from error
