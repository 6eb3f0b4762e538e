"""The benchmark of flash attention off the card: its inputs, its arithmetic, its regimes, and its options."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from script import load
from torch import Tensor
from torch.nn.attention import SDPBackend

import deep_kernels as dk

problems = load("attention_problems")
load("timing")  # what the benchmark imports
bench = load("bench_attention")
tables = load("readme_tables")

SMALL = problems.Shape(2, 70, 70, 4, 2, 64, causal=True)
SHORT = problems.Shape(2, 3, 300, 4, 1, 64)
PREFILL, DECODE = bench.Row("prefill", SMALL), bench.Row("decode", SHORT)
CURVE = bench.Row("curve", problems.Shape(1, 64, 64, 2, 2, 64))


@pytest.fixture
def math_for_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a card: two others."""
    monkeypatch.setattr(bench, "OTHERS", {"cudnn": SDPBackend.MATH, "torch_flash": SDPBackend.FLASH_ATTENTION})


# ------------------------------------------------------------------------------------------ shapes and inputs


def test_work_of_a_shape() -> None:
    assert problems.Shape(2, 8, 8, 4, 2, 64).flop == 2 * 4 * (8 * 8) * 64 * 4
    assert problems.Shape(2, 8, 8, 4, 2, 64, causal=True).flop == 2 * 4 * (8 * 8 / 2) * 64 * 4
    assert problems.Shape(1, 2, 8, 1, 1, 64, causal=True).flop == (2 * 8 - 2) * 64 * 4, "bottom right"
    assert SHORT.num_bytes == 2 * 2 * 64 * (2 * 3 * 4 + 2 * 300 * 1)
    assert (SMALL.label, SHORT.label) == ("D64 2x70 H4/2 causal", "D64 2x3/300 H4/1")


def test_rows_are_those_of_the_targets() -> None:
    shapes = {kind: [row.shape for row in bench.ROWS if row.kind == kind] for kind in bench.KINDS}
    assert sum(map(len, shapes.values())) == len(bench.ROWS) == len(set(bench.ROWS))
    assert {shape.head_dim for shape in shapes["prefill"]} == {64, 128, 256}
    for shape in shapes["prefill"]:
        assert shape.num_q == shape.num_kv and shape.batch * shape.num_q == max(16384, shape.num_q)
    assert {(shape.num_q, shape.causal) for shape in shapes["prefill"] if shape.head_dim == 256} >= {
        (tokens, causal) for tokens in (4096, 8192, 16384, 32768) for causal in (False, True)
    } | {(131072, True)}
    assert {shape.num_kv_heads for shape in shapes["prefill"]} >= {32, 2, 4, 1}
    assert {shape.num_q for shape in shapes["decode"]} == {1, 4, 16}
    assert {shape.num_kv for shape in shapes["decode"]} == {8192, 32768, 131072}
    assert {shape.heads_per_kv for shape in shapes["decode"]} == {1, 4, 8, 16}
    assert {shape.head_dim for shape in shapes["curve"]} == {64, 128, 256}
    assert all(row.shape.refusal("sm_89") is None for row in bench.ROWS)


def test_the_check_before_timing_knows_right_from_wrong(math_for_cudnn: None) -> None:
    problem = problems.make_problem(SMALL, "cpu")
    calls = bench.calls_of(SMALL, problem)
    assert list(calls) == ["deep_kernels", "cudnn", "torch_flash"]
    deviations = problems.check(SMALL, problem, calls)
    assert list(deviations) == list(calls) and all(0 < one < 6e-3 for one in deviations.values())

    def other(change: Callable[[Tensor], Tensor]) -> dict[str, Callable[[], Tensor]]:
        return calls | {"cudnn": lambda: change(calls["cudnn"]().clone())}

    for change in (lambda out: out * 1.02, lambda out: out * torch.nan, lambda out: out.flip(1)):
        with pytest.raises(RuntimeError, match=r"D64 2x70 H4/2 causal: wrong result of cudnn, relative deviation \S+$"):
            problems.check(SMALL, problem, other(change))

    def beside(out: Tensor) -> Tensor:
        out[1, 30, 1] += 1  # neither a row nor a head that float64 looks at
        return out

    with pytest.raises(RuntimeError, match=r"wrong result of cudnn, relative deviation from deep_kernels"):
        problems.check(SMALL, problem, other(beside))


@pytest.mark.parametrize("shape", (SMALL, SHORT, problems.Shape(1, 40, 90, 2, 1, 64, True, "float16")))
def test_float64_of_rows_is_the_op(shape: Any) -> None:
    problem = problems.make_problem(shape, "cpu")
    out, lse = problems.call_of(shape, problem)(return_lse=True)
    assert problems.is_right(shape, problems.deviation_of(shape, problem, out))
    assert problems.lse_error_of(shape, problem, lse) < 1e-5
    assert problems.lse_error_of(shape, problem, lse + 1e-3) > problems.MAX_LSE_ERROR
    shifted = problems.Problem(problem.q, problem.k, problem.v.roll(1, 1))
    assert not problems.is_right(shape, problems.deviation_of(shape, shifted, out))


def test_what_torch_lacks_is_left_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    problem = problems.make_problem(SMALL, "cpu")
    assert list(bench.calls_of(SMALL, problem)) == ["deep_kernels", "torch_flash"], "no cuDNN here"
    assert capsys.readouterr().out.count("| cudnn is left out with ") == 2
    ragged = problems.Shape(1, 40, 90, 2, 1, 64, causal=True)
    assert bench.other_calls(ragged, problems.make_problem(ragged, "cpu")) == {}, "another alignment"
    real = bench.functional.scaled_dot_product_attention

    def without_shared_heads(*arguments: Any, enable_gqa: bool, **options: Any) -> Tensor:
        if enable_gqa:
            raise RuntimeError("no kernel with shared heads\nand so on")
        return real(*arguments, **options)

    monkeypatch.setattr(bench.functional, "scaled_dot_product_attention", without_shared_heads)
    monkeypatch.setattr(bench, "OTHERS", {"cudnn": SDPBackend.MATH})
    calls = bench.calls_of(SMALL, problem)
    assert list(calls) == ["deep_kernels", "cudnn_repeated"]
    problems.check(SMALL, problem, calls)
    assert capsys.readouterr().out.endswith("cudnn is left out with 1x the kv heads: no kernel with shared heads\n")


# ------------------------------------------------------------------------------------------ emulations


@pytest.mark.parametrize(
    ("arch", "head_dim", "causal", "fragment"),
    (("cpu", 64, False, 32), ("sm90:sm_90a", 64, False, 32), ("sm90:sm_90a", 256, True, 16), ("sm_89", 256, False, 8)),
)
def test_emulations_are_sets_of_their_own(arch: str, head_dim: int, causal: bool, fragment: int) -> None:
    shape = problems.Shape(1, 64, 64, 2, 2, head_dim, causal)
    found = problems.emulations_of(shape, arch)
    count = 4 if arch == "cpu" else 1
    sets = []
    for (freq, res), share in found.items():
        choice = dk._C.ex2_choice(arch, shape.case((freq, res)))
        assert (choice["fragment"], choice["num_fragments"]) == (fragment, count)
        assert choice["ex2"] == (freq, res, 0)
        inside = [k for k in range(fragment) if (k - k % 2) % freq >= freq - res]
        eligible = range(count if count == 1 else count - 1)
        assert choice["emulated"] == [n * fragment + k for n in eligible for k in inside] != []
        assert share == dk.ex2_emulated_share(freq, res, fragment=fragment, num_fragments=count)
        sets.append(choice["emulated"])
    assert all(sets.count(one) == 1 for one in sets)
    assert list(found.values()) == sorted(found.values()) and len(found) >= 4
    assert (32, 2) in found or fragment < 32, "what emulates nothing is off, no emulation"


def test_words_that_mean_one_set_are_one_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "_EMULATIONS", ((4, 3), (4, 2), (64, 2), (2, 2), (1, 1)))
    assert problems.emulations_of(CURVE.shape, "sm90:sm_90a") == {(4, 3): 0.5, (2, 2): 1.0}


# ------------------------------------------------------------------------------------------ regimes


class FakeCard:
    """A clock that a replay moves, graphs that know how long they take, and what was done in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times_us: Mapping[str, float]) -> None:
        self.now, self.log, self.times_us = 0.0, list[str](), times_us
        card = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = card.now

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, other: Any) -> float:
                return float(other.at - self.at) / 1000

        def graph(function: Callable[[], str], calls: int) -> Any:
            return SimpleNamespace(graph=SimpleNamespace(replay=lambda: card.replay(function(), calls)), calls=calls)

        monkeypatch.setattr(bench.timing, "Graph", graph)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.log.append("queued"))
        monkeypatch.setattr(bench.timing.time, "sleep", lambda seconds: self.log.append(f"idle {seconds}"))

    def replay(self, name: str, calls: int) -> None:
        self.log.append(name)
        self.now += self.times_us[name] * calls

    def regimes(self, calls: Mapping[str, int]) -> Any:
        return bench.timing.Regimes({name: lambda name=name: name for name in calls}, calls)


def test_a_burst_is_one_replay_of_a_rested_card(monkeypatch: pytest.MonkeyPatch) -> None:
    card = FakeCard(monkeypatch, {"a": 1000.0, "b": 20.0, "c": 3.0})
    found = card.regimes({"a": 1, "b": 8, "c": 1}).burst(6)
    assert {name: one.samples_us for name, one in found.items()} == {
        name: [pytest.approx(time)] * 6 for name, time in card.times_us.items()
    }
    assert [card.log[i : i + 2] for i in range(0, len(card.log), 3)] == [["idle 0.025", "queued"]] * 18
    rounds = ["".join(card.log[i + 2 : i + 9 : 3]) for i in range(0, len(card.log), 9)]
    assert {"".join(sorted(one)) for one in rounds} == {"abc"} and len(set(rounds)) > 1, "shuffled"


def test_sustained_is_45_ms_back_to_back(monkeypatch: pytest.MonkeyPatch) -> None:
    card = FakeCard(monkeypatch, {"a": 1000.0, "b": 20.0})
    regimes = card.regimes({"a": 1, "b": 9})
    found = regimes.sustained(4)
    assert {name: [round(x, 6) for x in one.samples_us] for name, one in found.items()} == {
        "a": [1000.0] * 4,
        "b": [20.0] * 4,
    }
    assert not [word for word in card.log if word.startswith(("idle", "queued"))]
    assert "".join(card.log) == "aaabbb" + ("a" * 45 + "b" * 250) * 5, "how long, warm, and four times timed"


# ------------------------------------------------------------------------------------------ rows

TIMES = {"deep_kernels": 8.0, "cudnn": 10.0, "torch_flash": 12.0, "read_bw": 100.0, "off": 8.0, "again": 8.1}


class FakeRegimes:
    """Made-up times; sustained ones are a tenth longer."""

    def __init__(self, functions: Mapping[str, Callable[[], Any]], calls: Mapping[str, int]) -> None:
        assert set(functions) == set(calls)
        self.calls = calls
        for name, function in functions.items():
            for _ in range(calls[name]):
                function()

    def timings(self, samples: int, factor: float) -> dict[str, Any]:
        return {name: bench.timing.Timing([TIMES.get(name, 9.0) * factor] * samples) for name in self.calls}

    def burst(self, samples: int) -> dict[str, Any]:
        return self.timings(samples, 1.0)

    def sustained(self, samples: int) -> dict[str, Any]:
        return self.timings(samples, 1.1)


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, math_for_cudnn: None) -> dict[str, Any]:
    """A row of each kind, with made-up times."""
    monkeypatch.setattr(bench.timing, "Regimes", FakeRegimes)
    monkeypatch.setattr(bench.timing, "read_call", lambda: (lambda: None, 1 << 30))
    monkeypatch.setattr(bench, "_CACHE_BYTES", 2 * SHORT.num_bytes)
    rows = [bench.bench_row(row, 7, bench.REGIMES, "cpu", "cpu") for row in (PREFILL, DECODE, CURVE)]
    return {"card": "a card", "torch": "2.x", "results": json.loads(json.dumps(rows))}


def test_figures_of_rows(results: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    prefill, decode, curve = results["results"]
    for regime, factor, samples in (("burst", 1.0, 7), ("sustained", 1.1, 3)):
        ours = prefill[regime]["deep_kernels"]
        assert ours["samples"] == samples and ours["median_us"] == pytest.approx(8 * factor)
        assert ours["tflops"] == pytest.approx(SMALL.flop / (8 * factor) / 1e6)
        assert (ours["x_cudnn"], ours["x_torch_flash"]) == (pytest.approx(1.25), pytest.approx(1.5))
        assert "x_cudnn" not in prefill[regime]["cudnn"]
        ours, read = decode[regime]["deep_kernels"], decode[regime]["read_bw"]
        assert ours["tb_s"] == pytest.approx(SHORT.num_bytes / (8 * factor) / 1e6)
        assert read["tb_s"] == pytest.approx((1 << 30) / (100 * factor) / 1e6)
        assert ours["of_read_bw"] == pytest.approx(ours["tb_s"] / read["tb_s"]) and read["of_read_bw"] == 1
        assert ours["x_cudnn"] == pytest.approx(1.25) and "x_cudnn" not in read
        assert curve[regime]["4/3"]["x_off"] == pytest.approx(8 / 9)
    shares = {name_of: share for name_of, share in curve["shares"].items() if share}
    assert shares == {
        "{}/{}".format(*words): share for words, share in problems.emulations_of(CURVE.shape, "cpu").items()
    }
    assert list(curve["burst"]) == ["off", "again", *shares] == list(curve["shares"]) == list(curve["deviations"])
    for row in results["results"]:
        bench.print_row(row)
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.startswith("prefill D64 2x70 H4/2 causal") and " | burst deep_kernels 8.0 us " in first
    assert "(x_cudnn 1.250, x_torch_flash 1.500)" in first and " | sustained deep_kernels 8.8 us" in first
    assert "TB/s (x_cudnn 1.250, x_torch_flash 1.500, of_read_bw " in second and "read_bw 100.0 us" in second
    assert third.startswith("curve ") and f"4/3 ({shares['4/3']:.0%})" in third


def test_launches_of_decode_rows_take_turns_on_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_CACHE_BYTES", 2 * SHORT.num_bytes)
    monkeypatch.setattr(bench, "OTHERS", {})
    monkeypatch.setattr(bench.timing, "read_call", lambda: (lambda: None, 1 << 30))
    seen: list[int] = []
    real = bench.call_of

    def spy(shape: Any, problem: Any) -> Callable[[], Tensor]:
        call = real(shape, problem)

        def run() -> Tensor:
            seen.append(problem.k.data_ptr())
            return call()

        return run

    monkeypatch.setattr(bench, "call_of", spy)
    monkeypatch.setattr(bench.timing, "Regimes", FakeRegimes)
    bench.bench_row(DECODE, 3, ("burst",), "cpu", "cpu")
    checked, timed = seen[:3], seen[3:]
    assert len(set(checked)) == 3 and timed == checked * 3, "8 launches at least, every set as often"


def test_a_wrong_result_stops_a_row(monkeypatch: pytest.MonkeyPatch, math_for_cudnn: None) -> None:
    monkeypatch.setattr(bench.timing, "Regimes", lambda *arguments: pytest.fail("timed before it was checked"))
    real = bench.call_of
    monkeypatch.setattr(bench, "call_of", lambda *arguments: lambda: real(*arguments)() * 1.02)
    for row in (PREFILL, DECODE, CURVE):
        with pytest.raises(RuntimeError, match=r"wrong result of (deep_kernels|off)"):
            bench.bench_row(row, 3, ("burst",), "cpu", "cpu")


# ------------------------------------------------------------------------------------------ README and picture


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_tables_of_rows(results: dict[str, Any]) -> None:
    lines = tables.attention_section(results)
    text = "\n".join(lines)
    assert "a card, torch 2.x" in lines[0]
    prefill = next(line for line in lines if line.startswith("| D64 2x70"))
    rate = SMALL.flop / 8 / 1e6
    assert cells(prefill)[1:] == ["8.0", f"{rate:.0f}", "1.25", "1.50", f"{rate / 1.1:.0f}", "1.25", "1.50"]
    decode = cells(next(line for line in lines if line.startswith("| D64 2x3/300")))
    assert decode[1:2] + decode[4:6] == ["8.0", "1.25", "1.50"] and len(decode) == 10
    curve = cells(next(line for line in lines if line.startswith("| D64 1x64")))
    assert curve[2].count("): ") == len(results["results"][2]["shares"]) - 2 and "(4/3): " in curve[2]
    headers = [i for i, line in enumerate(lines) if line.startswith("|---")]
    assert len(headers) == 3
    for i in headers:
        assert len(cells(lines[i - 1])) == len(cells(lines[i])) == len(cells(lines[i + 1]))
    assert "attention.png" in text


def test_tables_of_what_was_measured_alone(results: dict[str, Any]) -> None:
    prefill, decode, curve = results["results"]
    for row in (prefill, decode):
        del row["sustained"]
        row["burst"].pop("cudnn")
        row["burst"]["deep_kernels"].pop("x_cudnn")
    del curve["burst"]
    line = next(line for line in tables.attention_section(results) if line.startswith("| D64 2x70"))
    assert cells(line)[3:] == ["-", "1.50", "-", "-", "-"]
    assert "unit, sustained:" in "\n".join(tables.attention_section(results))
    assert "head_dim" not in "\n".join(tables.attention_section(results | {"results": []}))


def test_without_results_there_is_no_section(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr("sys.argv", ["readme_tables.py"])
    assert tables.main() == 0
    assert (tmp_path / "README.md").read_text() == f"before\n{tables.BEGIN}\n{tables.END}\nafter\n"


def test_results_can_be_plotted(results: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    kept = tmp_path / "kept.json"
    words = ["bench_attention.py", "--replot", str(kept), "--plot", str(tmp_path / "made_up.png")]
    monkeypatch.setattr("sys.argv", words)
    for rows in (results["results"], results["results"][2:]):
        kept.write_text(json.dumps(results | {"results": rows}))
        (tmp_path / "made_up.png").unlink(missing_ok=True)
        assert bench.main() == 0
        assert (tmp_path / "made_up.png").stat().st_size > 10_000
    monkeypatch.setattr("sys.argv", words[:3])
    with pytest.raises(SystemExit):
        bench.main()


# ------------------------------------------------------------------------------------------ the command


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, Any]]]:
    """What is compiled ahead, on a card that only answers questions."""
    prepared: list[list[dict[str, Any]]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench.attention_problems, "arch_of_card", lambda: "sm90:sm_90a")
    monkeypatch.setattr(problems.Shape, "refusal", lambda self: None)
    monkeypatch.setattr(bench.dk, "prepare", prepared.append)
    return prepared


@pytest.mark.parametrize(
    ("words", "count", "regimes"),
    (
        (["--rows", "prefill", "D256", "causal", "H32/32"], 4, ["burst", "sustained"]),
        (["--rows", "decode", "D128", "--regime", "burst"], 8, ["burst"]),
        (["--rows", "curve", "D64", "--regime", "sustained"], 1, ["sustained"]),
        ([], len(bench.ROWS), ["burst", "sustained"]),
    ),
)
def test_rows_and_regimes_can_be_chosen(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    card: list[list[dict[str, Any]]],
    words: list[str],
    count: int,
    regimes: list[str],
) -> None:
    benched: list[str] = []

    def bench_row(row: Any, samples: int, regimes: Any, arch: str) -> dict[str, Any]:
        assert (samples, arch) == (5, "sm90:sm_90a")
        benched.append(row.shape.label)
        return {"kind": row.kind, "label": row.shape.label, "regimes": list(regimes)}

    monkeypatch.setattr(bench, "bench_row", bench_row)
    out = tmp_path / "results" / "attention.json"
    monkeypatch.setattr("sys.argv", ["bench_attention.py", *words, "--samples", "5", "--out", str(out)])
    assert bench.main() == 0
    kept = json.loads(out.read_text())["results"]
    assert [row["label"] for row in kept] == benched and len(benched) == count
    assert all(row["regimes"] == regimes for row in kept)
    curves = [row for row in kept if row["kind"] == "curve"]
    explicit = [case for case in card[0] if "ex2_emu_freq" in case]
    assert len(card[0]) - len(explicit) == count - len(curves) and len(explicit) >= 7 * len(curves)


def test_rows_before_a_wrong_result_are_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, card: list[list[dict[str, Any]]]
) -> None:
    def bench_row(row: Any, **options: Any) -> dict[str, Any]:
        if row.shape.causal:
            raise RuntimeError("wrong")
        return {"kind": row.kind, "label": row.shape.label}

    monkeypatch.setattr(bench, "bench_row", bench_row)
    out = tmp_path / "attention.json"
    monkeypatch.setattr("sys.argv", ["bench_attention.py", "--out", str(out)])
    with pytest.raises(RuntimeError, match=r"^wrong$"):
        bench.main()
    assert [row["label"] for row in json.loads(out.read_text())["results"]] == [bench.ROWS[0].shape.label]


def test_what_the_card_cannot_run_is_left_out(
    monkeypatch: pytest.MonkeyPatch, card: list[list[dict[str, Any]]], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(problems.Shape, "refusal", lambda self: "no kernel for it")
    monkeypatch.setattr("sys.argv", ["bench_attention.py"])
    assert bench.main() == 0
    assert capsys.readouterr().out.count("left out: no kernel for it") == len(bench.ROWS)


def test_without_a_card(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench_attention.py"])
    assert bench.main() == 2
    assert capsys.readouterr().err == "bench_attention: a CUDA device is needed, torch sees none\n"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_rows_on_the_card() -> None:
    """Small shapes: what is measured, not how fast."""
    arch = problems.arch_of_card()
    for row in (PREFILL, DECODE, CURVE):
        if reason := row.shape.refusal():
            pytest.skip(reason)
        result = bench.bench_row(row, 3, bench.REGIMES, arch)
        for regime in bench.REGIMES:
            assert set(result["deviations"]) <= set(result[regime])
            assert all(entry["median_us"] > 0 for entry in result[regime].values())
