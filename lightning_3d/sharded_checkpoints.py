"""Lightning's hooks around checkpoints: what ``ThreeDStrategy`` is made of besides steps. Each delegates to ``checkpoint/``."""

from collections.abc import Mapping
from typing import Any

from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from torch.optim import Optimizer
from typing_extensions import override

from lightning_3d.checkpoint import Saver, load_trainer_state, put_random_states_back, remove, restore, restore_or_older
from lightning_3d.errors import ConfigError
from lightning_3d.interrupt import EndTogether
from lightning_3d.mesh import ParallelDims


class ShardedCheckpoints(ModelParallelStrategy):
    """A strategy whose ranks write and read their own parts; what is left to Lightning is the Trainer's state, which is small."""

    saver: Saver
    together: EndTogether
    resume_from_older: bool  # where the checkpoint to load is damaged

    @property
    def dims(self) -> ParallelDims:
        """Sizes of the axes."""
        raise NotImplementedError

    @property
    def _module(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        raise ConfigError(f"plugins: {type(io).__name__} has no effect on sharded checkpoints: leave it out")

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing: ``save_checkpoint`` writes the shards from the module itself."""
        return {}

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Nothing, for the same reason."""
        return {}

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: _PATH, storage_options: Any | None = None) -> None:
        if storage_options is not None:
            raise ConfigError("storage_options of save_checkpoint() have no effect on sharded checkpoints: leave them out")
        if self.together.all_arrived():
            optimizers = self.optimizers if "optimizer_states" in checkpoint else []  # not there: weights only
            self.saver.save(self.broadcast(str(filepath)), self._module, optimizers, checkpoint, layout=str(self.dims))
            state = self._module.trainer.state
            if (state.fn, state.status) != (TrainerFn.FITTING, TrainerStatus.RUNNING):  # no training to go on with
                self.saver.wait()

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        self.saver.wait_for_copy()
        load = restore_or_older if self.resume_from_older else restore
        path = load(self.broadcast(str(checkpoint_path)), self._module, self.optimizers, strict=self._module.strict_loading)
        state = load_trainer_state(path)
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            put_random_states_back(state, str(self.dims))
        return state

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: ``load_checkpoint`` has loaded it."""

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: ``load_checkpoint`` has loaded it."""

    @override
    def remove_checkpoint(self, filepath: _PATH) -> None:
        self.saver.wait()  # Lightning removes one as soon as the save of that which replaces it returns
        if self.is_global_zero:
            remove(filepath)
