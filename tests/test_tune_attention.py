"""The table of exp2 emulation: what measurements make of it, its text, who reads it, and its tuner."""

from __future__ import annotations

import itertools
import json
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
problems = load("attention_problems")
table = load("attention_table")
tuner = load("tune_ex2_emu")

OP = "flash_attn_fwd"
FILE = ROOT / "csrc" / "ops" / "attention_table.h"
LENGTHS = (4096, 16384, 65536)
EMULATIONS = {"16/2": (16, 2), "8/2": (8, 2), "4/3": (4, 3)}
SHARES = {"16/2": 0.125, "8/2": 0.25, "4/3": 0.5}


def measured(num_kv: int = 4096, heads_per_kv: int = 1, again: float = 1.0, **factors: float) -> Any:
    """Made-up times: those of emulations over that of off, slower with their share unless `factors` say."""
    slow = {name: 1 + share / 5 for name, share in SHARES.items()}
    slow |= {name[1:].replace("_", "/"): factor for name, factor in factors.items()}
    drift = [1 + 0.05 * (i % 7 - 3) / 7 for i in range(21)]
    times = {table.OFF: 1.0, table.AGAIN: again, **slow}
    samples = {name: [1000 * factor * one for one in drift] for name, factor in times.items()}
    return table.Measured("sm90", "bfloat16", 128, True, heads_per_kv, num_kv, EMULATIONS, SHARES, (), samples)


def decide(rows: Sequence[Any]) -> list[Any]:
    found: list[Any] = table.decide(rows, "a card", "2026-01-02")
    return found


def bands(found: Sequence[Any]) -> list[tuple[int, int, tuple[int, int, int]]]:
    return [(row.min_heads_per_kv, row.min_num_kv, row.ex2) for row in found]


# ------------------------------------------------------------------------------------------ decisions


def test_off_is_an_answer_with_its_curve() -> None:
    (row,) = decide([measured(num_kv) for num_kv in LENGTHS])
    assert bands([row]) == [(0, 0, table.NONE)]
    assert row.gain == pytest.approx(0.125 / 5, abs=1e-4), "what the next best costs more"
    assert row.reason == (
        "no emulation wins at 4096, 16384, 65536 keys, spread 0.00%; time by share (freq/res) over off: "
        "12% (16/2) +2.5%, 25% (8/2) +5.0%, 50% (4/3) +10.0%"
    )
    assert (row.gpu, row.date, row.backend, row.dtype, row.head_dim, row.causal) == (
        *("a card", "2026-01-02", "sm90", "bfloat16", 128, True),
    )


def test_bands_of_lengths_and_of_heads() -> None:
    """As on a card where emulation pays with many keys, and earlier with shared heads."""
    rows = [measured(num_kv, 1, **({"e8_2": 0.94} if num_kv == 65536 else {})) for num_kv in LENGTHS]
    rows += [measured(num_kv, 8, **({"e4_3": 0.96} if num_kv > 4096 else {})) for num_kv in LENGTHS]
    found = decide(list(reversed(rows)))
    assert bands(found) == [
        (8, 16384, (4, 3, 0)),
        (8, 0, table.NONE),
        (0, 65536, (8, 2, 0)),
        (0, 0, table.NONE),
    ]
    assert found[2].gain == pytest.approx(1 / 0.94 - 1, abs=1e-4)
    assert found[0].reason.startswith("50% of the exponentials emulated win at 16384, 65536 keys, spread")


@pytest.mark.parametrize(
    ("factor", "again", "wins"),
    (
        (0.98, 1.0, True),
        (0.992, 1.0, False),  # below 1%
        (0.96, 1.02, False),  # below three times what off differs from itself
        (0.96, 0.98, False),
        (0.96, 1.01, True),
        (1.05, 1.0, False),
    ),
)
def test_a_win_counts_past_one_percent_and_past_the_spread(factor: float, again: float, wins: bool) -> None:
    (row,) = decide([measured(again=again, e8_2=factor, e16_2=1.2)])
    assert row.ex2 == ((8, 2, 0) if wins else table.NONE)
    if wins:
        assert row.gain == pytest.approx(1 / factor - 1, abs=1e-4)
    else:
        counts = factor > 1
        assert row.gain == (pytest.approx(factor - 1, abs=1e-4) if counts else 0)


def test_a_spread_of_rounds_counts_where_their_median_is_none() -> None:
    row = measured(e8_2=0.95)
    again = [time * (1 + 0.4 * (-1) ** i) for i, time in enumerate(row.times_us[table.OFF])]
    assert row.words() == (8, 2, 0) and row.spread() == pytest.approx(0)
    assert replace(row, times_us=row.times_us | {table.AGAIN: again}).words() == table.NONE


def test_emulations_that_spill_are_named() -> None:
    row = measured()
    without = replace(row, emulations={"8/2": (8, 2)}, spilled=("4/3", "16/2"))
    assert decide([without])[0].reason.endswith("over off: 25% (8/2) +5.0%; spills, not measured: 16/2, 4/3")
    (alone,) = decide([replace(row, emulations={}, spilled=tuple(EMULATIONS))])
    assert (alone.ex2, alone.gain) == (table.NONE, 0) and "over off: nothing; spills" in alone.reason


def test_other_cases_stay() -> None:
    before = table.parse(FILE.read_text())
    first = table.merged(before, decide([measured()]))
    after = table.merged(first, decide([replace(measured(), causal=False), replace(measured(), dtype="float16")]))
    kept = [row for row in after if row.case not in {("sm90", "bfloat16", 128, False), ("sm90", "float16", 128, True)}]
    assert kept == first and set(before) <= set(after) and len(after) == len(before) + 3
    assert after[-1].dtype == "", "what fits anything comes last"
    anew = table.merged(first, decide([measured(num_kv, e4_3=0.9) for num_kv in LENGTHS[1:]]))
    assert [row.ex2 for row in anew if row.case == measured_case()] == [(4, 3, 0)], "all bands of a case are replaced"
    with pytest.raises(ValueError, match=r"^the table has no place for sm77$"):
        table.merged(before, decide([replace(measured(), backend="sm77")]))


def measured_case() -> tuple[Any, ...]:
    return "sm90", "bfloat16", 128, True


# ------------------------------------------------------------------------------------------ text


def unlike_rows() -> list[Any]:
    """A table whose neighbours have other answers."""
    rows = [measured(num_kv, 1, **({"e8_2": 0.94} if num_kv == 65536 else {})) for num_kv in LENGTHS]
    rows += [measured(num_kv, 8, **({"e4_3": 0.96} if num_kv > 4096 else {})) for num_kv in LENGTHS]
    rows += [replace(measured(e16_2=0.9), dtype="float16", causal=False)]
    unmeasured = table.Ex2Row("sm90", "", 0, None, 0, 0, table.NONE, "", "", 0.0, "not measured")
    found: list[Any] = table.merged([unmeasured], decide(rows))
    return found


def test_text_and_back() -> None:
    rows = unlike_rows()
    assert len(rows) == 6 and table.parse(table.render(rows)) == rows


def test_the_table_is_what_the_tuner_writes() -> None:
    rows = table.parse(FILE.read_text())
    assert table.render(rows) == FILE.read_text()
    for backend in table.BACKENDS:
        assert [row for row in rows if row.backend == backend][-1].case == (backend, "", 0, None), "for any case"
    for row in rows:
        assert bool(row.gpu) == bool(row.date) and row.reason
        assert row.gpu or (row.ex2 == table.NONE and not row.gain)


@pytest.mark.parametrize(
    "change",
    (
        lambda text: text.replace("Backend::sm89, {}, 0", "Backend::sm89, {}, 00", 1),
        lambda text: text.replace("0.0000", "0.000", 1),
        lambda text: text.replace("Backend::sm89", "Backend::sm100", 1),
        lambda text: text.replace("0, 0, {}", "0, 0, {0, 0, 0}", 1),
        lambda text: text.replace("Backend::cpu", "Backend::sm90", 1),
        lambda text: text.replace("// clang-format on", "// clang-format on, again"),
    ),
)
def test_a_table_that_was_changed_by_hand(change: Callable[[str], str]) -> None:
    text = change(FILE.read_text())
    assert text != FILE.read_text()
    with pytest.raises(ValueError, match="changed by hand"):
        table.parse(text)


def test_texts_that_would_not_be_a_cpp_string() -> None:
    for changed in ({"reason": 'say "no"'}, {"gpu": "a\\b"}):
        with pytest.raises(ValueError, match=r"^a row's texts must be without quotes, backslashes and line ends"):
            table.render([replace(unlike_rows()[0], **changed)])


PLACES = (  # dtype, head_dim, causal, heads per kv head, keys, row
    ("bfloat16", 128, "true", 8, 16384, 0),
    ("bfloat16", 128, "true", 16, 1 << 40, 0),
    ("bfloat16", 128, "true", 8, 16383, 1),
    ("bfloat16", 128, "true", 7, 65536, 2),
    ("bfloat16", 128, "true", 1, 65535, 3),
    ("float16", 128, "false", 1, 0, 4),
    ("float16", 128, "true", 1, 0, 5),
    ("bfloat16", 256, "true", 8, 65536, 5),
)


def test_the_choice_follows_a_table_of_unlike_rows(tmp_path: Path) -> None:
    """The library's function on a table where emulation wins somewhere."""
    text = table.render(unlike_rows())
    facts = [
        f"find_ex2_row(kEx2Table, Backend::sm90, DType::{dtype}, {dim}, {causal}, {heads}, {keys}) == &kEx2Table[{row}]"
        for dtype, dim, causal, heads, keys, row in PLACES
    ]
    facts.append("find_ex2_row(kEx2Table, Backend::sm89, DType::bfloat16, 128, true, 8, 65536) == nullptr")
    facts += ["kEx2Table[0].ex2 == Ex2Emulation{4, 3, 0}", "kEx2Table[1].ex2 == Ex2Emulation{}"]
    tuner_runs.header_holds("ops/attention_table.h", text, facts, tmp_path)


# ------------------------------------------------------------------------------------------ readers


@pytest.mark.parametrize(("backend", "arch"), (("cpu", "cpu"), ("sm89", "sm_89"), ("sm90", "sm_90a")))
def test_the_library_chooses_by_the_file(backend: str, arch: str) -> None:
    rows = [row for row in table.parse(FILE.read_text()) if row.backend == backend]
    for head_dim, dtype, causal, heads, num_kv in itertools.product(
        (64, 128, 256), ("bfloat16", "float16"), (False, True), (1, 4, 16), (1, 8192, 1 << 20)
    ):
        shape = problems.Shape(1, 1, num_kv, 16, 16 // heads, head_dim, causal, dtype)
        expected = next(
            row.ex2
            for row in rows
            if row.dtype in ("", dtype)
            and row.head_dim in (0, head_dim)
            and row.causal in (None, causal)
            and row.min_heads_per_kv <= heads
            and row.min_num_kv <= num_kv
        )
        assert _C.ex2_choice(arch, shape.case())["ex2"] == expected
        assert _C.ex2_choice(arch, shape.case((4, 3)))["ex2"] == (4, 3, 0), "an explicit setting is taken"


def test_the_inspector_shows_the_rows_of_the_file() -> None:
    shown = [row for row in _C.tuning_rows() if row["op"] == OP]
    names = ("backend", "gpu", "date", "gain", "reason")
    assert [tuple(row[name] for name in names) for row in shown] == [
        tuple(getattr(row, name) for name in names) for row in table.parse(FILE.read_text())
    ]
    assert all(row["choice"].startswith("exp2 emulation ") for row in shown)


# ------------------------------------------------------------------------------------------ the command


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copy(FILE, tmp_path))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file = tmp_path / "times.json"
    rows = [measured(num_kv, **({"e8_2": 0.9} if num_kv == 65536 else {})) for num_kv in LENGTHS]
    results = [{name: getattr(row, name) for name in table.Measured.__dataclass_fields__} for row in rows]
    file.write_text(json.dumps({"gpu": "a card", "date": "2026-03-04", "results": results}))
    return file


def test_a_run_that_was_kept_makes_the_table(copy: Path, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors = tuner_runs.makes_the_table("attention", copy, FILE, saved, capsys)
    assert "head_dim 128 causal, 0 or more heads per kv head, 65536 or more keys: freq 8 res 2 start_frg 0; " in errors
    assert "sm90 bfloat16 head_dim 128 causal, 0 or more heads per kv head, 0 or more keys: off; no emul" in errors
    again = saved.with_name("again.json")
    words = ["tune", "attention", "--table", str(copy), "--load", str(saved)]
    assert main([*words, "--save", str(again), "--dry-run"]) == 0
    assert json.loads(again.read_text()) == json.loads(saved.read_text())
    capsys.readouterr()
    text = copy.read_text().replace("{8, 2, 0}", "{8, 2}", 1)
    tuner_runs.finds_what_was_changed_by_hand("attention", copy, text, capsys)


@tuner_runs.by_what_cannot_be_measured
def test_what_cannot_be_measured(
    copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    tuner_runs.cannot_measure("attention", copy, FILE, words, sentence, monkeypatch, capsys)


def test_whose_kernels_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuner.arch_of("sm89:sm_90a") == "sm89:sm_90a"
    with pytest.raises(ValueError, match=r"^tune: --arch must begin with sm89 or sm90, got sm_90a$"):
        tuner.arch_of("sm_90a")
    with pytest.raises(ValueError, match=r"^tune: flash_attn_fwd: backend sm90 cannot be compiled for"):
        tuner.arch_of("sm90:sm_89")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_C, "device_facts", lambda device: ("a card", 90, 132))
    assert tuner.arch_of(None) == "sm90:sm_90a"


# ------------------------------------------------------------------------------------------ measuring

TINY = problems.Shape(1, 40, 150, 2, 1, 64, causal=True)


def test_shapes_are_every_key_of_a_row() -> None:
    keys = [(one.head_dim, one.dtype, one.causal, one.heads_per_kv, one.num_kv) for one in tuner.shapes()]
    assert len(set(keys)) == len(keys) == 3 * 2 * 2 * 2 * 3
    assert set(keys) == set(
        itertools.product((64, 128, 256), ("bfloat16", "float16"), (False, True), tuner.HEADS_PER_KV, LENGTHS)
    )
    assert all(shape.num_q * shape.num_kv * shape.batch * shape.num_q_heads <= 1 << 32 for shape in tuner.shapes())


def test_wrong_results_stop_the_tuner() -> None:
    problem = problems.make_problem(TINY, "cpu")
    calls = tuner.calls_of(TINY, problem, EMULATIONS, None)
    assert list(calls) == [table.OFF, table.AGAIN, *EMULATIONS]
    assert 0 < tuner.require_right(TINY, problem, calls) < 6e-3
    bits = {name: call(return_lse=True)[1] for name, call in calls.items()}
    assert torch.equal(bits[table.OFF], bits[table.AGAIN])
    assert not torch.equal(bits[table.OFF], bits["4/3"]), "an emulation is none"
    out, lse = calls["8/2"](return_lse=True)
    for wrong, words in (((out * 1.02, lse), "wrong result of 8/2"), ((out, lse + 1e-3), "wrong lse of 8/2, off by")):

        def call(return_lse: bool = False, wrong: Any = wrong) -> Any:
            return wrong if return_lse else wrong[0]

        with pytest.raises(RuntimeError, match=rf"^D64 1x40/150 H2/1 causal: {words}"):
            tuner.require_right(TINY, problem, calls | {"8/2": call})


def reports(store: int, load: int) -> list[dict[str, Any]]:
    return [{"about": json.dumps({"spill_store_bytes": store, "spill_load_bytes": load})}]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Two lengths on the CPU, where nothing is compiled; the kernel of 4/3 spills with float16."""
    asked: list[dict[str, Any]] = []
    lengths = (tuner.Length(1, 24, 24, 8), tuner.Length(1, 8, 140, 8))
    monkeypatch.setattr(tuner, "LENGTHS", lengths)
    monkeypatch.setattr(tuner, "HEAD_DIMS", (64,))
    monkeypatch.setattr(tuner, "HEADS_PER_KV", (1, 4))

    def prepare(cases: list[dict[str, Any]], arch: str) -> list[dict[str, Any]]:
        assert arch == "sm90:sm_90a"
        asked.extend(cases)
        spills = [case["dtype"] == "float16" and case["ex2_emu_freq"] == "4" for case in cases]
        return [report for one in spills for report in reports(0, 16 if one else 0)]

    monkeypatch.setattr(tuner.dk, "prepare", prepare)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return asked


def test_a_run_from_measuring_to_rows(
    tiny: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On CPU tensors with made-up times: full masks and 140 keys are where half of the exponentials win."""

    def fake_measure(functions: dict[str, Any], samples: int, calls: int, queued: bool) -> dict[str, Any]:
        assert samples == 9 and calls == 1 and queued
        keywords = functions[table.OFF].keywords
        _, k, _ = functions[table.OFF].args
        wins = k.shape[1] == 140 and not keywords["causal"]
        assert keywords["num_splits"] == 1 and keywords["ex2_emu_freq"] == 0
        times = dict.fromkeys(functions, 1.05) | {table.OFF: 1.0, table.AGAIN: 1.0}
        if "4/3" in times and wins:
            times["4/3"] = 0.9
        return {name: tuner.timing.Timing([time] * samples) for name, time in times.items()}

    monkeypatch.setattr(tuner.timing, "measure", fake_measure)
    times = json.loads(json.dumps(tuner.measure("sm90:sm_90a", 9, device="cpu")))
    assert (times["gpu"], len(times["results"])) == ("a card", 16)
    assert len({tuple(sorted(case.items())) for case in tiny if case["num_kv"] == "24"}) > 30
    assert re.search(r"D64 1x8/140 H8/2 float16: off 1\.0, .* us; spills: 4/3\n", capsys.readouterr().err)
    rows = tuner.rows_of(times)
    assert [(row.dtype, row.causal, row.min_heads_per_kv, row.min_num_kv, row.ex2) for row in rows] == [
        ("bfloat16", False, 4, 140, (4, 3, 0)),
        ("bfloat16", False, 4, 0, table.NONE),
        ("bfloat16", False, 0, 140, (4, 3, 0)),
        ("bfloat16", False, 0, 0, table.NONE),
        *((dtype, causal, heads, 0, table.NONE) for dtype, causal in REST for heads in (4, 0)),
    ]
    assert all(("spills, not measured: 4/3" in row.reason) == (row.dtype == "float16") for row in rows)
    for result in times["results"]:
        assert list(result["times_us"]) == [table.OFF, table.AGAIN, *result["emulations"]]


REST = (("bfloat16", True), ("float16", False), ("float16", True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_run_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shapes: what is measured, not how fast."""
    monkeypatch.setattr(tuner, "LENGTHS", (tuner.Length(1, 200, 300, 8),))
    times = tuner.measure(tuner.arch_of(None), samples=4)
    assert len(times["results"]) == 3 * 2 * 2 * 2
    for result in times["results"]:
        assert all(len(samples) == 4 and min(samples) > 0 for samples in result["times_us"].values())
    assert len(tuner.rows_of(times)) == len(times["results"])
