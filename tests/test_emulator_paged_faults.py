"""Faults put into copies of the paged kernel are caught by the emulator, and the message says where."""

from __future__ import annotations

from pathlib import Path

import emulator
import pytest
from emulator.faults import altered_include
from emulator.fixtures import emulator_ready  # noqa: F401
from emulator.paged_cases import run_paged
from emulator.paged_faults import PAGED_FAULTS, PagedFault

EVERY_FAULT = pytest.mark.parametrize("fault", PAGED_FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))


@EVERY_FAULT
def test_fault_is_caught(fault: PagedFault, tmp_path: Path) -> None:
    altered = emulator.Emulator(include=altered_include(fault, tmp_path))
    with emulator.installed(altered, fault.paged.num_sms), pytest.raises(emulator.EmulatorError) as caught:
        run_paged(fault.paged, fault.paged.make_inputs(), f"emulator:{fault.backend}")
    text = str(caught.value)
    assert caught.value.kind in fault.kinds, text
    for word in fault.words:
        assert word in text, text


@EVERY_FAULT
def test_unaltered_kernel_passes(fault: PagedFault) -> None:
    """The call of each fault is fine without it."""
    with emulator.installed(emulator.Emulator(), fault.paged.num_sms):
        run_paged(fault.paged, fault.paged.make_inputs(), f"emulator:{fault.backend}")
