"""The benchmark of the FP8 prefill MLP off the card: its inputs, its arithmetic, and its options."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from script import load
from torch import Tensor

import deep_kernels as dk
from deep_kernels import formats

bench = load("bench_silu_fold")
tables = load("readme_tables")

SMALL = bench.Shape("small", 24)
VARIANTS = ("fold", "two_launches", "gemm")  # torch_gemm is for CUDA alone


@pytest.fixture(autouse=True)
def small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.MODELS, "small", bench.Model(hidden_size=256, intermediate_size=384, num_sets=3))


@pytest.fixture
def torch_has_a_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card."""

    def call_of(x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor) -> Callable[[], Tensor]:
        weight = formats.dequantize_fp8_128x128(w, w_scale)
        return lambda: (formats.dequantize_fp8_block128(x, x_scale) @ weight.T).bfloat16()

    monkeypatch.setattr(bench, "torch_gemm_call", call_of)


def test_the_check_before_timing_knows_right_from_wrong(torch_has_a_gemm: None) -> None:
    problem = bench.make_problem(SMALL, "cpu")
    for which in range(3):
        calls = bench.calls_of(problem, which)
        assert set(calls) == {*VARIANTS, "torch_gemm"}
        assert 0.01 < bench.check(SMALL, problem, calls, which) < 0.035
        with pytest.raises(SystemExit, match="small S24: wrong result of fold"):
            bench.check(SMALL, problem, calls, (which + 1) % 3)  # the weights of another set

    def changed(name: str) -> Any:
        result = calls[name]()
        return (result[0], result[1] * 1.1) if isinstance(result, tuple) else result * 1.01

    for name in calls:
        with pytest.raises(SystemExit, match=f"wrong result of {name},"):
            bench.check(SMALL, problem, calls | {name: lambda name=name: changed(name)}, 2)


def test_what_torch_lacks_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert tuple(bench.calls_of(bench.make_problem(SMALL, "cpu"))) == VARIANTS
    assert capsys.readouterr().out.startswith("torch's GEMM is left out: ")


def test_the_activation_is_the_other_half() -> None:
    problem = bench.make_problem(SMALL, "cpu")
    halves, whole = bench.activation_call(problem)(), bench.calls_of(problem)["two_launches"]()
    for half, one in zip(halves, whole, strict=True):
        assert torch.equal(half.view(torch.uint8), one.view(torch.uint8))


def test_layers_with_and_without_the_fold() -> None:
    problem = bench.make_problem(SMALL, "cpu")
    calls = bench.layer_calls(problem)
    results = {name: call() for name, call in calls.items()}
    assert torch.equal(results["two_launches"], problem.layers[0](problem.x))
    assert not torch.equal(results["fold"], results["two_launches"])
    assert calls["fold"].func.down_weight is problem.layers[0].down_weight, "no second copy of the weights"


def test_rows_are_those_of_the_models() -> None:
    labels = [shape.label for shape in bench.SHAPES]
    tokens = (16, 32, 64, 128, 192, 256, 512, 1024, 2048, 8192)
    assert labels == [f"{model} S{count}" for model in ("2B", "8B") for count in tokens]
    assert bench.Shape("2B", 128).flop == 2 * 128 * 2 * 6144 * 2048
    assert all(shape.refusal() == dk.supported("fp8_silu_fold_prefill") for shape in bench.SHAPES)
    for model in (bench.MODELS[shape.model] for shape in bench.SHAPES):
        assert bench._LAUNCHES % model.num_sets == 0, "every set as often"
        weight_bytes = 2 * model.intermediate_size * model.hidden_size
        assert (model.num_sets - 1) * weight_bytes > 60 << 20, "more than a cache holds until a set's next turn"


TIMES = {"fp8_peak": 50.0, "fold": 8.0, "two_launches": 10.0, "gemm": 7.0, "activation": 3.0, "torch_gemm": 16.0}


def fake_measure(
    functions: Mapping[str, Callable[[], Any]], samples: int, calls: Mapping[str, int], queued: bool
) -> dict[str, Any]:
    assert samples == 7 and queued and set(calls) == set(functions) | {"fp8_peak"}
    assert calls["fp8_peak"] == 1 < calls["fold"]
    for function in functions.values():
        function()
    return {name: bench.timing.Timing([TIMES[name]] * samples) for name in functions}


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, torch_has_a_gemm: None) -> dict[str, Any]:
    """Of a row with cold weights and of one without, with made-up times."""
    monkeypatch.setattr(bench.timing, "measure", fake_measure)
    monkeypatch.setattr(bench.timing, "fp8_peak_call", lambda: (lambda: None, 1e9))
    monkeypatch.setattr(bench, "_COLD_TOKENS", 100)
    rows = [bench.bench_shape(bench.Shape("small", count), samples=7, device="cpu") for count in (24, 144)]
    return {"card": "a card", "torch": "2.x", "results": json.loads(json.dumps(rows))}


def test_figures_of_rows(results: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    small, large = results["results"]
    assert list(small["warm"]) == ["fp8_peak", "fold", "two_launches", "gemm", "torch_gemm", "activation"]
    assert list(small["cold"]) == ["fp8_peak", "fold", "two_launches", "gemm", "torch_gemm"]
    assert list(small["layer"]) == ["fold", "two_launches"]
    assert "cold" not in large
    flop = 2 * 24 * 768 * 256
    for way in ("warm", "cold"):
        fold = small[way]["fold"]
        assert fold["tflops"] == pytest.approx(flop / 8 / 1e6)
        assert fold["of_fp8_peak"] == pytest.approx(fold["tflops"] / (1e9 / 50 / 1e6))
        assert fold["time_of_two_launches"] == pytest.approx(0.8)
        assert fold["time_of_torch_gemm"] == pytest.approx(0.5)
    assert "tflops" not in small["warm"]["activation"]
    assert small["layer"]["fold"]["time_of_two_launches"] == pytest.approx(0.8)
    for row in results["results"]:
        bench.print_row(row)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("small S24 | warm fp8_peak 20 TFLOPS fold 8.0 us (") and " | cold fp8_peak" in first
    assert first.count("time_of_two_launches 0.800") == 3 and "activation 3.0 us" in first
    assert " | cold" not in second and second.endswith(
        "layer fold 8.0 us (time_of_two_launches 0.800) two_launches 10.0 us"
    )


def test_table_of_rows(results: dict[str, Any]) -> None:
    text, _, header, _, *lines = tables.silu_section(results)
    assert "a card, torch 2.x" in text
    titles = [title.strip() for title in header.strip("|").split("|")]
    assert titles[:4] == ["model, tokens", "fold, us", "two launches, us", "fold / two launches"]
    share = f"{results['results'][0]['warm']['fold']['of_fp8_peak']:.2f}"
    assert lines[0] == f"| small S24 | 8.0 | 10.0 | 0.80 | 16.0 | 0.50 | {share} | 8.0 | 0.80 | 0.80 |"
    assert lines[1].endswith(" | - | - | 0.80 |")
    assert {len(line.split("|")) for line in lines if line.startswith("|")} == {len(titles) + 2}
    for row in results["results"]:
        for way in ("warm", "cold"):
            row.get(way, {}).pop("torch_gemm", None)
            row.get(way, {}).get("fold", {}).pop("time_of_torch_gemm", None)
    assert f"| small S24 | 8.0 | 10.0 | 0.80 | - | - | {share} |" in "\n".join(tables.silu_section(results))


def test_results_can_be_plotted(results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps(results))
    words = ["bench_silu_fold.py", "--replot", str(kept), "--plot", str(tmp_path / "made_up.png")]
    monkeypatch.setattr("sys.argv", words)
    assert bench.main() == 0
    assert (tmp_path / "made_up.png").stat().st_size > 10_000
    monkeypatch.setattr("sys.argv", words[:3])
    with pytest.raises(SystemExit):
        bench.main()


@pytest.mark.parametrize(
    ("words", "labels"),
    (
        (["--models", "8B", "--tokens", "16", "8192"], ["8B S16", "8B S8192"]),
        (["--tokens", "192"], ["2B S192", "8B S192"]),
        (["--models", "2B"], [f"2B S{count}" for count in (16, 32, 64, 128, 192, 256, 512, 1024, 2048, 8192)]),
    ),
)
def test_rows_can_be_chosen(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    words: list[str],
    labels: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    benched: list[str] = []

    def bench_shape(shape: Any, samples: int) -> dict[str, Any]:
        benched.append(shape.label)
        return {"label": shape.label}

    monkeypatch.setattr(bench, "bench_shape", bench_shape)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench.Shape, "refusal", lambda self: None)
    out = tmp_path / "results" / "silu.json"
    monkeypatch.setattr("sys.argv", ["bench_silu_fold.py", *words, "--out", str(out)])
    assert bench.main() == 0
    assert benched == labels
    assert [row["label"] for row in json.loads(out.read_text())["results"]] == labels
    monkeypatch.setattr(bench.Shape, "refusal", lambda self: "no kernel for it")
    assert bench.main() == 0
    assert benched == labels
    assert capsys.readouterr().out.count("left out: no kernel for it") == len(labels)


def test_without_a_card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench_silu_fold.py"])
    assert bench.main() == 2
    assert capsys.readouterr().err == "bench_silu_fold: a CUDA device is needed, torch sees none\n"
