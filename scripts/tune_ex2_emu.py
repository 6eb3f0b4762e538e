#!/usr/bin/env python3
"""Measures which exponentials flash attention should emulate, and writes csrc/ops/attention_table.h.

    python -m deep_kernels tune attention
    python scripts/tune_ex2_emu.py --save benchmarks/results/attention_table.json

Of the backend that the card's calls take, or the one that --arch names, for every head_dim, dtype, mask, heads per kv
head and length: "off", "off" once more, which says what a time differs from itself, and every emulation that is another
set of elements take turns in one process (scripts/timing.py). An emulation whose kernel spills is left out, and before
anything is timed out and lse of all must be those of float64. What is made of the times: scripts/attention_table.py.
Rows of other cases stay as they are. The extension has to be built again afterwards.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import attention_problems
import attention_table
import timing
import tuning
from attention_problems import OP, Problem, Shape, call_of, emulations_of, make_problem, name_of
from attention_table import AGAIN, DTYPES, HEAD_DIMS, OFF, Ex2Row, Measured
from tuning import Times

import deep_kernels as dk
from deep_kernels import inspector
from deep_kernels import tune as command

TABLE = Path(__file__).resolve().parent.parent / "csrc" / "ops" / "attention_table.h"
BACKENDS = ("sm89", "sm90")


@dataclass(frozen=True)
class Length:
    """Fewer queries and heads the more keys, so that a launch takes a few milliseconds."""

    batch: int
    num_q: int
    num_kv: int
    num_heads: int


LENGTHS = (Length(2, 4096, 4096, 32), Length(1, 8192, 16384, 16), Length(1, 4096, 65536, 16))
HEADS_PER_KV = (1, 8)

Emulations = dict[str, tuple[int, int]]  # by name
Calls = dict[str, partial[Any]]


def shapes() -> list[Shape]:
    return [
        Shape(one.batch, one.num_q, one.num_kv, one.num_heads, one.num_heads // heads, head_dim, causal, dtype)
        for head_dim, dtype, causal, heads, one in itertools.product(
            HEAD_DIMS, DTYPES, (False, True), HEADS_PER_KV, LENGTHS
        )
    ]


# ------------------------------------------------------------------------------------------ what is measured


def arch_of(wanted: str | None) -> str:
    """Backend and target whose kernels are measured."""
    arch = wanted or attention_problems.arch_of_card()
    if arch.partition(":")[0] not in BACKENDS:
        raise ValueError(f"tune: --arch must begin with {' or '.join(BACKENDS)}, got {arch}")
    if reason := dk.supported(OP, arch):
        raise ValueError(f"tune: {reason}")
    return arch


def spilling(compiled: Sequence[Mapping[str, Any]]) -> bool:
    return any(inspector.spilled_bytes(json.loads(report["about"])) > 0 for report in compiled)


def usable(shape: Shape, emulations: Emulations, arch: str) -> Emulations:
    """Those whose kernels spill nothing; compiles what is not there."""
    compiled = {
        name: dk.prepare([{"op": OP, **shape.case(words, num_splits=1)}], arch=arch)
        for name, words in emulations.items()
    }
    return {name: words for name, words in emulations.items() if not spilling(compiled[name])}


def prepare(arch: str) -> None:
    """Compiles side by side the kernels of all shapes, which have few among them."""
    cases = {
        tuple(shape.case(words, num_splits=1).items()): None
        for shape in shapes()
        if shape.num_kv == LENGTHS[0].num_kv and shape.heads_per_kv == HEADS_PER_KV[0]
        for words in ((0, 0), *emulations_of(shape, arch))
    }
    dk.prepare([{"op": OP, **dict(case)} for case in cases], arch=arch)


def calls_of(shape: Shape, problem: Problem, emulations: Emulations, arch: str | None) -> Calls:
    words = {OFF: (0, 0), AGAIN: (0, 0), **emulations}
    return {name: call_of(shape, problem, one, num_splits=1, arch=arch) for name, one in words.items()}


def require_right(shape: Shape, problem: Problem, calls: Calls) -> float:
    """That out and lse of all are those of float64; the largest deviation."""
    deviations = attention_problems.check(shape, problem, calls)
    for name, call in calls.items():
        error = attention_problems.lse_error_of(shape, problem, call(return_lse=True)[1])
        if not error < attention_problems.MAX_LSE_ERROR:
            raise RuntimeError(f"{shape.label}: wrong lse of {name}, off by {error:.2e}")
    return max(deviations.values())


def measure_shape(shape: Shape, arch: str, samples: int, device: str = "cuda") -> dict[str, Any]:
    shares = {name_of(words): (words, share) for words, share in emulations_of(shape, arch).items()}
    every = {name: words for name, (words, _) in shares.items()}
    emulations = usable(shape, every, arch)
    problem = make_problem(shape, device)
    calls = calls_of(shape, problem, emulations, arch if problem.q.is_cuda else None)
    try:
        deviation = require_right(shape, problem, calls)
    except RuntimeError as error:
        raise RuntimeError(f"tune: {error}") from error
    timings = timing.measure(calls, samples, calls=1, queued=True)
    medians = ", ".join(f"{name} {one.median_us:.1f}" for name, one in timings.items())
    spilled = [name for name in every if name not in emulations]
    print(f"{shape.label}: {medians} us; spills: {', '.join(spilled) or 'none'}", file=sys.stderr, flush=True)
    return {
        "backend": arch.partition(":")[0],
        "dtype": shape.dtype,
        "head_dim": shape.head_dim,
        "causal": shape.causal,
        "heads_per_kv": shape.heads_per_kv,
        "num_kv": shape.num_kv,
        "emulations": emulations,
        "shares": {name: shares[name][1] for name in emulations},
        "spilled": spilled,
        "deviation": deviation,
        "times_us": {name: one.samples_us for name, one in timings.items()},
    }


def measure(arch: str, samples: int, device: str = "cuda") -> Times:
    """Times of all variants of every shape."""
    prepare(arch)
    results = []
    for shape in shapes():
        results.append(measure_shape(shape, arch, samples, device))
        gc.collect()
        torch.cuda.empty_cache()
    return {"gpu": torch.cuda.get_device_name(), "date": date.today().isoformat(), "results": results}


# ------------------------------------------------------------------------------------------ what is made of it


def rows_of(times: Times) -> list[Ex2Row]:
    """What the times ask for."""
    fields = Measured.__dataclass_fields__
    measured = [Measured(**{name: result[name] for name in fields}) for result in times["results"]]
    return attention_table.decide(measured, times["gpu"], times["date"])


def updated(table: list[Ex2Row], times: Times) -> str:
    """The table's text with the rows that the times ask for."""
    found = rows_of(times)
    for row in found:
        print(
            f"{row.backend} {row.dtype} head_dim {row.head_dim} {'causal' if row.causal else 'full'}, "
            f"{row.min_heads_per_kv} or more heads per kv head, {row.min_num_kv} or more keys: "
            f"{'off' if row.ex2 == attention_table.NONE else 'freq {} res {} start_frg {}'.format(*row.ex2)}; "
            f"{row.reason}",
            file=sys.stderr,
        )
    return attention_table.render(attention_table.merged(table, found))


def tune(args: argparse.Namespace) -> int:
    """The command with the options of deep_kernels/tune.py; errors are exceptions with one sentence."""
    if args.formats:
        raise ValueError("tune: --formats is for mqa_logits alone")

    def measured() -> Times:
        return measure(arch_of(args.arch), args.samples)

    return tuning.run(args, TABLE, attention_table.parse, measured, updated)


if __name__ == "__main__":
    raise SystemExit(tuning.main(__doc__, command.add_arguments, tune))
