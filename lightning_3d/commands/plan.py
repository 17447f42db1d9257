"""``python -m lightning_3d plan --config recipe.yaml``: what a run will hold, send and compute, before anything is started."""

from lightning.pytorch.cli import LightningArgumentParser

from lightning_3d.commands.recipe import Reader, read_recipe
from lightning_3d.errors import ConfigError
from lightning_3d.planning.estimate import Costs, estimate
from lightning_3d.planning.gpus import GIB, Gpu, find_gpu
from lightning_3d.planning.pictures import draw
from lightning_3d.planning.report import report
from lightning_3d.planning.search import proposals, search
from lightning_3d.planning.verdict import verdict


def options(parser: LightningArgumentParser) -> None:
    """What `plan` takes besides the options of `fit`."""
    parser.add_argument("--gpu", type=str, default="h100-80gb", help="What each rank has; an unknown name lists the known.")
    parser.add_argument("--memory_gib", type=float | None, default=None, help="Memory of each rank, instead of the GPU's.")
    parser.add_argument("--world_size", "--world-size", type=int | None, default=None, help="Ranks, instead of devices x num_nodes.")
    parser.add_argument("--gpus_per_node", "--gpus-per-node", type=int, default=8, help="Ranks of a node.")
    parser.add_argument("--search", action="store_true", help="Propose the best layouts for these ranks instead of planning the recipe's.")
    parser.add_argument("--out", type=str | None, default=None, help="Folder for pictures of the schedule, memory and the mesh.")


def run(argv: list[str]) -> None:
    """Read, estimate, print.

    Raises:
        ConfigError: a recipe that is wrong, or a GPU that is not known.
    """
    reader = Reader(argv[1:], options)
    gpu = chosen_gpu(reader.options["gpu"], reader.options["memory_gib"])
    recipe = read_recipe(
        reader.options, reader.model, world_size=reader.options["world_size"], gpus_per_node=reader.options["gpus_per_node"]
    )
    if reader.options["search"]:
        print(proposals(search(recipe.model, recipe.setting, gpu), gpu))
        return
    known: Costs = {}
    made = estimate(recipe.model, recipe.setting, gpu, known)
    print(report(made), verdict(recipe.model, made, known), sep="\n\n")
    if reader.options["out"]:
        print("pictures   ", ", ".join(path for path in draw(made, reader.options["out"]) if path.endswith(".png")))


def chosen_gpu(name: str, memory_gib: float | None) -> Gpu:
    """A known GPU, with another memory where that is given."""
    gpu = find_gpu(name)
    if memory_gib is None:
        return gpu
    if memory_gib <= 0:
        raise ConfigError(f"memory_gib={memory_gib} must be greater than 0")
    return Gpu(
        f"{name} ({memory_gib:g} GiB)", int(memory_gib * GIB), gpu.peak_flops_per_s, gpu.inside_nbytes_per_s, gpu.between_nbytes_per_s
    )
