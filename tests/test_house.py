"""The house rules of CONTRIBUTING.md that a machine can check."""

import ast
import re
import statistics
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parent.parent
TRACKED = [ROOT / name for name in subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()]
TEXT = [path for path in TRACKED if path.is_file() and path.suffix in {".py", ".md", ".yaml", ".toml", ".txt", ".json", ""}]
PACKAGE = [path for path in TRACKED if path.is_file() and path.suffix == ".py" and path.is_relative_to(ROOT / "lightning_3d")]
SCRIPTS = [
    path for path in TRACKED if path.is_file() and path.suffix == ".py" and path.relative_to(ROOT).parts[0] in {"recipes", "benchmarks"}
]
TESTS = [path for path in TRACKED if path.is_file() and path.suffix == ".py" and path.is_relative_to(ROOT / "tests")]
RECIPES = [path for path in TRACKED if path.is_file() and path.suffix == ".yaml" and path.is_relative_to(ROOT / "recipes")]
TREES = {path: ast.parse(path.read_text()) for path in [*PACKAGE, *SCRIPTS, *TESTS]}

Function = ast.FunctionDef | ast.AsyncFunctionDef
COLLECTIVES = re.compile(
    r"(all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|scatter|gather|send|recv|isend|irecv|batch_isend_irecv)\w*$"
)
COLLECTIVE_MODULES = {"dist", "funcol", "distributed", "c10d"}


def functions(path: Path) -> Iterator[Function]:
    return (node for node in ast.walk(TREES[path]) if isinstance(node, Function))


def length(node: Function) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def where(path: Path, node: ast.AST | None = None, text: str = "") -> str:
    line = f":{node.lineno}" if node is not None and hasattr(node, "lineno") else ""
    return f"{path.relative_to(ROOT)}{line} {getattr(node, 'name', '')} {text}".strip()


def matches(pattern: str, paths: list[Path]) -> list[str]:
    lines = ((path, number, line) for path in paths for number, line in enumerate(path.read_text().splitlines(), 1))
    return [f"{path.relative_to(ROOT)}:{number} {line.strip()[:100]}" for path, number, line in lines if re.search(pattern, line)]


def assert_none(found: list[str]) -> None:
    assert not found, "\n" + "\n".join(found)


def test_files_are_short() -> None:
    counts = {path: len(path.read_text().splitlines()) for path in [*PACKAGE, *SCRIPTS]}
    assert_none([where(path, text=f"{n} lines > 400") for path, n in counts.items() if n > 400])
    assert_none([where(path, text=f"{n} lines > 400") for path in TESTS if (n := len(path.read_text().splitlines())) > 400])
    assert statistics.median(counts.values()) <= 150


def test_functions_are_short() -> None:
    lengths = [(path, node, length(node)) for path in [*PACKAGE, *SCRIPTS] for node in functions(path)]
    assert_none([where(path, node, f"{n} lines > 60") for path, node, n in lengths if n > 60])
    assert statistics.median(n for _, _, n in lengths) <= 12


def unannotated(node: Function, in_class: bool) -> list[str]:
    args = [*node.args.posonlyargs, *node.args.args]
    static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    args = args[1:] if in_class and not static else args
    args += [*node.args.kwonlyargs, *filter(None, [node.args.vararg, node.args.kwarg])]
    return [arg.arg for arg in args if arg.annotation is None] + (["return"] if node.returns is None else [])


def with_parents(path: Path) -> Iterator[tuple[Function, ast.AST]]:
    for parent in ast.walk(TREES[path]):
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, Function):
                yield node, parent


def test_everything_is_annotated() -> None:
    nodes = [(path, node, parent) for path in [*PACKAGE, *SCRIPTS] for node, parent in with_parents(path)]
    missing = [(path, node, unannotated(node, isinstance(parent, ast.ClassDef))) for path, node, parent in nodes]
    assert_none([where(path, node, f"lacks annotations: {names}") for path, node, names in missing if names])


def test_public_tensors_have_shapes() -> None:
    """A bare Tensor in a public signature says nothing; jaxtyping's Float[Tensor, "B S D"] does."""

    def bare(node: Function) -> bool:
        annotations = [arg.annotation for arg in [*node.args.args, *node.args.kwonlyargs]] + [node.returns]
        return any(a is not None and ast.unparse(a) in {"Tensor", "torch.Tensor"} for a in annotations)

    assert_none([where(path, node) for path in PACKAGE for node in functions(path) if not node.name.startswith("_") and bare(node)])


def test_shapes_are_seen_by_the_checker() -> None:
    """Under `from __future__ import annotations` beartype would get strings."""
    future = [path for path in PACKAGE if re.search(r"^from __future__ import annotations", path.read_text(), re.M)]
    assert_none([where(path) for path in future if re.search(r"^from jaxtyping import", path.read_text(), re.M)])


def test_modules_and_public_names_have_docstrings() -> None:
    assert_none([where(path, text="no module docstring") for path in PACKAGE if not ast.get_docstring(TREES[path])])


def communicates(node: Function) -> bool:
    calls = (call.func for call in ast.walk(node) if isinstance(call, ast.Call))
    attributes = (f for f in calls if isinstance(f, ast.Attribute) and COLLECTIVES.match(f.attr))
    return any(ast.unparse(f.value).split(".")[-1] in COLLECTIVE_MODULES for f in attributes)


def test_communication_is_described() -> None:
    """A function that communicates says Shapes, Placement, Communication and Source, in its docstring or its class's."""
    missing = []
    for path in PACKAGE:
        if path.parent.name != "parallel":
            continue
        for node, parent in with_parents(path):
            own = ast.get_docstring(node) or ""
            text = own + ((ast.get_docstring(parent) or "") if isinstance(parent, ast.ClassDef) else "")
            lacking = [word for word in ("Shapes", "Placement", "Communication", "Source") if f"{word}:" not in text]
            missing += [where(path, node, f"lacks {lacking}")] if communicates(node) and lacking else []
    assert_none(missing)


FORBIDDEN = {
    "an open end": r"\b(TOD[O]|FIXM[E]|XX[X])\b",
    "a path of one machine": r"(?<![\w.])/(wor[k]|hom[e]|roo[t]|User[s]|op[t]/wheels)/",
    "a registry's host": r"\b(pyp[i]\.org|pythonhoste[d]\.org|registry\.npm[j]s\.org)\b",
    "a stub": r"raise NotImplementedErro[r]\(\)",
}


@pytest.mark.parametrize("pattern", FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_no_tracked_file_has(pattern: str) -> None:
    assert_none(matches(pattern, [path for path in TEXT if path.name != "LICENSE"]))


def test_recipes_are_short() -> None:
    assert_none([where(path) for path in RECIPES if len(path.read_text().splitlines()) > 40])


def test_recipes_have_a_header() -> None:
    words = ("# What:", "# Hardware:", "# Command:", "# Measured:")
    assert_none([where(path, text=f"lacks {word}") for path in RECIPES for word in words if word not in path.read_text()])


def test_layers() -> None:
    """DESIGN's layers, as pyproject.toml states them: imports only go down."""
    assert lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == 0


def test_the_model_knows_nothing_of_distribution() -> None:
    """import-linter sees no subpackages of other packages, so this one is looked for in the text."""
    assert_none(matches(r"torch\.distributed|\bdist\.", [path for path in PACKAGE if path.parent.name == "model"]))
