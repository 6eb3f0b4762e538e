"""The paged kernels on the emulator, against the float64 oracle, strictly checked while they run."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import oracle
import pytest
import torch
from emulator import Emulator, installed
from emulator.cases import hash_bits
from emulator.driver import SANITIZED_FLAGS, compile_ahead
from emulator.fixtures import emulator_ready  # noqa: F401
from emulator.memory import guarded
from emulator.paged_cases import PAGED_CASES, PAGED_SPREADS, PagedCase, PagedInputs, paged_schedule, run_paged
from torch import Tensor

import deep_kernels

ARCHES = ("emulator:sm90", "emulator:sm89")
# 1 - 2 sum(xy) / sum(x^2 + y^2) inside the contexts.
LIMITS = {torch.float32: 5e-6, torch.bfloat16: 3e-5}


def limit_of(case: PagedCase) -> float:
    return max(LIMITS[case.logits_dtype], LIMITS.get(case.weights_dtype, 0.0))


def serves(case: PagedCase, arch: str) -> bool:
    """Whether the backend has a kernel for the case; the refusal itself is checked where it is made."""
    backend = arch.removeprefix("emulator:")
    return deep_kernels.supported("fp8_fp4_paged_mqa_logits", backend, format=case.format) is None


SERVED = [
    pytest.param(case, arch, id=f"{arch.removeprefix('emulator:')}-{case}")
    for case, arch in itertools.product(PAGED_CASES, ARCHES)
    if serves(case, arch)
]


@pytest.fixture(autouse=True, scope="module")
def compiled(emulator_ready: None) -> Iterator[None]:  # noqa: F811
    """All kernels of the cases, compiled side by side before the first is run."""

    def run_all() -> None:
        for case, arch in itertools.product((*PAGED_CASES, *PAGED_SPREADS), ARCHES):
            if serves(case, arch):
                run_paged(case, case.make_inputs(), arch)

    compile_ahead(run_all)
    yield


def run(
    case: PagedCase, arch: str, inputs: PagedInputs | None = None, *, emulator: Emulator | None = None
) -> Tensor:  # fmt: skip
    """The case on the emulator, its inputs between pages that fault."""
    with installed(emulator or Emulator(), case.num_sms):
        return run_paged(case, (inputs or case.make_inputs()).map(guarded), arch)


def expected(case: PagedCase, inputs: PagedInputs) -> tuple[Tensor, Tensor]:
    return oracle.paged_mqa_logits(
        (inputs.q, inputs.q_scale), inputs.kv_cache, inputs.weights, inputs.context_lens, inputs.block_table,
        case.width, format=case.format, clean=case.clean,
    )  # fmt: skip


def bits(logits: Tensor, inside: Tensor) -> Tensor:
    """The bits of the logits inside the contexts."""
    return logits[inside].contiguous().view(torch.int32 if logits.dtype == torch.float32 else torch.int16)


@pytest.mark.parametrize("case, arch", SERVED)
def test_logits_agree_with_the_oracle(case: PagedCase, arch: str) -> None:
    inputs = case.make_inputs()
    logits = run(case, arch, inputs)
    wanted, inside = expected(case, inputs)
    oracle.assert_agrees(logits, wanted, inside, limit_of(case))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("case", PAGED_SPREADS, ids=str)
def test_exponents_far_apart(case: PagedCase, arch: str) -> None:
    """Row by row, so that large ones do not hide small ones; against what float32 can hold."""
    if not serves(case, arch):
        pytest.skip(f"no {arch} kernel for {case.format}")
    inputs = case.make_inputs()
    logits = run(case, arch, inputs)
    wanted, inside = expected(case, inputs)
    wanted = wanted.float().double()
    for row in range(len(wanted)):
        one = slice(row, row + 1)
        oracle.assert_agrees(logits[one], wanted[one], inside[one], limit_of(case))


BASES = [
    PagedCase(batch=5, num_heads=64, head_dim=128, max_len=300, width=310, seed=7),
    PagedCase(batch=3, next_n=3, num_heads=24, block_kv=16, seed=8),
    PagedCase(batch=7, num_heads=32, lens="indices", block_kv=32, seed=9),
    PagedCase(batch=3, next_n=2, num_heads=128, format="mxfp8", lens="2d", seed=10),
    PagedCase(batch=3, num_heads=8, format="mxfp4", seed=11),
]
EVERY_BASE = pytest.mark.parametrize(
    "base, arch",
    [
        pytest.param(base, arch, id=f"{arch.removeprefix('emulator:')}-{base}")
        for base, arch in itertools.product(BASES, ARCHES)
        if serves(base, arch)
    ],
)


@EVERY_BASE
def test_bits_do_not_depend_on_mode_schedule_or_width(base: PagedCase, arch: str) -> None:
    inputs = base.make_inputs()
    wanted = run(base, arch, inputs)
    _, inside = expected(base, inputs)
    changes = ({"clean": False}, {"metadata": True}, {"metadata": True, "num_sms": 8}, {"num_sms": 1}, {"num_sms": 132})
    for change in changes:
        case = replace(base, **change)
        assert torch.equal(bits(run(case, arch, inputs), inside), bits(wanted, inside)), change
    narrow = replace(base, width=100)
    _, inside = expected(narrow, inputs)
    assert torch.equal(bits(run(narrow, arch, inputs), inside), bits(wanted[:, :100], inside))


@EVERY_BASE
def test_any_schedule_gives_the_same_bits(base: PagedCase, arch: str) -> None:
    inputs = base.make_inputs()
    wanted = run(base, arch, inputs)
    largest = 2**31 - 1
    schedules = {
        "zeros": torch.zeros(5, 2),
        "largest": torch.full((5, 2), largest),
        "smallest": torch.full((5, 2), -largest - 1),
        "falling": torch.arange(40, 0, -1).view(20, 2),
        "random": hash_bits(3, 133, 2) - 2**30,
        "small": hash_bits(4, 6, 2) % 5,
        "shortest": torch.zeros(2, 2),
    }
    for name, schedule in schedules.items():
        with installed(Emulator(flags=SANITIZED_FLAGS), base.num_sms):
            logits = run_paged(base, inputs, arch, schedule=guarded(schedule.to(torch.int32)))
        assert torch.equal(
            bits(logits, torch.ones_like(logits, dtype=torch.bool)), wanted.flatten().view(torch.int32)
        ), name


@EVERY_BASE
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_bits_do_not_depend_on_the_order_of_threads(base: PagedCase, arch: str, seed: int) -> None:
    case = replace(base, num_sms=2)
    wanted = run(case, arch)
    assert torch.equal(run(case, arch, emulator=Emulator(seed=seed)).view(torch.int32), wanted.view(torch.int32))


@EVERY_BASE
def test_bits_do_not_depend_on_what_locals_held(base: PagedCase, arch: str) -> None:
    """Variables that nobody initialised would differ between the two builds."""
    zeros, patterns = (
        run(base, arch, emulator=Emulator(flags=("-O1", f"-ftrivial-auto-var-init={value}"))).view(torch.int32)
        for value in ("zero", "pattern")
    )
    assert torch.equal(zeros, patterns)


@EVERY_BASE
def test_lengths_and_tables_at_the_limits(base: PagedCase, arch: str) -> None:
    """Lengths at the limits of int32, and entries inside a context that name no page: all reads stay in the cache."""
    inputs = base.make_inputs()
    low, high = -(2**31), 2**31 - 1
    lens = inputs.context_lens.clone()
    lens[0], lens[1:], table = high, low, inputs.block_table.clone()
    sanitized = Emulator(flags=SANITIZED_FLAGS)
    for entry in (low, -1, inputs.kv_cache.shape[0], high):
        table[:, 0] = entry
        if base.lens == "indices":
            table[1] = table[0]
        logits = run(base, arch, replace(inputs, context_lens=lens, block_table=table), emulator=sanitized)
        beyond = min(base.width, table.shape[1] * base.block_kv)
        assert torch.isneginf(logits[:, beyond:]).all()
        if base.lens != "indices":
            assert torch.isneginf(logits[base.next_n :]).all()


@EVERY_BASE
def test_pages_and_rows_may_lie_apart(base: PagedCase, arch: str) -> None:
    """What lies between them belongs to nobody: the emulator knows every byte that is not the tensors'."""
    inputs = base.make_inputs()
    wanted = run(base, arch, inputs)
    pages = inputs.kv_cache
    stride = pages[0].numel() + 48
    cache = torch.full((len(pages) * stride,), 0xFF, dtype=torch.uint8).as_strided(
        pages.shape, (stride, pages.shape[3], pages.shape[3], 1)
    )
    cache.copy_(pages)
    apart = replace(
        inputs,
        kv_cache=cache,
        weights=torch.nn.functional.pad(inputs.weights, (0, 3), value=torch.nan)[:, : base.num_heads],
        context_lens=torch.stack((inputs.context_lens, inputs.context_lens * 0 - 7), dim=-1)[..., 0],
        block_table=torch.nn.functional.pad(inputs.block_table, (0, 5), value=-1)[:, : inputs.block_table.shape[1]],
    )
    out = torch.zeros(len(wanted), base.width + 3, dtype=base.logits_dtype)[:, : base.width]
    with installed(Emulator(), base.num_sms):
        assert run_paged(base, apart, arch, out=out) is out
    assert torch.equal(out.contiguous().view(torch.int32), wanted.contiguous().view(torch.int32))


METADATA_CASES = [
    PagedCase(
        batch=batch, next_n=3 if lens == "2d" else 1, lens=lens, max_len=900, num_heads=1, head_dim=32, block_kv=256,
        num_sms=num_sms,
    )
    for lens in ("1d", "2d", "indices")
    for batch in (1, 2, 33, 150)
    for num_sms in (1, 7, 132)
]  # fmt: skip


@pytest.mark.parametrize("case", METADATA_CASES, ids=str)
def test_schedule_is_that_of_the_cpu(case: PagedCase) -> None:
    inputs = case.make_inputs()
    with installed(Emulator(), case.num_sms):
        schedule = paged_schedule(case, inputs.map(guarded), "emulator:sm89")
    assert torch.equal(schedule, paged_schedule(case, inputs, "cpu"))
