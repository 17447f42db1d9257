"""What one microbatch costs a stage: the stage's own forward, loss and backward run on fake tensors, which have shapes and no content.

Every tensor that the run would make is seen as it is made and as it goes, so that a change of the model, of recomputation or of the loss
changes the plan without a formula to keep in step. Blocks that are alike are traced twice at most: from a stage with two and a stage
with three of them follows one with any number, since a block more adds the same to everything.

torch chooses the attention kernel of a CPU here. CUDA's keep the same tensors: queries, keys, values, the output and a number a row.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Shaped
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_3d.errors import ConfigError
from lightning_3d.parallel.blocks import blocks_of, named_blocks
from lightning_3d.planning.parameters import cut_stage
from lightning_3d.planning.setting import PlannedModule, Setting

TRACED_BLOCKS = 3  # the first, the last, and one between
Call = tuple[str, str, int]
Phase = Literal["forward", "loss", "backward", "end", "after"]  # all but the first: of a backward; its end begins with the second block


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that exist, as operations make them and as they go; those in ``known`` are not counted."""

    def __init__(self, known: list[Tensor] | None = None) -> None:
        super().__init__()
        self.now = 0
        self._peak = 0
        self._known = known or []
        self._sizes = {tensor.untyped_storage()._cdata: 0 for tensor in self._known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count the memory that is new."""
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._see(leaf.untyped_storage())
        return out

    def peak(self) -> int:
        """The most since it was last asked for."""
        peak, self._peak = self._peak, self.now
        return peak

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self._peak = max(self._peak, self.now)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)


@dataclass(frozen=True)
class Cost:
    """Bytes and collectives of one microbatch on one stage.

    Args:
        kept: what it keeps from its forward to its backward.
        shared: what the first microbatch makes and all of a step use: copies of the weights in the autocast's dtype.
        extra: what its forward and the phases of its backward need for moments besides; less where much of what was kept is free again.
        output: what the stage gives to the next, or to the loss.
        logits: the same, where those are logits.
        calls: how many collectives of its forward and backward, by axis, kind and bytes of the whole tensor.
    """

    kept: int
    shared: int
    extra: Mapping[Phase, int]
    output: int
    logits: int = 0
    calls: Mapping[Call, int] = field(default_factory=dict)

    def with_more(self, of: "Cost", than: "Cost", times: int) -> "Cost":
        """The cost with ``times`` what one cost has over another one; what is needed for moments does not grow."""

        def grown(name: str) -> int:
            return getattr(self, name) + times * (getattr(of, name) - getattr(than, name))

        calls = {key: count + times * (of.calls.get(key, 0) - than.calls.get(key, 0)) for key, count in self.calls.items()}
        return replace(self, kept=grown("kept"), shared=grown("shared"), calls=calls)


def trace(module: PlannedModule, setting: Setting, index: int) -> Cost:
    """What a microbatch costs stage ``index`` on the rank that holds the most of it.

    Raises:
        ConfigError: the stage or the loss cannot run on batches of {"input_ids", "labels"}.
    """
    sizes = {kind: len(names) for kind, names in _kinds(cut_stage(module, setting, index)[0]).items()}
    counts = {kind: min(size, TRACED_BLOCKS) for kind, size in sizes.items()}
    return _extrapolate(lambda some: _trace(module, setting, index, some), counts, sizes)


def _extrapolate(run: Callable[[Mapping[Any, int]], Cost], counts: dict[Any, int], sizes: Mapping[Any, int]) -> Cost:
    """The cost with ``sizes`` blocks of each kind, from runs with as few as will do."""
    total = traced = run(counts)
    for kind, size in sizes.items():
        if counts[kind] == size:
            continue
        fewer = run({**counts, kind: counts[kind] - 1})
        if max(traced.extra.values()) < max(fewer.extra.values()):  # the peak is not yet where it will be with more blocks
            return _extrapolate(run, {**counts, kind: min(2 * counts[kind], size)}, sizes)
        total = total.with_more(traced, fewer, size - counts[kind])
    return total


def _kinds(stage: nn.Module) -> dict[Any, list[str]]:
    """The names of a stage's blocks by what they are: class and shapes."""
    kinds: dict[Any, list[str]] = {}
    for name, block in named_blocks(stage):
        key = (type(block).__name__, tuple((key, tuple(p.shape)) for key, p in block.named_parameters()))
        kinds.setdefault(key, []).append(name)
    return kinds


def _trace(module: PlannedModule, setting: Setting, index: int, counts: Mapping[Any, int]) -> Cost:
    """The cost of the stage with so many blocks of each kind."""
    calls: Counter[Call] = Counter()
    stage, _ = cut_stage(module, setting, index, note=lambda *call: calls.update([call]))
    for kind, names in _kinds(stage).items():
        for name in names[counts[kind] :]:
            group, key = name.rsplit(".", 1)
            delattr(stage.get_submodule(group), key)
    alone = _copy(module, stage)
    with _fake_tensors(setting) as autocast:
        _give_memory(stage, setting.dtype)
        live = LiveBytes([*stage.parameters()])
        try:
            with live, autocast:
                return _steps(_Microbatch(alone, setting, stage, index), live, calls)
        except (RuntimeError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"plan: stage {index} of {type(module).__name__} cannot run on batches of input_ids and labels: {error}"
            ) from error


def _copy(module: Any, stage: nn.Module) -> Any:
    """The module with this stage alone, and without tp: the loss of this rank's logits takes as much memory as its share of all."""
    alone = copy.copy(module)
    alone.__dict__["_modules"] = {"stages": nn.ModuleDict({"0": stage})}
    alone.tensor_parallel = None
    return alone


class _Microbatch:
    """Forward and backward of a microbatch through a stage."""

    def __init__(self, module: Any, setting: Setting, stage: nn.Module, index: int) -> None:
        self._module, self._stage = module, stage
        self._last = index == setting.layout.num_stages - 1
        self.makes_logits = self._last and not getattr(stage, "head_later", False)
        shape = (setting.micro_batch_size, setting.held_tokens)
        self._batch = {"input_ids": torch.zeros(shape, dtype=torch.int64), "labels": torch.zeros(shape, dtype=torch.int64)}
        if setting.mask_documents:
            self._batch["position_ids"] = torch.zeros(setting.micro_batch_size, setting.sequence_length, dtype=torch.int64)
        self._input: Tensor = self._batch["input_ids"] if index == 0 else _hidden(module, setting)

    def forward(self) -> tuple[Shaped[Tensor, "..."], Shaped[Tensor, "..."]]:
        """The stage's output, and what its backward begins from."""
        x = self._input if not self._input.is_floating_point() else self._input.detach().requires_grad_()
        output = self._stage(x, **self._module.stage_kwargs(self._batch))
        if not self._last:
            return output, output
        result = self._module.pipeline_loss(output, self._batch)
        return output, result[0] if isinstance(result, tuple) else result

    def when_backward_comes_to(self, index: int, call: Callable[[], None]) -> None:
        """Have something called before each backward of a block, or of the one that is nearest to that index."""
        blocks = [*blocks_of(self._stage)]

        def hook(block: nn.Module, args: Any, output: Any) -> None:
            for leaf in tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(lambda gradient: call())

        if blocks:
            blocks[min(index, len(blocks) - 1)].register_forward_hook(hook)

    @staticmethod
    def backward(result: tuple[Tensor, Tensor]) -> None:
        """Gradients of the parameters and of the input, as when they have come from the next stage."""
        root = result[1]
        root.backward(torch.empty_like(root) if root.dim() else None)


def _steps(microbatch: _Microbatch, live: LiveBytes, calls: Counter[Call]) -> Cost:
    """Forwards and backwards in the order of a pipeline; the numbers are those of microbatches after the first."""
    phases: dict[Phase, int] = {}

    def ends(phase: Phase) -> None:
        phases[phase] = max(phases.get(phase, 0), live.peak())  # a block with several outputs is come to several times

    microbatch.when_backward_comes_to(-1, lambda: ends("loss"))
    microbatch.when_backward_comes_to(1, lambda: ends("backward"))
    first = microbatch.forward()
    after_one = live.now
    second = microbatch.forward()
    kept = live.now - after_one
    shared = after_one - kept
    microbatch.backward(first)  # makes the gradients
    del first
    calls.clear()
    live.peak()
    third = microbatch.forward()
    before = live.now
    phases.clear()
    ends("forward")
    microbatch.backward(second)
    ends("end")
    output = _storage_nbytes(third[0])
    extra = {phase: nbytes - before for phase, nbytes in phases.items()}
    return Cost(kept, shared, extra, output, output * microbatch.makes_logits, dict(calls))


def _storage_nbytes(tensor: Shaped[Tensor, "..."]) -> int:
    return tensor.untyped_storage().nbytes()


@contextmanager
def _fake_tensors(setting: Setting) -> Iterator[Any]:
    """A place where tensors have no content; gives the autocast of the run."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield torch.autocast("cpu", torch.bfloat16, enabled=setting.precision == "bf16-mixed")


def _give_memory(stage: nn.Module, dtype: torch.dtype) -> None:
    made: dict[int, nn.Parameter] = {}
    for module in stage.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                new = made.setdefault(id(parameter), nn.Parameter(torch.empty(parameter.shape, dtype=dtype), parameter.requires_grad))
                module._parameters[name] = new


def _hidden(module: Any, setting: Setting) -> Tensor:
    """What a stage other than the first takes: the residual stream, as the stage before gives it."""
    dims = setting.layout.dims
    length = setting.held_tokens // dims.tp if setting.layout.sequence_parallel else setting.held_tokens
    return torch.empty(setting.micro_batch_size, length, module.llama.hidden_size, dtype=setting.dtype)
