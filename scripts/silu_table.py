"""The tables of csrc/ops/silu_table.h: what measurements say of the FP8 prefill MLP's tiles and ways, and their text.

Nothing here measures; `python -m deep_kernels tune silu_fold` does. Tiles have the words of DEEP_KERNELS_SILU_TILE:
tokens, and behind an x the SMs that share one.

Tiles. The library takes the tile whose rounds over the card, times the time of one, are least. For these times

    time of a call = overhead of the model + rounds * time of the tile's round at the model

is fitted to each model alone by least absolute relative errors, which a few shapes with other bounds do not move, and a
tile's time over that of the last tile is the geometric mean over the models. Where the tile by this rule takes more
than MAX_RULE_LOSS over the fastest one, the row of that I and those tokens names the fastest; it holds for a card of as
many SMs.

Ways. The two launches are taken where the fold takes longer. All comparisons are medians over the rounds of a rotation
of ratios within a round. A row's spread is what one variant differs from itself, measured as two, or the standard error
of that, whichever is larger; what is below SPREADS times the spread, or below MIN_GAIN, is no difference, and then the
fold is taken, which needs no memory between its launches. Neighbouring rows that say the same become one band.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import tuning
from tuning import STRING, Paired

MIN_GAIN = 0.01
MAX_RULE_LOSS = 0.03
SPREADS = 3
BACKENDS = ("sm89", "sm90")
_NUM_REWEIGHTINGS = 60
_EXACT = 1e-6  # a relative error that counts as none
TWO_LAUNCHES, AGAIN = "two_launches", "again"


@dataclass(frozen=True)
class TileRow:
    """As struct TileRow of csrc/ops/silu_rows.h."""

    backend: str
    tile: str
    time: int
    gpu: str
    date: str
    reason: str

    @property
    def key(self) -> tuple[int, int, int]:
        return _backend_order(self.backend), *_tile_order(self.tile)


@dataclass(frozen=True)
class FoldRow:
    """As struct FoldRow of csrc/ops/silu_rows.h."""

    backend: str
    num_columns: int
    k: int
    max_tokens: int
    fused: bool
    tile: str  # empty: by rounds
    num_sms: int
    gpu: str
    date: str
    gain: float
    reason: str

    @property
    def key(self) -> tuple[int, int, int]:
        return _backend_order(self.backend), self.num_columns, self.max_tokens


@dataclass(frozen=True)
class Table:
    tiles: Sequence[TileRow]
    folds: Sequence[FoldRow]


@dataclass(frozen=True)
class Measured:
    """One shape: rounds by tile, and microseconds by tile, TWO_LAUNCHES, and AGAIN, which is `again` once more."""

    backend: str
    k: int
    num_columns: int
    num_tokens: int
    rounds: Mapping[str, int]
    again: str
    times_us: Mapping[str, Sequence[float]]

    def median_us(self, name: str) -> float:
        return statistics.median(self.times_us[name])

    def log_ratio(self, first: str, second: str) -> float:
        """Above 0: the second takes longer."""
        return Paired(self.times_us[first], self.times_us[second]).log_ratio()

    def spread(self) -> float:
        same = Paired(self.times_us[self.again], self.times_us[AGAIN])
        return max(abs(same.log_ratio()), math.sqrt(same.variance()))

    def differs(self, log_ratio: float, least: float) -> bool:
        return abs(log_ratio) > max(math.log1p(least), SPREADS * self.spread())


# ------------------------------------------------------------------------------------------ tiles


def tile_sizes(word: str) -> tuple[int, int]:
    """Tokens and SMs of a tile."""
    tokens, _, sms = word.partition("x")
    return int(tokens), int(sms or 1)


def _tile_order(word: str) -> tuple[int, int]:
    tokens, sms = tile_sizes(word)
    return sms, tokens


def tile_by_rounds(rounds: Mapping[str, int], times: Mapping[str, int]) -> str:
    """As the library: the least time, of equals the last."""
    return min(reversed(list(rounds)), key=lambda tile: rounds[tile] * times[tile])


@dataclass(frozen=True)
class Fit:
    """Of one model, microseconds."""

    k: int
    overhead: float
    rounds: Mapping[str, float]  # by tile
    errors: Sequence[float]  # of the fitted times, relative


def fit(rows: Sequence[Measured]) -> Fit:
    """Overhead and rounds of one model."""
    tiles = list(rows[0].rounds)
    times = [(row.median_us(tile), row.rounds[tile], i) for row in rows for i, tile in enumerate(tiles)]
    terms = torch.zeros(len(times), 1 + len(tiles), dtype=torch.float64)
    for line, (time, rounds, tile) in zip(terms, times, strict=True):
        line[0], line[1 + tile] = 1 / time, rounds / time
    overhead, *found = _least_absolute(terms).tolist()
    if min(found) <= 0:
        raise RuntimeError(f"tune: no times of rounds fit those of {rows[0].backend} at K {rows[0].k}")
    errors = terms @ torch.tensor([overhead, *found], dtype=torch.float64) - 1
    return Fit(rows[0].k, overhead, dict(zip(tiles, found, strict=True)), errors.tolist())


def _least_absolute(terms: torch.Tensor) -> torch.Tensor:
    """The solution of terms @ solution = 1 with the least sum of absolute errors: squares, weighted again and again."""
    weights = torch.ones(len(terms), 1, dtype=torch.float64)
    for _ in range(_NUM_REWEIGHTINGS):
        solution = torch.linalg.lstsq(terms * weights, weights, driver="gelsd").solution
        weights = (terms @ solution - 1).abs().clamp(min=_EXACT).rsqrt()
    return solution.flatten()


def round_times(fits: Sequence[Fit]) -> dict[str, int]:
    """By tile, 1000 for the last of the table's order."""
    last = max(fits[0].rounds, key=_tile_order)
    ratios = {tile: [math.log(one.rounds[tile] / one.rounds[last]) for one in fits] for tile in fits[0].rounds}
    return {tile: max(round(1000 * math.exp(statistics.fmean(logs))), 1) for tile, logs in ratios.items()}


def rule_loss(row: Measured, times: Mapping[str, int]) -> tuple[str, float]:
    """The fastest tile, and the logarithm of what the one by rounds takes over it."""
    best = min(row.rounds, key=row.median_us)
    return best, row.log_ratio(best, tile_by_rounds(row.rounds, times))


# ------------------------------------------------------------------------------------------ decisions


@dataclass(frozen=True)
class _Decision:
    row: Measured
    fused: bool
    tile: str  # empty: by rounds
    rule_loss: float
    excess: float  # logarithm of the two launches' time over the fold's

    @property
    def answer(self) -> tuple[bool, str]:
        return self.fused, self.tile

    def gain(self) -> float:
        return math.expm1(abs(self.excess)) if self.row.differs(self.excess, MIN_GAIN) else 0.0


def _decide(row: Measured, times: Mapping[str, int]) -> _Decision:
    best, loss = rule_loss(row, times)
    own = best if loss > 0 and row.differs(loss, MAX_RULE_LOSS) else ""
    excess = row.log_ratio(own or tile_by_rounds(row.rounds, times), TWO_LAUNCHES)
    fused = excess > 0 or not row.differs(excess, MIN_GAIN)
    return _Decision(row, fused, own, loss, excess)


def _band(decisions: Sequence[_Decision], num_sms: int, gpu: str, date: str) -> FoldRow:
    row, (fused, tile) = decisions[-1].row, decisions[0].answer
    tokens = ", ".join(str(one.row.num_tokens) for one in decisions)
    low, high = (math.expm1(pick(one.excess for one in decisions)) for pick in (min, max))
    loss = math.expm1(max(0.0, *(one.rule_loss for one in decisions)))
    spread = math.expm1(max(one.row.spread() for one in decisions))
    of_tile = "up to {:.1%} slower than the fastest" if not tile else "up to {:.1%} slower than this"
    reason = (
        f"two launches over fold at {tokens} tokens: {low:+.1%} to {high:+.1%}, spread {spread:.2%}; "
        f"the tile by rounds is {of_tile.format(loss)}"
    )
    gain = round(min(one.gain() for one in decisions), 4)
    return FoldRow(row.backend, row.num_columns, row.k, row.num_tokens, fused, tile, num_sms, gpu, date, gain, reason)


def decide(measured: Iterable[Measured], num_sms: int, gpu: str, date: str) -> Table:
    """What the measurements of one backend ask for."""
    models: dict[int, list[Measured]] = {}
    for row in sorted(measured, key=lambda row: (row.num_columns, row.num_tokens)):
        models.setdefault(row.num_columns, []).append(row)
    fits = [fit(rows) for rows in models.values()]
    times = round_times(fits)
    errors = [abs(error) for one in fits for error in one.errors]
    reasons = {
        tile: ", ".join(f"{one.rounds[tile]:.1f} us a round at K {one.k}" for one in fits)
        + f"; the fit's times are off by {statistics.median(errors):.1%} in the median, {max(errors):.1%} at most"
        for tile in times
    }
    backend = next(iter(models.values()))[0].backend
    tiles = [TileRow(backend, tile, time, gpu, date, reasons[tile]) for tile, time in times.items()]
    folds = [
        _band(list(band), num_sms, gpu, date)
        for rows in models.values()
        for _, band in itertools.groupby((_decide(row, times) for row in rows), lambda one: one.answer)
    ]
    return Table(tiles, folds)


def merged(table: Table, found: Table) -> Table:
    """The table, all rows of the backends that were measured anew replaced, in order."""
    anew = {row.backend for row in (*found.tiles, *found.folds)}
    tiles = {row.key: row for row in (*table.tiles, *found.tiles) if row.backend not in anew or row in found.tiles}
    folds = {row.key: row for row in (*table.folds, *found.folds) if row.backend not in anew or row in found.folds}
    return Table([tiles[key] for key in sorted(tiles)], [folds[key] for key in sorted(folds)])


def _backend_order(backend: str) -> int:
    if backend not in BACKENDS:
        raise ValueError(f"the table has no place for {backend}")
    return BACKENDS.index(backend)


# ------------------------------------------------------------------------------------------ text

_HEAD = """\
// Of the FP8 prefill MLP: what a tile's round over the card takes, and where the fold or the two
// launches are faster. Written by `python -m deep_kernels tune silu_fold` on a card, not by hand.
#pragma once

#include "ops/silu_rows.h"

namespace deep_kernels {

// clang-format off
inline constexpr TileRow kTileRows[] = {
"""
_BETWEEN = """\
};
inline constexpr FoldRow kFoldRows[] = {
"""
_BACKEND = rf"Backend::({'|'.join(BACKENDS)})"
_TILE = r"\{(\d+), (\d+)\}"
_TILE_ROW = re.compile(rf"    \{{{_BACKEND}, {_TILE}, (\d+), {STRING}, {STRING},\n     {STRING}\}},\n")
_FOLD_ROW = re.compile(
    rf"    \{{{_BACKEND}, (\d+), (\d+), (\d+), (true|false), (?:kByRounds|{_TILE}), (\d+), {STRING}, {STRING}, "
    rf"([\d.]+),\n     {STRING}\}},\n"
)


def render(table: Table) -> str:
    """The text of csrc/ops/silu_table.h."""
    tiles, folds = "".join(map(_render_tile_row, table.tiles)), "".join(map(_render_fold_row, table.folds))
    return _HEAD + tiles + _BETWEEN + folds + tuning.TABLE_TAIL


def _braced(tile: str) -> str:
    return "{{{}, {}}}".format(*tile_sizes(tile)) if tile else "kByRounds"


def _word(tokens: str | None, sms: str | None) -> str:
    if tokens is None:
        return ""
    return tokens if sms == "1" else f"{tokens}x{sms}"


def _render_tile_row(row: TileRow) -> str:
    tuning.require_plain(row, row.gpu, row.date, row.reason)
    return (
        f'    {{Backend::{row.backend}, {_braced(row.tile)}, {row.time}, "{row.gpu}", "{row.date}",\n'
        f'     "{row.reason}"}},\n'
    )


def _render_fold_row(row: FoldRow) -> str:
    tuning.require_plain(row, row.gpu, row.date, row.reason)
    return (
        f"    {{Backend::{row.backend}, {row.num_columns}, {row.k}, {row.max_tokens}, {str(row.fused).lower()}, "
        f'{_braced(row.tile)}, {row.num_sms}, "{row.gpu}", "{row.date}", {row.gain:.4f},\n     "{row.reason}"}},\n'
    )


def parse(text: str) -> Table:
    """The rows of a text that `render` made of a table in order; any other is refused."""
    tiles = [
        TileRow(backend, _word(tokens, sms), int(time), gpu, date, reason)
        for backend, tokens, sms, time, gpu, date, reason in (one.groups() for one in _TILE_ROW.finditer(text))
    ]
    folds = []
    for one in _FOLD_ROW.finditer(text):
        backend, columns, k, most, fused, tokens, sms, num_sms, gpu, date, gain, reason = one.groups()
        sizes = int(columns), int(k), int(most)
        tile = _word(tokens, sms)
        folds.append(FoldRow(backend, *sizes, fused == "true", tile, int(num_sms), gpu, date, float(gain), reason))
    table = Table(tiles, folds)
    tuning.require_written(text, render(merged(table, Table([], []))))
    return table
