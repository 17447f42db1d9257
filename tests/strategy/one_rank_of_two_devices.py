"""Two steps on one rank whose GPU is made up: where each collective's tensors lie, and that no operation mixes two places.

torch lets Python be a device, here called gpu. Tensors are fake: they have shapes, a device and no content, and like real ones they are not
combined across devices. The process group is torch's fake one, in which this process is any one rank, with the backends that the strategy
asks for. FSDP, autograd, the hand-over of gradients, clipping and the optimizer are what runs in training; of a pipeline this is one stage,
fed by hand. No number is computed.
"""

import json
import sys
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from lightning_3d.callbacks.layer_stats import LayerStats, all_reduced
from lightning_3d.checkpoint.state import OwnState
from lightning_3d.mesh import Mesh, ParallelDims, backend_for
from lightning_3d.model.config import LlamaConfig
from lightning_3d.module import LlamaModule
from lightning_3d.optim.clipping import gradient_norm, gradients_of, scale_to_norm
from lightning_3d.parallel import stages as building
from lightning_3d.parallel.data import set_last_microbatch
from lightning_3d.parallel.gradients import Gradients, hand_over
from lightning_3d.parallel.recorder import Recorder
from lightning_3d.parallel.stages import Layout, Stages

TIED = "embed_tokens.weight"
LENGTH, WIDTH = 16, 32
LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=WIDTH,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=LENGTH,
    tie_word_embeddings=True,
)


class Gpu(_DummyBackendModule):
    """The device's module: streams and events that do nothing, as those of the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


class Module(LlamaModule):
    """With a buffer, which FSDP does not move."""

    def build_stage(self, index: int, num_stages: int) -> Any:
        stage = super().build_stage(index, num_stages)
        stage.unused = torch.nn.BatchNorm1d(1, affine=False)
        return stage


class Places(Recorder):
    """Notes also where the tensors of each collective lie; a group that cannot send them from there is an error."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.places: set[tuple[str, str, str]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = len(self.calls)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for call in self.calls[before:]:
            devices = {leaf.device for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)}
            held = [arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())]
            for group, device in product(map(dist.ProcessGroup.unbox, held), devices):
                group._get_backend(device)
            self.places |= {(call.op, call.axis, device.type) for device in devices}
        return result


def outside(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same with real tensors: a mesh reads the numbers of its ranks."""

    def real(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return real


def two_steps(dims: ParallelDims, rank: int, options: dict[str, Any], *, gloo: bool) -> dict[str, Any]:
    """The places of collectives, and of what is kept.

    Args:
        gloo: whether groups have the backend for tensors on the CPU.
    """
    _setup_privateuseone_for_python_backend("gpu", Gpu())
    backends = backend_for("fake", "gpu", on_cpu_too=True).replace("gloo", "fake") if gloo else "gpu:fake"
    dist.init_process_group(backends, store=FakeStore(), rank=rank, world_size=dims.world_size)
    mesh, device, fake = Mesh.build(dims, "gpu"), torch.device("gpu", 0), FakeTensorMode(allow_non_fake_inputs=True)
    building.find_tied = lambda names, mesh: (
        {TIED: [0, dims.pp - 1]} if dims.pp > 1 else {}
    )  # the fake group cannot tell other ranks' names
    module = Module(LLAMA)
    with fake, patch.object(DeviceMesh, "__init__", outside(DeviceMesh.__init__)):
        built = Stages.build(module, mesh, device, Layout(dims, tuple(range(dims.pp)), **options))
    module.built = built
    module.stages.update({str(index): stage for index, stage in built.modules.items()})
    gradients = Gradients(built.parameters(), mesh, built.partial, built.tied, built.copies())
    with fake, Places(mesh) as places, patch.object(dist, "all_gather_object", alone):
        optimizer, stats = torch.optim.AdamW(module.parameters(), fused=True), LayerStats()
        for _ in range(2):
            fresh = gradients.run_apart(lambda: microbatches(module, dims, device, stats))
            loss = hand_over(torch.zeros((), device=device), lambda scale, fresh=fresh: gradients.deliver(fresh, scale, reduce=True))
            loss.backward()
            norm = gradient_norm(gradients.counted_once(), mesh)
            scale_to_norm(gradients_of(optimizer), norm, 1.0)
            optimizer.step()
        for name, parameter in gradients.held_first().items():
            stats._add("gradients", name, parameter.grad)
        strategy = SimpleNamespace(root_device=device, counted_parameters=gradients.held_first)
        numbers = all_reduced(stats._sums, SimpleNamespace(world_size=dims.world_size, strategy=strategy)).values()
        saved = OwnState(module, [optimizer])
        saved.take(saved.by_file_name(), [[]])
    moments = [value for values in optimizer.state.values() for key, value in values.items() if key != "step"]
    lie = {
        "parameters": module.parameters(),
        "buffers": module.buffers(),
        "gradients": gradients_of(optimizer),
        "moments": moments,
        "numbers": [norm, *numbers],
        "saved": [value for name, value in saved.by_file_name().items() if ".unused." not in name],
    }
    return {"collectives": sorted(places.places), "lie": {what: sorted({each.device.type for each in some}) for what, some in lie.items()}}


def alone(everyone: list[Any], value: Any, group: Any = None) -> None:
    """What a rank would hear if all said what it says: the fake group has no others to ask."""
    everyone[:] = [value] * len(everyone)


def microbatches(module: Module, dims: ParallelDims, device: torch.device, stats: LayerStats) -> None:
    """Two forwards and backwards of the stage that lies here, as a pipeline would feed it."""
    ((index, stage),) = module.built.modules.items()
    batch = {key: torch.ones(2, LENGTH, dtype=torch.int64, device=device) for key in ("input_ids", "labels")}
    for is_last in (False, True):
        set_last_microbatch(stage, is_last)
        length = LENGTH // dims.tp if module.built.layout.sequence_parallel else LENGTH
        x = torch.empty(2, length, WIDTH, device=device, requires_grad=True) if index else batch["input_ids"]
        output = stage(x, **module.stage_kwargs(batch))
        stats._add("activations", "layers.0", output)
        loss = module.pipeline_loss(output, batch)[0] if index == dims.pp - 1 else output.sum()
        loss.backward()


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps(two_steps(ParallelDims(**asked.pop("dims")), **asked)))
