"""``python -m lightning_3d COMMAND``: dispatch, and user errors as one line.

Nothing heavy is imported here, so that the list of commands appears in a tenth of a second: `import lightning.pytorch` alone takes four.
A further command is a line in FUNCTIONS: its options come from the function's signature, its help from the docstring.
"""

import argparse
import sys
import time
from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

from lightning_3d import launched
from lightning_3d.errors import ConfigError
from lightning_3d.usage import OneLineErrors

TRAINER = {
    "fit": "train a model",
    "validate": "compute the validation metrics of a checkpoint",
    "test": "compute the test metrics of a checkpoint",
    "predict": "run a checkpoint on the data module's prediction set",
    "profile": "train for a few steps and show where the time goes",
}


class Function(NamedTuple):
    """A command that is a plain function; the parameters named in ``positional`` take the bare arguments, one each or (``+``) all."""

    path: str
    help: str
    positional: tuple[str, ...] = ()


RECIPES = {  # modules with run(argv)
    "plan": Function("lightning_3d.commands.plan", "show what a recipe will hold, send and compute; starts nothing"),
}

FUNCTIONS = {
    "prepare": Function("lightning_3d.data.prepare.prepare", "tokenise text into a Nanoset", ("inputs+",)),
    "inspect": Function("lightning_3d.data.inspect.inspect", "show what is in a Nanoset", ("data+",)),
    "export": Function("lightning_3d.checkpoint.export.export", "write a checkpoint as a Hugging Face folder", ("checkpoint", "output")),
    "init": Function("lightning_3d.commands.init.init", "write a recipe to begin with, in a layout that fits"),
    "import-config": Function(
        "lightning_3d.commands.importing.command.import_config", "make a recipe of a Nanotron YAML or a TorchTitan TOML", ("file",)
    ),
    "generate": Function("lightning_3d.generate.generate", "let a model go on with a text", ("model",)),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit status: 2 for a user's error, which is shown as one line without a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    command = _parser().parse_args(argv[:1]).command
    try:
        if command in FUNCTIONS:
            _run_function(command, FUNCTIONS[command], argv[1:])
        elif command in RECIPES:
            import_module(RECIPES[command].path).run(argv)
        else:
            import_module("lightning_3d.cli").run(argv)
    except ConfigError as error:
        _show(error)
        return 2
    return 0


def _show(error: ConfigError) -> None:
    """One line from one rank where all have the same error: the first to end takes the others with it while they wait here."""
    if rank := launched.rank():
        time.sleep(5)
    sys.stderr.write(f"error{f' on rank {rank}' if rank else ''}: {error}\n")


def _parser() -> argparse.ArgumentParser:
    axes = "data, tensor, pipeline and context parallelism"
    parser = argparse.ArgumentParser("lightning_3d", description=f"Pretrain language models over {axes}.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands (each has its own --help)")
    for name, text in [*TRAINER.items(), *((name, function.help) for name, function in (RECIPES | FUNCTIONS).items())]:
        commands.add_parser(name, help=text, add_help=False)
    return parser


def _run_function(name: str, function: Function, argv: list[str]) -> None:
    import yaml
    from jsonargparse import ActionConfigFile, ArgumentParser

    class Parser(OneLineErrors, ArgumentParser):
        """The parser of one command."""

    class NoAliases(yaml.SafeDumper):
        """Writes what stands in two places twice."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    module, attribute = function.path.rsplit(".", 1)
    run = getattr(import_module(module), attribute)
    parser = Parser(prog=f"lightning_3d {name}", description=function.help)
    parser.add_argument("-c", "--config", action=ActionConfigFile, help="YAML file with the options below")
    for name in function.positional:
        parser.add_argument(name.rstrip("+"), nargs="+" if name.endswith("+") else None, type=str)
    parser.add_function_arguments(run, skip={name.rstrip("+") for name in function.positional}, as_positional=False)
    options = parser.parse_args(_switched_on(argv, run))
    result = run(**{key: value for key, value in vars(options).items() if key != "config"})
    if result is not None:
        print(yaml.dump(result, Dumper=NoAliases, sort_keys=False), end="")


def _switched_on(argv: list[str], run: Callable[..., Any]) -> list[str]:
    """`--greedy` for `--greedy true`, for all options that are true or false."""
    switches = {f"--{name}" for name, parameter in signature(run).parameters.items() if parameter.annotation is bool}
    following = [*argv[1:], ""]
    return [
        f"{arg}=true" if arg in switches and after not in ("true", "false") else arg for arg, after in zip(argv, following, strict=False)
    ]


if __name__ == "__main__":
    sys.exit(main())
