"""What is trained on from which step: a blend of sets, and later ones that replace it (a shorter run on better data, longer sequences).

A stage's stream begins at its first sample, however many samples came before; where that was is kept in the checkpoint, since
the size of a global batch may have changed since. A set that a stage shares with earlier ones goes on where they left it, as long as its
samples are as long; samples of another length are other samples, in another order.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_3d.data.blend import Blend
from lightning_3d.data.order import GOLDEN
from lightning_3d.data.stream import Samples, Stream
from lightning_3d.errors import ConfigError

OpenSet = Callable[[str, int], Samples]


@dataclass(frozen=True)
class DataStage:
    """Data that takes over at a step.

    Args:
        start_training_step: the first step on it, counted from 1.
        dataset_folder: Nanoset, or several.
        dataset_weights: share of each set in the samples; null: by their sizes.
        sequence_length: tokens a sample; null: as before.
        max_epochs: refuse to read a set more often than this; one number for all sets, or one (or null) for each.
    """

    start_training_step: int
    dataset_folder: str | list[str]
    dataset_weights: list[float] | None = None
    sequence_length: int | None = None
    max_epochs: float | list[float | None] | None = None


class Stage:
    """A stage with its sets open.

    Raises:
        ConfigError: a folder cannot be read or is named twice, the weights are of the wrong count or cannot be followed.
    """

    def __init__(self, config: DataStage, sequence_length: int, open_set: OpenSet, key: str) -> None:
        self.start_step = config.start_training_step
        self.sequence_length = sequence_length
        self.key = key
        self.folders = [config.dataset_folder] if isinstance(config.dataset_folder, str) else list(config.dataset_folder)
        if not self.folders or len(set(self.folders)) < len(self.folders):
            raise ConfigError(f"{key}dataset_folder={self.folders}: name at least one folder, and each only once")
        self.sets = [self._open(open_set, folder) for folder in self.folders]
        weights = [members.num_tokens for members in self.sets] if config.dataset_weights is None else config.dataset_weights
        limits = config.max_epochs if isinstance(config.max_epochs, list) else [config.max_epochs] * len(self.sets)
        for name, values in (("dataset_weights", weights), ("max_epochs", limits)):
            if len(values) != len(self.sets):
                raise ConfigError(f"{key}{name} has {len(values)} values for {len(self.sets)} folders: give one for each")
        self.max_epochs = limits
        try:
            self.blend = Blend(weights)
        except ConfigError as error:
            raise ConfigError(f"{key}{error}") from None
        self._description: dict[str, Any] | None = None

    def _open(self, open_set: OpenSet, folder: str) -> Samples:
        try:
            return open_set(folder, self.sequence_length)
        except ConfigError as error:
            raise ConfigError(f"{self.key}dataset_folder: {error}") from None

    def __len__(self) -> int:
        """Samples in all sets."""
        return sum(map(len, self.sets))

    def describe(self) -> dict[str, Any]:
        """What decides which sample stands at a position, wherever the folders lie."""
        if self._description is None:  # reads the ends of every file
            shares = [f"{quota}/{self.blend.period}" for quota in self.blend.quotas]
            fingerprints = [members.fingerprint() for members in self.sets]
            self._description = {"sequence_length": self.sequence_length, "dataset_weights": shares, "dataset_folder": fingerprints}
        return self._description


class Stages:
    """The stages of a run in their order; `begins` are the positions in the run, in samples, at which they begin.

    Args:
        configs: the first starts at step 1.
        sequence_length: of the first.
        open_set: folder and sequence length -> the set.

    Raises:
        ConfigError: a stage cannot be opened, or does not start after the one before.
    """

    def __init__(self, configs: Sequence[DataStage], sequence_length: int, open_set: OpenSet, seed: int) -> None:
        self.stages: list[Stage] = []
        for number, config in enumerate(configs):
            key = f"data.data_stages[{number - 1}]." if number else "data."
            if number and config.start_training_step <= self.stages[-1].start_step:
                before = self.stages[-1].start_step
                raise ConfigError(
                    f"{key}start_training_step={config.start_training_step} is not after {before}, where the stage before starts"
                )
            sequence_length = sequence_length if config.sequence_length is None else config.sequence_length
            if sequence_length < 1:
                raise ConfigError(f"{key}sequence_length is {sequence_length}: give a whole number of at least 1")
            self.stages.append(Stage(config, sequence_length, open_set, key))
        folders = dict.fromkeys(folder for stage in self.stages for folder in stage.folders)
        self.seeds = {folder: seed + number * GOLDEN for number, folder in enumerate(folders)}
        self.names = dict(zip(folders, set_names(list(folders)), strict=True))

    def streams(self, begins: list[int]) -> list[Stream]:
        """The stream of each stage."""
        done: Counter[tuple[str, int]] = Counter()
        streams = []
        for number, stage in enumerate(self.stages):
            keys = [(folder, stage.sequence_length) for folder in stage.folders]
            streams.append(Stream(stage.sets, stage.blend, [self.seeds[folder] for folder in stage.folders], [done[key] for key in keys]))
            if number + 1 < len(begins):
                done.update(dict(zip(keys, stage.blend.counts(begins[number + 1] - begins[number]), strict=True)))
        return streams

    def consumed_tokens(self, begins: list[int], consumed: int) -> dict[str, int]:
        """Tokens of each set among the first `consumed` samples of the run, by the set's name."""
        tokens: Counter[str] = Counter()
        for stage, begin, end in zip(self.stages, begins, [*begins[1:], consumed], strict=True):
            counts = stage.blend.counts(max(0, min(end, consumed) - begin))
            tokens.update({self.names[f]: n * stage.sequence_length for f, n in zip(stage.folders, counts, strict=True)})
        return dict(tokens)

    def check_epochs(self, begins: list[int], consumed: int) -> None:
        """Refuse a run of `consumed` samples in which a set is read too often.

        Raises:
            ConfigError: it would exceed its max_epochs.
        """
        streams = self.streams(begins)
        for stage, stream, begin, end in zip(self.stages, streams, begins, [*begins[1:], consumed], strict=True):
            counts = stage.blend.counts(max(0, min(end, consumed) - begin))
            for folder, members, limit, count, first in zip(stage.folders, stage.sets, stage.max_epochs, counts, stream.first, strict=True):
                if limit is not None and (epochs := (first + count) / len(members)) > limit:
                    raise ConfigError(
                        f"{stage.key}max_epochs={limit:g}: this run would read {folder} {epochs:.2f} times: train for fewer steps, give it "
                        "less weight, or raise max_epochs"
                    )


def set_names(folders: list[str]) -> list[str]:
    """Short names for logs: the last part of each path that is not "train", or the whole path where two have the same."""
    parts = [[part for part in Path(folder).parts if part not in ("/", "train")] or [folder] for folder in folders]
    last = Counter(names[-1] for names in parts)
    return [names[-1] if last[names[-1]] == 1 else "/".join(names) for names in parts]
