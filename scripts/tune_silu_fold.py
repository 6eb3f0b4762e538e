#!/usr/bin/env python3
"""Measures the FP8 prefill MLP's tiles and its two launches, and writes csrc/ops/silu_table.h.

    python -m deep_kernels tune silu_fold
    python scripts/tune_silu_fold.py --save benchmarks/results/silu_table.json

For every backend that runs on the card, or the one that --arch names: every tile that a fold may have, the two
launches, and one tile once more, which says what a time differs from itself, take turns in one process
(scripts/timing.py), with the weights of the launch before. Before that, codes and scales must be those of the two
launches but for roundings. What is made of the times: scripts/silu_table.py. Rows of other backends stay as they are.
The extension has to be built again afterwards. The two launches choose their tile by the table that was built in.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import silu_table
import timing
import tuning
from bench_silu_fold import MODELS, Problem, Shape, make_problem
from silu_table import AGAIN, BACKENDS, TWO_LAUNCHES, Measured, Table
from tuning import Times

import deep_kernels as dk
from deep_kernels import _C
from deep_kernels import tune as command

OP = "fp8_silu_fold_prefill"
TABLE = Path(__file__).resolve().parent.parent / "csrc" / "ops" / "silu_table.h"
NUM_TOKENS = (16, 32, 64, 96, 128, 160, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192)

# The two launches round gate and up to bfloat16 before the activation, the fold does not: about 5% of the codes are
# neighbours, and a scale may be off by several such roundings.
MAX_UNLIKE = 0.1
MAX_SCALE_ERROR = 0.02

_VARIABLE = "DEEP_KERNELS_SILU_TILE"
_OTHER_VARIABLES = ("DEEP_KERNELS_SILU_ALGORITHM", "DEEP_KERNELS_SILU_STAGES")
_SHORT_TOKENS = 512  # up to here a launch takes microseconds, and a graph holds more of them

Pair = tuple[Tensor, Tensor]
Calls = dict[str, Callable[[], Pair]]


# ------------------------------------------------------------------------------------------ what is measured


def archs_of_card(wanted: str | None) -> dict[str, str]:
    """By backend, what calls are given as `arch`."""
    if wanted is not None:
        backend = wanted.partition(":")[0]
        if backend not in BACKENDS:
            raise ValueError(f"tune: --arch must begin with {' or '.join(BACKENDS)}, got {wanted}")
        if reason := dk.supported(OP, wanted):
            raise ValueError(f"tune: {reason}")
        return {backend: wanted}
    _, target = _C.arch_of_card(_C.device_facts(torch.cuda.current_device())[1])
    archs = {backend: f"{backend}:{target}" for backend in BACKENDS}
    return {backend: arch for backend, arch in archs.items() if dk.supported(OP, arch) is None}


def calls_of(problem: Problem, num_tokens: int, tiles: Sequence[str], again: str, arch: str | None) -> Calls:
    layer = problem.layers[0]
    rows = problem.codes[:num_tokens], problem.scale[:num_tokens]
    call = partial(dk.fp8_silu_fold_prefill, *rows, layer.gate_up_weight, layer.gate_up_scale, arch=arch)

    def with_tile(tile: str) -> Pair:
        with tuning.setting(_VARIABLE, tile):
            return call(fused=True)

    calls: Calls = {tile: partial(with_tile, tile) for tile in tiles}
    return calls | {AGAIN: partial(with_tile, again), TWO_LAUNCHES: partial(call, fused=False)}


def require_right(label: str, calls: Calls) -> float:
    """That all variants agree with the two launches; the largest share of codes that are not the same."""
    codes, scale = calls[TWO_LAUNCHES]()
    worst = 0.0
    for name, call in calls.items():
        found, found_scale = call()
        steps = (found.view(torch.uint8).short() - codes.view(torch.uint8).short()).abs()
        unlike = float((steps != 0).double().mean())
        error = float((found_scale / scale - 1).abs().max())
        if not (unlike <= MAX_UNLIKE and int(steps.max()) <= 1 and error <= MAX_SCALE_ERROR):
            raise RuntimeError(
                f"tune: {label}: {name} is not what the two launches give: {unlike:.1%} other codes, "
                f"up to {int(steps.max())} apart, scales off by up to {error:.1%}"
            )
        worst = max(worst, unlike)
    return worst


def measure_shape(
    backend: str, arch: str, shape: Shape, problem: Problem, num_sms: int, samples: int
) -> dict[str, Any]:
    model = MODELS[shape.model]
    choice = _C.silu_fold_choice(arch, shape.num_tokens, model.intermediate_size, num_sms)
    on_card = arch if problem.codes.is_cuda else None
    calls = calls_of(problem, shape.num_tokens, list(choice["rounds"]), choice["tile"], on_card)
    unlike = require_right(f"{backend} {shape.label}", calls)
    launches = 16 if shape.num_tokens <= _SHORT_TOKENS else 2
    timings = timing.measure(calls, samples, calls=launches, queued=True)
    medians = ", ".join(f"{name} {one.median_us:.1f}" for name, one in timings.items())
    print(f"{backend} {shape.label}: {medians} us; {unlike:.1%} other codes", file=sys.stderr, flush=True)
    return {
        "backend": backend,
        "k": model.hidden_size,
        "num_columns": model.intermediate_size,
        "num_tokens": shape.num_tokens,
        "rounds": choice["rounds"],
        "again": choice["tile"],
        "unlike": unlike,
        "times_us": {name: one.samples_us for name, one in timings.items()},
    }


def measure(archs: Mapping[str, str], num_sms: int, samples: int, device: str = "cuda") -> Times:
    """Times of all variants of every shape."""
    results = []
    for model in MODELS:
        problem = make_problem(Shape(model, max(NUM_TOKENS)), device)
        for backend, arch in archs.items():
            for num_tokens in NUM_TOKENS:
                shape = Shape(model, num_tokens)
                results.append(measure_shape(backend, arch, shape, problem, num_sms, samples))
                gc.collect()
                torch.cuda.empty_cache()
    return {
        "gpu": torch.cuda.get_device_name(),
        "date": date.today().isoformat(),
        "num_sms": num_sms,
        "results": results,
    }


# ------------------------------------------------------------------------------------------ what is made of it


def tables_of(times: Times) -> Iterator[Table]:
    """What the times ask for, backend by backend."""
    fields = Measured.__dataclass_fields__
    measured = [Measured(**{name: result[name] for name in fields}) for result in times["results"]]
    for backend in dict.fromkeys(row.backend for row in measured):
        rows = [row for row in measured if row.backend == backend]
        yield silu_table.decide(rows, times["num_sms"], times["gpu"], times["date"])


def updated(table: Table, times: Times) -> str:
    """The table's text with the rows that the times ask for."""
    for found in tables_of(times):
        for tile in found.tiles:
            print(f"{tile.backend} tile {tile.tile}: {tile.time}, {tile.reason}", file=sys.stderr)
        for row in found.folds:
            way = "fold" if row.fused else "two launches"
            print(
                f"{row.backend} I {row.num_columns}, up to {row.max_tokens} tokens: {way}, "
                f"{'tile ' + row.tile if row.tile else 'tile by rounds'}; {row.reason}",
                file=sys.stderr,
            )
        table = silu_table.merged(table, found)
    return silu_table.render(table)


def tune(args: argparse.Namespace) -> int:
    """The command with the options of deep_kernels/tune.py; errors are exceptions with one sentence."""
    if args.formats:
        raise ValueError("tune: --formats is for mqa_logits alone")

    def measured() -> Times:
        if forced := [name for name in (_VARIABLE, *_OTHER_VARIABLES) if os.environ.get(name)]:
            raise ValueError(f"tune: {forced[0]} must not be set")
        num_sms = _C.num_sms() or _C.device_facts(torch.cuda.current_device())[2]
        return measure(archs_of_card(args.arch), num_sms, args.samples)

    return tuning.run(args, TABLE, silu_table.parse, measured, updated)


if __name__ == "__main__":
    raise SystemExit(tuning.main(__doc__, command.add_arguments, tune))
