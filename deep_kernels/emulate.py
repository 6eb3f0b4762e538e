"""Runs one case of an op on the host emulator and shows how its kernel moves: who waits for whom, step by step."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import deep_kernels

_CHECKOUT = Path(__file__).resolve().parents[1]
_PAGED = "fp8_fp4_paged_mqa_logits"
_OPS = ("fp8_fp4_mqa_logits", _PAGED, "get_mqa_logits_metadata")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument("op", choices=_OPS, metavar="OP", help=f"one of {', '.join(_OPS)}")
    parser.add_argument(
        "--shape",
        default="24,700,64,128",
        metavar="M,N,H,D",
        help="query tokens (paged: requests), kv tokens (of the longest), heads, head_dim (default %(default)s)",
    )
    parser.add_argument("--format", choices=("fp8", "mxfp8", "mxfp4"), default="fp8")
    parser.add_argument("--reduction", choices=("exact", "folded"), default="exact", help="not of the paged op")
    parser.add_argument("--next-n", type=int, default=1, metavar="N", help="paged: query tokens of a request")
    parser.add_argument("--block-kv", type=int, default=64, metavar="T", help="paged: kv tokens of a page")
    parser.add_argument("--arch", default="sm90", help="backend, target or both, as everywhere (default %(default)s)")
    parser.add_argument(
        "--windows",
        choices=("causal", "full", "ragged", "sparse"),
        default="causal",
        help="which kv tokens the query tokens see",
    )
    parser.add_argument("--clean", choices=("concurrent", "deferred", "off"), default="concurrent")
    parser.add_argument("--max-seqlen-k", type=int, default=0, metavar="K", help="compressed logits of K columns")
    parser.add_argument("--logits-dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--metadata", action="store_true", help="cut the work with get_mqa_logits_metadata first")
    parser.add_argument("--sms", type=int, default=2, metavar="N", help="SMs that the emulator has (default 2)")
    parser.add_argument("--seed", type=int, default=0, help="another order of threads and copies; 0 is the fixed one")
    parser.add_argument("--block", type=int, default=0, metavar="B", help="the block that the text shows (default 0)")
    parser.add_argument("--all-warps", action="store_true", help="every warp in the text, not one per role")
    parser.add_argument(
        "--html", type=Path, default=Path("emulate.html"), metavar="FILE", help="the picture (default %(default)s)"
    )


def _load() -> Any:
    """The emulator of the checkout, or None where there is none."""
    tests = _CHECKOUT / "tests"
    if not (tests / "emulator" / "__init__.py").exists():
        return None
    sys.path.insert(0, str(tests))
    try:
        return importlib.import_module("emulator")
    finally:
        sys.path.remove(str(tests))


def _refuse(sentence: str) -> int:
    print(f"emulate: {sentence}", file=sys.stderr)
    return 2


def _make_case(args: argparse.Namespace) -> Any:
    numbers = [int(word) for word in args.shape.split(",")]
    if len(numbers) != 4:
        raise ValueError
    num_q, num_kv, num_heads, head_dim = numbers
    if args.op == _PAGED:
        return importlib.import_module("emulator.paged_cases").PagedCase(
            batch=num_q,
            next_n=args.next_n,
            max_len=num_kv,
            width=num_kv,
            num_heads=num_heads,
            head_dim=head_dim,
            format=args.format,
            block_kv=args.block_kv,
            logits_dtype=getattr(torch, args.logits_dtype),
            clean=args.clean != "off",
            metadata=args.metadata,
            num_sms=args.sms,
        )
    return importlib.import_module("emulator.cases").MqaCase(
        num_q=num_q,
        num_kv=num_kv,
        num_heads=num_heads,
        head_dim=head_dim,
        logits_dtype=getattr(torch, args.logits_dtype),
        clean=args.clean,
        max_seqlen_k=args.max_seqlen_k,
        metadata=args.metadata or args.op == "get_mqa_logits_metadata",
        windows=args.windows,
        num_sms=args.sms,
        format=args.format,
        reduction=args.reduction,
    )


def _call(op: str, case: Any, arch: str) -> None:
    """The call that the command shows, on the installed emulator."""
    inputs = case.make_inputs()
    if op == _PAGED:
        importlib.import_module("emulator.paged_cases").run_paged(case, inputs, arch)
        return
    cases = importlib.import_module("emulator.cases")
    if op == "get_mqa_logits_metadata":
        schedule = cases.mqa_schedule(case, inputs, arch)
        print(f"(query block, chunk) of each cut: {schedule.view(-1, 2).tolist()}")
    else:
        cases.run_mqa(case, inputs, arch)


def run(args: argparse.Namespace) -> int:
    """Runs the command: 0 if the kernel ran, 1 for a fault in it, 2 with a sentence on what is wrong."""
    emulator = _load()
    if emulator is None:
        return _refuse("needs a checkout of the project; an installed package does not hold the emulator")
    try:
        emulator.build.compiler()
    except emulator.CompilerMissing as missing:
        return _refuse(str(missing))
    timeline = importlib.import_module("emulator.timeline")
    try:
        case = _make_case(args)
    except ValueError:
        return _refuse(f"--shape must be four integers M,N,H,D, got '{args.shape}'")
    if args.sms < 1:
        return _refuse(f"--sms must be at least 1, got {args.sms}")
    if case.format != "fp8" and (case.head_dim < 32 or case.head_dim % 32):
        return _refuse(f"head_dim must be a multiple of 32 with MX formats, got {case.head_dim}")

    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "events"
        machine = emulator.Emulator(seed=args.seed, trace_file=str(trace))
        try:
            with emulator.installed(machine, args.sms):
                _call(args.op, case, f"emulator:{args.arch}")
        except emulator.EmulatorError as fault:
            print(fault)
            return 1
        except (ValueError, deep_kernels.UnsupportedError) as refusal:
            return _refuse(str(refusal))
        if not trace.exists():
            return _refuse("there is nothing to compute in this shape, so no kernel ran")
        blocks = timeline.read_events(trace)
    launch = machine.launches[-1]
    title = f"{launch['op']} on {args.arch}, {case}"
    args.html.write_text(timeline.page(title, blocks))
    print(f"{title}\n{launch['spec']}")
    if args.block >= len(blocks):
        return _refuse(f"--block must be below the number of blocks, {len(blocks)}, got {args.block}")
    print(timeline.describe(blocks[args.block], all_warps=args.all_warps))
    print(f"\n{len(blocks)} blocks of {launch['grid']} drawn in {args.html}")
    return 0
