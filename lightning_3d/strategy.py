"""``Trainer(strategy=ThreeDStrategy(dp=2, tp=2, pp=2))``: data, tensor, pipeline and context parallelism as a Lightning strategy.

Lightning's hooks only, each a few lines that delegate. Nothing of Lightning is patched, and no loop, closure or step is overridden: the
pipeline's schedule runs inside the ordinary ``training_step`` and hands its gradients over through autograd (parallel/gradients.py).
"""

from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from jaxtyping import Float
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.fabric.utilities.init import _materialize_distributed_module
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d import launched
from lightning_3d.checkpoint import Saver
from lightning_3d.checks import check_run
from lightning_3d.errors import ConfigError
from lightning_3d.faults import Faults
from lightning_3d.interrupt import EndTogether, RankLauncher, init_worker
from lightning_3d.mesh import Mesh, ParallelDims, backend_for
from lightning_3d.optim.clipping import clip_values, gradient_norm, gradients_of, is_counted, parameters_of, scale_to_norm
from lightning_3d.parallel.compiled import Compile, check_compile
from lightning_3d.parallel.context import ContextMethod, check_method
from lightning_3d.parallel.data import DATA_PARALLEL_MODES, DataParallel, start_equal
from lightning_3d.parallel.evaluation import EvaluationRunner
from lightning_3d.parallel.float8 import Float8, check_float8
from lightning_3d.parallel.gradients import Gradients
from lightning_3d.parallel.guard import BatchGuard
from lightning_3d.parallel.pipeline import TrainingRunner
from lightning_3d.parallel.recompute import Recompute, check_recompute
from lightning_3d.parallel.schedules import Engine, check_engine, check_halves, stage_coords
from lightning_3d.parallel.stages import Layout, Stages
from lightning_3d.parallel.step import StepRunner
from lightning_3d.precision import with_global_clipping
from lightning_3d.rendezvous import connect_under_torchrun
from lightning_3d.sharded_checkpoints import ShardedCheckpoints


class ThreeDStrategy(ShardedCheckpoints):
    """Data, tensor, pipeline and context parallelism: dp x tp x pp x cp = number of processes.

    Args:
        dp: replicas that read different data; "auto" takes what the others leave.
        tp: ranks that share each layer's matrices.
        pp: ranks that share the layers.
        cp: ranks that share each sequence.
        cp_method: how attention reaches the other ranks' tokens, with cp > 1 (parallel/context.py); None: ring.
        pp_engine: schedule of the pipeline (parallel/schedules.py): a name, or a .csv file with a row of actions (0F0, 0B0 ...) a rank.
        virtual_stages: stages on each rank of the pipeline.
        data_parallel: who holds copies of parameters, gradients and optimizer state (parallel/data.py).
        dp_replicate: number of copies under ``hsdp``; its shards span dp x cp / dp_replicate ranks.
        sequence_parallel: keep S/tp of the hidden state on each tp rank between layers.
        async_tensor_parallel: send parts of the hidden state over tp while others are multiplied, on CUDA (parallel/async_tensor.py).
        batch_accumulation_per_replica: microbatches in a batch; None takes the data module's, else pp.
        recompute: what the backward computes again to save memory: none, full, selective, or full in every n-th block.
        compile: torch.compile each block; the name of one of torch's backends takes that instead of inductor.
        float8: which linears are multiplied in float8, and how.
        cpu_offload: keep shards of parameters, gradients and optimizer state on the CPU, where the optimizer runs (not ``ddp``).
        async_checkpoint: write checkpoints while training goes on; it waits only for a copy of the weights.
        timeout_s: seconds after which a collective that waits for other ranks fails, once the first step is done.
        first_step_timeout_s: the same until then, while ranks compile, connect and open files; at least ``timeout_s``.
    """

    def __init__(
        self,
        dp: int | Literal["auto"] = "auto",
        tp: int = 1,
        pp: int = 1,
        cp: int = 1,
        cp_method: ContextMethod | None = None,
        pp_engine: Engine = "1f1b",
        virtual_stages: int = 1,
        data_parallel: DataParallel = "ddp",
        dp_replicate: int = 1,
        sequence_parallel: bool = False,
        async_tensor_parallel: bool = False,
        batch_accumulation_per_replica: int | None = None,
        recompute: Recompute = "none",
        compile: Compile = False,  # noqa: A002  (the option's name)
        float8: Float8 | None = None,
        cpu_offload: bool = False,
        async_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout_s: float = 600.0,
        first_step_timeout_s: float = 1800.0,
    ) -> None:
        self.faults = Faults(timeout_s, first_step_timeout_s)
        super().__init__(dp, tp, True, process_group_backend, timedelta(seconds=self.faults.first_s))
        check_engine(pp_engine, pp=pp, virtual_stages=virtual_stages, microbatches=batch_accumulation_per_replica)
        if data_parallel not in DATA_PARALLEL_MODES or (dp_replicate > 1) != (data_parallel == "hsdp"):
            raise ConfigError(
                f"data_parallel={data_parallel!r} with dp_replicate={dp_replicate}: choose from {list(DATA_PARALLEL_MODES)}; "
                "hsdp needs dp_replicate >= 2, the others 1"
            )
        check_halves(pp_engine, pp, {"recompute": recompute, "compile": compile})
        self._stage_coords = stage_coords(pp_engine, pp, virtual_stages)
        self._sizes: dict[str, Any] = {"dp": dp, "tp": tp, "pp": pp, "cp": cp, "replicate": dp_replicate}
        self.pp_engine, self.virtual_stages, self.data_parallel = pp_engine, virtual_stages, data_parallel
        check_method(cp_method, cp)
        self.cp_method: ContextMethod = cp_method or "ring"
        check_recompute(recompute)
        self.sequence_parallel, self.recompute, self.compile = sequence_parallel, recompute, compile
        self.async_tensor_parallel, self.float8, self.cpu_offload = async_tensor_parallel, float8, cpu_offload
        self.batch_accumulation_per_replica = batch_accumulation_per_replica
        self.last_grad_norm: Tensor | None = None
        self._dims: ParallelDims | None = None
        self._mesh: Mesh | None = None
        self._stages: Stages | None = None
        self._gradients: Gradients | None = None
        self._step: StepRunner
        self._accumulating = False
        self._zero_grad_is_next = False
        self.together = EndTogether(self)
        self.saver = Saver(in_background=async_checkpoint)
        self.resume_from_older = False

    # ---- layout ----------------------------------------------------------------------------------------------------------

    @property
    @override
    def dims(self) -> ParallelDims:
        """Sizes of the axes; known once the Trainer is built."""
        assert self._dims is not None, "the strategy is not connected to a Trainer yet"
        return self._dims

    @property
    def mesh(self) -> Mesh:
        """The axes as process groups; known once the processes are connected."""
        assert self._mesh is not None, "the processes are not connected yet"
        return self._mesh

    @property
    def layout(self) -> Layout:
        """What decides which parameters lie on a rank."""
        mine = {name: getattr(self, name) for name in Layout.__dataclass_fields__ if name not in ("dims", "stage_coords")}
        return Layout(self.dims, self._stage_coords, **mine)

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline over all ranks."""
        return self.layout.num_stages

    @property
    def microbatches(self) -> int:
        """Microbatches in a training batch."""
        return self._microbatch_count(getattr(self._module.trainer, "datamodule", None))

    def _microbatch_count(self, datamodule: Any) -> int:
        return self.batch_accumulation_per_replica or getattr(datamodule, "batch_accumulation_per_replica", None) or self.dims.pp

    def parameter_counts(self) -> tuple[int, int]:
        """Number of parameters (of the whole model, on this rank); collective."""
        if self._stages is None:
            count = sum(p.numel() for p in self._module.parameters())
            return count, count
        return self._stages.counts(self.mesh, self.root_device)

    @override
    def _configure_launcher(self) -> None:
        """Called when the Trainer is built: the last moment to refuse sizes before processes start."""
        assert self.cluster_environment is not None
        if isinstance(self.cluster_environment, SLURMEnvironment):
            self.cluster_environment.auto_requeue = False  # it saves inside a signal handler: interrupt.py stops, recipes/slurm.sh requeues
        asked = started = self.num_processes, self.num_nodes
        if self.cluster_environment.creates_processes_externally:
            started = launched.processes() or (self.cluster_environment.world_size() // self.num_nodes, self.num_nodes)
        if started != asked:
            raise ConfigError(
                f"trainer.devices={asked[0]} x num_nodes={asked[1]}, but {started[0]} processes were started on each of {started[1]} "
                f"nodes: set trainer.devices={started[0]} and trainer.num_nodes={started[1]}, or trainer.devices=auto"
            )
        self._dims = ParallelDims.resolve(world_size=asked[0] * asked[1], **self._sizes)
        self._launcher = RankLauncher(self.check, self.cluster_environment, self.num_processes, self.num_nodes)

    def check(self, module: Any, datamodule: Any) -> None:
        """Whether this module can run in this layout; called before processes start (``checks.py`` says what is refused)."""
        if hasattr(datamodule, "split_over"):
            datamodule.split_over(self.dims.dp)
        check_compile(self.compile, self.root_device)
        check_float8(self.float8, self.root_device)
        check_run(module, datamodule, self.layout, self.root_device, engine=self.pp_engine, microbatches=self._microbatch_count(datamodule))

    @override
    def setup_environment(self) -> None:
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        assert isinstance(self._launcher, RankLauncher)
        self.accelerator.setup_device(self.root_device)
        root = self._module.trainer.default_root_dir
        self.faults.prepare(root, self.root_device)
        self._process_group_backend = backend_for(self._get_process_group_backend(), self.root_device.type, on_cpu_too=self.cpu_offload)
        connect_under_torchrun(self.cluster_environment, self._process_group_backend, self.root_device, self._timeout)
        self._setup_distributed()
        if self._mesh is None:  # fit, then test: new groups would leak
            self._mesh = Mesh.build(self.dims, self.root_device.type)
            self._device_mesh = self._mesh.device_mesh
            self.together.connect()
            self.saver.connect()
        self.faults.watch(self._mesh, self.together.store, self._module, root, self._launcher.end_children)
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.dims.dp, "rank": self.mesh.coord.dp}

    @property
    def sequence_part(self) -> tuple[int, int]:
        """Which part of how many of each sequence this rank trains on; for data modules that read no more than that."""
        return self.mesh.coord.cp, self.dims.cp

    @override
    def process_dataloader(self, dataloader: object) -> object:
        # Lightning seeds workers by rank, which gives ranks of one replica different random transforms; it leaves alone what is set.
        if isinstance(dataloader, torch.utils.data.DataLoader) and dataloader.worker_init_fn is None:
            dataloader.worker_init_fn = partial(init_worker, rank=self.mesh.coord.dp)
        return super().process_dataloader(dataloader)

    # ---- building --------------------------------------------------------------------------------------------------------

    def build_stages(self, module: Any) -> dict[int, nn.Module]:
        """This rank's stages of a ``PipelineMixin``, with their weights; those that an earlier Trainer built, where there are any."""
        if module.built is None:
            module.built = Stages.build(module, self.mesh, self.root_device, self.layout)
        stages: Stages = module.built
        stages.check_layout(self.layout)
        if stages is self._stages:
            self._step.count = self.microbatches  # of the data module of this fit
            return stages.modules
        self._stages = stages
        self._gradients = Gradients(stages.parameters(), self.mesh, stages.partial, stages.tied, stages.copies())
        self._step = StepRunner(module, self.mesh, self.root_device, self.microbatches, last=self._stage_coords[-1])
        self._train = TrainingRunner(stages.modules, self.num_stages, self.mesh, self.pp_engine, module, self._step.loss_of)
        self._evaluate = EvaluationRunner(stages.modules, self._stage_coords, self.mesh, module)
        return stages.modules

    @override
    def setup(self, trainer: "pl.Trainer") -> None:
        assert self.model is not None
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        _materialize_distributed_module(self.model, self.root_device)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if self._stages is None:  # a plain module, without PipelineMixin
            self._gradients = Gradients(dict(self._module.named_parameters()), self.mesh, set(), {})
            start_equal(self.model, self.mesh)
        self._guard = BatchGuard(self.mesh, self.root_device)
        self._metrics_over_dp()
        self.barrier()
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if fitting and not self.cpu_offload:
            _optimizers_to_device(self.optimizers, self.root_device)

    @override
    def model_to_device(self) -> None:
        if not self.cpu_offload:
            return super().model_to_device()
        for name, child in self._module.named_children():
            if name != "stages":  # FSDP wants those where they are
                child.to(self.root_device)
        return None

    def _metrics_over_dp(self) -> None:
        """Torchmetrics would add up over the world, i.e. count each sample tp x pp x cp times."""
        from torchmetrics import Metric

        for metric in self._module.modules():
            if isinstance(metric, Metric) and metric.process_group is None:
                metric.process_group = self.mesh.dp_group

    # ---- steps -----------------------------------------------------------------------------------------------------------

    def pipeline_step(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of a batch over all ranks; with gradients enabled, forward and backward of all microbatches."""
        self.faults.beat()
        if not torch.is_grad_enabled():
            return self._step.evaluate(batch, self._evaluate)
        assert self._gradients is not None
        if self._zero_grad_is_next:  # Lightning will zero them between the schedule and backward: hold no copy meanwhile
            self._gradients.drop()
        return self._step.train(batch, self._train, self._gradients, lambda: not self._accumulating)

    def pipeline_forward(self, batch: Any) -> list[Any]:
        """What the module's ``pipeline_output`` makes of each microbatch, on all ranks of the pipeline."""
        with torch.no_grad():
            return self._step.forward(batch, self._evaluate, self._module.pipeline_output)

    @override
    def on_train_start(self) -> None:
        self.together.watch_signals()

    on_validation_start = on_test_start = on_predict_start = on_train_start

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.faults.beat(self._module.trainer.global_step)
        begins_step = batch_idx % self._module.trainer.accumulate_grad_batches == 0
        if begins_step:  # the gradients of half an accumulation are in no checkpoint
            self.together.stop_if_asked()
        self._guard.check(batch)
        own = any(is_overridden(hook, self._module) for hook in ("optimizer_zero_grad", "on_before_zero_grad"))  # may keep or read them
        self._zero_grad_is_next = self._module.automatic_optimization and begins_step and not own

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Lightning enters this for all but the last batch of an accumulation."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def _after_backward(self) -> None:
        if self._stages is None and not self._accumulating:
            assert self._gradients is not None
            self._gradients.reduce_in_place()

    # ---- precision and clipping ------------------------------------------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> Precision:
        if self._precision_plugin is None:
            return self._clipping(Precision())
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        # None must stay None, or Lightning takes it for the user's choice and ignores Trainer(precision=...).
        self._precision_plugin = None if plugin is None else self._clipping(plugin)

    def _clipping(self, plugin: Precision) -> Precision:
        return with_global_clipping(plugin, clip_norm=self._clip_norm, clip_value=self._clip_value, after_backward=self._after_backward)

    def gradient_norm(self, optimizer: Optimizer | None = None, norm_type: float = 2.0) -> Float[Tensor, ""]:
        """The norm of the gradients that the optimizer (else all of them) is about to use, over the whole model; collective."""
        assert self._gradients is not None
        of = None if optimizer is None else parameters_of(optimizer)
        return gradient_norm(self._gradients.counted_once(of), self.mesh, norm_type)

    def counted_parameters(self) -> dict[str, nn.Parameter]:
        """Of each parameter the part, by global name, that no other rank counts: over all ranks each element once."""
        assert self._gradients is not None
        return {name: parameter for name, parameter in self._gradients.held_first().items() if is_counted(parameter, self.mesh)}

    def _clip_norm(self, optimizer: Optimizer, max_norm: float) -> None:
        self.last_grad_norm = self.gradient_norm(optimizer)
        scale_to_norm(gradients_of(optimizer), self.last_grad_norm, max_norm)

    def _clip_value(self, optimizer: Optimizer, limit: float) -> None:
        clip_values(gradients_of(optimizer), limit)

    # ---- reductions ------------------------------------------------------------------------------------------------------

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Without a group: over dp, since ranks of one replica hold the same numbers; means over cp too, where that may not be so."""
        if group is None:
            group = self.mesh.dp_cp_group if reduce_op in ("mean", "avg") else self.mesh.dp_group
        return super().reduce(tensor, group, reduce_op)

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Over the world."""
        votes = super().reduce(torch.tensor(int(decision), device=self.root_device), dist.group.WORLD, "sum")
        return bool(votes == self.world_size) if all else bool(votes)

    @override
    def barrier(self, name: str | None = None) -> None:
        if not self.together.is_lost:
            super().barrier(name)

    @override
    def teardown(self) -> None:
        try:
            self.saver.close(after_exception=self.together.was_interrupted)
            super().teardown()
        finally:
            self.faults.close()
        assert isinstance(self._launcher, RankLauncher)
        self.together.after(self._launcher)
