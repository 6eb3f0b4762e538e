#!/usr/bin/env python3
"""Counts register bank conflicts in the reductions of the dense MQA logits kernels for sm_90a.

    python scripts/bank_conflicts.py --heads 64 --head-dim 128

Needs no card: kernels are compiled (or taken from the cache) and disassembled by the nvdisasm of torch's triton. A
warp's registers lie in two banks, the even and the odd ones. While a tile is reduced other warps' wgmma use the same
register file, and two neighbouring instructions that read one bank more than twice hold the warp up. Printed for each
kernel: such pairs per inner tile. Measured on an H200 at 2048 / 32768, 64 heads: 40 per tile run at 0.91 of the FP8
peak, 55 at 0.88, 88 at 0.82 (benchmarks/notes_mqa.md).
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from deep_kernels import _C

_TARGET = "sm_90a"
_INNER_TILES = 4
_READS = ("FFMA", "FMNMX", "FMUL", "FADD", "FSEL")  # what a reduction is made of


def disassembler() -> str:
    """nvdisasm, which triton carries; torch brings triton."""
    import triton

    return str(Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm")


def instructions(cubin: bytes) -> list[str]:
    """The machine code's instructions, without addresses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [disassembler(), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(.*?);", text)
    return [line.strip() for line in found]


def bank_reads(code: list[str]) -> list[tuple[int, int]]:
    """Reads of the even and the odd bank per instruction; what the one before marked for reuse is not read again."""
    reads = []
    kept: dict[int, int] = {}
    for line in code:
        match = re.match(r"(?:@!?U?P\d+ +)?(\S+) +(.*)", line)
        operands = match[2].split(",")[1:] if match and match[1].startswith(_READS) else []
        count = [0, 0]
        keeps = {}
        for slot, operand in enumerate(operands):
            register = re.match(r"\s*[-|]*R(\d+)(\.reuse)?", operand)
            if not register:
                continue
            number = int(register[1])
            if kept.get(slot) != number:
                count[number % 2] += 1
            if register[2]:
                keeps[slot] = number
        kept = keeps
        reads.append((count[0], count[1]))
    return reads


def conflicts(code: list[str]) -> int:
    """Reads beyond two of one bank, over all pairs of neighbours."""
    reads = bank_reads(code)
    return sum(max(0, max(a[0] + b[0], a[1] + b[1]) - 2) for a, b in itertools.pairwise(reads))


def tiles(code: list[str]) -> Iterator[list[str]]:
    """From the wait for a tile's scores to the next tile's start."""
    for start, line in enumerate(code):
        if "QGMMA" not in line or "gsb0" not in line:
            continue
        first = next(i for i in range(start, len(code)) if "DEPBAR" in code[i])
        last = next(i for i in range(first, len(code)) if "WARPGROUP.ARRIVE" in code[i] or "BRA" in code[i])
        yield code[first:last]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, help="padded head count, 8 to 128")
    parser.add_argument("--head-dim", type=int)
    parser.add_argument("--format", choices=("fp8", "mxfp8", "mxfp4"))
    args = parser.parse_args()
    wanted = {"num_heads": args.heads, "head_dim": args.head_dim, "format": args.format}
    for op, text, build in _C.legal_specs(_TARGET):
        spec = json.loads(text)
        if op != "mqa_logits" or any(value is not None and spec[name] != value for name, value in wanted.items()):
            continue
        code = instructions(_C.read_entry(build()["file"])["cubin"])
        counts = [conflicts(tile) for tile in tiles(code)][:_INNER_TILES]
        words = [str(value) for name, value in spec.items() if name not in ("backend", "kv_stages")]
        print(f"{' '.join(words):60} {counts} {sum(counts)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
