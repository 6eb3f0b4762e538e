"""The table of csrc/ops/attention_table.h: which exp2 emulation measurements ask for, and its text.

Nothing here measures; `python -m deep_kernels tune attention` does. A measured row belongs to a backend, a dtype, a
head_dim, full or causal masks, a number of query heads per kv head, and a band of kv lengths; the library takes the
first row that fits, of the longest band that begins below its length.

The rule: an emulation's gain is the median, over the rounds of a rotation, of the time of "off" over its own in the
same round. The spread is what "off" differs from itself, measured as two, or the standard error of that, whichever is
larger. The fastest emulation is taken where its gain is past MIN_GAIN and past SPREADS times the spread, else off.
Neighbouring lengths with the same answer become one band; a row's reason has the curve of all emulations.
"""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import tuning
from tuning import STRING, Paired

MIN_GAIN = 0.01
SPREADS = 3
BACKENDS = ("cpu", "sm89", "sm90")
DTYPES = ("bfloat16", "float16")
HEAD_DIMS = (64, 128, 256)
OFF, AGAIN = "off", "again"

Words = tuple[int, int, int]  # freq, res, start_frg
NONE: Words = (0, 0, 0)


@dataclass(frozen=True)
class Ex2Row:
    """As struct Ex2Row of csrc/ops/attention_rows.h."""

    backend: str
    dtype: str  # empty: any
    head_dim: int  # 0: any
    causal: bool | None
    min_heads_per_kv: int
    min_num_kv: int
    ex2: Words
    gpu: str
    date: str
    gain: float
    reason: str

    @property
    def case(self) -> tuple[str, str, int, bool | None]:
        """What rows of a measurement share that replaces them."""
        return self.backend, self.dtype, self.head_dim, self.causal

    @property
    def place(self) -> tuple[int, ...]:
        """In the table: rows of any case behind those of one, larger least values before smaller ones."""
        return (
            _index(BACKENDS, self.backend),
            _index((*DTYPES, ""), self.dtype),
            _index((*HEAD_DIMS, 0), self.head_dim),
            _index((False, True, None), self.causal),
            -self.min_heads_per_kv,
            -self.min_num_kv,
        )


def _index(order: Sequence[object], value: object) -> int:
    if value not in order:
        raise ValueError(f"the table has no place for {value}")
    return order.index(value)


@dataclass(frozen=True)
class Measured:
    """One shape: (freq, res) and the share of each emulation, and microseconds by its name, OFF and AGAIN."""

    backend: str
    dtype: str
    head_dim: int
    causal: bool
    heads_per_kv: int
    num_kv: int
    emulations: Mapping[str, Sequence[int]]
    shares: Mapping[str, float]
    spilled: Sequence[str]  # emulations that were left out
    times_us: Mapping[str, Sequence[float]]

    def log_gain(self, name: str) -> float:
        """Above 0: off takes longer."""
        return Paired(self.times_us[name], self.times_us[OFF]).log_ratio()

    def spread(self) -> float:
        same = Paired(self.times_us[OFF], self.times_us[AGAIN])
        return max(abs(same.log_ratio()), math.sqrt(same.variance()))

    def counts(self, log_gain: float) -> bool:
        return abs(log_gain) > max(math.log1p(MIN_GAIN), SPREADS * self.spread())

    def best(self) -> str:
        """The fastest emulation, or OFF where none wins or was measured."""
        best = max(self.emulations, key=self.log_gain, default=OFF)
        return best if best != OFF and self.log_gain(best) > 0 and self.counts(self.log_gain(best)) else OFF

    def words(self) -> Words:
        return NONE if self.best() == OFF else (*_pair(self.emulations[self.best()]), 0)

    def gain(self) -> float:
        """What the next best of off and emulation costs more; 0 where that is no difference."""
        if self.best() != OFF:
            return math.expm1(self.log_gain(self.best()))
        losses = [-self.log_gain(name) for name in self.emulations]
        return math.expm1(min(losses)) if losses and min(losses) > 0 and self.counts(min(losses)) else 0.0


def _pair(words: Sequence[int]) -> tuple[int, int]:
    freq, res = words
    return freq, res


def _curve(rows: Sequence[Measured]) -> str:
    """Share, words and time over that of off, the mean over the rows."""
    shown = []
    for name, words in rows[0].emulations.items():
        excess = math.expm1(statistics.fmean(-row.log_gain(name) for row in rows))
        shown.append("{:.0%} ({}/{}) {:+.1%}".format(rows[0].shares[name], *words, excess))
    return ", ".join(shown) or "nothing"


def _reason(rows: Sequence[Measured]) -> str:
    best, tokens = rows[0].best(), ", ".join(str(row.num_kv) for row in rows)
    spread = math.expm1(max(row.spread() for row in rows))
    found = "no emulation wins" if best == OFF else f"{rows[0].shares[best]:.0%} of the exponentials emulated win"
    spilled = sorted({name for row in rows for name in row.spilled})
    left_out = f"; spills, not measured: {', '.join(spilled)}" if spilled else ""
    return f"{found} at {tokens} keys, spread {spread:.2%}; time by share (freq/res) over off: {_curve(rows)}{left_out}"


def _bands(rows: Sequence[Measured], is_least: bool, gpu: str, date: str) -> Iterable[Ex2Row]:
    """Of one number of heads per kv head, lengths in order. The first band, and the least number, hold for less too."""
    begin = 0
    for words, grouped in itertools.groupby(rows, Measured.words):
        band = list(grouped)
        one = band[0]
        least = 0 if is_least else one.heads_per_kv
        case = (one.backend, one.dtype, one.head_dim, one.causal, least)
        gain = round(min(row.gain() for row in band), 4)
        first = band[0].num_kv if begin else 0
        yield Ex2Row(*case, first, words, gpu, date, gain, _reason(band))
        begin += len(band)


def decide(measured: Iterable[Measured], gpu: str, date: str) -> list[Ex2Row]:
    """The rows that the measurements ask for, in the table's order."""
    ordered = sorted(measured, key=lambda row: (*_case(row), row.heads_per_kv, row.num_kv))
    found: list[Ex2Row] = []
    for _, of_case in itertools.groupby(ordered, _case):
        rows = list(of_case)
        for heads, of_heads in itertools.groupby(rows, lambda row: row.heads_per_kv):
            found += _bands(list(of_heads), heads == rows[0].heads_per_kv, gpu, date)
    return sorted(found, key=lambda row: row.place)


def _case(row: Measured) -> tuple[str, str, int, bool]:
    return row.backend, row.dtype, row.head_dim, row.causal


def merged(table: Iterable[Ex2Row], found: Sequence[Ex2Row]) -> list[Ex2Row]:
    """The table in order, all rows of the cases that were measured anew replaced."""
    anew = {row.case for row in found}
    rows = {row.place: row for row in (*(row for row in table if row.case not in anew), *found)}
    return [rows[place] for place in sorted(rows)]


# ------------------------------------------------------------------------------------------ text

_HEAD = """\
// Which exponentials flash attention emulates where a call does not say: the first row that fits.
// Written by `python -m deep_kernels tune attention` on a card, not by hand. "Off" is an answer.
#pragma once

#include "ops/attention_rows.h"

namespace deep_kernels {

// clang-format off
inline constexpr Ex2Row kEx2Table[] = {
"""
_ROW = re.compile(
    rf"    \{{Backend::({'|'.join(BACKENDS)}), (?:\{{\}}|DType::({'|'.join(DTYPES)})), (\d+), (\{{\}}|true|false), "
    rf"(\d+), (\d+), \{{(?:(\d+), (\d+), (\d+))?\}}, {STRING}, {STRING}, ([\d.]+),\n     {STRING}\}},\n"
)
_CAUSAL = {None: "{}", False: "false", True: "true"}


def render(rows: Iterable[Ex2Row]) -> str:
    """The text of csrc/ops/attention_table.h."""
    return _HEAD + "".join(map(_render_row, rows)) + tuning.TABLE_TAIL


def _render_row(row: Ex2Row) -> str:
    tuning.require_plain(row, row.gpu, row.date, row.reason)
    dtype = f"DType::{row.dtype}" if row.dtype else "{}"
    ex2 = ", ".join(map(str, row.ex2)) if row.ex2 != NONE else ""
    return (
        f"    {{Backend::{row.backend}, {dtype}, {row.head_dim}, {_CAUSAL[row.causal]}, {row.min_heads_per_kv}, "
        f'{row.min_num_kv}, {{{ex2}}}, "{row.gpu}", "{row.date}", {row.gain:.4f},\n     "{row.reason}"}},\n'
    )


def parse(text: str) -> list[Ex2Row]:
    """The rows of a text that `render` made of rows in order; any other is refused."""
    causal_of = {word: value for value, word in _CAUSAL.items()}
    rows = []
    for one in _ROW.finditer(text):
        backend, dtype, head_dim, causal, heads, num_kv, freq, res, start, gpu, date, gain, reason = one.groups()
        case = backend, dtype or "", int(head_dim), causal_of[causal]
        ex2 = NONE if freq is None else (int(freq), int(res), int(start))
        rows.append(Ex2Row(*case, int(heads), int(num_kv), ex2, gpu, date, float(gain), reason))
    tuning.require_written(text, render(merged(rows, [])))
    return rows
