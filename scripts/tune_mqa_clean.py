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
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import mqa_clean_table
import timing
from mqa_clean_table import FORMATS, PLACEMENTS, SCHEDULES, CleanRow, Comparison
from mqa_problems import OP, Shape, call_of, make_problem, metadata_of

import deep_kernels as dk
from deep_kernels import tune as command

TABLE = Path(__file__).resolve().parent.parent / "csrc" / "ops" / "mqa_clean_table.h"
SHAPES = (Shape(2048, 32768, 64, 128), Shape(8192, 8192, 64, 128), Shape(2048, 32768, 32, 128))

Times = dict[str, Any]  # of one card: gpu, date, backend, and under results lists of microseconds


@contextmanager
def placed(placement: str) -> Iterator[None]:
    """Calls within the block fill there; the library reads the setting at every call."""
    name = "DEEP_KERNELS_MQA_CLEAN"
    before = os.environ.get(name)
    os.environ[name] = placement
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def calls_of(shape: Shape, arch: str | None, device: str) -> dict[tuple[str, str], Callable[[], torch.Tensor]]:
    """By schedule and placement."""
    problem = make_problem(shape, device)
    call = call_of(shape, problem, arch)
    metadata = metadata_of(shape, problem, arch)

    def function(schedule: str, placement: str) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            with placed(placement):
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


def tune(args: argparse.Namespace) -> int:
    """The command with the options of deep_kernels/tune.py; errors are exceptions with one sentence."""
    table = args.table or TABLE
    rows = mqa_clean_table.parse(table.read_text(encoding="utf-8"))
    if args.check:
        return 0
    if args.load:
        times = json.loads(args.load.read_text(encoding="utf-8"))
    else:
        if not torch.cuda.is_available():
            raise RuntimeError("tune: a CUDA device is needed, torch sees none")
        if args.samples < 2:
            raise ValueError(f"tune: --samples must be at least 2, got {args.samples}")
        times = measure(backend_of(args.arch), args.arch, tuple(args.formats or FORMATS), args.samples)
    if args.save:
        args.save.write_text(json.dumps(times, indent=1) + "\n", encoding="utf-8")
    measured = rows_of(times)
    for row in measured:
        print(f"{' / '.join(row.key)}: {row.placement}, {row.reason}", file=sys.stderr)
    text = mqa_clean_table.render(mqa_clean_table.merged(rows, measured))
    if args.dry_run:
        print(text, end="")
    else:
        table.write_text(text, encoding="utf-8")
        print(f"{table} has {len(measured)} rows of {times['gpu']}; build the extension again", file=sys.stderr)
    return 0


def backend_of(arch: str | None) -> str:
    """The backend whose kernels calls with this `arch` use on the card at hand."""
    case = {"op": OP, "num_heads": 8, "head_dim": 32}
    spec: dict[str, Any] = json.loads(dk.prepare([case], arch=arch)[0]["about"])["spec"]
    return str(spec["backend"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_arguments(parser)
    try:
        return tune(parser.parse_args())
    except (ValueError, OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
