"""What the documentation takes from the package itself when it is built: pictures, and the list of errors with their cures.

A hook of mkdocs. Nothing of it is committed, so that it cannot drift.
"""

import ast
import contextlib
import io
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lightning_3d"

AREAS = {
    "The layout": ("mesh", "checks", "strategy", "parallel"),
    "The model": ("model", "pipeline_mixin", "module"),
    "Data": ("data", "datamodule", "text_datamodule", "synthetic_datamodule", "replica_data"),
    "Optimizer": ("optim",),
    "Checkpoints": ("checkpoint", "sharded_checkpoints", "generate"),
    "Callbacks": ("callbacks",),
    "Planning, and recipes from elsewhere": ("planning", "commands"),
    "The command line": ("cli", "__main__", "usage", "launched"),
}


PLANNED = ["plan", "--config", str(ROOT / "recipes/llama_1b.yaml"), "--trainer.strategy.dp", "2", "--trainer.strategy.pp", "4"]
PLANNED += ["--trainer.strategy.data_parallel", "ddp", "--data.batch_accumulation_per_replica", "8"]


def on_files(files: Files, config: Any) -> Files:
    """Add what is generated to the files of the site."""
    files.append(File.generated(config, "errors.md", content=errors_page()))
    for name, picture in pictures().items():
        files.append(File.generated(config, f"pictures/{name}", content=picture))
    return files


def pictures() -> dict[str, bytes]:
    """What `plan --out` draws of a recipe, by file name."""
    from lightning_3d.commands.plan import run

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        run([*PLANNED, "--out", folder])
        return {path.name: path.read_bytes() for path in Path(folder).glob("*.svg")}


def errors_page() -> str:
    """Every error that names a mistake of the user's, with what to do about it, by area."""
    lines = [
        "# Errors and their cures",
        "",
        "A mistake in a recipe, in data or in a layout is one line that names the key, the values and the cure, before any process",
        "starts where that can be known. This is the list of them, read from the sources when this page was built; `{...}` stands for",
        "what is filled in.",
        "For what goes wrong later (a lost node, a hanging collective, a full disk) see [checkpoints](checkpoints.md) and",
        "[many nodes](many-nodes.md).",
    ]
    seen: set[str] = set()
    for area, names in AREAS.items():
        rows = [row for name in names for row in _messages(name) if row not in seen]
        seen.update(rows)
        if rows:
            lines += ["", f"## {area}", "", "| what it says | what to do |", "|---|---|"]
            lines += [f"| {problem} | {cure} |" for problem, cure in map(_split, rows)]
    return "\n".join(lines) + "\n"


def _messages(name: str) -> Iterator[str]:
    folder = PACKAGE / name
    for path in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]:
        if not path.exists():
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ConfigError") and node.args:
                message = _text(node.args[0])
                if re.search(r"[a-z]{3,} [a-z]{2,}", re.sub(r"\{.*?\}", "", message)):  # not one that only passes another on
                    yield message


def _text(node: ast.expr) -> str:
    """A message as a person reads it: what is filled in becomes its name."""
    match node:
        case ast.Constant(value=value):
            return str(value)
        case ast.JoinedStr(values=parts):
            return "".join(_text(part) for part in parts)
        case ast.FormattedValue(value=value):
            return "{" + _name(value) + "}"
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
        case ast.IfExp(body=body):
            return _text(body)
        case _:
            return "{" + _name(node) + "}"


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Constant(value=value):
            return str(value)
        case ast.IfExp(body=body):
            return _name(body)
        case _:
            names = [_name(inner) for inner in ast.walk(node) if isinstance(inner, ast.Name | ast.Attribute)]
            return names[-1] if names else "..."


_CURE = re.compile(
    r"[:;,] (?=(?:choose|set|change|give|make|use|name|add|leave|derive|resume|keep|start|write|prepare|install|pip|override|remove|define|"
    r"only|take|run|put|it must|hsdp needs|interleaved_1f1b needs|tied ones|each|or |let|load|point|free|wait|call|pass|return|download|"
    r"shorten|convert|does|rename|delete|see)\b)"
)


def _split(message: str) -> tuple[str, str]:
    """The complaint as code, and the cure, which begins with what to do."""
    cut = _CURE.search(message)
    problem, cure = (message[: cut.start()], message[cut.end() :]) if cut else (message, "")
    problem = problem.replace("`", "'").replace("|", "\\|").replace("\n", " ")
    for character, escaped in (("<", "&lt;"), ("*", "\\*"), ("_", "\\_"), ("|", "&#124;"), ("\n", " ")):
        cure = cure.replace(character, escaped)
    return f"`{problem}`", cure or "as it says"
