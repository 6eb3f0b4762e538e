"""The benchmark scripts off the card: their inputs, their arithmetic, and the tables made of their results."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from script import ROOT, load

bench = load("bench_mqa_logits")
problems = load("mqa_problems")
tables = load("readme_tables")

SMALL = bench.Shape(24, 384, 8, 128)
FORMATS = ("fp8", "mxfp8", "mxfp4")


@pytest.mark.parametrize("windows", ("causal", "parallel", "ragged"))
@pytest.mark.parametrize("format", FORMATS)
def test_the_check_before_timing_knows_right_from_wrong(format: str, windows: str) -> None:
    shape = replace(SMALL, format=format, windows=windows)
    problem = bench.make_problem(shape, "cpu")
    call = bench.calls_of(shape, problem)["clean1_meta1"]
    assert bench.check(shape, problem, call) < 1e-5

    for change in (lambda logits: logits * 1.1, lambda logits: logits.masked_fill(logits.isneginf(), 0.0)):

        def wrong(change: Callable[[torch.Tensor], torch.Tensor] = change) -> torch.Tensor:
            return change(call())

        with pytest.raises(SystemExit, match=r"wrong result|-inf pattern"):
            bench.check(shape, problem, wrong)


def test_windows() -> None:
    """What each word promises; none is empty."""
    generator = torch.Generator().manual_seed(1)
    for num_q, num_kv in ((2048, 32768), (8192, 65536), (24, 384)):
        shape = replace(SMALL, num_q=num_q, num_kv=num_kv)
        windows = {
            word: problems.windows_of(replace(shape, windows=word), "cpu", generator)
            for word in ("causal", "parallel", "ragged")
        }
        for start, end in windows.values():
            assert start.dtype == end.dtype == torch.int32 and start.shape == end.shape == (num_q,)
            assert (start >= 0).all() and (start < end).all() and (end <= num_kv).all()
        start, end = windows["causal"]
        assert (start == 0).all() and end.tolist() == list(range(num_kv - num_q, num_kv))
        start, end = windows["parallel"]  # two runs of positions that mirror each other
        half = num_q // 2
        assert (start == 0).all() and ((end[1:] - end[:-1] == 1).sum() == num_q - 2)
        assert int(end[0] - 1 + end[-1]) == num_kv, "the halves are as far from both ends"
        assert half * (int(end[0]) // half) == end[0] - 1
        start, end = windows["ragged"]
        firsts = start.unique()
        assert firsts.numel() == 4 and (start[1:] >= start[:-1]).all()
        assert torch.equal(end[1:] - end[:-1] > 0, torch.ones(num_q - 1, dtype=torch.bool)), "causal in a document"


@pytest.mark.parametrize("format", ("mxfp8", "mxfp4"))
def test_ordinary_mx_data(format: str) -> None:
    """Exponents of neighbouring blocks differ, and spread as far as the factors and what randn adds."""
    problem = bench.make_problem(replace(SMALL, format=format), "cpu")
    codes = problem.kv_scale.view(torch.uint8).view(-1, 4).int()
    spread = codes.amax(1) - codes.amin(1)
    assert 4 <= int(spread.max()) <= 10
    assert (codes[:, 1:] != codes[:, :-1]).float().mean() > 0.7


def fake_measure(microseconds: Mapping[str, float]) -> Callable[..., dict[str, Any]]:
    def measure(functions: Mapping[str, Any], samples: int, calls: int) -> dict[str, Any]:
        assert samples == 7 and calls > 0
        return {name: bench.timing.Timing([microseconds[name]] * samples) for name in functions}

    return measure


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of small rows of every kind, with made-up times; folded sums differ from exact ones by decree."""
    variants = {f"clean{clean}_meta{meta}": 100.0 - 10 * meta + clean for clean in (0, 1) for meta in (0, 1)}
    times = {"fp8_peak": 50.0, "fp8": 88.0, "causal": 120.0, "metadata": 8.0, "clean1_meta1_folded": 70.0, **variants}
    monkeypatch.setattr(bench.timing, "measure", fake_measure(times))
    monkeypatch.setattr(bench.timing, "fp8_peak_call", lambda: (lambda: None, 1e9))
    monkeypatch.setattr(bench, "differs", lambda one, other: True)
    shapes = [SMALL, *(replace(SMALL, format=format) for format in FORMATS[1:]), replace(SMALL, windows="ragged")]
    rows = [bench.bench_shape(shape, samples=7, sustained=False, device="cpu") for shape in shapes]
    return {"card": "a card", "torch": "2.x", "results": rows}


def test_figures_of_rows(results: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    plain, mxfp8, mxfp4, ragged = results["results"]
    best = plain["variants"]["clean1_meta1"]
    flop = 2 * 8 * 128 * sum(range(360, 384))
    assert best["tflops"] == pytest.approx(flop / 91 / 1e6)
    assert best["of_fp8_peak"] == pytest.approx(best["tflops"] / (1e9 / 50 / 1e6))
    assert "time_of_fp8" not in best and "of_causal" not in best
    assert plain["variants"]["clean1_meta1_folded"]["median_us"] == 70
    for row in (mxfp8, mxfp4):
        assert row["variants"]["clean1_meta1"]["time_of_fp8"] == pytest.approx(91 / 88)
        assert row["variants"]["clean0_meta0"]["time_of_fp8"] == pytest.approx(100 / 88)
        assert "of_causal" not in row["variants"]["clean1_meta1"]
    problem = bench.make_problem(replace(SMALL, windows="ragged"), "cpu")
    share = problem.logits_inside / sum(range(360, 384))
    assert ragged["variants"]["clean1_meta1"]["of_causal"] == pytest.approx(share / 91 * 120)
    for row in results["results"]:
        bench.print_row(row)
    text = capsys.readouterr().out
    assert "time_of_fp8 1.034" in text and "clean1_meta1_folded 70.0 us" in text and "metadata 8.0 us" in text


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_table_of_rows(results: dict[str, Any]) -> None:
    text, _, header, _, *lines = tables.mqa_section(json.loads(json.dumps(results)))
    titles, rows = cells(header), {cells(line)[0]: cells(line)[1:] for line in lines if line.startswith("|")}
    assert titles[4:] == ["without schedule, us", "folded, of fp8_peak", "of FP8, causal"]
    assert {len(row) + 1 for row in rows.values()} == {len(titles)}
    best = results["results"][0]["variants"]["clean1_meta1"]
    folded = results["results"][0]["variants"]["clean1_meta1_folded"]
    figures = ["91", f"{best['tflops']:.0f}", f"{best['of_fp8_peak']:.2f}", "101", f"{folded['of_fp8_peak']:.2f}", "-"]
    assert rows["24/384 H8 D128 f32"] == figures
    assert rows["24/384 H8 D128 f32 mxfp4"][-1] == "0.97"  # 88 us of FP8 in 91
    ragged = results["results"][-1]["variants"]["clean1_meta1"]["of_causal"]
    assert rows["24/384 H8 D128 f32 ragged"][-2:] == ["-", f"{ragged:.2f}"]
    assert len(rows) == 4 and "pre-passes" in text and "last column" in text


def test_no_column_without_figures(results: dict[str, Any]) -> None:
    results["results"] = results["results"][:1]
    variants = results["results"][0]["variants"]
    del variants["clean1_meta1_folded"]
    text, _, header, *_ = tables.mqa_section(results)
    assert "MX" not in text and "last column" not in text
    assert cells(header)[-1] == "without schedule, us"
    variants["clean1_meta1"]["sustained_tflops"] = 12.0
    _, _, header, _, line, *_ = tables.mqa_section(results)
    assert cells(header)[-1] == "sustained" and cells(line)[-1] == "12"


def test_the_readme_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["readme_tables.py", "--check"])
    assert tables.main() == 0


def test_results_can_be_plotted(results: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    bench.plot(results, tmp_path / "made_up.png")
    assert (tmp_path / "made_up.png").stat().st_size > 10_000
    bench.plot(json.loads((ROOT / "benchmarks" / "results" / "mqa_logits.json").read_text()), tmp_path / "kept.png")


@pytest.mark.parametrize(
    ("words", "labels"),
    (
        (["--only", "mxfp4", "H32"], ["2048/32768 H32 D128 f32 mxfp4"]),
        (["--only", "ragged"], ["2048/32768 H64 D128 f32 ragged"]),
        (["--only", "bf16"], ["2048/32768 H64 D128 bf16"]),
        (["--rows", "2"], ["2048/32768 H64 D128 f32", "2048/32768 H64 D128 bf16"]),
        (["--rows", "2", "--only", "fp8", "causal", "f32"], ["2048/32768 H64 D128 f32"]),
    ),
)
def test_rows_can_be_chosen(
    monkeypatch: pytest.MonkeyPatch, words: list[str], labels: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    benched: list[str] = []

    def bench_shape(shape: Any, samples: int, sustained: bool) -> dict[str, Any]:
        benched.append(shape.label)
        return {"label": shape.label, "variants": {"clean1_meta1": {}, "fp8_peak": {}}}

    monkeypatch.setattr(bench, "bench_shape", bench_shape)
    monkeypatch.setattr(bench, "print_row", lambda result: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench.Shape, "refusal", lambda self: None)
    monkeypatch.setattr("sys.argv", ["bench_mqa_logits.py", *words])
    assert bench.main() == 0
    assert benched == labels
    monkeypatch.setattr(bench.Shape, "refusal", lambda self: "no kernel for it")
    assert bench.main() == 0
    assert benched == labels
    assert capsys.readouterr().out.count("left out: no kernel for it") == len(labels)
