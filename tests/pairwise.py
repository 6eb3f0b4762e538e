"""A small greedy generator of pairwise covering tests. Deterministic."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations, product

Row = dict[str, Hashable]


def _pairs_of(names: Sequence[str], row: Mapping[str, Hashable]) -> set[tuple[str, Hashable, str, Hashable]]:
    chosen = [name for name in names if name in row]
    return {(a, row[a], b, row[b]) for a, b in combinations(chosen, 2)}


def pairwise(factors: Mapping[str, Sequence[Hashable]]) -> list[Row]:
    """Rows such that any two values of any two factors meet in at least one of them.

    Each row starts from the first pair that is still missing and takes for each further factor, largest first,
    the value that adds most missing pairs; of equal values the one used least so far, so that no value is rare.
    """
    names = sorted(factors, key=lambda name: (-len(factors[name]), name))
    missing = {
        (a, x, b, y): None  # a dict, because it keeps its order
        for a, b in combinations(names, 2)
        for x, y in product(factors[a], factors[b])
    }
    used = {(name, value): 0 for name in names for value in factors[name]}
    rows: list[Row] = []
    while missing:
        a, x, b, y = next(iter(missing))
        row: Row = {a: x, b: y}
        for name in names:
            if name in row:
                continue

            def gain(value: Hashable, name: str = name, row: Row = row) -> tuple[int, int]:
                met = _pairs_of(names, {**row, name: value})
                return sum(pair in missing for pair in met), -used[name, value]

            row[name] = max(factors[name], key=gain)
        for pair in _pairs_of(names, row):
            missing.pop(pair, None)
        for name in names:
            used[name, row[name]] += 1
        rows.append({name: row[name] for name in factors})
    return rows
