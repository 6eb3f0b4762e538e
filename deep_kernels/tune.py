"""Measures choices that are not arithmetic on the card at hand and writes their tables into the checkout."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

_SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
OPS = {  # the script that measures each
    "mqa_logits": "tune_mqa_clean",
    "silu_fold": "tune_silu_fold",
    "attention": "tune_ex2_emu",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument(
        "--arch",
        help="backend, target or both whose kernels are measured; default: the card's (silu_fold: all it runs)",
    )
    parser.add_argument(
        "--formats", nargs="+", choices=("fp8", "mxfp8", "mxfp4"), help="of mqa_logits, only these; default: all"
    )
    parser.add_argument("--samples", type=int, default=40, metavar="N", help="rounds per shape (default %(default)s)")
    parser.add_argument("--save", type=Path, metavar="JSON", help="keep every measured time there")
    parser.add_argument("--load", type=Path, metavar="JSON", help="measure nothing, decide by times kept earlier")
    parser.add_argument("--table", type=Path, metavar="FILE", help="the table to update; default: the checkout's")
    parser.add_argument("--dry-run", action="store_true", help="print the table instead of writing it")
    parser.add_argument("--check", action="store_true", help="measure nothing, only say whether the table is intact")


def run(args: argparse.Namespace) -> int:
    """Runs the command: 0 if the table is written or intact, 1 if it is not, 2 with a sentence on what is missing."""
    if not (_SCRIPTS / f"{OPS[args.op]}.py").exists():
        print("tune: needs a checkout of the project, whose tables it writes", file=sys.stderr)
        return 2
    sys.path.insert(0, str(_SCRIPTS))
    try:
        script = importlib.import_module(OPS[args.op])
    finally:
        sys.path.remove(str(_SCRIPTS))
    status: int = script.tune(args)
    return status
