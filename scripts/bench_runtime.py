#!/usr/bin/env python3
"""What the runtime costs: first calls (nothing cached, warm disk) and host time per call.

    python scripts/bench_runtime.py --out benchmarks/results/runtime.json

First calls are timed in fresh processes, after torch has made its CUDA context and the inputs exist.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import timing

import deep_kernels as dk

Inputs = tuple[tuple[torch.Tensor, None], tuple[torch.Tensor, torch.Tensor], torch.Tensor, torch.Tensor, torch.Tensor]


def make_inputs(num_q: int = 8, num_kv: int = 1024, num_heads: int = 64, head_dim: int = 128) -> Inputs:
    q = torch.randn(num_q, num_heads, head_dim, device="cuda").to(torch.float8_e4m3fn)
    kv = torch.randn(num_kv, head_dim, device="cuda").to(torch.float8_e4m3fn)
    start = torch.zeros(num_q, dtype=torch.int32, device="cuda")
    return (
        (q, None),
        (kv, torch.rand(num_kv, device="cuda")),
        torch.randn(num_q, num_heads, device="cuda"),
        start,
        start + num_kv,
    )


def print_first_call() -> None:
    """Runs in a process of its own: seconds of the first call, then of a second kind of kernel."""
    import time

    inputs = make_inputs()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    dk.fp8_fp4_mqa_logits(*inputs)
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    begin = time.perf_counter()
    dk.fp8_fp4_mqa_logits(*inputs, clean_logits=False)
    torch.cuda.synchronize()
    print(json.dumps({"first_s": first, "next_kernel_s": time.perf_counter() - begin}))


def first_calls() -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "DEEP_KERNELS_CACHE_DIR": folder}
        results = {}
        for name in ("cold", "warm_disk"):
            process = subprocess.run(
                [sys.executable, __file__, "--first-call"], env=environment, check=True, capture_output=True, text=True
            )
            results[name] = json.loads(process.stdout)
    return results


def host_times() -> dict[str, float]:
    inputs = make_inputs()
    schedule = dk.get_mqa_logits_metadata(inputs[3], inputs[4], 1024, 64)
    out = torch.empty(8, 1024, device="cuda")
    functions = {
        "torch.empty": lambda: torch.empty(8, 1024, device="cuda"),
        "fp8_fp4_mqa_logits": lambda: dk.fp8_fp4_mqa_logits(*inputs),
        "fp8_fp4_mqa_logits with schedule": lambda: dk.fp8_fp4_mqa_logits(*inputs, schedule_meta=schedule),
        "fp8_fp4_mqa_logits into out": lambda: dk.fp8_fp4_mqa_logits(*inputs, out=out),
        "get_mqa_logits_metadata": lambda: dk.get_mqa_logits_metadata(inputs[3], inputs[4], 1024, 64),
    }
    for function in functions.values():
        function()
    return {name: timing.host_microseconds(function) for name, function in functions.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON of all figures")
    parser.add_argument("--first-call", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_runtime: a CUDA device is needed, torch sees none", file=sys.stderr)
        return 2
    if args.first_call:
        print_first_call()
        return 0
    results = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "first_calls_s": first_calls(),
        "host_us": host_times(),
    }
    print(json.dumps(results, indent=1))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
