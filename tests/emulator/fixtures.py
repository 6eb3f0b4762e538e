"""What a test module with the emulator needs: `from emulator.fixtures import emulator_ready  # noqa: F401`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from . import build


@pytest.fixture(autouse=True, scope="module")
def emulator_ready() -> Iterator[None]:
    """Skips the module where there is no compiler; one torch thread, since more only wait between tiny operations."""
    try:
        build.compiler()
    except build.CompilerMissing as missing:
        pytest.skip(str(missing))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
