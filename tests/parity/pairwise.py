"""A selection of option values in which every pair of values of two options occurs."""

from collections.abc import Callable, Iterator
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def pairs(case: Case) -> set[frozenset]:
    return {frozenset(pair) for pair in combinations(((key, repr(value)) for key, value in case.items()), 2)}


def all_cases(options: dict[str, list[Any]], allowed: Callable[[Case], bool]) -> Iterator[Case]:
    keys = list(options)
    return (case for values in product(*options.values()) if allowed(case := dict(zip(keys, values, strict=True))))


def pairwise(options: dict[str, list[Any]], allowed: Callable[[Case], bool]) -> list[Case]:
    """Greedy: the case with most uncovered pairs next, until every pair that an allowed case has is covered."""
    candidates = [(case, pairs(case)) for case in all_cases(options, allowed)]
    missing = set().union(*(found for _, found in candidates))
    chosen = []
    while missing:
        case, found = max(candidates, key=lambda item: len(item[1] & missing))
        chosen.append(case)
        missing -= found
    return chosen
