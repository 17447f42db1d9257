"""What each rank of a pipeline computes in which order, and when: lists of actions, and a simulation of them.

    F   forward of one microbatch through one stage
    B   backward of it
    I   the half of the backward that the stage before waits for: gradients of the stage's inputs
    W   the other half: gradients of its weights, which can fill a bubble

An action begins when its rank is free and what it needs is there: F the output of the stage before, B and I their own forward and the
gradient from the stage after, W its own I. Nothing else orders ranks, so a list that the simulation can run to its end cannot deadlock.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, get_args

from lightning_3d.errors import ConfigError

Kind = Literal["F", "B", "I", "W"]
KINDS: tuple[str, ...] = get_args(Kind)


class Action(NamedTuple):
    """One thing that a rank computes; as text "3F0": stage, kind, microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Timed(NamedTuple):
    """An action of a rank (pp coord) in a simulation, from ``start`` to ``end``, in the unit of the durations."""

    rank: int
    action: Action
    start: float
    end: float


Actions = Sequence[Sequence[Action]]  # by rank (pp coord), each in its order


def simulate(actions: Actions, duration: Callable[[Action], float], transfer: float = 0.0) -> list[Timed]:
    """When each action runs, rank by rank in the order of the lists.

    Args:
        actions: what each rank computes, in its order.
        duration: of an action, in any unit.
        transfer: what one message from rank to rank takes, in the same unit; ranks compute meanwhile.

    Raises:
        ConfigError: it does not come to an end; the message names what each rank is stuck at and what it waits for.
    """
    homes = {action.stage: rank for rank, row in enumerate(actions) for action in row}
    last = max(homes, default=0)
    ends: dict[Action, float] = {}
    free = [0.0] * len(actions)
    timeline: list[list[Timed]] = [[] for _ in actions]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(actions):
            while len(timeline[rank]) < len(row):
                action = row[len(timeline[rank])]
                needs = [_found(need, ends) for need in _needs(action, last)]
                if None in needs:
                    break
                ready = [ends[need] + transfer * (homes[need.stage] != rank) for need in needs if need is not None]
                start = max([free[rank], *ready])
                ends[action] = free[rank] = start + duration(action)
                timeline[rank].append(Timed(rank, action, start, free[rank]))
                moved = True
    stuck = [
        f"rank {rank} at {row[len(timeline[rank])]}, which needs {_missing(row[len(timeline[rank])], last, ends)}"
        for rank, row in enumerate(actions)
        if len(timeline[rank]) < len(row)
    ]
    if stuck:
        raise ConfigError("it waits for ever: " + "; ".join(stuck))
    return [timed for row in timeline for timed in row]


def makespan(timeline: Sequence[Timed]) -> float:
    """When the last action ends."""
    return max((timed.end for timed in timeline), default=0.0)


def most_held(row: Sequence[Action]) -> int:
    """The most forwards of a rank whose activations are kept at one time, of all its stages; the first half of a backward frees none."""
    held = [0]
    for action in row:
        held.append(held[-1] + {"F": 1, "I": 0}.get(action.kind, -1))
    return max(held)


def _needs(action: Action, last: int) -> list[Action]:
    """What must have ended; of a backward it may be the half that the stage before waits for."""
    stage, kind, microbatch = action
    if kind == "F":
        return [Action(stage - 1, "F", microbatch)] if stage else []
    if kind == "W":
        return [Action(stage, "I", microbatch)]
    return [Action(stage, "F", microbatch)] + ([Action(stage + 1, "B", microbatch)] if stage < last else [])


def _found(need: Action, ends: dict[Action, float]) -> Action | None:
    either = need._replace(kind="I") if need.kind == "B" else need
    return need if need in ends else either if either in ends else None


def _missing(action: Action, last: int, ends: dict[Action, float]) -> str:
    return " and ".join(str(need) for need in _needs(action, last) if _found(need, ends) is None)


def forward_order(coords: Sequence[int], microbatches: int) -> list[Action]:
    """Forwards of all stages and microbatches, in an order that all ranks can follow: each step every rank takes its deepest ready stage.

    Args:
        coords: the rank (pp coord) of each stage.
        microbatches: their number.
    """
    done = [0] * len(coords)  # microbatches behind each stage
    order: list[Action] = []
    while done[-1] < microbatches:
        before = list(done)
        busy: set[int] = set()
        for stage in reversed(range(len(coords))):
            if coords[stage] not in busy and before[stage] < (before[stage - 1] if stage else microbatches):
                busy.add(coords[stage])
                order.append(Action(stage, "F", before[stage]))
                done[stage] += 1
    return order


def check_actions(actions: Actions, num_stages: int, microbatches: int) -> None:
    """Whether the lists compute every microbatch once on every stage, and come to an end.

    Raises:
        ConfigError: an action that is missing, given twice or out of range, a stage on two ranks, or a deadlock.
    """
    homes: dict[int, int] = {}
    seen: set[Action] = set()
    for rank, row in enumerate(actions):
        for action in row:
            if not 0 <= action.stage < num_stages or not 0 <= action.microbatch < microbatches:
                raise ConfigError(f"{action} on rank {rank} is none of {num_stages} stages and {microbatches} microbatches (from 0)")
            if homes.setdefault(action.stage, rank) != rank:
                raise ConfigError(f"{action} is on rank {rank}, but stage {action.stage} is on rank {homes[action.stage]}")
            if action in seen:
                raise ConfigError(f"{action} is on rank {rank} twice")
            seen.add(action)
    for stage in range(num_stages):
        for microbatch in range(microbatches):
            kinds = "".join(sorted(kind for kind in KINDS if Action(stage, kind, microbatch) in seen))  # type: ignore[arg-type]
            if kinds not in ("BF", "FIW"):
                have = f"only {', '.join(f'{stage}{kind}{microbatch}' for kind in kinds)}" if kinds else "nothing"
                raise ConfigError(f"microbatch {microbatch} on stage {stage} has {have}: it needs F and B, or F, I and W")
    simulate(actions, lambda action: 1.0)
