#!/usr/bin/env python3
"""Compiles every legal kernel for the named archs, on any machine, and checks what the assembler made of each.

    scripts/compile_all.py                                        every kernel of every known target
    scripts/compile_all.py --arch sm_90a,sm89:sm_90a --kernel mqa_logits
    scripts/compile_all.py --subset pairwise                      every value of every field, in pairs
    scripts/compile_all.py --out prebuilt                         usable as DEEP_KERNELS_PREBUILT_DIR

Exit status: 0 if every kernel is sound; 1, with one line per offender, if one does not compile, spills more than
its Spec allows, has its wgmma pipeline serialized or holds another number of wgmma than its Spec implies; 2 if
nothing could be done.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

# Machine code of Hopper's wgmma: half, quarter (8 bit), integer and binary operands.
WGMMA = re.compile(r"\b[HQIB]GMMA\b")

Spec = Mapping[str, Any]
Report = Mapping[str, Any]  # entry, origin, file, about, seconds, as deep_kernels.prepare gives it


@dataclass(frozen=True)
class Job:
    arch: str
    kernel: str
    spec: Spec
    build: Callable[[], Report]

    def __str__(self) -> str:
        fields = " ".join(f"{name}={value}" for name, value in self.spec.items())
        return f"{self.arch} {self.kernel} {fields}"


@dataclass
class Row:
    """One line of the summary: a kernel on an arch."""

    kernels: int = 0
    compiled: int = 0
    cached: int = 0
    registers: int = 0
    seconds: float = 0.0
    faults: list[str] = field(default_factory=list)  # one line per kernel


def pairwise(specs: Sequence[Spec]) -> list[int]:
    """Indices of a small part of `specs` that holds every pair of field values that occurs in any of them.

    Greedy, the first of equals: at every step the Spec with the most pairs not yet seen.
    """
    pairs = [set(combinations(sorted((name, str(value)) for name, value in spec.items()), 2)) for spec in specs]
    singles = [{((name, str(value)),) for name, value in spec.items()} for spec in specs]
    wanted: list[set[Any]] = [one | two for one, two in zip(singles, pairs, strict=True)]
    missing = set().union(*wanted)
    chosen = []
    while missing:
        best = max(range(len(wanted)), key=lambda i: (len(wanted[i] & missing), -i))
        chosen.append(best)
        missing -= wanted[best]
    return sorted(chosen)


def collect(arch: str, only: Sequence[str] = (), subset: str | None = None) -> list[Job]:
    """The jobs of one arch; `only` are kernel names, all by default."""
    from deep_kernels import _C

    by_kernel: dict[str, list[Job]] = defaultdict(list)
    for kernel, spec, build in _C.legal_specs(arch):
        by_kernel[kernel].append(Job(arch, kernel, json.loads(spec), build))
    unknown = sorted(set(only) - set(by_kernel))
    if unknown:
        raise ValueError(f"{arch} has no kernel named {', '.join(unknown)}; it has {', '.join(by_kernel)}")
    jobs = []
    for kernel, found in by_kernel.items():
        if only and kernel not in only:
            continue
        if subset == "pairwise":
            found = [found[i] for i in pairwise([job.spec for job in found])]
        jobs += found
    return jobs


def problems_of(about: Mapping[str, Any], num_wgmma: int | None) -> list[str]:
    """What is wrong with an entry; `num_wgmma` as counted in its machine code, None if nothing could count."""
    from deep_kernels.inspector import spilled_bytes

    found = []
    spilled = spilled_bytes(about)
    if spilled > about["spill_limit_bytes"]:
        found.append(f"spills {spilled} bytes, {about['spill_limit_bytes']} are allowed")
    if about["wgmma_serialized"]:
        found.append("its wgmma are serialized")
    if num_wgmma is not None and num_wgmma != about["num_wgmma"]:
        found.append(f"holds {num_wgmma} wgmma, its Spec implies {about['num_wgmma']}")
    return found


def check(report: Report, with_wgmma: bool) -> list[str]:
    """What is wrong with a kernel that was built."""
    from deep_kernels import inspector

    about = json.loads(report["about"])
    if not report["file"]:
        return [*problems_of(about, None), "could not be written"]
    # Other targets have no wgmma at all: the assembler refuses it.
    if not with_wgmma or not about["target"].startswith("sm_90"):
        return problems_of(about, None)
    entry = inspector.read_entry(Path(report["file"]))
    if entry.fault:
        return [f"cannot be read back: {entry.fault}"]
    return problems_of(about, len(WGMMA.findall(inspector.sass(entry))))


def run(job: Job, with_wgmma: bool) -> tuple[Report | None, list[str]]:
    """Builds and checks one kernel; an exception becomes a problem, so that the others go on."""
    from deep_kernels import CompileError
    from deep_kernels.inspector import InspectorError

    try:
        report = job.build()
    except CompileError as error:
        lines = str(error).splitlines()
        reason = next((line for line in lines if "error" in line), lines[0])
        return None, [f"does not compile: {reason.strip()}"]
    try:
        return report, check(report, with_wgmma)
    except (InspectorError, OSError) as error:
        return report, [f"cannot be checked: {error}"]


def compile_jobs(
    jobs: Sequence[Job],
    num_jobs: int,
    with_wgmma: bool,
    progress: Callable[[Iterable[Any], int], Iterable[Any]] = lambda futures, total: futures,
) -> dict[tuple[str, str], Row]:
    """Threads are enough: NVRTC and the extension release the interpreter lock and compile side by side."""
    rows: dict[tuple[str, str], Row] = {(job.arch, job.kernel): Row() for job in jobs}
    problems: dict[int, list[str]] = {}
    pool = ThreadPoolExecutor(max_workers=num_jobs)
    try:
        futures = {pool.submit(run, job, with_wgmma): i for i, job in enumerate(jobs)}
        for future in progress(as_completed(futures), len(jobs)):
            index = futures[future]
            job = jobs[index]
            report, problems[index] = future.result()
            row = rows[job.arch, job.kernel]
            row.kernels += 1
            if report is not None:
                row.compiled += report["origin"] == "compiled"
                row.cached += report["origin"] != "compiled"
                row.registers = max(row.registers, json.loads(report["about"])["registers"])
                row.seconds += report["seconds"]
    finally:
        pool.shutdown(cancel_futures=True)
    for index, job in enumerate(jobs):
        if problems[index]:
            rows[job.arch, job.kernel].faults.append(f"{job}: {'; '.join(problems[index])}")
    return rows


def render(rows: Mapping[tuple[str, str], Row], seconds: float) -> str:
    head = ("arch", "kernel", "kernels", "compiled", "cached", "faulty", "registers", "seconds")
    table: list[tuple[str, ...]] = [head]
    for (arch, kernel), row in rows.items():
        counts = (row.kernels, row.compiled, row.cached, len(row.faults), row.registers)
        table.append((arch, kernel, *map(str, counts), f"{row.seconds:.1f}"))
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    lines = []
    for line in table:
        names = [cell.ljust(width) for cell, width in zip(line[:2], widths[:2], strict=True)]
        numbers = [cell.rjust(width) for cell, width in zip(line[2:], widths[2:], strict=True)]
        lines.append("  ".join(names + numbers))
    total = sum(row.kernels for row in rows.values())
    lines.append(f"{total} kernels in {seconds:.1f} s; registers: the most at a launch; seconds: summed over kernels")
    return "\n".join(lines)


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arch", action="extend", type=words, help='"sm_89,sm_90a,sm89:sm_90a"; default: every known')
    parser.add_argument("--kernel", action="extend", type=words, default=[], help="only these, as --list names them")
    parser.add_argument("--subset", choices=["pairwise"], help="a small part that has every pair of field values")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="kernels at a time")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where kernels go instead of the cache")
    parser.add_argument("--list", action="store_true", help="print the kernels, compile nothing")
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error("--jobs must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    try:
        import deep_kernels
        from deep_kernels import _C, inspector
    except ImportError as error:
        print(f"deep_kernels is not installed for {sys.executable} ({error}): run scripts/setup.sh", file=sys.stderr)
        return 2
    # What lies in a prebuilt folder would neither be compiled nor written.
    os.environ.pop("DEEP_KERNELS_PREBUILT_DIR", None)
    if args.out:
        os.environ["DEEP_KERNELS_CACHE_DIR"] = str(args.out.absolute())
    try:
        jobs = [job for arch in args.arch or _C.known_targets() for job in collect(arch, args.kernel, args.subset)]
        if not args.list:
            _C.nvrtc()
    except (ValueError, deep_kernels.UnsupportedError, deep_kernels.CompileError) as error:
        print(str(error), file=sys.stderr)
        return 2
    if args.list:
        print("\n".join(map(str, jobs)))
        return 0
    with_wgmma = inspector.disassembler() is not None
    if not with_wgmma:
        print("no disassembler in torch's triton package or on PATH: wgmma are not counted", file=sys.stderr)

    begin = time.monotonic()
    rows = compile_jobs(jobs, args.jobs, with_wgmma, progress_bar)
    print(render(rows, time.monotonic() - begin))
    faults = [fault for row in rows.values() for fault in row.faults]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


def progress_bar(futures: Iterable[Any], total: int) -> Iterable[Any]:
    try:
        from tqdm import tqdm
    except ImportError:  # only of the test extra
        return futures
    bar: Iterable[Any] = tqdm(futures, total=total, unit="kernel", disable=None, smoothing=0.1)
    return bar


if __name__ == "__main__":
    sys.exit(main())
