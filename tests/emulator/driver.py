"""Runs launches of the op layer on the emulator."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from . import build

_MAP_BYTES = 120  # sizeof(MapDescription)
_ENCODED_BYTES = 128  # sizeof(ptx::TensorMap)


# Variables that the kernel does not initialise hold a pattern that no one could take for a value.
DEFAULT_FLAGS = ("-O1", "-ftrivial-auto-var-init=pattern")
# Signed overflow, shifts and indices out of range, conversions that do not fit: each ends the launch.
SANITIZED_FLAGS = (*DEFAULT_FLAGS, "-fsanitize=undefined,float-cast-overflow", "-fsanitize-undefined-trap-on-error")


class EmulatorError(Exception):
    """A fault that the emulator found in a kernel; `kind` is one word for what it is."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.POINTER(ctypes.c_longlong)),
        ("strides", ctypes.POINTER(ctypes.c_longlong)),
        ("rank", ctypes.c_int),
        ("element_bytes", ctypes.c_int),
        ("writable", ctypes.c_int),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char_p),
        ("entry", ctypes.c_void_p),
        ("params", ctypes.POINTER(ctypes.c_void_p)),
        ("source_roots", ctypes.c_char_p),
        ("tensors", ctypes.POINTER(_Tensor)),
        ("num_tensors", ctypes.c_int),
        ("grid", ctypes.c_int),
        ("cluster", ctypes.c_int),
        ("block", ctypes.c_int),
        ("smem_bytes", ctypes.c_int),
        ("programmatic", ctypes.c_int),
        ("seed", ctypes.c_ulonglong),
        ("trace_file", ctypes.c_char_p),
    ]


@cache
def core() -> ctypes.CDLL:
    """The emulator's library, loaded."""
    return ctypes.CDLL(str(build.core_library()), mode=ctypes.RTLD_GLOBAL)


@cache
def _load(path: Path) -> ctypes.CDLL:
    core()
    return ctypes.CDLL(str(path))


_one_at_a_time = threading.Lock()  # the machine is one


def _calls(library: Path, offsets: Iterable[int]) -> list[str]:
    """Where in the kernel's text the thread was, innermost first, if the binutils are there to tell."""
    addresses = [hex(offset) for offset in offsets]
    tool = shutil.which("addr2line")
    if not tool or not addresses:
        return []
    command = [tool, "-i", "-f", "-C", "-e", str(library), *addresses]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    places = []
    for function, place in zip(lines[::2], lines[1::2], strict=True):
        if match := re.match(r"/+((?:kernels|tile)/\S+)", place):
            places.append(f"{match[1]} ({_short_name(function)})")
    return places


def _short_name(function: str) -> str:
    """'store' of 'void deep_kernels::Math<(Spec){..}>::store<true>(float const (&) [1]) const'."""
    while (plain := re.sub(r"<[^<>]*>|\{[^{}]*\}|\([^()]*\)", "", function)) != function:
        function = plain
    words = re.findall(r"[\w~]+(?:::[\w~]+)*", function)
    names = [word for word in words if "::" in word] or words
    return str(names[0].rpartition("::")[2])


@dataclass
class Emulator:
    """How launches run: which headers, which flags, which order of threads."""

    include: Path = build.PACKAGE_INCLUDE
    flags: Sequence[str] = DEFAULT_FLAGS
    seed: int = 0
    trace_file: str | None = None
    launches: list[dict[str, Any]] = field(default_factory=list)  # what ran, without addresses

    def __call__(self, launch: dict[str, Any]) -> None:
        """Compiles and runs one launch in place; raises EmulatorError for a fault of the kernel."""
        self.launches.append({key: launch[key] for key in ("op", "spec", "entry", "target", "grid")})
        path = build.kernel_library(launch["source"], launch["entry"], include=self.include, flags=self.flags)
        library = _load(path)
        blobs = [launch["args"]]
        maps: bytes = launch.get("maps", b"")
        if maps:
            count = len(maps) // _MAP_BYTES
            blobs.append(
                b"".join(maps[i * _MAP_BYTES : (i + 1) * _MAP_BYTES].ljust(_ENCODED_BYTES, b"\0") for i in range(count))
            )
        for index, blob in enumerate(blobs):
            expected = library.dk_emulator_param_bytes(index)
            assert expected == len(blob), f"parameter {index} has {len(blob)} bytes, the kernel wants {expected}"
        threads = ctypes.c_int.in_dll(library, "dk_emulator_threads").value
        assert threads == launch["block"], f"launched with {launch['block']} threads, built for {threads}"
        # Parameters as a kernel has them: aligned to 64 bytes.
        buffers = [ctypes.create_string_buffer(len(blob) + 64) for blob in blobs]
        params = (ctypes.c_void_p * len(blobs))()
        for index, (buffer, blob) in enumerate(zip(buffers, blobs, strict=True)):
            address = (ctypes.addressof(buffer) + 63) // 64 * 64
            ctypes.memmove(address, blob, len(blob))
            params[index] = address
        tensors = (_Tensor * len(launch["buffers"]))()
        keep = []
        for tensor, (name, data, sizes, strides, element_bytes, writable) in zip(
            tensors, launch["buffers"], strict=True
        ):
            shape = (ctypes.c_longlong * len(sizes))(*sizes)
            steps = (ctypes.c_longlong * len(strides))(*strides)
            keep.append((shape, steps))
            tensor.name, tensor.data, tensor.sizes, tensor.strides = name.encode(), data, shape, steps
            tensor.rank, tensor.element_bytes, tensor.writable = len(sizes), element_bytes, int(writable)
        roots = ":".join(str(root) for root in build.source_roots(self.include))
        request = _Launch(
            kernel=launch["entry"].encode(),
            entry=ctypes.cast(library.dk_emulator_entry, ctypes.c_void_p),
            params=params,
            source_roots=roots.encode(),
            tensors=tensors,
            num_tensors=len(tensors),
            grid=launch["grid"],
            cluster=launch["cluster"],
            block=launch["block"],
            smem_bytes=launch["smem_bytes"],
            programmatic=json.loads(launch["spec"]).get("backend") == "sm90",  # as the op layer launches them
            seed=self.seed,
            trace_file=self.trace_file.encode() if self.trace_file else None,
        )
        fault = ctypes.create_string_buffer(1 << 16)
        calls = (ctypes.c_ulonglong * 64)()
        with _one_at_a_time:
            status = core().dk_emulator_run(ctypes.byref(request), fault, len(fault), calls, len(calls))
        if status != 0:
            kind, _, text = fault.value.decode().partition("\n")
            places = _calls(path, itertools.takewhile(bool, calls))
            if places and "\n  at " not in text:
                text += f"\n  at {places[0]}"
            raise EmulatorError(kind, "\n  called from ".join([text, *places[1:]]))

    def with_seed(self, seed: int) -> Emulator:
        """The same with another order of threads and copies."""
        return replace(self, seed=seed, launches=[])


def compile_ahead(run: Callable[[], None], flags: Sequence[str] = DEFAULT_FLAGS) -> None:
    """Compiles the kernels that `run` would launch, on all cores; nothing is launched."""
    wanted: dict[str, str] = {}

    def note(launch: dict[str, Any]) -> None:
        wanted[launch["source"]] = launch["entry"]

    with installed(note):
        run()
    build.core_library()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for job in [pool.submit(build.kernel_library, *kernel, flags=flags) for kernel in wanted.items()]:
            job.result()


@contextmanager
def installed(emulator: Callable[[dict[str, Any]], None], num_sms: int = 3) -> Iterator[None]:
    """Sends arch="emulator:..." to this emulator within the block."""
    from deep_kernels import _C

    _C.set_emulator(emulator, num_sms)
    try:
        yield
    finally:
        _C.set_emulator(None, 0)
