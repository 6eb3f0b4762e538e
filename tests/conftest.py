"""Fixtures: the backend a test runs on."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import setuptools  # noqa: F401  before a test imports Python's own distutils, beside which it cannot be imported any more
import torch


@dataclass(frozen=True)
class Backend:
    """Where tensors live and which kernels they meet."""

    name: str
    device: str
    arch: str | None  # the `arch` argument of calls; CPU tensors ignore it

    @property
    def supported_arch(self) -> str:
        """The `arch` argument with which `supported` asks about this backend."""
        return self.arch or "cpu"

    def missing(self) -> str | None:
        """Why this machine cannot run the backend, or None."""
        if self.device == "cpu":
            return None
        if not torch.cuda.is_available():
            return "no GPU"
        major, minor = torch.cuda.get_device_capability()
        if self.arch == "sm90" and (major, minor) != (9, 0):
            return f"sm90 needs compute capability 9.0, this GPU has {major}.{minor}"
        if (major, minor) < (8, 9):
            return f"sm89 needs compute capability 8.9 or more, this GPU has {major}.{minor}"
        return None


BACKENDS = (
    Backend("cpu", "cpu", None),
    Backend("cuda-sm90", "cuda", "sm90"),
    Backend("cuda-sm89", "cuda", "sm89"),
)


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.name)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every backend in turn, skipped with the reason where this machine lacks it."""
    if reason := request.param.missing():
        pytest.skip(reason)
    return request.param


@pytest.fixture
def device(backend: Backend) -> str:
    """The device of the backend's tensors."""
    return backend.device
