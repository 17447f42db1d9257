"""How many parameters a model has, wherever they live."""

from lightning.pytorch import LightningModule, Trainer


def parameter_counts(trainer: Trainer, pl_module: LightningModule) -> tuple[int, int]:
    """Parameters (of the whole model, held by this rank); a strategy that splits the model knows both, others hold all of it."""
    counts = getattr(trainer.strategy, "parameter_counts", None)
    if counts is not None:
        total, local = counts()
        return int(total), int(local)
    whole = sum(p.numel() for p in pl_module.parameters())
    return whole, whole
