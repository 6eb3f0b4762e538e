"""The tables of the FP8 prefill MLP: what measurements make of them, their text, who reads them, and their tuner."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tuner_runs
from script import ROOT, load

from deep_kernels import _C
from deep_kernels.__main__ import main

load("tuning")  # what these import
table = load("silu_table")
bench = load("bench_silu_fold")
tuner = load("tune_silu_fold")

OP = "fp8_silu_fold_prefill"
FILE = ROOT / "csrc" / "ops" / "silu_table.h"
NUM_SMS = 132
MODELS = ((2048, 6144), (4096, 12288))
TOKENS = (16, 64, 128, 192, 256, 512, 1024, 8192)
COST = {"64": 6.0, "128": 10.0, "64x2": 4.0}  # made-up microseconds of a round at K 2048


def rounds_of(tile: str, num_columns: int, num_tokens: int, num_sms: int = NUM_SMS) -> int:
    tokens, sms = table.tile_sizes(tile)
    return math.ceil(math.ceil(num_tokens / tokens) * math.ceil(num_columns / 128) / (num_sms // sms))


def measured(k: int, num_columns: int, num_tokens: int, two: float = 1.2, again: float = 1.0, **factors: float) -> Any:
    """Times of the made-up model; `factors` change those of tiles, `two` is over the fastest tile's."""
    rounds = {tile: rounds_of(tile, num_columns, num_tokens) for tile in COST}
    times = {tile: (3.0 + rounds[tile] * COST[tile] * k / 2048) * factors.get(f"t{tile}", 1.0) for tile in COST}
    times[table.TWO_LAUNCHES] = two * min(times.values())
    times[table.AGAIN] = again * times["64"]
    drift = [1 + 0.05 * (i % 7 - 3) / 7 for i in range(21)]
    samples = {name: [time * one for one in drift] for name, time in times.items()}
    return table.Measured("sm90", k, num_columns, num_tokens, rounds, "64", samples)


def sweep(change: Callable[[int, int], dict[str, float]] = lambda columns, tokens: {}) -> list[Any]:
    return [
        measured(k, columns, tokens, **change(columns, tokens))
        for (k, columns), tokens in itertools.product(MODELS, TOKENS)
    ]


def decide(rows: Sequence[Any]) -> Any:
    return table.decide(rows, NUM_SMS, "a card", "2026-01-02")


def bands(found: Any, num_columns: int) -> list[tuple[int, bool, str]]:
    return [(row.max_tokens, row.fused, row.tile) for row in found.folds if row.num_columns == num_columns]


# ------------------------------------------------------------------------------------------ decisions


def test_times_of_rounds_come_out_of_the_sweep() -> None:
    """Whatever a launch costs besides."""
    found = decide(sweep())
    assert {row.tile: row.time for row in found.tiles} == {"64": 1500, "128": 2500, "64x2": 1000}
    one = table.fit(sweep()[: len(TOKENS)])
    assert one.overhead == pytest.approx(3.0) and max(map(abs, one.errors)) < 1e-6
    assert one.rounds == pytest.approx(COST)
    assert {(row.gpu, row.date, row.backend) for row in found.tiles} == {("a card", "2026-01-02", "sm90")}
    assert all("us a round at K 2048" in row.reason and "us a round at K 4096" in row.reason for row in found.tiles)


def test_what_the_rule_explains_needs_no_tile_of_its_own() -> None:
    found = decide(sweep())
    for _, columns in MODELS:
        assert bands(found, columns) == [(8192, True, "")]
    assert [row.gain for row in found.folds] == [pytest.approx(0.2, abs=0.01)] * 2
    listed = ", ".join(map(str, TOKENS))
    assert all(row.reason.startswith(f"two launches over fold at {listed} tokens: +20.0% to") for row in found.folds)


@pytest.mark.parametrize(("factor", "tile"), ((0.7, "64x2"), (0.985, "")))
def test_where_the_rule_is_wrong_the_row_names_the_tile(factor: float, tile: str) -> None:
    """By more than it may be."""

    def change(columns: int, tokens: int) -> dict[str, float]:
        if (columns, tokens) != (6144, 192):
            return {}
        plain = measured(2048, 6144, 192)
        return {"t64x2": factor * plain.median_us("128") / plain.median_us("64x2")}

    found = decide(sweep(change))
    assert bands(found, 12288) == [(8192, True, "")]
    if tile:
        assert bands(found, 6144) == [(128, True, ""), (192, True, "64x2"), (8192, True, "")]
        assert "the tile by rounds is up to 4" in found.folds[1].reason and "slower than this" in found.folds[1].reason
    else:
        assert bands(found, 6144) == [(8192, True, "")]


def test_two_launches_where_they_win() -> None:
    found = decide(sweep(lambda columns, tokens: {"two": 0.9} if columns == 12288 and tokens >= 512 else {}))
    assert bands(found, 6144) == [(8192, True, "")]
    assert bands(found, 12288) == [(256, True, ""), (8192, False, "")]
    assert found.folds[-1].gain == pytest.approx(1 / 0.9 - 1, abs=1e-4)


@pytest.mark.parametrize(
    ("two", "again", "fused", "gain"),
    (
        (0.98, 1.0, False, 0.0204),
        (0.992, 1.0, True, 0.0),  # below 1%
        (0.9, 1.05, True, 0.0),  # below three times what one variant differs from itself
        (0.9, 1.02, False, 0.1111),
        (1.005, 1.0, True, 0.0),
        (1.1, 1.05, True, 0.0),
        (1.1, 1.01, True, 0.1),
    ),
)
def test_a_win_counts_past_one_percent_and_past_the_spread(two: float, again: float, fused: bool, gain: float) -> None:
    found = decide(sweep(lambda columns, tokens: {"two": two, "again": again}))
    assert {row.fused for row in found.folds} == {fused}
    assert [row.gain for row in found.folds] == [pytest.approx(gain, abs=1e-4)] * 2
    assert all(f"spread {again - 1:.2%};" in row.reason for row in found.folds)


def test_a_spread_of_rounds_counts_where_their_median_is_none() -> None:
    row = measured(2048, 6144, 128)
    again = [time * (1 + 0.4 * (-1) ** i) for i, time in enumerate(row.times_us["64"])]
    assert row.spread() == pytest.approx(0)
    assert replace(row, times_us=row.times_us | {table.AGAIN: again}).spread() > 0.05


def test_of_equal_times_the_last_tile() -> None:
    assert table.tile_by_rounds({"64": 2, "128": 1}, {"64": 500, "128": 1000}) == "128"
    assert table.tile_by_rounds({"64": 2, "128": 1}, {"64": 499, "128": 1000}) == "64"


def test_times_that_no_rounds_explain() -> None:
    rows = [replace(row, rounds={tile: 100 - count for tile, count in row.rounds.items()}) for row in sweep()]
    with pytest.raises(RuntimeError, match=r"^tune: no times of rounds fit those of sm90 at K 2048$"):
        decide(rows)


def test_other_backends_stay() -> None:
    before = table.parse(FILE.read_text())
    after = table.merged(before, decide(sweep()))
    for kept, rows in ((before.tiles, after.tiles), (before.folds, after.folds)):
        assert [row for row in rows if row.backend == "sm89"] == [row for row in kept if row.backend == "sm89"] != []
    assert [row.tile for row in after.tiles if row.backend == "sm90"] == ["64", "128", "64x2"], "by SMs, then tokens"
    assert all(row.gpu == "a card" for row in (*after.tiles, *after.folds) if row.backend == "sm90")
    with pytest.raises(ValueError, match=r"^the table has no place for sm77$"):
        table.merged(before, decide([replace(row, backend="sm77") for row in sweep()]))


# ------------------------------------------------------------------------------------------ text


def unlike_rows() -> Any:
    """Tables whose neighbours have other answers."""

    def two(columns: int, tokens: int) -> dict[str, float]:
        return {"two": 0.8} if columns == 12288 and tokens >= 512 else {"t64x2": 0.2} if tokens == 192 else {}

    found = decide(sweep(two))
    assert bands(found, 6144) == [(128, True, ""), (192, True, "64x2"), (8192, True, "")]
    assert bands(found, 12288) == [(128, True, ""), (192, True, "64x2"), (256, True, ""), (8192, False, "")]
    return table.merged(table.Table([], []), found)


def test_text_and_back() -> None:
    rows = unlike_rows()
    assert table.parse(table.render(rows)) == rows


def test_the_table_is_what_the_tuner_writes() -> None:
    rows = table.parse(FILE.read_text())
    assert table.render(rows) == FILE.read_text()
    for backend, target in (("sm89", "sm_89"), ("sm90", "sm_90a")):
        tiles = [row.tile for row in rows.tiles if row.backend == backend]
        assert tiles and set(tiles) <= set(_C.silu_fold_choice(target, 128, 6144, NUM_SMS)["rounds"])
        assert {(row.k, row.num_columns) for row in rows.folds if row.backend == backend} == set(MODELS)
    for row in (*rows.tiles, *rows.folds):
        assert bool(row.gpu) == bool(row.date) and row.reason
    for row in rows.folds:
        assert bool(row.gpu) == bool(row.num_sms) and (row.gpu or (row.fused and not row.gain and not row.tile))


@pytest.mark.parametrize(
    "change",
    (
        lambda text: text.replace("true", "yes", 1),
        lambda text: re.sub(r"(, 0\.\d{3})\d,$", r"\1,", text, count=1, flags=re.MULTILINE),
        lambda text: text.replace("{64, 1}", "{64, 01}", 1),
        lambda text: text.replace("{64, 1}", "{32, 1}", 1),
        lambda text: text.replace("kByRounds", "{0, 1, 2}", 1),
        lambda text: text.replace("6144, 2048, 8192", "12288, 2048, 8192", 1),
        lambda text: text.replace("// clang-format on", "// clang-format on, again"),
    ),
)
def test_a_table_that_was_changed_by_hand(change: Callable[[str], str]) -> None:
    text = change(FILE.read_text())
    assert text != FILE.read_text()
    with pytest.raises(ValueError, match="changed by hand"):
        table.parse(text)


def test_texts_that_would_not_be_a_cpp_string() -> None:
    rows = unlike_rows()
    for changed in (
        replace(rows, tiles=[replace(rows.tiles[0], reason='say "no"')]),
        replace(rows, folds=[replace(rows.folds[0], gpu="a\\b")]),
    ):
        with pytest.raises(ValueError, match=r"^a row's texts must be without quotes, backslashes and line ends"):
            table.render(changed)


def test_the_choice_follows_a_table_of_unlike_rows(tmp_path: Path) -> None:
    """The library's functions on a table where the two launches win somewhere, and a tile that is no rule's."""
    text = table.render(unlike_rows())
    facts = [f"tile_time(kTileRows, Backend::sm90, {{{tile}}}) == {time}" for tile, time in TIMES.items()]
    for columns, tokens, index, fused in PLACES:
        sizes = f"Backend::sm90, {columns}, {tokens}"
        facts.append(f"find_fold_row(kFoldRows, {sizes}) == &kFoldRows[{index}]")
        facts.append(f"fold_is_chosen(kFoldRows, {sizes}) == {str(fused).lower()}")
    facts.append("find_fold_row(kFoldRows, Backend::sm89, 6144, 128) == nullptr")
    facts.append("fold_is_chosen(kFoldRows, Backend::sm89, 12288, 8192)")
    facts += [f"kFoldRows[1].tile_for({sizes}) == {tile}" for sizes, tile in MEASURED_TILES.items()]
    for tile, (columns, tokens) in itertools.product(COST, ((6144, 16), (6144, 512), (12288, 8192), (48, 129))):
        braced = "TileShape{{{}, {}}}".format(*table.tile_sizes(tile))
        rounds = rounds_of(tile, columns, tokens)
        facts.append(f"fold_rounds({braced}, {tokens}, {-(-columns // 128)}, {NUM_SMS}) == {rounds}")
    facts.append("fold_rounds(TileShape{64, 2}, 64, 48, 1) == 48")
    tuner_runs.header_holds("ops/silu_table.h", text, facts, tmp_path)


TIMES = {"64, 1": 1500, "64, 2": 1000, "192, 2": 0}
PLACES = (  # I, tokens, row, fused
    (6144, 1, 0, True),
    (6144, 128, 0, True),
    (6144, 129, 1, True),
    (6144, 193, 2, True),
    (6144, 1 << 40, 2, True),  # more than was measured: the last
    (128, 8192, 2, True),
    (8000, 192, 1, True),  # nearest by ratio
    (8800, 256, 5, True),
    (12288, 257, 6, False),
    (12288, 9000, 6, False),
    (1 << 20, 8192, 6, False),
)
MEASURED_TILES = {
    "6144, 192, 132": "TileShape{64, 2}",
    "6144, 193, 132": "kByRounds",
    "6272, 192, 132": "kByRounds",
    "6144, 192, 78": "kByRounds",
}


# ------------------------------------------------------------------------------------------ readers


@pytest.mark.parametrize(("backend", "arch"), (("sm89", "sm_89"), ("sm89", "sm89:sm_90a"), ("sm90", "sm_90a")))
def test_the_library_chooses_by_the_file(monkeypatch: pytest.MonkeyPatch, backend: str, arch: str) -> None:
    monkeypatch.delenv("DEEP_KERNELS_SILU_TILE", raising=False)
    rows = table.parse(FILE.read_text())
    times = {row.tile: row.time for row in rows.tiles if row.backend == backend}
    seen = set()
    for columns, tokens, num_sms in itertools.product(
        (48, 6144, 8192, 12288), (1, 33, 64, 100, 192, 256, 500, 513, 8192, 99999), (1, 78, 132)
    ):
        choice = _C.silu_fold_choice(arch, tokens, columns, num_sms)
        folds = [row for row in rows.folds if row.backend == backend]
        nearest = min((row.num_columns for row in folds), key=lambda other: abs(math.log(other / columns)))
        near = [row for row in folds if row.num_columns == nearest]
        row = next((row for row in near if tokens <= row.max_tokens), near[-1])
        known = columns == row.num_columns and tokens <= row.max_tokens and num_sms == row.num_sms
        fits = {tile for tile in times if table.tile_sizes(tile)[1] <= num_sms}  # a cluster needs its SMs
        rounds = {tile: count for tile, count in choice["rounds"].items() if tile in fits}
        expected = (row.tile if known else "") or table.tile_by_rounds(rounds, times)
        assert (choice["tile"], choice["fused"]) == (expected, row.fused)
        seen.add(choice["tile"])
    assert len(seen) > 1, "sizes that tell tiles apart"


def test_rounds_by_hand() -> None:
    rounds = _C.silu_fold_choice("sm_90a", 512, 6144, 132)["rounds"]
    assert (rounds["64"], rounds["128"]) == (3, 2)
    assert _C.silu_fold_choice("sm_89", 33, 129, 1)["rounds"] == {"32": 4, "64": 2, "128": 2}


def test_the_variable_overrules_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """With each of the words that the tuner is told."""
    for tile in _C.silu_fold_choice("sm_90a", 512, 6144, 132)["rounds"]:
        monkeypatch.setenv("DEEP_KERNELS_SILU_TILE", tile)
        assert _C.silu_fold_choice("sm_90a", 512, 6144, 132)["tile"] == tile


def test_the_inspector_shows_the_rows_of_the_file() -> None:
    rows = table.parse(FILE.read_text())
    shown = [row for row in _C.tuning_rows() if row["op"] == OP]
    facts = [
        (row.backend, f"tile {row.tile}: a round counts {row.time}", row.gpu, row.date, 0, row.reason)
        for row in rows.tiles
    ]
    facts += [
        (
            row.backend,
            f"I {row.num_columns}, up to {row.max_tokens} tokens",
            row.gpu,
            row.date,
            row.gain,
            row.reason,
        )
        for row in rows.folds
    ]
    assert [
        tuple(row[name] for name in ("backend", "cases", "gpu", "date", "gain", "reason")) for row in shown
    ] == facts
    ways = [
        ("fold" if row.fused else "two launches") + (f", its tile {row.tile}" if row.tile else "") for row in rows.folds
    ]
    assert [row["choice"] for row in shown[len(rows.tiles) :]] == ways


# ------------------------------------------------------------------------------------------ the command


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copy(FILE, tmp_path))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file = tmp_path / "times.json"
    results = [
        {name: getattr(row, name) for name in table.Measured.__dataclass_fields__}
        for row in sweep(lambda columns, tokens: {"two": 0.8} if tokens == 192 else {})
    ]
    file.write_text(json.dumps({"gpu": "a card", "date": "2026-03-04", "num_sms": NUM_SMS, "results": results}))
    return file


def test_a_run_that_was_kept_makes_the_table(copy: Path, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors = tuner_runs.makes_the_table("silu_fold", copy, FILE, saved, capsys)
    assert "sm90 I 6144, up to 192 tokens: two launches, tile by rounds; " in errors
    assert "sm90 tile 64x2: 1000, 4.0 us a round at K 2048, 8.0 us a round at K 4096; " in errors
    text = copy.read_text().replace("false", "true", 1).replace("kByRounds", "kNone", 1)
    tuner_runs.finds_what_was_changed_by_hand("silu_fold", copy, text, capsys)


@tuner_runs.by_what_cannot_be_measured
def test_what_cannot_be_measured(
    copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    tuner_runs.cannot_measure("silu_fold", copy, FILE, words, sentence, monkeypatch, capsys)


def test_variables_that_would_choose_stop_the_tuner(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("DEEP_KERNELS_SILU_STAGES", "1")
    assert main(["tune", "silu_fold", "--table", str(copy)]) == 2
    assert capsys.readouterr().err == "deep_kernels: tune: DEEP_KERNELS_SILU_STAGES must not be set\n"


@pytest.mark.parametrize(
    ("capability", "archs"),
    (
        (90, {"sm89": "sm89:sm_90a", "sm90": "sm90:sm_90a"}),
        (89, {"sm89": "sm89:sm_89"}),
    ),
)
def test_every_backend_that_runs_on_the_card(
    monkeypatch: pytest.MonkeyPatch, capability: int, archs: dict[str, str]
) -> None:
    monkeypatch.delenv("DEEP_KERNELS_ARCH", raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_C, "device_facts", lambda device: ("a card", capability, 132))
    assert tuner.archs_of_card(None) == archs


def test_a_backend_that_is_named() -> None:
    assert tuner.archs_of_card("sm89:sm_90a") == {"sm89": "sm89:sm_90a"}
    with pytest.raises(ValueError, match=r"^tune: --arch must begin with sm89 or sm90, got sm_90a$"):
        tuner.archs_of_card("sm_90a")
    with pytest.raises(ValueError, match=r"^tune: fp8_silu_fold_prefill: backend sm90 cannot be compiled for"):
        tuner.archs_of_card("sm90:sm_89")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models and some tokens, as small as they go."""
    for name in list(bench.MODELS):
        monkeypatch.delitem(tuner.MODELS, name)
    monkeypatch.setitem(tuner.MODELS, "a", bench.Model(256, 256, 1))
    monkeypatch.setitem(tuner.MODELS, "b", bench.Model(384, 512, 1))
    monkeypatch.setattr(tuner, "NUM_TOKENS", (16, 80, 200))


def test_each_call_has_its_tile_and_the_setting_goes(tiny: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str | None, bool]] = []
    real = tuner.dk.fp8_silu_fold_prefill

    def spy(*arguments: Any, **options: Any) -> Any:
        seen.append((os.environ.get("DEEP_KERNELS_SILU_TILE"), options["fused"]))
        return real(*arguments, **options)

    monkeypatch.setattr(tuner.dk, "fp8_silu_fold_prefill", spy)
    monkeypatch.delenv("DEEP_KERNELS_SILU_TILE", raising=False)
    problem = bench.make_problem(bench.Shape("a", 80), "cpu")
    calls = tuner.calls_of(problem, 33, ["64", "128", "64x2"], "128", None)
    assert list(calls) == ["64", "128", "64x2", table.AGAIN, table.TWO_LAUNCHES]
    assert all(call()[0].shape == (33, 256) for call in calls.values())
    assert seen == [("64", True), ("128", True), ("64x2", True), ("128", True), (None, False)]
    assert "DEEP_KERNELS_SILU_TILE" not in os.environ


def test_wrong_results_stop_the_tuner(tiny: None) -> None:
    problem = bench.make_problem(bench.Shape("a", 80), "cpu")
    calls = tuner.calls_of(problem, 80, ["64"], "64", None)
    assert 0.01 < tuner.require_right("a S80", calls) < tuner.MAX_UNLIKE
    codes, scale = calls["64"]()
    other = codes.view(torch.uint8).clone()
    other[79, 255] ^= 4
    some = scale.clone()
    some[79, 1] *= 1.03
    for wrong in (
        (codes, some),
        (codes, scale * torch.nan),
        (other.view(codes.dtype), scale),
        ((codes.view(torch.uint8) + 1).view(codes.dtype), scale),
    ):
        with pytest.raises(RuntimeError, match=r"^tune: a S80: 64 is not what the two launches give: \d"):
            tuner.require_right("a S80", calls | {"64": lambda wrong=wrong: wrong})


def test_a_run_from_measuring_to_rows(
    tiny: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On CPU tensors with times that are made of the library's own rounds; in one model the two launches win."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    archs = {"sm89": "sm89:sm_90a", "sm90": "sm90:sm_90a"}
    real = _C.silu_fold_choice

    def of_tile_64(*sizes: Any) -> dict[str, Any]:
        return real(*sizes) | {"tile": "64"}

    def fake_measure(functions: dict[str, Any], samples: int, calls: int, queued: bool) -> dict[str, Any]:
        assert samples == 9 and calls == 16 and queued
        ((num_tokens, columns),) = {function()[0].shape for function in functions.values()}
        times = {}
        for tile in (name for name in functions if name not in (table.AGAIN, table.TWO_LAUNCHES)):
            tokens, sms = table.tile_sizes(tile)
            times[tile] = 4 + rounds_of(tile, columns, num_tokens, 2) * (1 + tokens / 16 / sms)
        best = min(times.values())
        times |= {table.AGAIN: times["64"], table.TWO_LAUNCHES: best * (0.9 if columns == 512 else 1.1)}
        return {name: tuner.timing.Timing([times[name]] * samples) for name in functions}

    monkeypatch.setattr(tuner.timing, "measure", fake_measure)
    monkeypatch.setattr(tuner._C, "silu_fold_choice", of_tile_64)
    times = json.loads(json.dumps(tuner.measure(archs, 2, 9, device="cpu")))
    assert (times["gpu"], times["num_sms"], len(times["results"])) == ("a card", 2, 12)
    assert re.search(r"sm89 a S80: 32 \d+\.0, 64 .* us; \d\.\d% other codes", capsys.readouterr().err)
    for result in times["results"]:
        words = list(real(archs[result["backend"]], 16, 256, 2)["rounds"])
        assert list(result["times_us"]) == [*words, table.AGAIN, table.TWO_LAUNCHES]
    found = list(tuner.tables_of(times))
    assert [one.tiles[0].backend for one in found] == ["sm89", "sm90"]
    assert [row.fused for one in found for row in one.folds] == [True, False] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_run_on_the_card(tiny: None) -> None:
    """Small shapes: what is measured, not how fast."""
    archs = tuner.archs_of_card(None)
    times = tuner.measure(archs, _C.device_facts(torch.cuda.current_device())[2], samples=4)
    backends = [backend for _ in tuner.MODELS for backend in archs for _ in tuner.NUM_TOKENS]
    assert [result["backend"] for result in times["results"]] == backends
    for result in times["results"]:
        assert all(len(samples) == 4 and min(samples) > 0 for samples in result["times_us"].values())
        assert result["unlike"] < tuner.MAX_UNLIKE
