#!/usr/bin/env python3
"""Times fp8_silu_fold_prefill against two launches and torch's own GEMM, in one process.

    python scripts/bench_silu_fold.py --out benchmarks/results/silu_fold.json --plot benchmarks/results/silu_fold.png

gate_up of the MLP of a 2B and an 8B model, S tokens of prefill. Useful FLOP = 2 * S * 2I * K. Variants:

  fold           fp8_silu_fold_prefill
  two_launches   the same with fused=False, and its halves alone: gemm, activation
  torch_gemm     torch._scaled_mm with the same block scales: no activation, no quantization, where torch has it
  fp8_peak       torch._scaled_mm 8192^3 without block scales

Times are rotating medians of CUDA-graph replays. warm: the weights are those of the launch before, as far as the L2
cache holds them. cold, up to 512 tokens: launches take turns on several sets of weights, which come from memory then.
layer: all of nn.SwiGLUMLP, with the quantization of its input in plain torch and the down projection.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent))
import timing

import deep_kernels as dk
from deep_kernels import formats
from deep_kernels.nn import SwiGLUMLP

_COLD_TOKENS = 512  # with more of them the weights' way from memory no longer counts
_SHORT_TOKENS = 512  # up to here a launch takes microseconds, and a graph holds more of them
_LAUNCHES = 16  # to such a graph, and to one of cold weights: a multiple of all numbers of sets
_CHECKED_ROWS = 3

Calls = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Model:
    hidden_size: int
    intermediate_size: int
    num_sets: int  # of weights that take turns: those between two turns of one are more than an L2 cache holds


MODELS = {"2B": Model(2048, 6144, 4), "8B": Model(4096, 12288, 2)}


@dataclass(frozen=True)
class Shape:
    model: str
    num_tokens: int

    @property
    def label(self) -> str:
        return f"{self.model} S{self.num_tokens}"

    @property
    def flop(self) -> float:
        model = MODELS[self.model]
        return 2.0 * self.num_tokens * 2 * model.intermediate_size * model.hidden_size

    def refusal(self) -> str | None:
        """Why it cannot run, or None."""
        return dk.supported("fp8_silu_fold_prefill")


SHAPES = tuple(
    Shape(model, num_tokens) for model in MODELS for num_tokens in (16, 32, 64, 128, 192, 256, 512, 1024, 2048, 8192)
)


@dataclass(frozen=True)
class Problem:
    """One input, and layers with weights of their own."""

    x: Tensor  # [num_tokens, hidden_size] bfloat16
    codes: Tensor  # [num_tokens, hidden_size] e4m3
    scale: Tensor  # [num_tokens, hidden_size / 128] float32
    layers: list[SwiGLUMLP]


def make_problem(shape: Shape, device: str = "cuda", seed: int = 0) -> Problem:
    """Random inputs: zeros would draw less power and run faster."""
    generator = torch.Generator(device).manual_seed(seed)
    model = MODELS[shape.model]

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, device=device, generator=generator)

    def weight(rows: int, columns: int) -> Tensor:
        return (normal(rows, columns) / columns**0.5).to(torch.bfloat16)

    sizes = (model.intermediate_size, model.hidden_size)
    layers = [
        SwiGLUMLP.from_weights(weight(*sizes), weight(*sizes), weight(*sizes[::-1]), use_silu_fold_prefill=False)
        for _ in range(model.num_sets)
    ]
    x = normal(shape.num_tokens, model.hidden_size).to(torch.bfloat16)
    return Problem(x, *formats.quantize_fp8_block128(x), layers)


# --- what is timed -----------------------------------------------------------------------------------------


def calls_of(problem: Problem, which: int = 0) -> Calls:
    """The launches that read the weights of one layer."""
    layer = problem.layers[which]
    arguments = (problem.codes, problem.scale, layer.gate_up_weight, layer.gate_up_scale)
    calls: Calls = {
        "fold": partial(dk.fp8_silu_fold_prefill, *arguments, fused=True),
        "two_launches": partial(dk.fp8_silu_fold_prefill, *arguments, fused=False),
        "gemm": partial(dk.fp8_block_gemm_nt, *arguments),
    }
    other = torch_gemm_call(*arguments)
    return calls | ({"torch_gemm": other} if other else {})


def activation_call(problem: Problem) -> Callable[[], Any]:
    return partial(dk.silu_mul_to_fp8_block128, calls_of(problem)["gemm"]())


def torch_gemm_call(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor) -> Callable[[], Tensor] | None:
    """torch's GEMM of block-scaled FP8, or None where this torch has none for the device."""
    scales = x_scale.t().contiguous().t(), w_scale.t()  # it wants those of x by columns
    call = partial(torch._scaled_mm, x, w.t(), *scales, out_dtype=torch.bfloat16)
    try:
        call()
    except (RuntimeError, ValueError) as error:
        reason = str(error).split("\n")[0]
        print(f"torch's GEMM is left out: {reason}", flush=True)
        return None
    return call


def layer_calls(problem: Problem) -> Calls:
    """The first layer as a module, with and without the fold."""
    folded = copy.copy(problem.layers[0])
    folded.use_silu_fold_prefill = True
    return {"fold": partial(folded, problem.x), "two_launches": partial(problem.layers[0], problem.x)}


# --- right results before times ----------------------------------------------------------------------------


def check(shape: Shape, problem: Problem, calls: Calls, which: int = 0) -> float:
    """Relative deviation of a few rows from float64, the worst of the variants; e4m3 alone makes 0.03 of it."""
    rows = torch.linspace(0, shape.num_tokens - 1, _CHECKED_ROWS, device=problem.x.device).long()
    layer = problem.layers[which]
    x = formats.dequantize_fp8_block128(problem.codes[rows], problem.scale[rows], torch.float64)
    halves = zip(layer.gate_up_weight.chunk(2), layer.gate_up_scale.chunk(2), strict=True)
    g, u = (x @ formats.dequantize_fp8_128x128(*half, torch.float64).T for half in halves)
    worst = 0.0
    for name, call in calls.items():
        result = call()
        if isinstance(result, tuple):
            y, y_scale = result
            actual = formats.dequantize_fp8_block128(y[rows], y_scale[rows], torch.float64)
            expected, limit = functional.silu(g) * u, 0.04
        else:
            actual, expected, limit = result[rows].double(), torch.cat((g, u), dim=1), 0.005
        deviation = float((actual - expected).norm() / expected.norm())
        if not deviation < limit:
            raise SystemExit(f"{shape.label}: wrong result of {name}, relative deviation {deviation:.2e}")
        worst = max(worst, deviation)
    return worst


# --- times -------------------------------------------------------------------------------------------------


def bench_shape(shape: Shape, samples: int, device: str = "cuda") -> dict[str, Any]:
    problem = make_problem(shape, device)
    sets = [calls_of(problem, which) for which in range(len(problem.layers))]
    deviation = max(check(shape, problem, calls, which) for which, calls in enumerate(sets))
    peak, peak_flop = timing.fp8_peak_call()
    flops = {"fp8_peak": peak_flop, **dict.fromkeys(sets[0], shape.flop)}
    launches = _LAUNCHES if shape.num_tokens <= _SHORT_TOKENS else 2

    def measure(functions: Calls) -> dict[str, timing.Timing]:
        return timing.measure(
            functions, samples, calls=dict.fromkeys(functions, launches) | {"fp8_peak": 1}, queued=True
        )

    warm = {"fp8_peak": peak, **sets[0], "activation": activation_call(problem)}
    result: dict[str, Any] = {"shape": asdict(shape), "label": shape.label, "deviation": deviation}
    result["warm"] = figures(measure(warm), flops)
    if shape.num_tokens <= _COLD_TOKENS:
        turns = {name: timing.in_turn([calls[name] for calls in sets]) for name in sets[0]}
        result["cold"] = figures(measure({"fp8_peak": peak, **turns}), flops)
    result["layer"] = figures(measure(layer_calls(problem)), {})
    return result


def figures(timings: Mapping[str, timing.Timing], flops: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Of each variant, times; of those that have some FLOP, rates; and how the fold compares."""
    found: dict[str, dict[str, float]] = {name: one.as_dict() for name, one in timings.items()}
    for name, flop in flops.items():
        found[name]["tflops"] = flop / found[name]["median_us"] / 1e6
    for name in flops:
        found[name]["of_fp8_peak"] = found[name]["tflops"] / found["fp8_peak"]["tflops"]
    for other in ("two_launches", "torch_gemm"):
        if other in found:
            found["fold"][f"time_of_{other}"] = found["fold"]["median_us"] / found[other]["median_us"]
    return found


def print_row(result: dict[str, Any]) -> None:
    cells = [f"{result['label']:9}"]
    for way in ("warm", "cold", "layer"):
        words = [way]
        for name, entry in result.get(way, {}).items():
            if name == "fp8_peak":
                words.append(f"fp8_peak {entry['tflops']:.0f} TFLOPS")
                continue
            share = [f"{entry['of_fp8_peak']:.3f}"] if "of_fp8_peak" in entry else []
            share += [f"{key} {entry[key]:.3f}" for key in entry if key.startswith("time_of_")]
            words.append(f"{name} {entry['median_us']:.1f} us" + (f" ({', '.join(share)})" if share else ""))
        if len(words) > 1:
            cells.append(" ".join(words))
    print(" | ".join(cells), flush=True)


LEGEND = {
    "fold": "fold",
    "two_launches": "two launches",
    "gemm": "the GEMM of the two alone",
    "torch_gemm": "torch's GEMM alone",
    "fp8_peak": "torch._scaled_mm, 8192^3, no block scales",
}


def plot(about: dict[str, Any], path: Path) -> None:
    """TFLOPS against tokens, a panel for every model; warm weights."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    models = list(dict.fromkeys(row["shape"]["model"] for row in about["results"]))
    figure, panels = pyplot.subplots(
        len(models), figsize=(11, 4.4 * len(models)), constrained_layout=True, squeeze=False
    )
    for axes, model in zip(panels[:, 0], models, strict=True):
        rows = [row for row in about["results"] if row["shape"]["model"] == model]
        for name, label in LEGEND.items():
            points = [(row["shape"]["num_tokens"], row["warm"][name]["tflops"]) for row in rows if name in row["warm"]]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, marker="o", linestyle="-")
        tokens = [row["shape"]["num_tokens"] for row in rows]
        axes.set_xscale("log", base=2)
        axes.set_xticks(tokens, tokens)
        axes.minorticks_off()
        sizes = MODELS[model]
        axes.set_ylabel(f"{model} (K={sizes.hidden_size}, I={sizes.intermediate_size}): useful TFLOPS")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    panels[0, 0].set_title(f"fp8_silu_fold_prefill on {about['card']}, warm weights, medians")
    panels[0, 0].legend(fontsize=8)
    panels[-1, 0].set_xlabel("tokens")
    figure.savefig(path, dpi=150)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timing.add_result_arguments(parser, "TFLOPS against tokens")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, metavar="S", help="only rows of these: 16 128")
    args = parser.parse_args()
    status = timing.settled(parser, args, plot)
    if status is not None:
        return status
    dk.set_pdl(False)
    results = []
    for shape in SHAPES:
        if shape.model not in args.models or (args.tokens and shape.num_tokens not in args.tokens):
            continue
        if reason := shape.refusal():
            print(f"{shape.label:9} | left out: {reason}", flush=True)
            continue
        results.append(bench_shape(shape, args.samples))
        print_row(results[-1])
        gc.collect()
        torch.cuda.empty_cache()
    timing.write_results(results, args.out, args.plot, plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
