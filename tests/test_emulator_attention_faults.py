"""Faults put into copies of the attention kernels are caught by the emulator or, where only numbers are wrong, by what
the tests compare with."""

from __future__ import annotations

import math
from pathlib import Path

import emulator
import pytest
from attention_cases import GuardedOut, attend_packed, check, check_jumps, check_negative, make_inputs, pack, run_case
from conftest import Backend
from emulator.attention_faults import ATTENTION_FAULTS, NARROW_BANDS, WRONG, AttentionFault
from emulator.faults import altered_include
from emulator.fixtures import emulator_ready  # noqa: F401
from storage import poisoned_memory

EVERY_FAULT = pytest.mark.parametrize(
    "fault", ATTENTION_FAULTS, ids=lambda fault: f"{fault.backend}-{fault.name.replace(' ', '-')}"
)


def check_call(fault: AttentionFault, machine: emulator.Emulator) -> None:
    """The call of the fault, and what it gives against the oracle. Scratch memory and results begin as NaN, and so do
    tokens behind the last member: whatever is taken from there shows."""
    case, backend = fault.attention, Backend(f"emulator-{fault.backend}", "cpu", f"emulator:{fault.backend}")
    with emulator.installed(machine), poisoned_memory(backend, None):
        if fault.jumps:
            for first in (False, True):
                check_jumps(backend, case.dtype, case.ex2, first)
            check_negative(backend, case.dtype)
            return
        if not fault.lengths:
            inputs = make_inputs(case, "cpu")
            check(backend, case, inputs, run_case(backend, case, inputs))
            return
        packed = pack(case, list(fault.lengths), "cpu", behind=5)
        num_q, num_kv = (sum(one) for one in zip(*fault.lengths, strict=True))
        packed.inputs.q[num_q:] = packed.inputs.k[num_kv:] = packed.inputs.v[num_kv:] = math.nan
        guard = GuardedOut(tuple(packed.inputs.q.shape), case.dtype, "cpu")
        out, lse = attend_packed(backend, packed, out=guard.view, **case.options)
    assert (out[num_q:] == 7).all(), "written behind the last member"
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


@pytest.mark.parametrize("bands", NARROW_BANDS, ids=lambda bands: str(bands.attention.num_splits))
def test_narrow_bands_are_right(bands: AttentionFault, tmp_path: Path) -> None:
    """Faults that need more bands than a small case has bring them along: they are none by themselves."""
    check_call(bands, emulator.Emulator(include=altered_include(bands, tmp_path)))
