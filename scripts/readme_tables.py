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


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    return content


def mqa_section(results: dict[str, Any]) -> list[str]:
    rows = results["results"]
    mx = [row for row in rows if "time_of_fp8" in row["variants"][BEST]]
    windows = [row for row in rows if "of_causal" in row["variants"][BEST]]
    plain = [row for row in rows if row not in mx and row not in windows]
    lines = [
        f"MQA logits, FP8, causal windows, cleaning included, {results['card']}, torch {results['torch']}; TFLOPS of "
        "useful work, and the share of `fp8_peak` (torch._scaled_mm 8192^3 in the same process).",
        "",
        *plain_table(plain),
        "",
    ]
    if mx:
        lines += [
            "MX formats, pre-passes included, against FP8 in the same process; blocks of a row differ by 2^-4 to 2^4.",
            "",
            *ratio_table(mx, "format", "time_of_fp8", "time of FP8's"),
            "",
        ]
    if windows:
        lines += [
            "FP8 with other windows, against the TFLOPS of causal ones in the same process.",
            "",
            *ratio_table(windows, "windows", "of_causal", "of causal"),
            "",
        ]
    return [*lines, "![TFLOPS against shape](benchmarks/results/mqa_logits.png)", ""]


def plain_table(rows: list[dict[str, Any]]) -> list[str]:
    """The column of folded sums only where some row has one."""
    has_folded = any(FOLDED in row["variants"] for row in rows)
    titles = ["queries / kv, heads, head_dim, logits", "us", "TFLOPS", "of fp8_peak", "sustained"]
    lines = [[*titles, "without schedule, us", *["folded, of fp8_peak"] * has_folded]]
    for row in rows:
        best, plain, folded = (row["variants"].get(name) for name in (BEST, "clean1_meta0", FOLDED))
        sustained = best.get("sustained_tflops")
        cells = [row["label"], f"{best['median_us']:.0f}", f"{best['tflops']:.0f}", f"{best['of_fp8_peak']:.2f}"]
        cells += [f"{sustained:.0f}" if sustained else "-", f"{plain['median_us']:.0f}"]
        lines.append(cells + [f"{folded['of_fp8_peak']:.2f}" if folded else "-"] * has_folded)
    return table(lines)


def ratio_table(rows: list[dict[str, Any]], field: str, ratio: str, title: str) -> list[str]:
    lines = [["queries / kv, heads, head_dim, logits", field, "us", "TFLOPS", title, "without schedule"]]
    for row in rows:
        best, plain = row["variants"][BEST], row["variants"]["clean1_meta0"]
        word = row["shape"][field]
        cells = [row["label"].removesuffix(f" {word}"), word, f"{best['median_us']:.0f}", f"{best['tflops']:.0f}"]
        lines.append([*cells, f"{best[ratio]:.2f}", f"{plain[ratio]:.2f}"])
    return table(lines)


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END, 1)[1]
    section = "\n".join([*mqa_section(load("mqa_logits.json")), *runtime_section(load("runtime.json"))])
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
