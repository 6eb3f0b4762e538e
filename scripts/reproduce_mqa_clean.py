#!/usr/bin/env python3
"""What cleaning costs MX MQA logits, as a caller of the established library measures it: its calls and its forms.

    python scripts/reproduce_mqa_clean.py --out clean.json
    python scripts/reproduce_mqa_clean.py --device cpu --sizes 64/1000

Zero queries, keys and weights, scales of one, row i sees [0, N - M + i). Before anything is timed, the cleaned logits
must be 0 inside of every window and -inf at every column outside. Times are rotating medians of CUDA-graph replays; on
the CPU there are none.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import timing

import deep_kernels as dg

HEADS, HEAD_DIM = 64, 128
ONES = 0x7F7F7F7F  # four block exponents of 2^0
FORMATS = ("fp8", "mxfp8", "mxfp4")
SIZES = ("2048/32768", "8192/65536")
_CHECKED_ROWS = 128  # at a time: a comparison of all of them would take gigabytes


def calls_of(num_q: int, num_kv: int, format: str, device: str) -> tuple[dict[str, Callable[[], Any]], torch.Tensor]:
    """Calls by cleaning and schedule, and where every row ends."""
    packed = format == "mxfp4"
    dtype = torch.int8 if packed else torch.float8_e4m3fn
    q = torch.zeros((num_q, HEADS, HEAD_DIM // 2 if packed else HEAD_DIM), device=device, dtype=dtype)
    k = torch.zeros((num_kv, q.shape[-1]), device=device, dtype=dtype)
    if format == "fp8":
        q_scale, k_scale = None, torch.ones(num_kv, device=device)
    else:
        q_scale = torch.full((num_q, HEADS), ONES, device=device, dtype=torch.int32)
        k_scale = torch.full((num_kv,), ONES, device=device, dtype=torch.int32)
    weights = torch.zeros((num_q, HEADS), device=device, dtype=torch.float32)
    starts = torch.zeros(num_q, device=device, dtype=torch.int32)
    ends = torch.arange(num_q, device=device, dtype=torch.int32) + num_kv - num_q
    metadata = dg.get_mqa_logits_metadata(starts, ends, num_kv, HEADS)
    call = partial(dg.fp8_fp4_mqa_logits, (q, q_scale), (k, k_scale), weights, starts, ends, logits_dtype=torch.float32)
    calls: dict[str, Callable[[], Any]] = {
        f"clean{int(clean)}_meta{int(meta)}": partial(
            call, clean_logits=clean, schedule_meta=metadata if meta else None
        )
        for clean in (False, True)
        for meta in (False, True)
    }
    return calls, ends


def check(logits: torch.Tensor, ends: torch.Tensor, clean: bool) -> None:
    """Zero inside of every window, and -inf at every column outside of a cleaned one."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    for row in range(0, logits.shape[0], _CHECKED_ROWS):
        rows = slice(row, row + _CHECKED_ROWS)
        inside = columns < ends[rows, None]
        if clean and not torch.equal(logits[rows].isneginf(), ~inside):
            raise RuntimeError(f"the -inf pattern is wrong in one of the rows from {row}")
        if not bool((logits[rows].masked_fill(~inside, 0) == 0).all()):
            raise RuntimeError(f"a logit is not 0 in one of the rows from {row}")


def reproduce(num_q: int, num_kv: int, format: str, device: str, samples: int) -> dict[str, Any]:
    calls, ends = calls_of(num_q, num_kv, format, device)
    for name, call in calls.items():
        check(call(), ends, clean=name.startswith("clean1"))
    timings = timing.measure(calls, samples) if device == "cuda" else {}
    return {
        "shape": [num_q, num_kv, HEADS, HEAD_DIM],
        "format": format,
        "timings": {name: one.as_dict() for name, one in timings.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", nargs="+", default=SIZES, metavar="M/N", help="default: %(default)s")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--out", type=Path, help="JSON of all figures")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "reproduce_mqa_clean: a CUDA device is needed, torch sees none; --device cpu checks only", file=sys.stderr
        )
        return 2
    dg.set_pdl(False)
    where = f"{torch.cuda.get_device_name()}, " if args.device == "cuda" else ""
    print(f"{where}{dg.get_num_sms()} SMs", flush=True)
    results = []
    for size in args.sizes:
        num_q, num_kv = map(int, size.split("/"))
        for format in args.formats:
            arch = "cpu" if args.device == "cpu" else None
            if reason := dg.supported("fp8_fp4_mqa_logits", arch, format=format):
                print(f"{size} {format}: left out, {reason}", flush=True)
                continue
            result = reproduce(num_q, num_kv, format, args.device, args.samples)
            results.append(result)
            medians = {name: round(one["median_us"], 1) for name, one in result["timings"].items()}
            print(f"{size} {format}: right; {medians} us" if medians else f"{size} {format}: right", flush=True)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
