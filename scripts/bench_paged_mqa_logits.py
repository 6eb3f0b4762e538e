#!/usr/bin/env python3
"""Times fp8_fp4_paged_mqa_logits against what the card reads from memory, in one process.

    python scripts/bench_paged_mqa_logits.py --out benchmarks/results/paged_mqa_logits.json \\
        --plot benchmarks/results/paged_mqa_logits.png

Contexts are uniform in 0.7 to 1.3 of the mean, pages of 64 tokens lie at random. Bytes = those of the kv tokens that
are seen, with their scales, and 4 per logit. Two ways of timing, both from CUDA graphs whose second replay is timed:

  one graph   a launch to a graph; the kv tokens are those of the replay before, as far as the L2 cache holds them
  rotating    16 or 32 launches to a graph, over sets of different pages, so that they come from memory
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import timing
from mqa_problems import dequantized, with_block_factors

import deep_kernels as dk
from deep_kernels import formats

HEAD_DIM = 128
BLOCK_KV = 64
_COLD_BYTES = 160 << 20  # of kv tokens in all sets: several times an L2 cache
_CHUNK_TOKENS = 1 << 20  # that are quantized at a time


@dataclass(frozen=True)
class Shape:
    batch: int
    mean_context: int
    next_n: int
    num_heads: int = 64
    format: str = "fp8"

    @property
    def label(self) -> str:
        return f"{self.format} B{self.batch} L{self.mean_context} n{self.next_n} H{self.num_heads}"

    @property
    def token_bytes(self) -> int:
        return (HEAD_DIM // 2 if self.format == "mxfp4" else HEAD_DIM) + 4

    def refusal(self) -> str | None:
        """Why it cannot run, or None."""
        case = {"format": self.format, "num_heads": self.num_heads, "head_dim": HEAD_DIM, "next_n": self.next_n}
        return dk.supported("fp8_fp4_paged_mqa_logits", **case)


ROWS = (
    Shape(1, 32768, 1),
    Shape(16, 32768, 1),
    Shape(64, 8192, 1),
    Shape(64, 8192, 2),
    Shape(256, 8192, 1),
    Shape(256, 8192, 2),
    Shape(64, 65536, 1),
    Shape(64, 65536, 2),
    Shape(256, 65536, 1),
)


@dataclass
class Problem:
    """Some sets of pages with a table each; all else is the same for all of them."""

    shape: Shape
    q: tuple[Tensor, Tensor | None]
    weights: Tensor
    lens: Tensor
    kv_cache: Tensor
    tables: list[Tensor]

    @property
    def width(self) -> int:
        return int(self.lens.max())

    @property
    def num_bytes(self) -> int:
        """Read and written by one call."""
        tokens = int(self.lens.sum(dtype=torch.int64))
        hidden = self.shape.batch * self.shape.next_n * (self.shape.next_n - 1) // 2
        return tokens * self.shape.token_bytes + 4 * (tokens * self.shape.next_n - hidden)

    def arguments(self, which: int) -> tuple[Any, ...]:
        return (self.q, self.kv_cache, self.weights, self.lens, self.tables[which])


def quantized(shape: Shape, generator: torch.Generator, *size: int) -> tuple[Tensor, Tensor]:
    """Values and scale of normal numbers; with MX formats the blocks differ."""
    x = torch.randn(*size, device=generator.device, generator=generator)
    if shape.format != "fp8":
        x = with_block_factors(x, generator)
    values, scale = getattr(formats, f"quantize_{shape.format}")(x)
    return values, scale


def random_pages(shape: Shape, num_pages: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Pages of random tokens, in pieces."""
    for first in range(0, num_pages, _CHUNK_TOKENS // BLOCK_KV):
        count = min(_CHUNK_TOKENS // BLOCK_KV, num_pages - first)
        yield formats.pack_paged_kv(*quantized(shape, generator, count * BLOCK_KV, HEAD_DIM), BLOCK_KV)


def make_problem(shape: Shape, device: str = "cuda", seed: int = 0) -> Problem:
    """Random inputs: zeros would draw less power and run faster."""
    generator = torch.Generator(device).manual_seed(seed)
    low, high = int(0.7 * shape.mean_context), int(1.3 * shape.mean_context)
    lens = torch.randint(low, high + 1, (shape.batch,), generator=generator, dtype=torch.int32, device=device)
    pages_of = (lens.long() + BLOCK_KV - 1) // BLOCK_KV
    per_set = int(pages_of.sum())
    num_sets = min(32, max(4, -(-_COLD_BYTES // (per_set * BLOCK_KV * shape.token_bytes))))

    places = torch.randperm(num_sets * per_set, generator=generator, device=device, dtype=torch.int32)
    max_blocks = int(pages_of.max())
    exists = torch.arange(max_blocks, device=device) < pages_of[:, None]
    tables = [torch.zeros(shape.batch, max_blocks, dtype=torch.int32, device=device) for _ in range(num_sets)]
    for table, place in zip(tables, places.view(num_sets, per_set), strict=True):
        table[exists] = place

    q, q_scale = quantized(shape, generator, shape.batch, shape.next_n, shape.num_heads, HEAD_DIM)
    return Problem(
        shape,
        (q, None if shape.format == "fp8" else q_scale),
        torch.randn(shape.batch * shape.next_n, shape.num_heads, device=device, generator=generator),
        lens,
        torch.cat(list(random_pages(shape, num_sets * per_set, generator))),
        tables,
    )


def metadata_of(problem: Problem) -> Tensor:
    return dk.get_paged_mqa_logits_metadata(problem.lens, BLOCK_KV, dk.get_num_sms())


def logits_calls(problem: Problem, schedule: Tensor | None) -> list[Callable[[], Tensor]]:
    """One call per set of pages."""
    return [
        partial(dk.fp8_fp4_paged_mqa_logits, *problem.arguments(i), schedule, problem.width)
        for i in range(len(problem.tables))
    ]


def other_libraries(problem: Problem) -> dict[str, list[Callable[[], Any]]]:
    """The same calls of other libraries, where they are installed."""
    try:
        deep_gemm = importlib.import_module("deep_gemm")
    except ImportError:
        return {}
    if problem.shape.format != "fp8":
        return {}
    lens = problem.lens
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, BLOCK_KV, deep_gemm.get_num_sms())
    calls: list[Callable[[], Any]] = [
        partial(
            deep_gemm.fp8_paged_mqa_logits, problem.q[0], problem.kv_cache, problem.weights, lens, table, schedule,
            problem.width, clean_logits=False,
        )
        for table in problem.tables
    ]  # fmt: skip
    return {"deep_gemm": calls}


def check(problem: Problem, calls: Sequence[Callable[[], Tensor]]) -> float:
    """Largest deviation of a request's last row from float64, relative to its largest logit; in two sets of pages."""
    shape = problem.shape
    worst = 0.0
    for which, request in ((0, 0), (len(calls) - 1, shape.batch - 1)):
        length = int(problem.lens[request])
        pages = problem.tables[which][request, : -(-length // BLOCK_KV)].long()
        values, scale = formats.unpack_paged_kv(problem.kv_cache[pages], shape.format, HEAD_DIM)
        q, q_scale = problem.q
        query = dequantized(q[request, -1], None if q_scale is None else q_scale[request, -1], shape.format)
        at = (request + 1) * shape.next_n - 1
        scores = (query @ dequantized(values, scale, shape.format).T).relu()
        expected = problem.weights[at].double() @ scores
        if shape.format == "fp8":
            expected = expected * scale.double()
        difference = calls[which]()[at, :length].double() - expected[:length]
        worst = max(worst, float(difference.abs().amax() / expected[:length].abs().amax()))
    if not worst < 1e-3:  # the tensor cores keep about 14 bits of an e4m3 dot product
        raise SystemExit(f"{shape.label}: wrong result, relative deviation {worst:.2e}")
    return worst


def bench_shape(shape: Shape, samples: int, device: str = "cuda") -> dict[str, Any]:
    problem = make_problem(shape, device)
    scheduled = logits_calls(problem, metadata_of(problem))
    deviation = check(problem, scheduled)
    read, read_bytes = timing.read_call()
    variants: dict[str, list[Callable[[], Any]]] = {
        "schedule": scheduled,
        "derived": logits_calls(problem, None),
        **other_libraries(problem),
    }
    others: dict[str, Callable[[], Any]] = {
        "read_bw": read,
        "empty": timing.empty_call(),
        "metadata": partial(metadata_of, problem),
    }
    launches = max(16, len(problem.tables))
    ways = {
        "one_graph": timing.measure(
            {**others, **{name: calls[0] for name, calls in variants.items()}}, samples, calls=1
        ),
        "rotating": timing.measure(
            {**others, **{name: timing.in_turn(calls) for name, calls in variants.items()}},
            samples,
            calls={"read_bw": 1, "empty": launches, "metadata": launches, **dict.fromkeys(variants, launches)},
        ),
    }
    result: dict[str, Any] = {
        "shape": asdict(shape),
        "label": shape.label,
        "deviation": deviation,
        "bytes": problem.num_bytes,
        "sets": len(problem.tables),
    }
    for way, timings in ways.items():
        read_gbps = read_bytes / timings["read_bw"].median_us / 1e3
        entries: dict[str, Any] = {}
        for name, value in timings.items():
            entries[name] = value.as_dict()
            if name == "read_bw" or name in variants:
                num_bytes = read_bytes if name == "read_bw" else problem.num_bytes
                entries[name]["gb_per_s"] = num_bytes / value.median_us / 1e3
                entries[name]["of_read_bw"] = entries[name]["gb_per_s"] / read_gbps
        result[way] = entries
    return result


def print_row(result: dict[str, Any]) -> None:
    cells = [f"{result['label']:28}"]
    for way in ("rotating", "one_graph"):
        words = [way]
        for name, entry in result[way].items():
            share = f" ({entry['of_read_bw']:.3f})" if "of_read_bw" in entry and name != "read_bw" else ""
            shown = f"{entry['gb_per_s']:.0f} GB/s" if name == "read_bw" else f"{entry['median_us']:.1f} us"
            words.append(f"{name} {shown}{share}")
        cells.append(" ".join(words))
    print(" | ".join(cells), flush=True)


def plot(about: dict[str, Any], path: Path) -> None:
    """The share of read_bw, rotating, with a schedule: formats side by side, a panel for every number of heads."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shapes = [Shape(**result["shape"]) for result in about["results"]]
    share = {
        shape: result["rotating"]["schedule"]["of_read_bw"]
        for shape, result in zip(shapes, about["results"], strict=True)
    }
    heads = list(dict.fromkeys(shape.num_heads for shape in shapes))
    names = list(dict.fromkeys(shape.format for shape in shapes))
    figure, panels = pyplot.subplots(len(heads), figsize=(11, 3.6 * len(heads)), constrained_layout=True, squeeze=False)
    width = 0.8 / len(names)
    for axes, num_heads in zip(panels[:, 0], heads, strict=True):
        rows = list(dict.fromkeys(replace(shape, format="fp8") for shape in shapes if shape.num_heads == num_heads))
        for i, name in enumerate(names):
            heights = [share.get(replace(row, format=name), math.nan) for row in rows]
            places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(rows))]
            axes.bar(places, heights, width, label=name.upper())
        axes.set_xticks(range(len(rows)), [f"B{row.batch} L{row.mean_context}\nn{row.next_n}" for row in rows])
        axes.set_ylabel(f"share of read_bw, {num_heads} heads")
        axes.set_ylim(0, 1)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    panels[0, 0].set_title(f"fp8_fp4_paged_mqa_logits, pages that come from memory, on {about['card']}")
    panels[0, 0].legend(ncols=len(names), loc="upper left")
    panels[-1, 0].set_xlabel("requests, mean context, next_n")
    figure.savefig(path, dpi=150)


def words_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated words, each one of the known."""

    def parse(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"must be some of {', '.join(known)}, got '{word}'")
        return words

    return parse


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    timing.add_result_arguments(parser, "shares against shape")
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument("--rows", type=int, default=len(ROWS), help="only the first rows of the table")
    parser.add_argument("--heads", type=words_of(("32", "64", "128")), default=["64", "32"], help="64,32")
    parser.add_argument("--formats", type=words_of(formats.FORMATS), default=list(formats.FORMATS), help="fp8,mxfp8")
    args = parser.parse_args()
    status = timing.settled(parser, args, plot)
    if status is not None:
        return status
    dk.set_pdl(False)
    results = []
    for row, heads, format in itertools.product(ROWS[: args.rows], args.heads, args.formats):
        shape = replace(row, num_heads=int(heads), format=format)
        if reason := shape.refusal():
            print(f"{shape.label} left out: {reason}", flush=True)
            continue
        results.append(bench_shape(shape, args.samples))
        print_row(results[-1])
        gc.collect()
        torch.cuda.empty_cache()
    timing.write_results(results, args.out, args.plot, plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
