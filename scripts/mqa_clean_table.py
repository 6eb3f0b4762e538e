"""The table of csrc/ops/mqa_clean_table.h: which placement of the -inf fill measurements ask for, and its text.

Nothing here measures; `python -m deep_kernels tune mqa_logits` does. A row of the table belongs to a backend, a format
and a way of scheduling, and rests on several shapes.

The rule: a shape's ratio is the median, over the rounds of a rotation, of the deferred placement's time over that of
the concurrent one in the same round; its uncertainty is twice the standard error of that median. A row's ratio is the
geometric mean of its shapes'. What differs from 1 by less than its uncertainty, or by less than MIN_GAIN, is no
difference, and then the fill is concurrent, which needs no barrier of all warps.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import tuning
from tuning import STRING

MIN_GAIN = 0.005
PLACEMENTS = ("concurrent", "deferred")
BACKENDS = ("sm89", "sm90")
FORMATS = ("fp8", "mxfp8", "mxfp4")
SCHEDULES = ("derived", "metadata")

Key = tuple[str, str, str]  # backend, format, schedule


@dataclass(frozen=True)
class CleanRow:
    """As struct CleanRow of csrc/ops/mqa_clean.h."""

    backend: str
    format: str
    schedule: str
    placement: str
    gpu: str
    date: str
    gain: float
    reason: str

    @property
    def key(self) -> Key:
        return self.backend, self.format, self.schedule


@dataclass(frozen=True)
class Comparison:
    """Microseconds of both placements at one shape; equal positions are of one round."""

    label: str
    concurrent: Sequence[float]
    deferred: Sequence[float]

    @property
    def times(self) -> tuning.Paired:
        return tuning.Paired(self.concurrent, self.deferred)

    def log_ratio(self) -> float:
        """Above 0: the deferred placement takes longer."""
        return self.times.log_ratio()


def decide(key: Key, comparisons: Sequence[Comparison], gpu: str, date: str) -> CleanRow:
    """The row that the comparisons of all shapes ask for."""
    log_ratio = statistics.fmean(one.log_ratio() for one in comparisons)
    error = 2 * math.sqrt(sum(one.times.variance() for one in comparisons)) / len(comparisons)
    placement, other = PLACEMENTS if log_ratio > 0 else reversed(PLACEMENTS)
    excess = math.expm1(abs(log_ratio))
    shapes = ", ".join(f"{one.label} {math.expm1(one.log_ratio()):+.1%}" for one in comparisons)
    reason = f"{other} takes {excess:.2%} +- {error:.2%} longer; deferred over concurrent: {shapes}"
    if excess < MIN_GAIN or abs(log_ratio) < error:
        return CleanRow(*key, "concurrent", gpu, date, 0.0, f"no difference: {reason}")
    return CleanRow(*key, placement, gpu, date, round(excess, 4), reason)


def merged(rows: Iterable[CleanRow], measured: Iterable[CleanRow]) -> list[CleanRow]:
    """The rows, those that were measured anew replaced, in the order of the table."""
    by_key = {row.key: row for row in (*rows, *measured)}
    order = [(backend, format, schedule) for backend in BACKENDS for format in FORMATS for schedule in SCHEDULES]
    if unknown := by_key.keys() - set(order):
        raise ValueError(f"the table has no place for {' / '.join(min(unknown))}")
    return [by_key[key] for key in order if key in by_key]


# ------------------------------------------------------------------------------------------ text

_HEAD = """\
// Where the -inf fill of MQA logits happens, a row per backend, format and way of scheduling.
// Written by `python -m deep_kernels tune mqa_logits` on a card, not by hand.
#pragma once

#include "ops/mqa_clean.h"

namespace deep_kernels {

// clang-format off
inline constexpr CleanRow kCleanTable[] = {
"""
_ROW = re.compile(
    rf"    \{{Backend::({'|'.join(BACKENDS)}), Format::({'|'.join(FORMATS)}), Schedule::({'|'.join(SCHEDULES)}), "
    rf"Clean::({'|'.join(PLACEMENTS)}), {STRING}, {STRING}, ([\d.]+),\n     {STRING}\}},\n"
)


def render(rows: Iterable[CleanRow]) -> str:
    """The text of csrc/ops/mqa_clean_table.h."""
    return _HEAD + "".join(map(_render_row, rows)) + tuning.TABLE_TAIL


def _render_row(row: CleanRow) -> str:
    tuning.require_plain(row, row.gpu, row.date, row.reason)
    return (
        f"    {{Backend::{row.backend}, Format::{row.format}, Schedule::{row.schedule}, Clean::{row.placement}, "
        f'"{row.gpu}", "{row.date}", {row.gain:.4f},\n     "{row.reason}"}},\n'
    )


def parse(text: str) -> list[CleanRow]:
    """The rows of a text that `render` made of rows in order; any other is refused."""
    rows = [
        CleanRow(backend, format, schedule, placement, gpu, date, float(gain), reason)
        for backend, format, schedule, placement, gpu, date, gain, reason in _ROW.findall(text)
    ]
    tuning.require_written(text, render(merged([], rows)))
    return rows
