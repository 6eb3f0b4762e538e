"""The benchmark of paged logits off the card: its inputs, its arithmetic, and its options."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from script import ROOT, load

from deep_kernels import formats

bench = load("bench_paged_mqa_logits")
tables = load("readme_tables")

SMALL = bench.Shape(batch=3, mean_context=200, next_n=2, num_heads=8)


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_COLD_BYTES", 1 << 18)


@pytest.mark.parametrize("format", formats.FORMATS)
def test_the_check_before_timing_knows_right_from_wrong(format: str) -> None:
    problem = bench.make_problem(replace(SMALL, format=format), "cpu")
    calls = bench.logits_calls(problem, bench.metadata_of(problem))
    assert bench.check(problem, calls) < 1e-5
    with pytest.raises(SystemExit, match="wrong result"):
        bench.check(problem, [lambda call=call: call() * 1.1 for call in calls])
    with pytest.raises(SystemExit, match="wrong result"):
        bench.check(problem, calls[::-1])  # the pages of another set


def test_sets_of_pages_are_apart() -> None:
    problem = bench.make_problem(SMALL, "cpu")
    assert ((problem.lens >= 140) & (problem.lens <= 260)).all()
    used = [table[b, : -(-int(problem.lens[b]) // 64)] for table in problem.tables for b in range(3)]
    pages = torch.cat(used)
    assert pages.unique().numel() == pages.numel() == problem.kv_cache.shape[0]
    assert 4 <= len(problem.tables) <= 32


def test_bytes_of_a_call() -> None:
    for format, token_bytes in (("fp8", 132), ("mxfp8", 132), ("mxfp4", 68)):
        problem = bench.make_problem(replace(SMALL, format=format), "cpu")
        lens = problem.lens.tolist()
        assert problem.num_bytes == sum(lens) * token_bytes + 4 * sum(2 * length - 1 for length in lens)


def test_figures_of_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    times = {"read_bw": 100.0, "empty": 1.0, "metadata": 3.0, "schedule": 20.0, "derived": 25.0}

    def measure(functions: Mapping[str, Callable[[], Any]], samples: int, calls: Any) -> dict[str, Any]:
        assert set(functions) == set(times) and samples == 7
        assert calls == 1 or (set(calls) == set(times) and calls["schedule"] >= 16)
        functions["derived"]()
        return {name: bench.timing.Timing([times[name]] * samples) for name in functions}

    monkeypatch.setattr(bench.timing, "measure", measure)
    monkeypatch.setattr(bench.timing, "read_call", lambda: (lambda: None, 10**9))
    monkeypatch.setattr(bench.timing, "empty_call", lambda: lambda: None)
    row = json.loads(json.dumps(bench.bench_shape(SMALL, 7, "cpu")))
    for way in ("one_graph", "rotating"):
        assert row[way]["read_bw"]["gb_per_s"] == pytest.approx(10**4)
        assert row[way]["schedule"]["gb_per_s"] == pytest.approx(row["bytes"] / 20 / 1e3)
        assert row[way]["derived"]["of_read_bw"] == pytest.approx(row["bytes"] / 25 / 1e3 / 10**4)
        assert "gb_per_s" not in row[way]["empty"] and row[way]["metadata"]["median_us"] == 3
    bench.print_row(row)
    text = capsys.readouterr().out
    assert text.startswith("fp8 B3 L200 n2 H8") and text.count("schedule 20.0 us") == 2


def test_calls_take_turns() -> None:
    function = bench.timing.in_turn([lambda: 1, lambda: 2, lambda: 3])
    assert [function() for _ in range(7)] == [1, 2, 3, 1, 2, 3, 1]


def test_rows_can_be_chosen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benched: list[str] = []

    def bench_shape(shape: Any, samples: int) -> dict[str, Any]:
        benched.append(shape.label)
        return {"label": shape.label}

    monkeypatch.setattr(bench, "bench_shape", bench_shape)
    monkeypatch.setattr(bench, "print_row", lambda result: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench.Shape, "refusal", lambda self: None)
    out = tmp_path / "results" / "paged.json"
    words = ["--rows", "2", "--heads", "32", "--formats", "fp8,mxfp4", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["bench_paged_mqa_logits.py", *words])
    assert bench.main() == 0
    assert benched == [f"{format} B{batch} L32768 n1 H32" for batch in (1, 16) for format in ("fp8", "mxfp4")]
    assert [row["label"] for row in json.loads(out.read_text())["results"]] == benched
    monkeypatch.setattr(bench.Shape, "refusal", lambda self: "no kernel for it")
    assert bench.main() == 0
    assert capsys.readouterr().out.count("left out: no kernel for it") == len(benched)


def made_up(shape: Any, us: float, share: float) -> dict[str, Any]:
    rotating = {"schedule": {"median_us": us, "of_read_bw": share}, "metadata": {"median_us": 2.5}}
    return {"shape": vars(shape), "label": shape.label, "rotating": rotating}


@pytest.fixture
def results() -> dict[str, Any]:
    """Two shapes, one of them in a single format."""
    mxfp8 = replace(SMALL, format="mxfp8")
    rows = [made_up(SMALL, 20.04, 0.5), made_up(mxfp8, 30.06, 0.25), made_up(replace(mxfp8, num_heads=32), 7, 0.75)]
    return {"card": "a card", "torch": "2.x", "results": rows}


def test_table_of_rows(results: dict[str, Any]) -> None:
    lines = [line for line in tables.paged_section(results) if line.startswith("|")]
    assert lines[0].endswith("| FP8, us | of read_bw | MXFP8, us | of read_bw | metadata, us |")
    assert lines[2:] == [
        "| B3 L200 n2 H8 | 20.0 | 0.50 | 30.1 | 0.25 | 2.5 |",
        "| B3 L200 n2 H32 | - | - | 7.0 | 0.75 | 2.5 |",
    ]


def test_results_can_be_plotted(results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    bench.plot(results, tmp_path / "made_up.png")
    assert (tmp_path / "made_up.png").stat().st_size > 10_000
    kept = ROOT / "benchmarks" / "results" / "paged_mqa_logits.json"
    words = ["bench_paged_mqa_logits.py", "--replot", str(kept), "--plot", str(tmp_path / "kept.png")]
    monkeypatch.setattr("sys.argv", words)
    assert bench.main() == 0
    assert (tmp_path / "kept.png").stat().st_size > 10_000
    monkeypatch.setattr("sys.argv", words[:3])
    with pytest.raises(SystemExit):
        bench.main()
