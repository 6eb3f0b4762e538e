"""The kernels of the FP8 prefill MLP on the emulator, against the float64 oracle, strictly checked while they run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import oracle
import pytest
import torch
from conftest import Backend
from emulator import Emulator, installed
from emulator.driver import SANITIZED_FLAGS, compile_ahead
from emulator.fixtures import emulator_ready  # noqa: F401
from emulator.memory import guarded
from silu_cases import (
    ACTIVATIONS,
    Case,
    GuardedOut,
    Inputs,
    Pair,
    assert_same_pair,
    block_gemm,
    expected,
    expected_of,
    fold,
    laid_out,
    make_gate_up,
    make_inputs,
    run_case,
    silu_mul,
    sum_error,
)

BACKENDS = tuple(Backend(f"emulator-{name}", "cpu", f"emulator:{name}") for name in ("sm90", "sm89"))
by_backend = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)

# Tiles that end within blocks, several of them, all activations and both formats.
CASES = (
    Case(1, 16, 16),
    Case(65, 144, 128, "oss", scale_fmt="ue8m0"),
    Case(130, 272, 144, "gelu", w_scale_dtype=torch.bfloat16, layout="columns"),
    Case(17, 400, 272, "clamped", round_bf16=False, layout="strided", out=True),
    Case(70, 640, 256, "gelu-clamped", round_bf16=False, scale_fmt="ue8m0", out=True),
    Case(33, 1024, 384, layout="strided"),
)
by_case = pytest.mark.parametrize("case", CASES, ids=str)


def guarded_inputs(inputs: Inputs) -> Inputs:
    return Inputs(*(guarded(tensor) for tensor in inputs.tensors()))


def run(backend: Backend, case: Case, inputs: Inputs, *, emulator: Emulator | None = None, num_sms: int = 3) -> Pair:
    """The fold on the emulator, its inputs between pages that fault unless their strides are the matter."""
    if case.layout == "rows":
        inputs = guarded_inputs(inputs)
    emulator = emulator or Emulator()
    with installed(emulator, num_sms):
        pair = run_case(backend, case, inputs, fused=True)
    assert [launch["op"] for launch in emulator.launches] == ["silu_fold"]
    return pair


@pytest.fixture(autouse=True, scope="module")
def compiled(emulator_ready: None) -> Iterator[None]:  # noqa: F811
    """All kernels of the cases, compiled side by side before the first is run."""

    def run_all() -> None:
        for backend in BACKENDS:
            for case in CASES:
                inputs, gate_up = make_inputs(case, "cpu"), make_gate_up(case, "cpu")
                fold(backend, inputs, fused=True, round_bf16=case.round_bf16, **case.options)
                silu_mul(backend, gate_up, **case.options)
                for dtype in (torch.float32, torch.bfloat16):
                    block_gemm(backend, (inputs.x, inputs.x_scale), inputs.half(0), dtype)

    compile_ahead(run_all)
    yield


@by_backend
@by_case
def test_fold_agrees_with_the_oracle(backend: Backend, case: Case) -> None:
    inputs = make_inputs(case, "cpu")
    oracle.assert_quantized(*run(backend, case, inputs), expected(backend, case, inputs), case.scale_fmt)


@by_backend
@by_case
def test_block_gemm_agrees_with_the_oracle(backend: Backend, case: Case) -> None:
    inputs = guarded_inputs(make_inputs(case, "cpu"))
    x, w = (inputs.x, inputs.x_scale), inputs.half(1)
    acc = oracle.block_gemm(*x, *w, error=sum_error(backend))
    noise = torch.randn(acc.value.shape, generator=torch.Generator().manual_seed(1)) * float(acc.value.abs().mean())
    for dtype, residual in (
        (torch.bfloat16, None),
        (torch.bfloat16, noise.bfloat16()),
        (torch.float32, noise.bfloat16()),
        (torch.float32, noise),
    ):
        with installed(Emulator()):
            product = block_gemm(backend, x, w, dtype, None if residual is None else guarded(residual))
        oracle.assert_bounded(product, oracle.residual_sum(acc, residual, dtype))


@by_backend
@by_case
def test_silu_mul_agrees_with_the_oracle(backend: Backend, case: Case) -> None:
    gate_up = guarded(make_gate_up(case, "cpu"))
    guard = GuardedOut(case, "cpu")
    with installed(Emulator()):
        result = silu_mul(backend, gate_up, out=guard.pair, **case.options)
    y, y_scale = (part.clone() for part in result)
    guard.check(result)
    oracle.assert_quantized(y, y_scale, expected_of(case, gate_up), case.scale_fmt)


@by_backend
def test_every_activation_over_many_gates(backend: Backend) -> None:
    """Every 61st bfloat16 number as a gate, NaN and infinities among them, each in a block of its own."""
    gates = torch.arange(-(2**15), 2**15, 61, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    gates = torch.cat((gates, torch.tensor([torch.inf, -torch.inf, torch.nan], dtype=torch.bfloat16)))
    gate_up = torch.zeros(len(gates), 32, dtype=torch.bfloat16)
    gate_up[:, 0], gate_up[:, 16] = gates, 1.0
    for activation in ACTIVATIONS:
        case = Case(activation=activation)
        with installed(Emulator()):
            pair = silu_mul(backend, gate_up, **case.options)
        oracle.assert_quantized(*pair, expected_of(case, gate_up))


BASE = Case(75, 528, 272)


@by_backend
def test_bits_depend_on_no_order_and_no_grid(backend: Backend) -> None:
    inputs = make_inputs(BASE, "cpu")
    wanted = run(backend, BASE, inputs)
    for seed, num_sms in ((1, 1), (2, 3), (3, 8), (4, 132)):
        assert_same_pair(run(backend, BASE, inputs, emulator=Emulator(seed=seed), num_sms=num_sms), wanted)


@by_backend
def test_bits_do_not_depend_on_what_locals_held(backend: Backend) -> None:
    """Variables that nobody initialised would differ between the two builds."""
    inputs = make_inputs(BASE, "cpu")
    zeros, patterns = (
        run(backend, BASE, inputs, emulator=Emulator(flags=("-O1", f"-ftrivial-auto-var-init={value}")))
        for value in ("zero", "pattern")
    )
    assert_same_pair(zeros, patterns)


@by_backend
@pytest.mark.parametrize("layout", ("columns", "strided"))
def test_strides_change_no_bit(backend: Backend, layout: str) -> None:
    inputs = make_inputs(BASE, "cpu")
    other = replace(BASE, layout=layout)
    assert_same_pair(run(backend, other, laid_out(inputs, layout)), run(backend, BASE, inputs))


@by_backend
def test_rows_do_not_depend_on_others(backend: Backend) -> None:
    inputs = make_inputs(BASE, "cpu")
    whole = run(backend, BASE, inputs)
    for part in (slice(0, 1), slice(70, 75), slice(3, 68)):
        assert_same_pair(run(backend, BASE, inputs.rows(part)), (whole[0][part], whole[1][part]))


def spoilt(inputs: Inputs, name: str, index: tuple[int, int], byte: int | float) -> Inputs:
    tensor = getattr(inputs, name).clone()
    (tensor.view(torch.uint8) if isinstance(byte, int) else tensor)[index] = byte
    return replace(inputs, **{name: tensor})


@by_backend
@pytest.mark.parametrize(
    "name, index, value",
    [
        ("x", (5, 300), 0x7F),
        ("w", (130, 3), 0xFF),
        ("w", (272 + 200, 3), 0x7F),
        ("x_scale", (5, 2), torch.inf),
        ("x_scale", (5, 0), 1e30),
        ("w_scale", (1, 0), torch.nan),
        ("w_scale", (4, 1), torch.inf),
    ],
)
def test_special_values_stay_in_their_rows_and_blocks(
    backend: Backend, name: str, index: tuple[int, int], value: int | float
) -> None:
    """In builds that stop at undefined behaviour."""
    inputs = make_inputs(BASE, "cpu")
    wanted = run(backend, BASE, inputs)
    bad = spoilt(inputs, name, index, value)
    y, y_scale = run(backend, BASE, bad, emulator=Emulator(flags=SANITIZED_FLAGS))
    oracle.assert_quantized(y, y_scale, expected(backend, BASE, bad))
    touched = torch.zeros(75, 3, dtype=torch.bool)
    if name.startswith("x"):
        touched[5] = True
    else:
        touched[:, 1] = True
    columns = touched.repeat_interleave(128, dim=1)[:, :272]
    assert torch.equal(y.view(torch.uint8)[~columns], wanted[0].view(torch.uint8)[~columns])
    assert torch.equal(y_scale[~touched], wanted[1][~touched])
