"""CUDA-graph timing for the benchmark scripts: variants take turns inside one process.

Every variant is captured into a graph of a few calls with outputs of their own; samples go round the variants in
rotating and alternating order, each replay warmed up by one before it, so that clocks and caches treat all alike.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_QUEUE_CYCLES = 200_000  # about 0.1 ms


@dataclass
class Timing:
    """Microseconds per call."""

    samples_us: list[float]

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    def quantile_us(self, share: float) -> float:
        return sorted(self.samples_us)[int(share * (len(self.samples_us) - 1))]

    def as_dict(self) -> dict[str, float]:
        return {
            "median_us": self.median_us,
            "p10_us": self.quantile_us(0.1),
            "p90_us": self.quantile_us(0.9),
            "samples": len(self.samples_us),
        }


class Graph:
    """Some calls of a function in a CUDA graph; outputs stay alive with it."""

    def __init__(self, function: Callable[[], object], calls: int) -> None:
        self.calls = calls
        for _ in range(3):
            function()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = [function() for _ in range(calls)]
        for _ in range(3):
            self.graph.replay()
        torch.cuda.synchronize()


def measure(
    functions: Mapping[str, Callable[[], object]],
    samples: int = 40,
    calls: int | Mapping[str, int] = 5,
    *,
    queued: bool = False,
) -> dict[str, Timing]:
    """Rotating timings of all functions, microseconds per call; `calls` to a graph, of all or by name.

    With `queued` the card is kept busy until both replays are in its queue: a host that launches slowly would
    otherwise be what is timed for graphs of a few microseconds.
    """
    graphs = {
        name: Graph(function, calls if isinstance(calls, int) else calls[name]) for name, function in functions.items()
    }
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for name in _turns(list(functions), samples):
        graph = graphs[name].graph
        if queued:
            torch.cuda._sleep(_QUEUE_CYCLES)
        graph.replay()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times[name].append(begin.elapsed_time(end) * 1000 / graphs[name].calls)
    return {name: Timing(values) for name, values in times.items()}


def _turns(names: list[str], samples: int) -> Iterator[str]:
    """Each name once a round, from another one on, every second round backwards."""
    for sample in range(samples):
        order = names[sample % len(names) :] + names[: sample % len(names)]
        yield from reversed(order) if sample % 2 else order


class Regimes:
    """Functions in graphs, timed as single replays of a rested card and as many of a busy one."""

    def __init__(self, functions: Mapping[str, Callable[[], object]], calls: Mapping[str, int]) -> None:
        self.graphs = {name: Graph(function, calls[name]) for name, function in functions.items()}
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]

    def burst(self, samples: int, idle: float = 0.025) -> dict[str, Timing]:
        """One replay after the card did nothing for a while, in shuffled order; the host is not part of it."""
        order = random.Random(0)
        times: dict[str, list[float]] = {name: [] for name in self.graphs}
        for _ in range(samples):
            for name in order.sample(list(self.graphs), len(self.graphs)):
                torch.cuda.synchronize()
                time.sleep(idle)
                torch.cuda._sleep(_QUEUE_CYCLES)
                times[name].append(self._replayed(name, 1))
        return {name: Timing(values) for name, values in times.items()}

    def sustained(self, samples: int, seconds: float = 0.045) -> dict[str, Timing]:
        """So long back to back that the card is at its power limit; as long again without a pause before the first."""
        replays = {name: max(1, round(seconds * 1e6 / self._replay_us(name))) for name in self.graphs}
        for name, count in replays.items():
            self._replayed(name, count)
        times: dict[str, list[float]] = {name: [] for name in self.graphs}
        for name in _turns(list(self.graphs), samples):
            times[name].append(self._replayed(name, replays[name]))
        return {name: Timing(values) for name, values in times.items()}

    def _replay_us(self, name: str) -> float:
        return self._replayed(name, 3) * self.graphs[name].calls

    def _replayed(self, name: str, replays: int) -> float:
        """Microseconds per call."""
        begin, end = self._events
        begin.record()
        for _ in range(replays):
            self.graphs[name].graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1000 / (replays * self.graphs[name].calls)


def in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """A function that makes the next of the calls each time."""
    cycle = itertools.cycle(calls)
    return lambda: next(cycle)()


def measure_sustained(function: Callable[[], object], seconds: float = 0.5) -> float:
    """Microseconds per call, back to back at the card's power limit; a third of the time again warms up."""
    graph = Graph(function, calls=1).graph
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(3):
        graph.replay()
    end.record()
    end.synchronize()
    replays = max(3, int(seconds * 1000 / (begin.elapsed_time(end) / 3)))
    for _ in range(replays // 3):
        graph.replay()
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000 / replays


def host_microseconds(function: Callable[[], object], calls: int = 300, rounds: int = 15) -> float:
    """Host time per call while the device keeps up: the best round of a few hundred calls."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        best = min(best, time.perf_counter() - start)
    torch.cuda.synchronize()
    return best / calls * 1e6


def read_call(num_bytes: int = 1 << 30) -> tuple[Callable[[], object], int]:
    """The yardstick of what lives on memory: a sum of float32, and the bytes that it reads."""
    x = torch.randn(num_bytes // 4, device="cuda")
    return x.sum, num_bytes


def empty_call() -> Callable[[], object]:
    """As close to an empty kernel as torch has: what a launch costs at least."""
    one = torch.zeros(1, device="cuda")
    return lambda: one.fill_(0.0)


def fp8_peak_call(size: int = 8192) -> tuple[Callable[[], object], float]:
    """The yardstick: torch._scaled_mm of e4m3 with fast accumulation, and its FLOP."""
    a = torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn)
    b = torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn).t()
    one = torch.ones((), device="cuda")
    return (
        lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True),
        2.0 * size**3,
    )


def add_result_arguments(parser: argparse.ArgumentParser, picture: str) -> None:
    """Where the results of a benchmark go; `picture` says what the plot shows."""
    parser.add_argument("--out", type=Path, help="JSON of all figures")
    parser.add_argument("--plot", type=Path, help=f"PNG of {picture}")
    parser.add_argument("--replot", type=Path, metavar="JSON", help="measure nothing, plot earlier figures")


def settled(
    parser: argparse.ArgumentParser, args: argparse.Namespace, plot: Callable[[dict[str, Any], Path], None]
) -> int | None:
    """The exit status of a benchmark that has nothing to measure, or has no card to do it on; else None."""
    if args.replot:
        if not args.plot:
            parser.error("--replot needs --plot")
        plot(json.loads(args.replot.read_text()), args.plot)
        return 0
    if not torch.cuda.is_available():
        print(f"{Path(parser.prog).stem}: a CUDA device is needed, torch sees none", file=sys.stderr)
        return 2
    return None


def write_results(
    results: list[dict[str, Any]], out: Path | None, picture: Path | None, plot: Callable[[dict[str, Any], Path], None]
) -> None:
    """What a benchmark found, with card and torch, as JSON and as a picture, where they are asked for."""
    about = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "results": results}
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(about, indent=1) + "\n")
    if picture:
        picture.parent.mkdir(parents=True, exist_ok=True)
        plot(about, picture)
