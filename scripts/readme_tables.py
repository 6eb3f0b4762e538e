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


def load(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    return content


def mqa_section(results: dict[str, Any]) -> list[str]:
    lines = [
        f"MQA logits, FP8, causal windows, cleaning included, {results['card']}, torch {results['torch']}; TFLOPS of "
        "useful work, and the share of `fp8_peak` (torch._scaled_mm 8192^3 in the same process).",
        "",
        "| queries / kv, heads, head_dim, logits | us | TFLOPS | of fp8_peak | sustained | without schedule, us |",
        "|---|---|---|---|---|---|",
    ]
    for result in results["results"]:
        best, plain = result["variants"]["clean1_meta1"], result["variants"]["clean1_meta0"]
        sustained = best.get("sustained_tflops")
        lines.append(
            f"| {result['label']} | {best['median_us']:.0f} | {best['tflops']:.0f} | {best['of_fp8_peak']:.2f} "
            f"| {f'{sustained:.0f}' if sustained else '-'} | {plain['median_us']:.0f} |"
        )
    return [*lines, "", "![TFLOPS against shape](benchmarks/results/mqa_logits.png)", ""]


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
