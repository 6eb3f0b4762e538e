#!/usr/bin/env python3
"""Times fp8_fp4_mqa_logits against the FP8 matrix rate of the card, in one process.

    python scripts/bench_mqa_logits.py --out benchmarks/results/mqa_logits.json --plot benchmarks/results/mqa_logits.png

Row i of the causal shapes sees [0, N - M + i). Useful FLOP = 2 * heads * head_dim per logit inside a window. Times are
rotating medians of CUDA-graph replays; the sustained figure is half a second back to back, at the power limit.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import timing

import deep_kernels as dk


@dataclass(frozen=True)
class Shape:
    num_q: int
    num_kv: int
    num_heads: int
    head_dim: int
    logits: str = "float32"

    @property
    def label(self) -> str:
        short = {"float32": "f32", "bfloat16": "bf16"}[self.logits]
        return f"{self.num_q}/{self.num_kv} H{self.num_heads} D{self.head_dim} {short}"


SHAPES = (
    Shape(2048, 32768, 64, 128),
    Shape(2048, 32768, 64, 128, "bfloat16"),
    Shape(8192, 65536, 64, 128),
    Shape(8192, 65536, 32, 128),
    Shape(2048, 32768, 32, 128),
    Shape(8192, 65536, 64, 64),
    Shape(8192, 8192, 64, 128),
)


@dataclass
class Problem:
    q: torch.Tensor
    kv: torch.Tensor
    kv_scale: torch.Tensor
    weights: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor

    @property
    def logits_inside(self) -> int:
        return int((self.end - self.start).clamp(min=0).sum(dtype=torch.int64))


def make_problem(shape: Shape, seed: int = 0) -> Problem:
    """Random inputs: zeros would draw less power and run faster."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", generator=generator)

    q = normal(shape.num_q, shape.num_heads, shape.head_dim).to(torch.float8_e4m3fn)
    kv_float = normal(shape.num_kv, shape.head_dim)
    kv_scale = kv_float.abs().amax(dim=1) / 448
    kv = (kv_float / kv_scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    rows = torch.arange(shape.num_q, dtype=torch.int32, device="cuda")
    return Problem(
        q, kv, kv_scale, normal(shape.num_q, shape.num_heads), torch.zeros_like(rows), rows + shape.num_kv - shape.num_q
    )


def calls_of(shape: Shape, problem: Problem) -> dict[str, Callable[[], torch.Tensor]]:
    metadata = dk.get_mqa_logits_metadata(problem.start, problem.end, shape.num_kv, shape.num_heads)
    call = partial(
        dk.fp8_fp4_mqa_logits,
        (problem.q, None),
        (problem.kv, problem.kv_scale),
        problem.weights,
        problem.start,
        problem.end,
        logits_dtype=getattr(torch, shape.logits),
    )
    return {
        f"clean{int(clean)}_meta{int(meta)}": partial(
            call, clean_logits=clean, schedule_meta=metadata if meta else None
        )
        for clean in (True, False)
        for meta in (True, False)
    }


def other_libraries(shape: Shape, problem: Problem) -> dict[str, Callable[[], Any]]:
    """The same call of other libraries, where they are installed."""
    found: dict[str, Callable[[], Any]] = {}
    try:
        deep_gemm = importlib.import_module("deep_gemm")
    except ImportError:
        return found
    if shape.logits == "float32":
        found["deep_gemm"] = partial(
            deep_gemm.fp8_mqa_logits,
            problem.q,
            (problem.kv, problem.kv_scale),
            problem.weights,
            problem.start,
            problem.end,
        )
    return found


def check(shape: Shape, problem: Problem, call: Callable[[], torch.Tensor]) -> float:
    """Largest deviation of a few rows from float64, relative to the largest logit; the mask must be exact."""
    logits = call()
    worst = 0.0
    columns = torch.arange(shape.num_kv, device="cuda")
    for row in (1, shape.num_q // 2, shape.num_q - 1):
        inside = columns < problem.end[row]
        if not torch.equal(logits[row].isneginf(), ~inside):
            raise SystemExit(f"{shape.label}: the -inf pattern of row {row} is wrong")
        scores = (problem.q[row].double() @ problem.kv.double().T).relu()
        expected = (problem.weights[row].double() @ scores) * problem.kv_scale.double()
        error = (logits[row].double() - expected)[inside].abs().amax() / expected[inside].abs().amax()
        worst = max(worst, float(error))
    if not worst < 2e-2:
        raise SystemExit(f"{shape.label}: wrong result, relative deviation {worst:.2e}")
    return worst


def bench_shape(shape: Shape, samples: int, sustained: bool) -> dict[str, Any]:
    problem = make_problem(shape)
    calls = calls_of(shape, problem)
    deviation = check(shape, problem, calls["clean1_meta1"])
    peak_call, peak_flop = timing.fp8_peak_call()
    flop = 2.0 * shape.num_heads * shape.head_dim * problem.logits_inside
    functions: dict[str, Callable[[], Any]] = {"fp8_peak": peak_call, **calls, **other_libraries(shape, problem)}
    metadata = partial(dk.get_mqa_logits_metadata, problem.start, problem.end, shape.num_kv, shape.num_heads)
    timings = timing.measure(functions, samples, calls=2 if shape.num_q > 4096 else 4)
    timings["metadata"] = timing.measure({"metadata": metadata}, samples, calls=20)["metadata"]
    peak_tflops = peak_flop / timings["fp8_peak"].median_us / 1e6
    result: dict[str, Any] = {"shape": asdict(shape), "label": shape.label, "deviation": deviation, "variants": {}}
    for name, value in timings.items():
        entry: dict[str, Any] = value.as_dict()
        if name != "metadata":
            entry["tflops"] = (peak_flop if name == "fp8_peak" else flop) / value.median_us / 1e6
            entry["of_fp8_peak"] = entry["tflops"] / peak_tflops
        result["variants"][name] = entry
    if sustained:
        for name in ("fp8_peak", "clean1_meta1"):
            us = timing.measure_sustained(functions[name])
            result["variants"][name]["sustained_tflops"] = (peak_flop if name == "fp8_peak" else flop) / us / 1e6
    return result


def print_row(result: dict[str, Any]) -> None:
    variants = result["variants"]
    cells = [f"{result['label']:28}"]
    for name, entry in variants.items():
        if name == "metadata":
            cells.append(f"metadata {entry['median_us']:.1f} us")
        elif name == "fp8_peak":
            cells.append(f"fp8_peak {entry['tflops']:.0f} TFLOPS")
        else:
            cells.append(f"{name} {entry['median_us']:.1f} us {entry['tflops']:.0f} ({entry['of_fp8_peak']:.3f})")
    sustained = [variants[name].get("sustained_tflops") for name in ("clean1_meta1", "fp8_peak")]
    if sustained[0] is not None:
        cells.append(f"sustained {sustained[0]:.0f} of {sustained[1]:.0f}")
    print(" | ".join(cells), flush=True)


LEGEND = {
    "fp8_peak": "torch._scaled_mm, 8192^3",
    "clean1_meta1": "cleaned, with a schedule",
    "clean1_meta0": "cleaned",
    "clean0_meta1": "not cleaned, with a schedule",
    "clean0_meta0": "not cleaned",
}


def plot(about: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = about["results"]
    names = [name for name in results[0]["variants"] if name != "metadata"]
    figure, axes = pyplot.subplots(figsize=(11, 4.8), constrained_layout=True)
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = [result["variants"].get(name, {}).get("tflops", math.nan) for result in results]
        places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(results))]
        axes.bar(places, heights, width, label=LEGEND.get(name, name))
    axes.set_xticks(range(len(results)), [result["label"].replace(" ", "\n", 1) for result in results], fontsize=9)
    axes.set_xlabel("query / kv tokens, heads, head_dim, logits")
    axes.set_ylabel("useful TFLOPS (median)")
    axes.set_ylim(0, 1800)
    axes.set_title(f"fp8_fp4_mqa_logits, FP8, causal windows, on {about['card']}")
    axes.legend(ncols=len(names), fontsize=8, loc="upper center")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON of all figures")
    parser.add_argument("--plot", type=Path, help="PNG of TFLOPS against shape")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--rows", type=int, default=len(SHAPES), help="only the first rows of the table")
    parser.add_argument("--replot", type=Path, metavar="JSON", help="measure nothing, plot earlier figures")
    parser.add_argument("--sustained", action="store_true", help="also half a second back to back per shape")
    args = parser.parse_args()
    if args.replot:
        if not args.plot:
            parser.error("--replot needs --plot")
        plot(json.loads(args.replot.read_text()), args.plot)
        return 0
    if not torch.cuda.is_available():
        print("bench_mqa_logits: a CUDA device is needed, torch sees none", file=sys.stderr)
        return 2
    dk.set_pdl(False)
    results = []
    for shape in SHAPES[: args.rows]:
        results.append(bench_shape(shape, args.samples, args.sustained))
        print_row(results[-1])
        gc.collect()
        torch.cuda.empty_cache()
    about = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(about, indent=1) + "\n")
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        plot(about, args.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
