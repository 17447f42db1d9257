"""torch's pass for asynchronous tensor parallelism, on CPUs.

The operations that it makes are there for CUDA only, but torch has what each means in plain collectives: those stand in for the kernels.
So the pass runs on the graphs of a real training, and what it makes of them runs too.
"""

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from functorch.compile import make_boxed_func
from ranks_compile import Compiled, fit
from torch._dynamo import register_backend
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V

from lightning_3d import checks

COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "fused_all_gather_matmul", "fused_matmul_reduce_scatter")
graphs: list[tuple[str, Counter[str]]] = []


@cache
def stand_ins() -> torch.library.Library:
    """What the fused operations do on CPUs; for as long as the process lives."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symm_mem._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symm_mem._fused_matmul_reduce_scatter_fallback, "CPU")
    return library


def run_after_passes(graph: torch.fx.GraphModule, inputs: Any, **about: Any) -> Callable[..., Any]:
    """In place of inductor's kernels: all its passes, then the operations one by one."""
    view_to_reshape(graph)
    with V.set_fake_mode(detect_fake_mode([node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")])):
        post_grad_passes(graph, about.get("is_inference", False))
    names = (str(node.target).split(".")[1] for node in graph.graph.nodes if node.op == "call_function" and "." in str(node.target))
    kind = "backward" if about.get("is_backward") else "validation" if about.get("is_inference") else "forward"
    counts = Counter(name for name in names if name in COLLECTIVES)
    counts["products"] = sum(len(node.args[1]) for node in graph.graph.nodes if "fused_all_gather" in str(node.target))
    graphs.append((kind, counts))
    return make_boxed_func(graph.forward)


@register_backend
def inductors_passes(graph: torch.fx.GraphModule, inputs: Any, options: dict[str, Any] | None = None) -> Any:
    return compile_fx(graph, inputs, inner_compile=run_after_passes, config_patches=options)


def fused_fit(case: Compiled, mode: Any = "inductors_passes") -> dict[str, Any]:
    """A training with the option, and the number of collectives in each graph."""
    stand_ins()
    graphs.clear()
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(force_disable_caches=True):  # a graph found there is not seen
        patch.setattr(dist, "is_nccl_available", lambda: True)  # the pass leaves graphs alone where torch was built without
        patch.setattr(checks, "check_async_tensor_parallel", lambda *sizes, **options: None)
        seen = fit(case, mode)
    return seen | {"fused": graphs.copy()}
