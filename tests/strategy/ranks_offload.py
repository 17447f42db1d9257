"""Which of a stage's parameters FSDP keeps on the CPU."""

from ranks_fit import Case, trainer_for
from ranks_precision import CONFIG
from scenario import quiet
from torch.distributed.fsdp import FSDPModule

from lightning_3d.module import LlamaModule


def offloaded(case: Case) -> tuple[int, int]:
    """How many FSDP units there are, and how many of them offload."""
    quiet()
    trainer, module = trainer_for(case), LlamaModule(CONFIG)
    trainer.fit(module, [])
    units = [unit._get_fsdp_state()._fsdp_param_group for unit in module.modules() if isinstance(unit, FSDPModule)]
    return len(units), sum(group.offload_policy.pin_memory is False for group in units if hasattr(group.offload_policy, "pin_memory"))
