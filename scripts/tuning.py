"""What the tuners share: settings for a block, statistics of a rotation, texts of tables, and the command itself."""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

Times = dict[str, Any]  # of one card: gpu, date, and what else a tuner keeps of a run
Table = TypeVar("Table")

STRING = r'"([^"\\]*)"'  # of a table's row
TABLE_TAIL = """\
};
// clang-format on

}  // namespace deep_kernels
"""


@contextmanager
def setting(name: str, value: str) -> Iterator[None]:
    """Calls within the block see it; the library reads its variables at every call."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@dataclass(frozen=True)
class Paired:
    """Microseconds of two variants; equal positions are of one round of a rotation, and drift together."""

    first: Sequence[float]
    second: Sequence[float]

    def log_ratios(self) -> list[float]:
        return [math.log(b / a) for a, b in zip(self.first, self.second, strict=True)]

    def log_ratio(self) -> float:
        """Above 0: the second takes longer."""
        return statistics.median(self.log_ratios())

    def variance(self) -> float:
        """Of that median, from the median deviation of the rounds, which a few disturbed ones do not move."""
        ratios, middle = self.log_ratios(), self.log_ratio()
        deviation = 1.4826 * statistics.median(abs(ratio - middle) for ratio in ratios)
        return math.pi / 2 * deviation**2 / len(ratios)


def require_written(text: str, rendered: str) -> None:
    """Of the rows that were read from the text of a table: it must be what the tuner writes of them."""
    if rendered != text:
        raise ValueError("the table is not what the tuner writes: it was changed by hand")


def require_plain(row: object, *texts: str) -> None:
    """That the texts of a row may stand between quotes."""
    if any(set(text) & set('"\\\n') for text in texts):
        raise ValueError(f"a row's texts must be without quotes, backslashes and line ends, got {row}")


def run(
    args: argparse.Namespace,
    file: Path,
    parse: Callable[[str], Table],
    measure: Callable[[], Times],
    updated: Callable[[Table, Times], str],
) -> int:
    """The command with the options of deep_kernels/tune.py; errors are exceptions with one sentence.

    `file` is the table, unless the options name another; `updated` makes its new text of its rows and of times.
    """
    file = args.table or file
    table = parse(file.read_text(encoding="utf-8"))
    if args.check:
        return 0
    if args.load:
        times = json.loads(args.load.read_text(encoding="utf-8"))
    else:
        if not torch.cuda.is_available():
            raise RuntimeError("tune: a CUDA device is needed, torch sees none")
        if args.samples < 2:
            raise ValueError(f"tune: --samples must be at least 2, got {args.samples}")
        times = measure()
    if args.save:
        args.save.write_text(json.dumps(times, indent=1) + "\n", encoding="utf-8")
    text = updated(table, times)
    if args.dry_run:
        print(text, end="")
    else:
        file.write_text(text, encoding="utf-8")
        print(f"{file} has the rows of {times['gpu']}; build the extension again", file=sys.stderr)
    return 0


def main(description: str | None, add_arguments: Callable[[argparse.ArgumentParser], None], tune: Any) -> int:
    """A tuner run as a script of its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    try:
        status: int = tune(parser.parse_args())
        return status
    except (ValueError, OSError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
