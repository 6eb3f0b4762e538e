"""The cleaning table: what measurements make of it, its text, who reads it, and the command that writes it."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import tuner_runs
from script import ROOT, load

import deep_kernels as dk
from deep_kernels import _C
from deep_kernels.__main__ import main

pytest_plugins = ("runtime_fixtures",)

load("tuning")  # what both of these import
table = load("mqa_clean_table")
tuner = load("tune_mqa_clean")

OP = "fp8_fp4_mqa_logits"
FILE = ROOT / "csrc" / "ops" / "mqa_clean_table.h"
KEYS = list(itertools.product(table.BACKENDS, table.FORMATS, table.SCHEDULES))
KEY = ("sm90", "mxfp8", "metadata")


def rounds(ratio: float, noise: float = 0.0, count: int = 40, drift: float = 0.05) -> Any:
    """A comparison whose deferred times are `ratio` of the concurrent ones of the same round, up to noise of 0 median.

    Rounds drift together, as the clock of a card does.
    """
    concurrent = [800 * (1 + drift * (i % 7) / 7) for i in range(count)]
    jitter = [noise * ((i * 7 % count) / (count - 1) - 0.5) for i in range(count)]
    deferred = [time * ratio * (1 + share) for time, share in zip(concurrent, jitter, strict=True)]
    return table.Comparison("2048/32768 H64", concurrent, deferred)


def decide(*comparisons: Any) -> Any:
    return table.decide(KEY, comparisons, "a card", "2026-01-02")


# ------------------------------------------------------------------------------------------ decisions


@pytest.mark.parametrize(
    ("ratio", "placement", "gain"),
    ((1.08, "concurrent", 0.08), (0.5, "deferred", 1.0), (1.006, "concurrent", 0.006), (0.99, "deferred", 0.0101)),
)
def test_a_clear_winner(ratio: float, placement: str, gain: float) -> None:
    row = decide(rounds(ratio, noise=0.002))
    assert (row.placement, row.gain) == (placement, pytest.approx(gain, abs=1e-4))
    assert (row.key, row.gpu, row.date) == (KEY, "a card", "2026-01-02")
    slower = "deferred" if placement == "concurrent" else "concurrent"
    assert re.fullmatch(rf"{slower} takes {gain:.2%} \+- 0.0\d% longer", row.reason.split(";")[0])
    assert f"2048/32768 H64 {ratio - 1:+.1%}" in row.reason


@pytest.mark.parametrize("ratio", (1.0, 1.004, 0.996))
def test_less_than_half_a_percent_is_no_difference(ratio: float) -> None:
    """However sure it is."""
    row = decide(rounds(ratio))
    assert (row.placement, row.gain) == ("concurrent", 0.0)
    assert row.reason.startswith("no difference: ")


def test_what_drowns_in_noise_is_no_difference() -> None:
    """The same 2% that few rounds cannot tell from none, many can."""
    few, many = (decide(rounds(0.98, noise=0.2, count=count)) for count in (8, 800))
    assert (few.placement, few.gain) == ("concurrent", 0.0)
    assert few.reason.startswith("no difference: concurrent takes 2.")
    assert (many.placement, many.gain) == ("deferred", pytest.approx(0.0204, abs=2e-3))


def test_rounds_are_compared_within_themselves() -> None:
    """A drift of the clock that is larger than the difference does not hide it."""
    row = decide(rounds(0.98, noise=0.002, drift=0.3))
    assert (row.placement, row.gain) == ("deferred", pytest.approx(0.0204, abs=1e-4))


def test_a_few_disturbed_rounds_decide_nothing() -> None:
    calm = rounds(1.02, noise=0.002)
    disturbed = replace(calm, concurrent=[time * (3 if i % 9 == 0 else 1) for i, time in enumerate(calm.concurrent)])
    assert decide(disturbed).placement == "concurrent"
    assert decide(disturbed).gain == pytest.approx(0.02, abs=1e-3)


def test_shapes_count_alike() -> None:
    """The geometric mean: gains and losses of the same size are no difference, and say so shape by shape."""
    against = replace(rounds(1 / 1.05), label="8192/8192 H64")
    row = decide(rounds(1.05), against)
    assert (row.placement, row.gain) == ("concurrent", 0.0)
    assert row.reason.endswith("deferred over concurrent: 2048/32768 H64 +5.0%, 8192/8192 H64 -4.8%")
    assert decide(rounds(1.05), replace(against, label="a"), replace(against, label="b")).placement == "deferred"


# ------------------------------------------------------------------------------------------ rows of a run


def times_of(ratios: dict[tuple[str, str], float], backend: str = "sm90") -> dict[str, Any]:
    """What a run of the tuner keeps, of made-up times: the deferred one's ratio by (format, schedule)."""
    results = []
    for shape in ("2048/32768 H64", "8192/8192 H64"):
        for format in dict.fromkeys(format for format, _ in ratios):
            times = {}
            for schedule in table.SCHEDULES:
                one = rounds(ratios[format, schedule])
                times |= {f"{schedule}/concurrent": one.concurrent, f"{schedule}/deferred": one.deferred}
            results.append({"format": format, "shape": shape, "times_us": times})
    return {"gpu": "NVIDIA Test", "date": "2026-03-04", "backend": backend, "results": results}


RATIOS = {
    ("fp8", "derived"): 1.03,
    ("fp8", "metadata"): 1.001,
    ("mxfp4", "derived"): 0.7,
    ("mxfp4", "metadata"): 1.2,
}


def test_rows_of_a_run_and_those_that_stay() -> None:
    """One format was not measured: its rows, and those of the other backend, stay as they are."""
    before = table.parse(FILE.read_text())
    measured = tuner.rows_of(times_of(RATIOS))
    assert [(row.key, row.placement) for row in measured] == [
        (("sm90", "fp8", "derived"), "concurrent"),
        (("sm90", "fp8", "metadata"), "concurrent"),
        (("sm90", "mxfp4", "derived"), "deferred"),
        (("sm90", "mxfp4", "metadata"), "concurrent"),
    ]
    assert [row.reason.startswith("no difference") for row in measured] == [False, True, False, False]
    after = table.merged(before, measured)
    assert [row.key for row in after] == KEYS
    for old, new in zip(before, after, strict=True):
        assert new is old or new in measured
    assert sum(new is old for old, new in zip(before, after, strict=True)) == len(KEYS) - 4


def test_a_backend_that_the_table_does_not_know() -> None:
    measured = tuner.rows_of(times_of(RATIOS, backend="sm77"))
    with pytest.raises(ValueError, match=r"^the table has no place for sm77 / fp8 / derived$"):
        table.merged([], measured)


# ------------------------------------------------------------------------------------------ text


def test_the_table_is_what_the_tuner_writes() -> None:
    text = FILE.read_text()
    rows = table.parse(text)
    assert table.render(rows) == text
    assert [row.key for row in rows] == KEYS, "one row per backend, format and schedule, in the table's order"
    for row in rows:
        assert bool(row.gpu) == bool(row.date) and row.reason
        assert row.gain == 0 or row.gpu


@pytest.mark.parametrize(
    "change",
    (
        lambda text: text.replace("Clean::deferred", "Clean::concurrent ", 1),
        lambda text: text.replace("0.0000", "0.0", 1),
        lambda text: text.replace("// clang-format on", "// clang-format on, again"),
        lambda text: text.replace("};", "    {Backend::sm100},\n};", 1),
        lambda text: text.replace("Clean::deferred", "Clean::off", 1),
        lambda text: text.replace("Schedule::metadata", "Schedule::derived", 1),
    ),
)
def test_a_table_that_was_changed_by_hand(change: Callable[[str], str]) -> None:
    text = change(FILE.read_text())
    assert text != FILE.read_text()
    with pytest.raises(ValueError, match="changed by hand"):
        table.parse(text)


@pytest.mark.parametrize("text", ('say "no"', "a\\b", "two\nlines"))
def test_texts_that_would_not_be_a_cpp_string(text: str) -> None:
    row = table.CleanRow(*KEY, "deferred", "", "", 0.0, text)
    with pytest.raises(ValueError, match=r"^a row's texts must be without quotes, backslashes and line ends"):
        table.render([row])


def test_a_table_of_unlike_rows_is_found_by_format_and_schedule(tmp_path: Path) -> None:
    """By the C++ side, in a table where neighbours have other answers; and that a row is missing."""
    placements = ["deferred" if (i * 5 // 2) % 2 else "concurrent" for i in range(len(KEYS))]
    assert len(set(placements[:6])) == 2 and placements[:6] != placements[6:]
    rows = [
        table.CleanRow(*key, placement, "a card", "2026-01-02", i / 100, f"reason {i}")
        for i, (key, placement) in enumerate(zip(KEYS, placements, strict=True))
    ]
    text = table.render(rows[:-1])
    facts = []
    for i, (backend, format, schedule) in enumerate(KEYS[:-1]):
        found = f"find_clean_row(kCleanTable, Backend::{backend}, Format::{format}, Schedule::{schedule})"
        facts.append(f"{found} == &kCleanTable[{i}]")
        facts.append(f"{found}->placement == Clean::{placements[i]} && {found}->gain == {i / 100}")
    backend, format, schedule = KEYS[-1]
    missing = f"find_clean_row(kCleanTable, Backend::{backend}, Format::{format}, Schedule::{schedule})"
    facts.append(f"{missing} == nullptr")
    tuner_runs.header_holds("ops/mqa_clean_table.h", text, facts, tmp_path)


# ------------------------------------------------------------------------------------------ readers


def test_the_inspector_shows_the_rows_of_the_file() -> None:
    rows = [row for row in _C.tuning_rows() if row["op"] == OP]
    assert rows == [
        {
            "op": OP,
            "backend": row.backend,
            "cases": f"{row.format}, {row.schedule} schedule",
            "choice": f"clean_logits fills {row.placement}",
            "gpu": row.gpu,
            "date": row.date,
            "gain": row.gain,
            "reason": row.reason,
        }
        for row in table.parse(FILE.read_text())
    ]


@pytest.mark.parametrize("row", table.parse(FILE.read_text()), ids=lambda row: "-".join(row.key))
def test_calls_follow_their_row(no_settings: Path, monkeypatch: pytest.MonkeyPatch, row: Any) -> None:
    """The Spec that a missing kernel is reported with; the setting overrules it."""
    case = {"op": OP, "format": row.format, "num_heads": 8, "metadata": row.schedule == "metadata"}
    arch = {"sm89": "sm_89", "sm90": "sm_90a"}[row.backend]
    if reason := dk.supported(case["op"], arch, format=row.format, num_heads=8):
        pytest.skip(reason)
    monkeypatch.setenv("DEEP_KERNELS_NO_COMPILE", "1")
    other = next(word for word in table.PLACEMENTS if word != row.placement)
    for setting, placement in (("", row.placement), (other, other)):
        if setting:
            monkeypatch.setenv("DEEP_KERNELS_MQA_CLEAN", setting)
        schedule = row.schedule if row.format == "fp8" else "derived"  # MX formats leave a given one alone
        with pytest.raises(dk.CompileError, match=f"format={row.format}.*clean={placement}.*schedule={schedule}"):
            dk.prepare([case], arch=arch)


# ------------------------------------------------------------------------------------------ the command


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copy(FILE, tmp_path))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file = tmp_path / "times.json"
    file.write_text(json.dumps(times_of(RATIOS)))
    return file


def test_a_run_that_was_kept_makes_the_table(copy: Path, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tuner_runs.makes_the_table("mqa_logits", copy, FILE, saved, capsys)


def test_check_finds_what_was_changed_by_hand(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "mqa_logits", "--table", str(copy), "--check"]) == 0
    text = copy.read_text().replace("Clean::deferred", "Clean::off")
    tuner_runs.finds_what_was_changed_by_hand("mqa_logits", copy, text, capsys)


def test_measuring_needs_a_card(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sentence = "tune: a CUDA device is needed, torch sees none"
    tuner_runs.cannot_measure("mqa_logits", copy, FILE, [], sentence, monkeypatch, capsys)


def test_each_call_is_placed_and_the_setting_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the tuner times, on the CPU, where all variants are one: the setting is there during the call alone."""
    seen: list[tuple[str | None, bool]] = []
    real = dk.fp8_fp4_mqa_logits

    def spy(*arguments: Any, **options: Any) -> torch.Tensor:
        seen.append((os.environ.get("DEEP_KERNELS_MQA_CLEAN"), options["schedule_meta"] is not None))
        return real(*arguments, **options)

    monkeypatch.setattr(dk, "fp8_fp4_mqa_logits", spy)
    monkeypatch.delenv("DEEP_KERNELS_MQA_CLEAN", raising=False)
    shape = replace(tuner.SHAPES[0], num_q=16, num_kv=300, num_heads=8)
    for format in table.FORMATS:
        seen.clear()
        calls = tuner.calls_of(replace(shape, format=format), None, "cpu")
        tuner.require_same_bits(shape, calls)
        assert seen == [(placement, schedule == "metadata") for schedule, placement in calls]
        assert set(calls) == set(itertools.product(table.SCHEDULES, table.PLACEMENTS))
        assert "DEEP_KERNELS_MQA_CLEAN" not in os.environ
    monkeypatch.setenv("DEEP_KERNELS_MQA_CLEAN", "deferred")
    next(iter(calls.values()))()
    assert os.environ["DEEP_KERNELS_MQA_CLEAN"] == "deferred"


@pytest.mark.parametrize(("arch", "backend"), (("sm_90", "sm89"), ("sm89:sm_90a", "sm89"), ("sm_90a", "sm90")))
def test_rows_are_those_of_the_kernels_that_run(
    no_settings: Path, nvrtc: tuple[str, str], arch: str, backend: str
) -> None:
    assert tuner.backend_of(arch) == backend


def test_unlike_outputs_stop_the_tuner() -> None:
    first, second = torch.zeros(3, 5), torch.zeros(3, 5)
    second[2, 4] = -torch.inf
    calls = {("derived", "concurrent"): lambda: first, ("derived", "deferred"): lambda: second}
    with pytest.raises(RuntimeError, match="derived / deferred does not give the bits of the first variant"):
        tuner.require_same_bits(tuner.SHAPES[0], calls)


def test_a_run_from_measuring_to_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On CPU tensors with made-up times: a format that is refused is named and has no row."""
    small = replace(tuner.SHAPES[0], num_q=16, num_kv=300, num_heads=8)
    monkeypatch.setattr(tuner, "SHAPES", (small, replace(small, num_q=8)))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    refusals = {"mxfp8": "no kernel for it"}
    monkeypatch.setattr(tuner.Shape, "refusal", lambda self, arch: refusals.get(self.format))

    def measured(functions: dict[str, Callable[[], Any]], samples: int, calls: int) -> dict[str, Any]:
        assert samples == 9 and calls > 0
        assert all(function().shape[1] == 300 for function in functions.values())
        slow = {"derived/deferred": 110.0, "metadata/concurrent": 120.0}
        return {name: tuner.timing.Timing([slow.get(name, 100.0)] * samples) for name in functions}

    monkeypatch.setattr(tuner.timing, "measure", measured)
    times = json.loads(json.dumps(tuner.measure("sm90", None, table.FORMATS, 9, device="cpu")))
    errors = capsys.readouterr().err
    assert errors.count("is left out: no kernel for it") == 2
    assert errors.count("derived/deferred 110.0") == 4
    rows = {row.key: (row.placement, row.gain, row.gpu) for row in tuner.rows_of(times)}
    assert rows == {
        ("sm90", format, schedule): (placement, gain, "a card")
        for format in ("fp8", "mxfp4")
        for schedule, placement, gain in (("derived", "concurrent", 0.1), ("metadata", "deferred", 0.2))
    }


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_run_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small shapes: what is measured, not how fast."""
    shape = tuner.SHAPES[0]
    monkeypatch.setattr(tuner, "SHAPES", (replace(shape, num_q=64, num_kv=2048, num_heads=8),))
    backend = tuner.backend_of(None)
    times = tuner.measure(backend, None, table.FORMATS, samples=4)
    formats = [format for format in table.FORMATS if replace(shape, format=format).refusal() is None]
    rows = tuner.rows_of(times)
    assert [row.key for row in rows] == list(itertools.product([backend], formats, table.SCHEDULES))
    assert all(row.gpu == torch.cuda.get_device_name() for row in rows)
