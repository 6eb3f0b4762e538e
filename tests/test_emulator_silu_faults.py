"""Faults put into copies of the FP8 prefill MLP's kernels are caught by the emulator or, where only numbers are wrong,
by what the tests compare with."""

from __future__ import annotations

import math
from pathlib import Path

import emulator
import oracle
import pytest
import torch
from emulator.faults import altered_include
from emulator.fixtures import emulator_ready  # noqa: F401
from emulator.silu_faults import SILU_FAULTS, WRONG, SiluFault
from silu_cases import block_gemm, expected, expected_of, make_gate_up, make_inputs, run_case, silu_mul, sum_error

EVERY_FAULT = pytest.mark.parametrize("fault", SILU_FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))


def check_call(fault: SiluFault, machine: emulator.Emulator) -> None:
    """The call of the fault, and what it gives against the oracle."""
    case = fault.silu
    with fault.variant.running(machine) as backend:
        if fault.op == "mul":
            gate_up = make_gate_up(case, "cpu")
            pair = silu_mul(backend, gate_up, **case.options)
            oracle.assert_quantized(*pair, expected_of(case, gate_up), case.scale_fmt)
            return
        inputs = make_inputs(case, "cpu")
        if fault.op == "gemm":
            x, w = (inputs.x, inputs.x_scale), inputs.half(1)
            out = torch.full((case.num_tokens, case.num_columns), math.nan)
            block_gemm(backend, x, w, torch.float32, out=out)
            acc = oracle.block_gemm(*x, *w, error=sum_error(backend))
            oracle.assert_bounded(out, oracle.residual_sum(acc, None, torch.float32))
            return
        pair = run_case(backend, case, inputs, fused=True)
        oracle.assert_quantized(*pair, expected(backend, case, inputs), case.scale_fmt)


@EVERY_FAULT
def test_fault_is_caught(fault: SiluFault, tmp_path: Path) -> None:
    altered = emulator.Emulator(include=altered_include(fault, tmp_path))
    with pytest.raises((emulator.EmulatorError, AssertionError)) as caught:
        check_call(fault, altered)
    text = str(caught.value)
    kind = caught.value.kind if isinstance(caught.value, emulator.EmulatorError) else WRONG
    assert kind in fault.kinds, text
    for word in fault.words:
        assert word in text, text


@EVERY_FAULT
def test_unaltered_kernel_passes(fault: SiluFault) -> None:
    """The call of each fault is fine without it."""
    check_call(fault, emulator.Emulator())
