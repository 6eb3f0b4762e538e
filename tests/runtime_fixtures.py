"""Fixtures of the runtime's tests: fresh processes, an NVRTC that can be slow or of another version, warm folders."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fresh import SCHEDULE, Fresh

import deep_kernels
from deep_kernels import _C


@pytest.fixture(scope="session")
def nvrtc() -> tuple[str, str]:
    """Path and version of the real one."""
    try:
        return _C.nvrtc()
    except deep_kernels.CompileError as error:
        pytest.skip(f"compiling needs NVRTC: {error}")


@pytest.fixture(scope="session")
def fresh() -> Iterator[Fresh]:
    server = Fresh(Path(deep_kernels.__file__).parents[1])
    yield server
    server.close()


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No setting but an empty cache folder, which does not exist yet."""
    for name in os.environ:
        if name.startswith("DEEP_KERNELS_") and name != "DEEP_KERNELS_NVRTC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("DEEP_KERNELS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def entry(nvrtc: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of SCHEDULE for sm_89, compiled once; tests copy its file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEP_KERNELS_CACHE_DIR", str(tmp_path_factory.mktemp("entry")))
        return deep_kernels.prepare([SCHEDULE], arch="sm_89")[0]


@pytest.fixture
def warm(no_settings: Path, entry: dict[str, Any]) -> Path:
    """The file of `entry` in the cache folder of this test."""
    no_settings.mkdir()
    return Path(shutil.copy(entry["file"], no_settings))


@pytest.fixture(scope="session")
def shim(nvrtc: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Settings that put tests/nvrtc_shim.c before the real NVRTC."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        pytest.skip("the NVRTC shim needs a C compiler")
    library = tmp_path_factory.mktemp("shim") / "libshim.so"
    source = Path(__file__).with_name("nvrtc_shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"], check=True)
    return {"DEEP_KERNELS_NVRTC": str(library), "SHIM_NVRTC": nvrtc[0]}


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that an unprivileged child may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        yield Path(folder)
