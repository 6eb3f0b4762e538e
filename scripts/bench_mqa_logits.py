#!/usr/bin/env python3
"""Times fp8_fp4_mqa_logits against the FP8 matrix rate of the card, in one process.

    python scripts/bench_mqa_logits.py --out benchmarks/results/mqa_logits.json --plot benchmarks/results/mqa_logits.png

Useful FLOP = 2 * heads * head_dim per logit inside a window; what windows and inputs are: scripts/mqa_problems.py.
Times are rotating medians of CUDA-graph replays; the sustained figure is half a second back to back, at the power
limit. Rows of MX formats, whose times hold their pre-passes, are also compared with FP8 at the same shape, and rows of
other windows with causal ones, each in the same rotation. What the card cannot run is left out, with the reason.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
import timing
from mqa_problems import Problem, Shape, call_of, dequantized, make_problem, metadata_of

import deep_kernels as dk

SHAPES = (
    Shape(2048, 32768, 64, 128),
    Shape(2048, 32768, 64, 128, "bfloat16"),
    Shape(8192, 65536, 64, 128),
    Shape(8192, 65536, 32, 128),
    Shape(2048, 32768, 32, 128),
    Shape(8192, 65536, 64, 64),
    Shape(8192, 8192, 64, 128),
    *(Shape(2048, 32768, 64, 128, windows=windows) for windows in ("parallel", "ragged")),
    *(
        Shape(*sizes, format=format)
        for format in ("mxfp8", "mxfp4")
        for sizes in ((2048, 32768, 64, 128), (2048, 32768, 32, 128), (8192, 8192, 64, 128), (8192, 65536, 64, 128))
    ),
)
BEST = "clean1_meta1"  # the variant that rows are compared by
FOLDED = f"{BEST}_folded"

Calls = dict[str, Callable[[], Any]]


def calls_of(shape: Shape, problem: Problem) -> Calls:
    metadata = metadata_of(shape, problem)
    call = call_of(shape, problem)
    calls: Calls = {
        f"clean{int(clean)}_meta{int(meta)}": partial(
            call, clean_logits=clean, schedule_meta=metadata if meta else None
        )
        for clean in (True, False)
        for meta in (True, False)
    }
    folded = partial(call, schedule_meta=metadata, reduction="folded")
    if shape.windows == "causal" and shape.refusal(reduction="folded") is None and differs(folded(), calls[BEST]()):
        calls[FOLDED] = folded
    return calls


def differs(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Where folded logits are the exact ones to the bit, there is no folded kernel to time."""
    return not torch.equal(one, other)


def references_of(shape: Shape, device: str) -> dict[str, tuple[Callable[[], Any], float]]:
    """What the row is compared with in the same rotation: its best call, and the useful FLOP."""
    names = {"fp8": replace(shape, format="fp8"), "causal": replace(shape, windows="causal")}
    found: dict[str, tuple[Callable[[], Any], float]] = {}
    for name, other in names.items():
        if other != shape:
            problem = make_problem(other, device)
            call = partial(call_of(other, problem), schedule_meta=metadata_of(other, problem))
            found[name] = call, useful_flop(other, problem)
    return found


def other_libraries(shape: Shape, problem: Problem) -> Calls:
    """The same call of other libraries, where they are installed."""
    found: Calls = {}
    try:
        deep_gemm = importlib.import_module("deep_gemm")
    except ImportError:
        return found
    if shape.logits == "float32" and shape.format == "fp8":
        found["deep_gemm"] = partial(
            deep_gemm.fp8_mqa_logits,
            problem.q,
            (problem.kv, problem.kv_scale),
            problem.weights,
            problem.start,
            problem.end,
        )
    return found


def useful_flop(shape: Shape, problem: Problem) -> float:
    return 2.0 * shape.num_heads * shape.head_dim * problem.logits_inside


def check(shape: Shape, problem: Problem, call: Callable[[], torch.Tensor]) -> float:
    """Largest deviation of a few rows from float64, relative to the largest logit; the mask must be exact."""
    logits = call()
    worst = 0.0
    columns = torch.arange(shape.num_kv, device=logits.device)
    kv = dequantized(problem.kv, problem.kv_scale, shape.format)
    for row in (1, shape.num_q // 2, shape.num_q - 1):
        inside = (columns >= problem.start[row]) & (columns < problem.end[row])
        if not torch.equal(logits[row].isneginf(), ~inside):
            raise SystemExit(f"{shape.label}: the -inf pattern of row {row} is wrong")
        q_scale = None if problem.q_scale is None else problem.q_scale[row]
        scores = (dequantized(problem.q[row], q_scale, shape.format) @ kv.T).relu()
        expected = problem.weights[row].double() @ scores
        if shape.format == "fp8":
            expected *= problem.kv_scale.double()
        error = (logits[row].double() - expected)[inside].abs().amax() / expected[inside].abs().amax()
        worst = max(worst, float(error))
    if not worst < 2e-2:
        raise SystemExit(f"{shape.label}: wrong result, relative deviation {worst:.2e}")
    return worst


def bench_shape(shape: Shape, samples: int, sustained: bool, device: str = "cuda") -> dict[str, Any]:
    problem = make_problem(shape, device)
    calls = calls_of(shape, problem)
    deviation = check(shape, problem, calls[BEST])
    peak_call, peak_flop = timing.fp8_peak_call()
    flop = useful_flop(shape, problem)
    references = references_of(shape, device)
    functions: Calls = {"fp8_peak": peak_call, **calls, **other_libraries(shape, problem)}
    functions |= {name: call for name, (call, _) in references.items()}
    flops = dict.fromkeys(functions, flop) | {"fp8_peak": peak_flop}
    flops |= {name: other_flop for name, (_, other_flop) in references.items()}
    timings = timing.measure(functions, samples, calls=2 if shape.num_q > 4096 else 4)
    metadata = partial(metadata_of, shape, problem)
    timings["metadata"] = timing.measure({"metadata": metadata}, samples, calls=20)["metadata"]
    result: dict[str, Any] = {"shape": asdict(shape), "label": shape.label, "deviation": deviation}
    result["variants"] = figures(timings, flops)
    if sustained:
        for name in ("fp8_peak", BEST):
            us = timing.measure_sustained(functions[name])
            result["variants"][name]["sustained_tflops"] = flops[name] / us / 1e6
    return result


def figures(timings: Mapping[str, timing.Timing], flops: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Of each variant, times; and of those that have some FLOP, rates and how they compare with the references."""
    variants: dict[str, dict[str, float]] = {name: one.as_dict() for name, one in timings.items()}
    for name, flop in flops.items():
        variants[name]["tflops"] = flop / variants[name]["median_us"] / 1e6
    for name in flops:
        one = variants[name]
        one["of_fp8_peak"] = one["tflops"] / variants["fp8_peak"]["tflops"]
        if "fp8" in flops and name.startswith("clean"):
            one["time_of_fp8"] = one["median_us"] / variants["fp8"]["median_us"]
        if "causal" in flops and name.startswith("clean"):
            one["of_causal"] = one["tflops"] / variants["causal"]["tflops"]
    return variants


def print_row(result: dict[str, Any]) -> None:
    variants = result["variants"]
    cells = [f"{result['label']:28}"]
    for name, entry in variants.items():
        if name == "metadata":
            cells.append(f"metadata {entry['median_us']:.1f} us")
        elif name == "fp8_peak":
            cells.append(f"fp8_peak {entry['tflops']:.0f} TFLOPS")
        else:
            ratios = [f"{entry['of_fp8_peak']:.3f}"]
            ratios += [f"{word} {entry[word]:.3f}" for word in ("time_of_fp8", "of_causal") if word in entry]
            cells.append(f"{name} {entry['median_us']:.1f} us {entry['tflops']:.0f} ({', '.join(ratios)})")
    sustained = [variants[name].get("sustained_tflops") for name in (BEST, "fp8_peak")]
    if sustained[0] is not None:
        cells.append(f"sustained {sustained[0]:.0f} of {sustained[1]:.0f}")
    print(" | ".join(cells), flush=True)


LEGEND = {
    "fp8_peak": "torch._scaled_mm, 8192^3",
    BEST: "cleaned, with a schedule",
    "clean1_meta0": "cleaned",
    "clean0_meta1": "not cleaned, with a schedule",
    "clean0_meta0": "not cleaned",
    FOLDED: "cleaned, with a schedule, folded",
    "fp8": "FP8 at that shape",
    "causal": "causal windows at that shape",
}


def is_plain(result: dict[str, Any]) -> bool:
    """FP8 with causal windows."""
    shape = Shape(**result["shape"])
    return (shape.format, shape.windows) == ("fp8", "causal")


def plot(about: dict[str, Any], path: Path) -> None:
    """Rows of FP8 and causal windows with all their variants; below them the others beside what they compare with."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plain = [result for result in about["results"] if is_plain(result)]
    others = [result for result in about["results"] if not is_plain(result)]
    legend = {name: name for row in about["results"] for name in row["variants"] if name != "metadata"} | LEGEND
    named = ((plain, list(legend)), (others, ["fp8_peak", BEST, "fp8", "causal"]))
    panels = [(rows, names) for rows, names in named if rows]
    figure, all_axes = pyplot.subplots(
        len(panels), figsize=(11, 4.8 * len(panels)), constrained_layout=True, squeeze=False
    )
    for axes, (rows, names) in zip(all_axes[:, 0], panels, strict=True):
        plot_bars(axes, rows, legend, [name for name in names if any(name in row["variants"] for row in rows)])
    all_axes[0, 0].set_title(f"fp8_fp4_mqa_logits on {about['card']}; FP8 and causal windows unless said")
    all_axes[-1, 0].set_xlabel("query / kv tokens, heads, head_dim, logits")
    figure.savefig(path, dpi=150)


def plot_bars(axes: Any, results: list[dict[str, Any]], legend: Mapping[str, str], names: list[str]) -> None:
    """A name has the same colour in every panel: that of its place in the legend."""
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = [result["variants"].get(name, {}).get("tflops", math.nan) for result in results]
        places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(results))]
        axes.bar(places, heights, width, label=legend[name], color=f"C{list(legend).index(name)}")
    axes.set_xticks(range(len(results)), [result["label"].replace(" ", "\n") for result in results], fontsize=8)
    axes.set_ylabel("useful TFLOPS (median)")
    axes.set_ylim(0, 1800)
    axes.legend(ncols=3, fontsize=8, loc="upper center")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timing.add_result_arguments(parser, "TFLOPS against shape")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--rows", type=int, default=len(SHAPES), help="only the first rows of the table")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only rows with all of them: H32 mxfp4, fp8 ragged")
    parser.add_argument("--sustained", action="store_true", help="also half a second back to back per shape")
    args = parser.parse_args()
    status = timing.settled(parser, args, plot)
    if status is not None:
        return status
    dk.set_pdl(False)
    results = []
    for shape in SHAPES[: args.rows]:
        if not set(args.only or ()) <= {*shape.label.split(), shape.format, shape.windows}:
            continue
        if reason := shape.refusal():
            print(f"{shape.label:28} | left out: {reason}", flush=True)
            continue
        results.append(bench_shape(shape, args.samples, args.sustained))
        print_row(results[-1])
        gc.collect()
        torch.cuda.empty_cache()
    timing.write_results(results, args.out, args.plot, plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
