#!/usr/bin/env python3
"""Measures both placements of the -inf fill of fp8_fp4_mqa_logits and writes csrc/ops/mqa_clean_table.h.

    python -m deep_kernels tune mqa_logits
    python scripts/tune_mqa_clean.py --save benchmarks/results/mqa_clean.json

Both placements, with and without a schedule, take turns in one process (scripts/timing.py) on random inputs; before
that, their complete outputs must be the same bits. The rule that makes a row of the times: scripts/mqa_clean_table.py.
Rows that cannot be measured on the card at hand stay as they are. The extension has to be built again afterwards.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import mqa_clean_table
import timing
import tuning
from mqa_clean_table import FORMATS, PLACEMENTS, SCHEDULES, CleanRow, Comparison
from mqa_problems import OP, Shape, call_of, make_problem, metadata_of
from tuning import Times

import deep_kernels as dk
from deep_kernels import tune as command

TABLE = Path(__file__).resolve().parent.parent / "csrc" / "ops" / "mqa_clean_table.h"
SHAPES = (Shape(2048, 32768, 64, 128), Shape(8192, 8192, 64, 128), Shape(2048, 32768, 32, 128))


def calls_of(shape: Shape, arch: str | None, device: str) -> dict[tuple[str, str], Callable[[], torch.Tensor]]:
    """By schedule and placement."""
    problem = make_problem(shape, device)
    call = call_of(shape, problem, arch)
    metadata = metadata_of(shape, problem, arch)

    def function(schedule: str, placement: str) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with tuning.setting("DEEP_KERNELS_MQA_CLEAN", placement):
                return call(schedule_meta=metadata if schedule == "metadata" else None)

        return run

    return {key: function(*key) for key in itertools.product(SCHEDULES, PLACEMENTS)}


def require_same_bits(shape: Shape, calls: dict[tuple[str, str], Callable[[], torch.Tensor]]) -> None:
    (first, *others) = (function().view(torch.int32) for function in calls.values())
    for key, other in zip(list(calls)[1:], others, strict=True):
        if not torch.equal(first, other):
            raise RuntimeError(f"tune: {shape.label}: {' / '.join(key)} does not give the bits of the first variant")


def measure(backend: str, arch: str | None, formats: tuple[str, ...], samples: int, device: str = "cuda") -> Times:
    """Times of all variants of every shape that the card can run."""
    results = []
    for shape in (replace(shape, format=format) for format in formats for shape in SHAPES):
        if reason := shape.refusal(arch):
            print(f"tune: {shape.label} is left out: {reason}", file=sys.stderr)
            continue
        calls = calls_of(shape, arch, device)
        require_same_bits(shape, calls)
        names = {"/".join(key): function for key, function in calls.items()}
        timings = timing.measure(names, samples, calls=4)
        times = {name: one.samples_us for name, one in timings.items()}
        results.append({"format": shape.format, "shape": short_label(shape), "times_us": times})
        medians = ", ".join(f"{name} {one.median_us:.1f}" for name, one in timings.items())
        print(f"{shape.label}: {medians} us", file=sys.stderr, flush=True)
        del calls, names
        gc.collect()
        torch.cuda.empty_cache()
    return {
        "gpu": torch.cuda.get_device_name(),
        "date": date.today().isoformat(),
        "backend": backend,
        "results": results,
    }


def short_label(shape: Shape) -> str:
    return f"{shape.num_q}/{shape.num_kv} H{shape.num_heads}"


def rows_of(times: Times) -> list[CleanRow]:
    """What the times ask for, a row per format and schedule that they hold."""
    rows = []
    for format, schedule in itertools.product(FORMATS, SCHEDULES):
        comparisons = [
            Comparison(result["shape"], *(result["times_us"][f"{schedule}/{placement}"] for placement in PLACEMENTS))
            for result in times["results"]
            if result["format"] == format
        ]
        if comparisons:
            key = times["backend"], format, schedule
            rows.append(mqa_clean_table.decide(key, comparisons, times["gpu"], times["date"]))
    return rows


def updated(rows: list[CleanRow], times: Times) -> str:
    """The table's text with the rows that the times ask for."""
    measured = rows_of(times)
    for row in measured:
        print(f"{' / '.join(row.key)}: {row.placement}, {row.reason}", file=sys.stderr)
    return mqa_clean_table.render(mqa_clean_table.merged(rows, measured))


def tune(args: argparse.Namespace) -> int:
    """The command with the options of deep_kernels/tune.py; errors are exceptions with one sentence."""

    def measured() -> Times:
        return measure(backend_of(args.arch), args.arch, tuple(args.formats or FORMATS), args.samples)

    return tuning.run(args, TABLE, mqa_clean_table.parse, measured, updated)


def backend_of(arch: str | None) -> str:
    """The backend whose kernels calls with this `arch` use on the card at hand."""
    case = {"op": OP, "num_heads": 8, "head_dim": 32}
    spec: dict[str, Any] = json.loads(dk.prepare([case], arch=arch)[0]["about"])["spec"]
    return str(spec["backend"])


if __name__ == "__main__":
    raise SystemExit(tuning.main(__doc__, command.add_arguments, tune))
