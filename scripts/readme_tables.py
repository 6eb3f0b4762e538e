#!/usr/bin/env python3
"""Writes the README's speed section from benchmarks/results; --check only says whether it is up to date."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "<!-- speed: made by scripts/readme_tables.py from benchmarks/results -->\n"
END = "<!-- /speed -->"
BEST, FOLDED = "clean1_meta1", "clean1_meta1_folded"  # variants of scripts/bench_mqa_logits.py
PAGED_BEST = "schedule"  # of scripts/bench_paged_mqa_logits.py


def results_of(name: str) -> Path:
    return ROOT / "benchmarks" / "results" / f"{name}.json"


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(results_of(name).read_text())
    return content


def mqa_section(results: dict[str, Any]) -> list[str]:
    rows = results["results"]
    variants = [row["variants"] for row in rows]
    optional = {
        "sustained": any("sustained_tflops" in one[BEST] for one in variants),
        "folded, of fp8_peak": any(FOLDED in one for one in variants),
        "of FP8, causal": any(of_plain(one) is not None for one in variants),
    }
    kept = [title for title, is_there in optional.items() if is_there]
    text = (
        f"MQA logits, cleaning included, {results['card']}, torch {results['torch']}; FP8 and causal windows unless "
        "the row says otherwise. TFLOPS of useful work, and their share of `fp8_peak` (torch._scaled_mm 8192^3 in the "
        "same process)."
    )
    if any("time_of_fp8" in one[BEST] for one in variants):
        text += " Times of MX formats hold their pre-passes; blocks of a row differ by 2^-4 to 2^4."
    if optional["of FP8, causal"]:
        text += " The last column is the rate against that of FP8 and causal windows at the same shape, same process."
    titles = ["queries / kv, heads, head_dim, logits", "us", "TFLOPS", "of fp8_peak", "without schedule, us"]
    lines = [titles + kept, *(mqa_cells(row, kept) for row in rows)]
    return [text, "", *table(lines), "", "![TFLOPS against shape](benchmarks/results/mqa_logits.png)", ""]


def mqa_cells(row: dict[str, Any], kept: list[str]) -> list[str]:
    best, derived, folded = (row["variants"].get(name) for name in (BEST, "clean1_meta0", FOLDED))
    cells = [row["label"], f"{best['median_us']:.0f}", f"{best['tflops']:.0f}", f"{best['of_fp8_peak']:.2f}"]
    optional = {
        "sustained": (best.get("sustained_tflops"), ".0f"),
        "folded, of fp8_peak": (folded and folded["of_fp8_peak"], ".2f"),
        "of FP8, causal": (of_plain(row["variants"]), ".2f"),
    }
    return [*cells, f"{derived['median_us']:.0f}", *(shown(*optional[title]) for title in kept)]


def of_plain(variants: dict[str, Any]) -> float | None:
    """The rate against that of FP8 and causal windows; None for those themselves."""
    best = variants[BEST]
    return 1 / best["time_of_fp8"] if "time_of_fp8" in best else best.get("of_causal")


def paged_section(results: dict[str, Any]) -> list[str]:
    """A line for every shape, formats side by side."""
    rows = results["results"]
    formats = list(dict.fromkeys(row["shape"]["format"] for row in rows))
    by_shape: dict[str, dict[str, Any]] = {}
    for row in rows:
        by_shape.setdefault(row["label"].split(" ", 1)[1], {})[row["shape"]["format"]] = row["rotating"]
    titles = ["requests, mean context, next_n, heads"]
    titles += [title for format in formats for title in (f"{format.upper()}, us", "of read_bw")]
    lines = [[*titles, "metadata, us"]]
    for label, found in by_shape.items():
        cells = [label]
        for format in formats:
            entry = found.get(format, {}).get(PAGED_BEST, {})
            cells += [shown(entry.get("median_us"), ".1f"), shown(entry.get("of_read_bw"), ".2f")]
        metadata = next(iter(found.values()))["metadata"]["median_us"]
        lines.append([*cells, f"{metadata:.1f}"])
    return [
        f"Paged MQA logits with a schedule, float32 logits, head_dim 128, {results['card']}, torch {results['torch']}. "
        "Contexts lie between 0.7 and 1.3 of their mean, in random pages of 64 tokens that come from memory: launches "
        "of a CUDA graph take turns on different pages. The share is that of bytes a second (kv tokens with their "
        "scales read once, logits written) in those of `read_bw` (a large tensor read in the same process); a token "
        "has 132 bytes, with MXFP4 68. The last column is what making the schedule takes.",
        "",
        *table(lines),
        "",
        "![share of the read bandwidth against shape](benchmarks/results/paged_mqa_logits.png)",
        "",
    ]


def silu_section(results: dict[str, Any]) -> list[str]:
    """A line for every model and number of tokens; weights that are in the cache, then such as are not."""
    titles = ["model, tokens", "fold, us", "two launches, us", "fold / two launches", "torch's GEMM alone, us"]
    titles += ["fold / torch's GEMM", "of fp8_peak", "cold: fold, us", "fold / two launches", "layer: the same ratio"]
    return [
        f"FP8 prefill MLP, {results['card']}, torch {results['torch']}: gate_up with activation and quantization, as "
        "the fold and as two launches, and torch's own block-scaled GEMM, which does neither. 2B is K=2048, I=6144, 8B "
        "K=4096, I=12288. The share of `fp8_peak` (torch._scaled_mm 8192^3, without block scales, in the same process) "
        "is that of the fold's TFLOPS. Cold: launches of a CUDA graph take turns on different weights. The last column "
        "is the time of all of `nn.SwiGLUMLP` with the fold in that without it.",
        "",
        *table([titles, *(silu_cells(row) for row in results["results"])]),
        "",
        "![TFLOPS against tokens](benchmarks/results/silu_fold.png)",
        "",
    ]


def silu_cells(row: dict[str, Any]) -> list[str]:
    warm, cold, layer = row["warm"], row.get("cold", {}), row["layer"]
    fold, cold_fold = warm["fold"], cold.get("fold", {})
    return [
        row["label"],
        f"{fold['median_us']:.1f}",
        f"{warm['two_launches']['median_us']:.1f}",
        f"{fold['time_of_two_launches']:.2f}",
        shown(warm.get("torch_gemm", {}).get("median_us"), ".1f"),
        shown(fold.get("time_of_torch_gemm"), ".2f"),
        f"{fold['of_fp8_peak']:.2f}",
        shown(cold_fold.get("median_us"), ".1f"),
        shown(cold_fold.get("time_of_two_launches"), ".2f"),
        f"{layer['fold']['time_of_two_launches']:.2f}",
    ]


def attention_section(results: dict[str, Any]) -> list[str]:
    """Prefill, decode and curves, each where there are rows of it."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for row in results["results"]:
        by_kind.setdefault(row["kind"], []).append(row)
    parts = {"prefill": attention_prefill, "decode": attention_decode, "curve": attention_curves}
    lines = [line for kind, part in parts.items() if kind in by_kind for line in (*part(by_kind[kind]), "")]
    return [
        f"Flash attention, bfloat16, {results['card']}, torch {results['torch']}, next to torch's "
        "scaled_dot_product_attention with cuDNN and with its own flash kernels in the same process. *Burst* is one "
        "launch after 25 ms of nothing, *sustained* 45 ms back to back at the power limit; x is how many times as "
        "fast. Causal work counts half.",
        "",
        *lines,
        "![TFLOPS, bandwidth, and curves of emulation](benchmarks/results/attention.png)",
        "",
    ]


def attention_figures(row: dict[str, Any], rate: tuple[str, str], ratios: tuple[str, ...]) -> list[str]:
    """Microseconds of a burst, and rate and ratios of both regimes."""
    found = [row.get(regime, {}).get("deep_kernels", {}) for regime in ("burst", "sustained")]
    cells = [shown(found[0].get("median_us"), ".1f")]
    for entry in found:
        cells += [shown(entry.get(rate[0]), rate[1]), *(shown(entry.get(ratio), ".2f") for ratio in ratios)]
    return [row["label"], *cells]


def attention_prefill(rows: list[dict[str, Any]]) -> list[str]:
    of_regime = ["TFLOPS", "x cuDNN", "x torch's flash"]
    titles = ["head_dim, batch x tokens, heads / kv heads", "us", *of_regime]
    titles += [f"sustained: {of_regime[0]}", *of_regime[1:]]
    return table([titles, *(attention_figures(row, ("tflops", ".0f"), ("x_cudnn", "x_torch_flash")) for row in rows)])


def attention_decode(rows: list[dict[str, Any]]) -> list[str]:
    of_regime = ["TB/s", "of read_bw", "x cuDNN", "x torch's flash"]
    titles = ["head_dim, batch x queries / keys, heads / kv heads", "us", *of_regime]
    titles += [f"sustained: {of_regime[0]}", *of_regime[1:]]
    ratios = ("of_read_bw", "x_cudnn", "x_torch_flash")
    return [
        "Few queries; launches take turns on different keys, which come from memory. The share is that in `read_bw`, a "
        "large tensor read in the same process.",
        "",
        *table([titles, *(attention_figures(row, ("tb_s", ".2f"), ratios) for row in rows)]),
    ]


def attention_curves(rows: list[dict[str, Any]]) -> list[str]:
    """TFLOPS by share, off twice: what a figure differs from itself."""
    regime = next(regime for regime in ("burst", "sustained") if all(regime in row for row in rows))
    lines = [["head_dim, batch x tokens, heads / kv heads", "off, again", "share of exponentials (freq/res): TFLOPS"]]
    for row in rows:
        tflops = {name: f"{entry['tflops']:.0f}" for name, entry in row[regime].items()}
        curve = [f"{row['shares'][name]:.0%} ({name}): {tflops[name]}" for name in tflops if row["shares"][name] > 0]
        lines.append([row["label"], f"{tflops['off']}, {tflops['again']}", ", ".join(curve)])
    return [f"Exponentials by a polynomial instead of the special function unit, {regime}:", "", *table(lines)]


def shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(lines: list[list[str]]) -> list[str]:
    """Markdown; the first line is the header."""
    header, *rest = (f"| {' | '.join(cells)} |" for cells in lines)
    return [header, "|---" * len(lines[0]) + "|", *rest]


def runtime_section(results: dict[str, Any]) -> list[str]:
    first, host = results["first_calls_s"], results["host_us"]
    return [
        f"First call in a new process on that machine: {first['cold']['next_kernel_s'] * 1000:.0f} ms with nothing "
        f"cached, {first['warm_disk']['next_kernel_s'] * 1000:.1f} ms with the kernel on disk. Host time per call: "
        f"{host['fp8_fp4_mqa_logits with schedule']:.1f} us, where torch.empty takes {host['torch.empty']:.1f} us.",
        "",
    ]


SECTIONS = {
    "mqa_logits": mqa_section,
    "paged_mqa_logits": paged_section,
    "silu_fold": silu_section,
    "attention": attention_section,
    "runtime": runtime_section,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END, 1)[1]
    section = "\n".join(
        line for name, lines in SECTIONS.items() if results_of(name).exists() for line in lines(load(name))
    )
    updated = f"{before}{BEGIN}\n{section}{END}{after}"
    if updated == text:
        return 0
    if args.check:
        print("README.md: the speed section is not what scripts/readme_tables.py makes", file=sys.stderr)
        return 1
    readme.write_text(updated)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
