"""Faults put into copies of the attention kernels are caught by the emulator or, where only numbers are wrong, by what
the tests compare with."""

from __future__ import annotations

from pathlib import Path

import emulator
import pytest
from attention_cases import GuardedOut, attend_packed, check, make_inputs, pack, run_case
from conftest import Backend
from emulator.attention_faults import ATTENTION_FAULTS, WRONG, AttentionFault
from emulator.faults import altered_include
from emulator.fixtures import emulator_ready  # noqa: F401

EVERY_FAULT = pytest.mark.parametrize("fault", ATTENTION_FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))


def check_call(fault: AttentionFault, machine: emulator.Emulator) -> None:
    """The call of the fault, and what it gives against the oracle."""
    case, backend = fault.attention, Backend(f"emulator-{fault.backend}", "cpu", f"emulator:{fault.backend}")
    with emulator.installed(machine):
        if not fault.lengths:
            inputs = make_inputs(case, "cpu")
            return check(backend, case, inputs, run_case(backend, case, inputs))
        packed = pack(case, list(fault.lengths), "cpu", behind=5)
        guard = GuardedOut(tuple(packed.inputs.q.shape), case.dtype, "cpu")
        out, lse = attend_packed(backend, packed, out=guard.view, **case.options)
    assert (out[sum(q for q, _ in fault.lengths) :] == 7).all(), "written behind the last member"
    for q, kv in packed.members():
        check(backend, case, packed.member(q, kv), (out[None, q], lse[None, :, q]))


@EVERY_FAULT
def test_fault_is_caught(fault: AttentionFault, tmp_path: Path) -> None:
    altered = emulator.Emulator(include=altered_include(fault, tmp_path))
    with pytest.raises((emulator.EmulatorError, AssertionError)) as caught:
        check_call(fault, altered)
    text = str(caught.value)
    kind = caught.value.kind if isinstance(caught.value, emulator.EmulatorError) else WRONG
    assert kind in fault.kinds, text
    for word in fault.words:
        assert word in text, text


@EVERY_FAULT
def test_unaltered_kernel_passes(fault: AttentionFault) -> None:
    """The call of each fault is fine without it."""
    check_call(fault, emulator.Emulator())
