"""Compiles the emulator and kernels for it with the C++ compiler of the machine; results are kept by content."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE_INCLUDE = ROOT / "deep_kernels" / "include"
EMULATOR_INCLUDE = HERE / "include"

FLAGS = [
    "-std=c++20",
    "-fPIC",
    "-march=native",
    "-ffp-contract=off",  # a fused multiply-add is written as such
    "-fno-strict-aliasing",
    "-fno-omit-frame-pointer",
    "-Wall",
    "-Wno-unknown-pragmas",
]


_KEEP_SECONDS = 14 * 24 * 3600


class CompilerMissing(Exception):
    """There is no C++ compiler."""


@cache
def compiler() -> str:
    """The C++ compiler: $CXX, else g++ or clang++."""
    for name in (os.environ.get("CXX"), "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise CompilerMissing("the emulator needs a C++20 compiler (g++ 12 or newer) and found none; set CXX")


@cache
def _machine() -> str:
    """What machine code depends on beside the text: compiler and processor."""
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    processor = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        processor += next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
    return version + processor


def cache_folder() -> Path:
    """Where compiled files lie: build/emulator in the checkout, or $DEEP_KERNELS_EMULATOR_CACHE."""
    folder = Path(os.environ.get("DEEP_KERNELS_EMULATOR_CACHE", ROOT / "build" / "emulator"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def tree_digest(folders: Sequence[Path]) -> str:
    """Digest of all files below the folders."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix in {".h", ".cuh", ".cpp"}:
                digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@contextmanager
def _missing(target: Path) -> Iterator[bool]:
    """Whether the file has to be made; meanwhile nobody else makes it."""
    if target.exists():
        yield False
        return
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not target.exists()


def _forget_old_files() -> None:
    """Removes what was compiled long ago: texts change with every edit of a header."""
    for path in cache_folder().iterdir():
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - _KEEP_SECONDS:
                path.unlink()


def _compile(command: list[str], target: Path) -> None:
    """Runs the compiler into a private file and renames it, so that a broken one is never found."""
    handle, private = tempfile.mkstemp(dir=target.parent, suffix=".so")
    os.close(handle)
    # Debug information names files relative to the folder of the compiler: none of this machine's.
    result = subprocess.run([*command, "-o", private], capture_output=True, text=True, cwd="/")
    if result.returncode != 0:
        os.unlink(private)
        raise RuntimeError(f"the emulator could not compile {target.stem}:\n{result.stderr}")
    os.replace(private, target)


@cache
def core_library() -> Path:
    """The emulator itself as a shared library."""
    sources = sorted((HERE / "core").glob("*.cpp"))
    key = hashlib.sha256((tree_digest([HERE / "core"]) + _machine()).encode()).hexdigest()[:16]
    target = cache_folder() / f"libdk_emulator_{key}.so"
    with _missing(target) as missing:
        if missing:
            _forget_old_files()
            _compile_core(sources, target)
    return target


def _compile_core(sources: list[Path], target: Path) -> None:
    include = [f"-I{HERE}", f"-I{PACKAGE_INCLUDE}"]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            subprocess.Popen(
                [compiler(), *FLAGS, "-O3", "-g1", *include, "-c", str(path), "-o", f"{folder}/{path.stem}.o"],
                stderr=subprocess.PIPE,
                text=True,
            )
            for path in sources
        ]
        errors = [job.communicate()[1] for job in jobs]
        if any(job.returncode for job in jobs):
            raise RuntimeError("the emulator could not be compiled:\n" + "".join(errors))
        _compile([compiler(), "-shared", *(f"{folder}/{path.stem}.o" for path in sources)], target)


def source_roots(include: Path) -> list[Path]:
    """Folders that hold the text of a kernel built with this include folder."""
    return [include / "deep_kernels", EMULATOR_INCLUDE / "deep_kernels", cache_folder()]


def kernel_library(
    source: str, entry: str, *, include: Path = PACKAGE_INCLUDE, flags: Sequence[str] = ("-O1",)
) -> Path:
    """A kernel's source text, as NVRTC would get it, as a shared library for the emulator.

    Args:
        source: the generated text.
        entry: name of the kernel in it.
        include: the package's include folder, or an altered copy.
        flags: of the compiler, added to the common ones.
    """
    text = f'{source}\n#include "core/entry.h"\nDK_EMULATOR_ENTRY({entry})\n'
    digest = tree_digest([include, EMULATOR_INCLUDE]) + tree_digest([HERE / "core"])
    parts = (text, digest, _machine(), *FLAGS, *flags)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    target = cache_folder() / f"{entry}_{key}.so"
    core = core_library()
    with _missing(target) as missing:
        if not missing:
            return target
        path = cache_folder() / f"{entry}_{key}.cpp"
        path.write_text(text)
        folders = [f"-I{EMULATOR_INCLUDE}", f"-I{include}", f"-I{HERE}"]
        # Reports name files by where they lie in an include folder, wherever that was.
        folders += [f"-ffile-prefix-map={root}/=" for root in source_roots(include)]
        command = [compiler(), *FLAGS, "-g1", *flags, *folders, "-shared", str(path), str(core)]
        _compile([*command, f"-Wl,-rpath,{core.parent}"], target)
    return target
