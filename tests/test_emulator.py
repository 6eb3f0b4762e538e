"""Every kernel on the emulator, against the float64 oracle, strictly checked while it runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import oracle
import pytest
import torch
from emulator import Emulator, card, installed, record_card
from emulator.cases import (
    MQA_CASES,
    MQA_FOLDED_CASES,
    MQA_MX_CASES,
    MqaCase,
    MqaInputs,
    e4m3_values,
    environment,
    hash_bits,
    inside_of,
    run_mqa,
)
from emulator.driver import SANITIZED_FLAGS, compile_ahead
from emulator.fixtures import emulator_ready  # noqa: F401
from emulator.memory import guarded
from emulator.paged_cases import PAGED_CASES
from torch import Tensor

import deep_kernels

ARCHES = ("emulator:sm90", "emulator:sm89")
# 1 - 2 sum(xy) / sum(x^2 + y^2) inside the windows.
LIMITS = {torch.float32: 5e-6, torch.bfloat16: 3e-5}


@pytest.fixture(autouse=True, scope="module")
def compiled(emulator_ready: None) -> Iterator[None]:  # noqa: F811
    """All kernels of the cases, compiled side by side before the first is run."""

    def run_all() -> None:
        for case, arch in itertools.product((*MQA_CASES, *MQA_MX_CASES), ARCHES):
            run_mqa(case, case.make_inputs(), arch)
        for case in MQA_FOLDED_CASES:
            run_mqa(case, case.make_inputs(), "emulator:sm90")

    compile_ahead(run_all)
    yield


def run(case: MqaCase, arch: str, inputs: MqaInputs | None = None, *, emulator: Emulator | None = None) -> Tensor:
    """The case on the emulator, its inputs between pages that fault."""
    inputs = (inputs or case.make_inputs()).map(guarded)
    with installed(emulator or Emulator(), case.num_sms):
        return run_mqa(case, inputs, arch)


def expected(case: MqaCase, inputs: MqaInputs) -> tuple[Tensor, Tensor]:
    return oracle.mqa_logits(
        (inputs.q, inputs.q_scale), (inputs.kv, inputs.kv_scale), inputs.weights, inputs.starts, inputs.ends,
        format=case.format, clean=case.clean != "off", max_seqlen_k=case.max_seqlen_k,
    )  # fmt: skip


def bits(logits: Tensor, inside: Tensor) -> Tensor:
    """The bits of the logits inside the windows."""
    return logits[inside].contiguous().view(torch.int32 if logits.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("case", MQA_CASES, ids=str)
def test_logits_agree_with_the_oracle(case: MqaCase, arch: str) -> None:
    inputs = case.make_inputs()
    logits = run(case, arch, inputs)
    wanted, inside = expected(case, inputs)
    assert logits.dtype == case.logits_dtype
    assert logits.stride(0) * logits.element_size() % 1024 == 0
    oracle.assert_agrees(logits, wanted, inside, LIMITS[case.logits_dtype])


def limit_of(case: MqaCase) -> float:
    return max(LIMITS[case.logits_dtype], LIMITS.get(case.weights_dtype, 0.0))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("case", MQA_MX_CASES, ids=str)
def test_mx_logits_agree_with_the_oracle(case: MqaCase, arch: str) -> None:
    """Large logits and those near 2^-60 each by themselves, so that the large hide no small ones."""
    inputs = case.make_inputs()
    logits = run(case, arch, inputs)
    wanted, inside = expected(case, inputs)
    is_small = wanted.abs() < 2.0**-30
    assert (inside & is_small & (wanted != 0)).any() and wanted[inside].isnan().any()
    for lot in (inside & is_small, inside & ~is_small):
        oracle.assert_agrees(logits, wanted, lot, limit_of(case))


@pytest.mark.parametrize("case", MQA_FOLDED_CASES, ids=str)
def test_folded_logits_agree_with_the_oracle(case: MqaCase) -> None:
    inputs = case.make_inputs()
    wanted, inside = expected(case, inputs)
    oracle.assert_agrees(run(case, "emulator:sm90", inputs), wanted, inside, limit_of(case))


@pytest.mark.parametrize("base", [MQA_MX_CASES[0], MQA_MX_CASES[1], MQA_FOLDED_CASES[0]], ids=str)
def test_bits_of_other_formats_depend_on_no_order(base: MqaCase) -> None:
    """Neither on that of threads nor on how the work is cut."""
    inputs = base.make_inputs()
    inside = inside_of(base, inputs)
    wanted = bits(run(base, "emulator:sm90", inputs), inside)
    for case, seed in ((replace(base, num_sms=1), 1), (replace(base, num_sms=8), 2)):
        assert torch.equal(bits(run(case, "emulator:sm90", inputs, emulator=Emulator(seed=seed)), inside), wanted)


@pytest.mark.parametrize("case, arch", card.CALLS, ids=str)
def test_bits_are_those_of_the_card(case: card.Case, arch: str) -> None:
    """Against checksums recorded on an H200 by tests/emulator/record_card.py."""
    digest, checksums = card.recorded()
    inputs = case.make_inputs()
    keys = card.keys(case, inputs, arch)
    if not all(key in checksums for key in keys):
        pytest.skip("no card has been recorded for this Spec: run tests/emulator/record_card.py on one")
    with installed(Emulator(), case.num_sms):
        found = card.checksums(case, inputs, card.ARCHES[arch])
    wanted = [checksums[key] for key in keys]
    if found != wanted and digest != card.include_digest():
        pytest.skip(
            f"differs from what a card computed with headers {digest[:12]}, which are not these "
            f"({card.include_digest()[:12]}): run tests/emulator/record_card.py on one"
        )
    assert found == wanted


def test_recorder_writes_what_the_comparison_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program for the card, with the emulator in its place."""
    monkeypatch.setattr(card, "FILE", tmp_path / "checksums.json")
    out = tmp_path / "recorded.json"
    for case in (MQA_CASES[0], MQA_MX_CASES[3], MQA_FOLDED_CASES[1], PAGED_CASES[0]):
        assert record_card.main(["--emulated", "--only", str(case), "--out", str(out)]) == 0
        out.rename(card.FILE)
        card.recorded.cache_clear()
        digest, checksums = card.recorded()
        arches = [arch for other, arch in card.CALLS if other == case]
        wanted = [key for arch in arches for key in card.keys(case, case.make_inputs(), arch)]
        assert digest == card.include_digest() and list(checksums) == wanted
        assert len(wanted) == len(arches) * (1 + case.metadata)
    card.recorded.cache_clear()


BASE = MqaCase(num_q=19, num_kv=530, num_heads=64, head_dim=64, windows="ragged", seed=7)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("num_heads", [12, 64, 128])
def test_bits_do_not_depend_on_mode_or_schedule(arch: str, num_heads: int) -> None:
    base = replace(BASE, num_heads=num_heads)
    inputs = base.make_inputs()
    wanted = bits(run(base, arch, inputs), inside_of(base, inputs))
    for change in (
        {"clean": "deferred"},
        {"clean": "off"},
        {"metadata": True},
        {"metadata": True, "num_sms": 8},
        {"num_sms": 1},
        {"num_sms": 132},
        {"max_seqlen_k": 530},
    ):
        case = replace(base, **change)
        assert torch.equal(bits(run(case, arch, inputs), inside_of(case, inputs)), wanted), change


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_bits_do_not_depend_on_the_order_of_threads(arch: str, seed: int) -> None:
    case = replace(BASE, num_heads=(64, 128)[seed % 2], clean=("concurrent", "deferred")[seed // 2 % 2], num_sms=2)
    inputs = case.make_inputs()
    inside = inside_of(case, inputs)
    wanted = bits(run(case, arch, inputs), inside)
    assert torch.equal(bits(run(case, arch, inputs, emulator=Emulator(seed=seed)), inside), wanted)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("case", MQA_CASES[:42:4], ids=str)
def test_bits_do_not_depend_on_what_locals_held(case: MqaCase, arch: str) -> None:
    """Variables that nobody initialised would differ between the two builds."""
    inputs = case.make_inputs()
    inside = inside_of(case, inputs)
    zeros, patterns = (
        bits(run(case, arch, inputs, emulator=Emulator(flags=("-O1", f"-ftrivial-auto-var-init={value}"))), inside)
        for value in ("zero", "pattern")
    )
    assert torch.equal(zeros, patterns)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("clean", ["concurrent", "deferred", "off"])
def test_any_schedule_gives_the_same_bits(arch: str, clean: str) -> None:
    case = replace(BASE, clean=clean, metadata=True)
    inputs = case.make_inputs()
    inside = inside_of(case, inputs)
    wanted = bits(run(case, arch, inputs), inside)
    largest = 2**31 - 1
    schedules = {
        "zeros": torch.zeros(8, dtype=torch.int32),
        "largest": torch.full((8,), largest, dtype=torch.int32),
        "smallest": torch.full((8,), -largest - 1, dtype=torch.int32),
        "falling": torch.arange(40, 0, -1, dtype=torch.int32),
        "random": (hash_bits(3, 266) - 2**30).to(torch.int32),
        "small": (hash_bits(4, 12) % 5).to(torch.int32),
        "shortest": torch.zeros(4, dtype=torch.int32),
    }
    for name, schedule in schedules.items():
        with installed(Emulator(), case.num_sms):
            logits = run_mqa(case, inputs, arch, schedule=guarded(schedule))
        assert torch.equal(bits(logits, inside), wanted), name


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("num_heads", [8, 64, 100])
def test_no_undefined_behaviour_at_the_limits(arch: str, num_heads: int) -> None:
    """Windows and schedules at the limits of int32, in builds that stop at an overflow."""
    case = replace(BASE, num_heads=num_heads, logits_dtype=torch.bfloat16, metadata=True)
    inputs = case.make_inputs()
    low, high = -(2**31), 2**31 - 1
    limits = torch.tensor([[low, high], [high, low], [5, low], [low, 70], [400, high], [high, high], [low, low]])
    inputs.starts[: len(limits)], inputs.ends[: len(limits)] = limits[:, 0].int(), limits[:, 1].int()
    sanitized = Emulator(flags=SANITIZED_FLAGS)
    wanted, inside = expected(case, inputs)
    oracle.assert_agrees(run(case, arch, inputs, emulator=sanitized), wanted, inside, LIMITS[torch.bfloat16])
    with installed(sanitized, case.num_sms):
        for schedule in ([low] * 8, [high] * 8, [high, low] * 4, [low, high] * 4):
            logits = run_mqa(case, inputs, arch, schedule=torch.tensor(schedule, dtype=torch.int32))
            oracle.assert_agrees(logits, wanted, inside, LIMITS[torch.bfloat16])


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("max_seqlen_k", [0, 600])
def test_garbage_outside_the_windows_changes_nothing(arch: str, max_seqlen_k: int) -> None:
    case = replace(BASE, max_seqlen_k=max_seqlen_k)
    inputs = case.make_inputs()
    inputs.starts = inputs.starts.clamp(70, 400)
    inputs.ends = inputs.ends.clamp(0, 450)
    inside = inside_of(case, inputs)
    wanted = run(case, arch, inputs)
    kv = inputs.kv.view(torch.uint8).clone()
    scale = inputs.kv_scale.clone()
    kv[:70], kv[450:], scale[:70], scale[450:] = 0x7F, 0xFF, float("nan"), float("inf")
    inputs.kv, inputs.kv_scale = kv.view(torch.float8_e4m3fn), scale
    assert torch.equal(bits(run(case, arch, inputs), inside), bits(wanted, inside))
    outside = run(case, arch, inputs)[~inside]
    assert bool(torch.isneginf(outside).all())


@pytest.mark.parametrize("arch", ARCHES)
def test_special_values_stay_in_their_rows_and_columns(arch: str) -> None:
    case = replace(BASE, windows="full", num_q=11)
    inputs = case.make_inputs()
    wanted = run(case, arch, inputs)
    q, kv = inputs.q.view(torch.uint8).clone(), inputs.kv.view(torch.uint8).clone()
    q[3, 5, 7], kv[100, 1] = 0x7F, 0xFF
    inputs.kv_scale[200] = float("nan")
    inputs.weights[6, 2] = float("inf")
    inputs.q, inputs.kv = q.view(torch.float8_e4m3fn), kv.view(torch.float8_e4m3fn)
    logits = run(case, arch, inputs)
    assert bool(torch.isnan(logits[:, 200]).all())
    touched = torch.zeros_like(logits, dtype=torch.bool)
    touched[3], touched[6], touched[:, 100], touched[:, 200] = True, True, True, True
    same = ~touched
    assert torch.equal(logits[same], wanted[same])


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_inputs_and_output(arch: str, dtype: torch.dtype) -> None:
    case = replace(BASE, num_heads=33, logits_dtype=dtype)
    inputs = case.make_inputs()
    inside = inside_of(case, inputs)
    wanted = run(case, arch, inputs)
    q = e4m3_values(90, case.num_q, case.num_heads + 2, case.head_dim + 32)
    kv = e4m3_values(91, case.num_kv, case.head_dim + 16)
    weights = torch.full((case.num_q, case.num_heads + 3), 9.0)
    windows = torch.zeros(case.num_q, 3, dtype=torch.int32)
    strided = MqaInputs(
        q[:, 1 : case.num_heads + 1, 16 : case.head_dim + 16],
        kv[:, : case.head_dim],
        torch.zeros(case.num_kv + 5)[5:],
        weights[:, 2 : case.num_heads + 2],
        windows[:, 0],
        windows[:, 2],
    )
    for to, source in zip(strided.tensors().values(), inputs.tensors().values(), strict=True):
        to.view(torch.uint8 if to.dtype == torch.float8_e4m3fn else to.dtype).copy_(
            source.view(torch.uint8) if source.dtype == torch.float8_e4m3fn else source
        )
    storage = torch.full((case.num_q, case.num_kv + 7), 5.0, dtype=dtype)
    out = storage[:, 3 : case.num_kv + 3]
    with installed(Emulator(), case.num_sms):
        logits = run_mqa(case, strided, arch, out=out)
    assert logits is out
    assert torch.equal(bits(out, inside), bits(wanted, inside))
    assert bool(torch.isneginf(out[~inside]).all())
    assert bool((storage[:, :3] == 5).all() and (storage[:, case.num_kv + 3 :] == 5).all())


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("num_heads", [8, 64, 128])
def test_weights_at_the_ends_of_float32(arch: str, num_heads: int) -> None:
    """Each such row is right by itself, and no row beside it changes by a bit."""
    case = replace(BASE, windows="full", num_q=9, num_heads=num_heads)
    ordinary = case.make_inputs()
    ordinary.kv_scale[::2] *= 2.0**-60
    ordinary.kv_scale[1::2] *= 2.0**60
    extreme = replace(ordinary, weights=ordinary.weights.clone())
    factors = {1: 2.0**110, 2: 2.0**-110, 4: 2.0**124, 6: 2.0**-130, 7: 2.0**-146}
    for row, factor in factors.items():
        extreme.weights[row] *= factor
    extreme.weights[4, 1:] = extreme.weights[4].abs().max()  # the sum over heads leaves float32
    extreme.weights[5, 0] = float("nan")
    wanted, inside = expected(case, extreme)
    logits = run(case, arch, extreme)
    for row in factors:
        columns = [slice(0, None, 2), slice(1, None, 2)]  # apart: the scales differ by 2^120
        for part in columns:
            oracle.assert_agrees(logits[row, part], wanted[row, part], inside[row, part], LIMITS[torch.float32])
    others = [row for row in range(case.num_q) if row not in (*factors, 5)]
    assert torch.equal(bits(logits[others], inside[others]), bits(run(case, arch, ordinary)[others], inside[others]))


@pytest.mark.parametrize("num_heads", [3, 8, 16, 30, 64, 128])
@pytest.mark.parametrize("num_sms", [1, 3, 132])
@pytest.mark.parametrize("windows", ["ragged", "sparse", "causal"])
def test_metadata_kernel_cuts_as_the_cpu_does(num_heads: int, num_sms: int, windows: str) -> None:
    for num_q in (1, 130):
        case = MqaCase(num_q=num_q, num_kv=2000, num_heads=num_heads, windows=windows, seed=num_sms)
        starts, ends = (guarded(tensor) for tensor in case.make_windows())
        with installed(Emulator(), num_sms):
            found = deep_kernels.get_mqa_logits_metadata(starts, ends, case.num_kv, num_heads, arch="emulator:sm90")
        deep_kernels.set_num_sms(num_sms)
        try:
            wanted = deep_kernels.get_mqa_logits_metadata(starts, ends, case.num_kv, num_heads)
        finally:
            deep_kernels.set_num_sms(0)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("arch", ARCHES)
def test_nothing_to_do(arch: str) -> None:
    for num_q, num_kv in ((0, 5), (3, 0), (0, 0)):
        case = replace(BASE, num_q=num_q, num_kv=num_kv)
        logits = run(case, arch)
        assert list(logits.shape) == [num_q, num_kv]
    case = replace(BASE, num_q=3, num_kv=0, max_seqlen_k=5)
    assert bool(torch.isneginf(run(case, arch)).all())


# --- how a call gets there -------------------------------------------------------------------------------------------


def test_an_emulator_must_be_installed() -> None:
    case = replace(BASE, num_q=1, num_kv=3)
    with pytest.raises(ValueError, match=r"^fp8_fp4_mqa_logits: arch 'emulator:sm90' needs an emulator and none is"):
        run_mqa(case, case.make_inputs(), "emulator:sm90")
    starts, ends = case.make_windows()
    with pytest.raises(ValueError, match=r"^get_mqa_logits_metadata: arch 'emulator:sm89' needs an emulator"):
        deep_kernels.get_mqa_logits_metadata(starts, ends, 3, 4, arch="emulator:sm89")


def test_an_installed_emulator_is_not_chosen_silently() -> None:
    case = replace(BASE, num_q=2, num_kv=30)
    inputs = case.make_inputs()
    emulator = Emulator()
    with installed(emulator):
        for arch in ("sm90", "sm_89"):
            run_mqa(case, inputs, arch)  # CPU tensors: the CPU backend
        assert emulator.launches == []
        run_mqa(case, inputs, "emulator:sm89:sm_90a")
    assert [launch["target"] for launch in emulator.launches] == ["sm_90a"]


def test_the_emulator_gets_the_source_that_is_compiled_for_a_card() -> None:
    launches = []
    case = replace(BASE, num_q=1, num_kv=3)
    with installed(launches.append), environment("DEEP_KERNELS_ARCH", "sm_89"):
        run_mqa(case, case.make_inputs(), "emulator:sm90")
    source = launches[0]["source"]
    assert source.startswith('#include "deep_kernels/kernels/mqa_logits_sm90.cuh"\n')
    assert "    .head_dim = 64,\n" in source
    assert launches[0]["grid"] == 1 and launches[0]["block"] == 640


def test_refusals_are_those_of_a_card() -> None:
    case = replace(BASE, num_q=2, num_kv=30)
    inputs = case.make_inputs()
    with installed(Emulator()):
        with pytest.raises(ValueError, match="arch must be a backend"):
            run_mqa(case, inputs, "emulator:sm77")
        with pytest.raises(deep_kernels.UnsupportedError, match="no sm100 kernels"):
            run_mqa(case, inputs, "emulator:sm100")
