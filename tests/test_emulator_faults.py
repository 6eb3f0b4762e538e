"""The emulator can fail: faults put into copies of the kernels are caught, and the message says where."""

from __future__ import annotations

from pathlib import Path

import emulator
import pytest
from emulator import cases, faults
from emulator.fixtures import emulator_ready  # noqa: F401
from emulator.memory import guarded


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_fault_is_caught(fault: faults.Fault, tmp_path: Path) -> None:
    altered = emulator.Emulator(include=faults.altered_include(fault, tmp_path))
    with emulator.installed(altered, fault.case.num_sms), pytest.raises(emulator.EmulatorError) as caught:
        cases.run_mqa(fault.case, fault.case.make_inputs().map(guarded), f"emulator:{fault.backend}")
    text = str(caught.value)
    assert caught.value.kind in fault.kinds, text
    for word in fault.words:
        assert word in text, text


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_unaltered_kernel_passes(fault: faults.Fault) -> None:
    """The case of each fault is fine without it."""
    with emulator.installed(emulator.Emulator(), fault.case.num_sms):
        cases.run_mqa(fault.case, fault.case.make_inputs().map(guarded), f"emulator:{fault.backend}")
