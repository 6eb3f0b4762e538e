#!/usr/bin/env python3
"""Times flash_attn_fwd against torch's attention with cuDNN and with its own flash kernels, in one process.

    python scripts/bench_attention.py --out benchmarks/results/attention.json --plot benchmarks/results/attention.png

Three kinds of rows. prefill: as many queries as keys; TFLOPS, causal counted half. decode: 1 to 16 queries, TB/s of
tensors read and written once, of keys and values that launches take turns on, so that they come from memory, beside
`read_bw`, a large tensor read. curve: TFLOPS by the share of the exponentials that is emulated, off measured twice.

Two regimes, variants in changing order: burst is the median of single launches (decode: a few) after 25 ms of nothing,
sustained of 45 ms back to back, at the power limit. Results must be those of float64, and of each other, before that.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parent))
import attention_problems
import timing
from attention_problems import OP, Problem, Shape, call_of, check, emulations_of, make_problem, name_of

import deep_kernels as dk

OURS, OFF, AGAIN, READ = "deep_kernels", "off", "again", "read_bw"
OTHERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "torch_flash": SDPBackend.FLASH_ATTENTION}
KINDS = ("prefill", "decode", "curve")
REGIMES = ("burst", "sustained")

_CACHE_BYTES = 60 << 20  # between two turns of a set of decode inputs more than an L2 cache holds
_DECODE_LAUNCHES = 8  # to a graph, at least

Calls = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Row:
    kind: str
    shape: Shape

    @property
    def words(self) -> set[str]:
        return {self.kind, *self.shape.label.split()}


def prefill(head_dim: int, num_tokens: int, num_heads: int, num_kv_heads: int, causal: bool) -> Shape:
    """16k tokens in all, or one member that is longer."""
    batch = max(16384 // num_tokens, 1)
    return Shape(batch, num_tokens, num_tokens, num_heads, num_kv_heads, head_dim, causal)


def decode(head_dim: int, num_q: int, batch: int, num_kv: int, heads_per_kv: int) -> Shape:
    return Shape(batch, num_q, num_kv, 32, 32 // heads_per_kv, head_dim)


_PREFILL = (  # head_dim, tokens, heads, kv heads
    *(
        (256, tokens, 32, kv_heads)
        for tokens, kv_heads in ((4096, 32), (8192, 32), (16384, 32), (32768, 32), (8192, 2))
    ),
    *((128, tokens, 32, kv_heads) for tokens, kv_heads in ((4096, 32), (8192, 32), (16384, 32), (8192, 4))),
    *((64, tokens, 32, 32) for tokens in (8192, 16384)),
)
_DECODE = (  # queries, batch, keys, heads per kv head
    *((1, 16, 8192, 4), (1, 1, 8192, 8), (1, 4, 32768, 1), (1, 4, 32768, 8), (1, 4, 32768, 16), (1, 1, 131072, 4)),
    *((4, 4, 32768, 8), (16, 4, 32768, 8)),
)
ROWS = (
    *(Row("prefill", prefill(*sizes, causal)) for sizes in _PREFILL for causal in (False, True)),
    *(Row("prefill", prefill(*sizes, 8, 1, True)) for sizes in ((256, 65536), (256, 131072), (128, 131072))),
    *(Row("decode", decode(head_dim, *sizes)) for head_dim in (128, 256) for sizes in _DECODE),
    *(Row("curve", prefill(head_dim, 8192, 32, 32, False)) for head_dim in (256, 128, 64)),
    Row("curve", prefill(256, 8192, 32, 32, True)),
)


# --- what is timed -----------------------------------------------------------------------------------------


def other_call(shape: Shape, problem: Problem, backend: SDPBackend, kv_groups: int = 1) -> Callable[[], Tensor]:
    """torch's attention by one of its backends; each kv head as often as `kv_groups` says."""
    q, k, v = (x.transpose(1, 2) for x in (problem.q, problem.k, problem.v))
    if kv_groups > 1:
        k, v = (x.repeat_interleave(kv_groups, dim=1) for x in (k, v))
    shares = q.shape[1] != k.shape[1]

    def call() -> Tensor:
        with sdpa_kernel(backend):
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=shares)
        return out.transpose(1, 2)

    return call


def other_calls(shape: Shape, problem: Problem) -> dict[str, Callable[[], Tensor]]:
    """Those that this torch has for the shape. One that cannot share kv heads gets each as often as it is used."""
    found: dict[str, Callable[[], Tensor]] = {}
    if shape.causal and shape.num_q != shape.num_kv:
        return found  # torch aligns at the top left
    for name, backend in OTHERS.items():
        for kv_groups in dict.fromkeys((1, shape.heads_per_kv)):
            call = other_call(shape, problem, backend, kv_groups)
            try:
                call()
            except RuntimeError as error:
                reason = str(error).split("\n")[0]
                print(f"{shape.label} | {name} is left out with {kv_groups}x the kv heads: {reason}", flush=True)
            else:
                found[name if kv_groups == 1 else f"{name}_repeated"] = call
                break
    return found


def calls_of(shape: Shape, problem: Problem) -> Calls:
    return {OURS: call_of(shape, problem), **other_calls(shape, problem)}


def curve_calls(shape: Shape, problem: Problem, arch: str) -> tuple[Calls, dict[str, float]]:
    """Off twice and every emulation, by name, and their shares."""
    words = {OFF: (0, 0), AGAIN: (0, 0)}
    emulations = emulations_of(shape, arch)
    shares = dict.fromkeys(words, 0.0) | {name_of(one): share for one, share in emulations.items()}
    words |= {name_of(one): one for one in emulations}
    return {name: call_of(shape, problem, one) for name, one in words.items()}, shares


# --- times -------------------------------------------------------------------------------------------------


def bench_row(row: Row, samples: int, regimes: Sequence[str], arch: str, device: str = "cuda") -> dict[str, Any]:
    shape = row.shape
    result: dict[str, Any] = {"kind": row.kind, "shape": asdict(shape), "label": shape.label}
    launches, sets = 1, 1
    if row.kind == "decode":
        sets = 1 + math.ceil(_CACHE_BYTES / shape.num_bytes)
        launches = sets * math.ceil(_DECODE_LAUNCHES / sets)
    problems = [make_problem(shape, device, seed) for seed in range(sets)]
    if row.kind == "curve":
        calls, result["shares"] = curve_calls(shape, problems[0], arch)
        deviations = [check(shape, problems[0], calls)]
    else:
        of_sets = [calls_of(shape, problem) for problem in problems]
        deviations = [check(shape, *one) for one in zip(problems, of_sets, strict=True)]
        calls = {name: timing.in_turn([one[name] for one in of_sets]) for name in of_sets[0]}
    result["deviations"] = {name: max(one[name] for one in deviations) for name in calls}
    counts, work = dict.fromkeys(calls, launches), dict.fromkeys(calls, float(shape.num_bytes))
    if row.kind == "decode":
        calls[READ], work[READ] = timing.read_call()
        counts[READ] = 1
    timed = timing.Regimes(calls, counts)
    for regime in regimes:
        times = timed.burst(samples) if regime == "burst" else timed.sustained(max(samples // 3, 3))
        result[regime] = rates(times, shape.flop) if row.kind != "decode" else bandwidths(times, work)
    return result


def rates(timings: Mapping[str, timing.Timing], flop: float) -> dict[str, dict[str, float]]:
    """Times, TFLOPS, and how many times those of the others, or of off, they are."""
    found = with_ratios(timings)
    for entry in found.values():
        entry["tflops"] = flop / entry["median_us"] / 1e6
    return found


def bandwidths(timings: Mapping[str, timing.Timing], num_bytes: Mapping[str, float]) -> dict[str, dict[str, float]]:
    found = with_ratios(timings)
    for name, entry in found.items():
        entry["tb_s"] = num_bytes[name] / entry["median_us"] / 1e6
    for entry in found.values():
        entry["of_read_bw"] = entry["tb_s"] / found[READ]["tb_s"]
    return found


def with_ratios(timings: Mapping[str, timing.Timing]) -> dict[str, dict[str, float]]:
    """Above 1: faster than the other."""
    found: dict[str, dict[str, float]] = {name: one.as_dict() for name, one in timings.items()}
    for base in (name for name in found if name.startswith((OFF, *OTHERS))):
        short = base.removesuffix("_repeated")
        for name in found.keys() - {base, READ}:
            found[name][f"x_{short}"] = found[base]["median_us"] / found[name]["median_us"]
    return found


def print_row(result: dict[str, Any]) -> None:
    cells = [f"{result['kind']:7} {result['label']:28}"]
    for regime in REGIMES:
        words = [regime]
        for name, entry in result.get(regime, {}).items():
            rate = f"{entry['tflops']:.1f}" if "tflops" in entry else f"{entry['tb_s']:.2f} TB/s"
            if name in result.get("shares", {}):
                words.append(f"{name} ({result['shares'][name]:.0%}) {rate}")
                continue
            ratios = [f"{key} {entry[key]:.3f}" for key in entry if key.startswith(("x_", "of_"))]
            words.append(f"{name} {entry['median_us']:.1f} us {rate}" + (f" ({', '.join(ratios)})" if ratios else ""))
        if len(words) > 1:
            cells.append(" ".join(words))
    print(" | ".join(cells), flush=True)


# --- picture -----------------------------------------------------------------------------------------------

LEGEND = {
    OURS: "deep_kernels",
    "cudnn": "cuDNN",
    "cudnn_repeated": "cuDNN, kv heads repeated",
    "torch_flash": "torch's flash",
    "torch_flash_repeated": "torch's flash, kv heads repeated",
    READ: "a large tensor read",
}


def plot(about: dict[str, Any], path: Path) -> None:
    """Prefill and decode as bars, curves against the share; of the first regime that a row has."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_kind = {kind: [row for row in about["results"] if row["kind"] == kind] for kind in KINDS}
    kinds = [kind for kind in KINDS if by_kind[kind]]
    figure, panels = pyplot.subplots(len(kinds), figsize=(13, 4.8 * len(kinds)), constrained_layout=True, squeeze=False)
    for axes, kind in zip(panels[:, 0], kinds, strict=True):
        if kind == "curve":
            plot_curves(axes, by_kind[kind])
        else:
            plot_bars(axes, by_kind[kind], *(("tflops", "TFLOPS") if kind == "prefill" else ("tb_s", "TB/s")))
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
        axes.legend(ncols=3, fontsize=8)
    panels[0, 0].set_title(f"{OP} on {about['card']}, bfloat16, {shown_regime(about['results'][0])}, medians")
    figure.savefig(path, dpi=150)


def shown_regime(row: Mapping[str, Any]) -> str:
    return next(regime for regime in REGIMES if regime in row)


def plot_bars(axes: Any, rows: Sequence[Mapping[str, Any]], key: str, unit: str) -> None:
    names = [name for name in LEGEND if any(name in row[shown_regime(row)] for row in rows)]
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        heights = [row[shown_regime(row)].get(name, {}).get(key, math.nan) for row in rows]
        places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(rows))]
        axes.bar(places, heights, width, label=LEGEND[name], color=f"C{list(LEGEND).index(name)}")
    axes.set_xticks(range(len(rows)), [row["label"].replace(" ", "\n") for row in rows], fontsize=7)
    axes.set_ylabel(unit)


def plot_curves(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        points = sorted((row["shares"][name], one["tflops"]) for name, one in row[shown_regime(row)].items())
        axes.plot(*zip(*points, strict=True), marker="o", label=row["label"])
    axes.set_xlabel("share of the exponentials that is emulated")
    axes.set_ylabel("TFLOPS")


# --- the command -------------------------------------------------------------------------------------------


def prepare(rows: Sequence[Row], arch: str) -> None:
    """Compiles side by side what the rows need."""
    cases = []
    for row in rows:
        emulations = ((0, 0), *emulations_of(row.shape, arch)) if row.kind == "curve" else (None,)
        cases += [{"op": OP, **row.shape.case(one)} for one in emulations]
    dk.prepare(cases)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timing.add_result_arguments(parser, "TFLOPS, bandwidth and curves")
    parser.add_argument("--samples", type=int, default=9, help="launches in a burst row; a third of it sustained")
    parser.add_argument(
        "--rows", nargs="+", metavar="WORD", help="only rows with all of them: prefill D256 causal, decode, curve"
    )
    parser.add_argument("--regime", choices=REGIMES, help="only this one; default: both")
    args = parser.parse_args()
    status = timing.settled(parser, args, plot)
    if status is not None:
        return status
    dk.set_pdl(False)
    rows = []
    for row in (row for row in ROWS if row.words >= set(args.rows or ())):
        if reason := row.shape.refusal():
            print(f"{row.kind:7} {row.shape.label:28} | left out: {reason}", flush=True)
        else:
            rows.append(row)
    arch = attention_problems.arch_of_card()
    prepare(rows, arch)
    regimes = (args.regime,) if args.regime else REGIMES
    measured = partial(bench_row, samples=args.samples, regimes=regimes, arch=arch)
    results = []
    try:
        for row in rows:
            results.append(measured(row))
            print_row(results[-1])
            gc.collect()
            torch.cuda.empty_cache()
    finally:  # what was measured before a wrong result is kept
        if results:
            timing.write_results(results, args.out, args.plot, plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
