"""The runtime from Python: what can run, compiling ahead, and the compatibility knobs."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from . import _C

CompileError = _C.CompileError
UnsupportedError = _C.UnsupportedError

_CORES_PER_SM = 128  # compute capability 8.9 to 12.0


def _package_folders() -> list[str]:
    """Folders of installed packages that may hold NVRTC: torch's own, then nvidia's wheels."""
    folders = [str(Path(torch.__file__).parent / "lib")]
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or []) if spec else []:
        folders += [str(path) for path in sorted(Path(root).glob("cu1*/lib"), reverse=True)]
        folders.append(str(Path(root) / "cuda_nvrtc" / "lib"))
    return folders


_C.set_package_folders(_package_folders())


def _capability() -> int | None:
    """Compute capability of the current CUDA device as major * 10 + minor, or None without one."""
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


def _words(op: str, case: Mapping[str, Any]) -> dict[str, str]:
    """A case as text, the form in which the C++ side reads it."""
    if not isinstance(op, str):
        raise TypeError(f"op must be a str, got {type(op).__name__}")
    for name, value in case.items():
        if not isinstance(value, (str, bool, int, torch.dtype)):
            raise TypeError(f"{op}: {name} must be a str, bool, int or torch.dtype, got {type(value).__name__}")
    return {name: str(value) for name, value in case.items()}


def _check_arch(name: str, arch: str | None) -> None:
    if arch is not None and not isinstance(arch, str):
        raise TypeError(f"{name}: arch must be a str or None, got {type(arch).__name__}")


def supported(op: str, arch: str | None = None, **case: Any) -> str | None:
    """Why a case cannot run, or None; nothing is compiled.

    Args:
        op: name of the op, for example "fp8_fp4_mqa_logits".
        arch: backend ("sm89", "sm90", "cpu"), target ("sm_90a") or both ("sm89:sm_90a"). Default: the card
            at hand, and the CPU where there is none.
        case: public argument names, and the words format ("fp8", "mxfp8", "mxfp4"), num_heads, head_dim,
            weights_dtype, logits_dtype, clean_logits, compressed, metadata, reduction. dtypes are torch dtypes
            or their names. What is left out has the op's default.
    Returns:
        One sentence that begins with the op's name, the same that the call itself would raise; None if it runs.
    Raises:
        ValueError: no such op, field or word. TypeError: a value of another Python type.
    """
    _check_arch("supported", arch)
    return _C.supported(op, arch, _words(op, case), _capability())


def prepare(
    cases: Iterable[Mapping[str, Any]],
    arch: str | None = None,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """Compiles ahead what calls of the given cases need, in parallel.

    Args:
        cases: dicts with "op" and the fields of `supported`.
        arch: as in `supported`; a named target ("sm_89", "sm_90a") needs no GPU.
        jobs: compilations at a time; default: the cores of this process.
        progress: called as progress(done, total) after every case.
    Returns:
        One dict per kernel: entry, origin ("prebuilt", "cache", "compiled"), file, seconds, about (JSON).
    Raises:
        ValueError, UnsupportedError: a case that `supported` refuses. CompileError: NVRTC is missing or fails.
    """
    _check_arch("prepare", arch)
    requests = []
    for case in cases:
        if not isinstance(case, Mapping):
            raise TypeError(f"prepare: a case must be a dict, got {type(case).__name__}")
        fields = dict(case)
        if "op" not in fields:
            raise ValueError(f"prepare: a case must name its op, got {fields}")
        op = fields.pop("op")
        requests.append((op, _words(op, fields)))
    capability = _capability()
    for op, words in requests:
        if reason := _C.supported(op, arch, words, capability):
            raise UnsupportedError(reason)
    results: list[list[dict[str, Any]]] = [[] for _ in requests]
    with ThreadPoolExecutor(max_workers=jobs or len(os.sched_getaffinity(0))) as pool:
        futures = {pool.submit(_C.prepare, op, arch, words, capability): i for i, (op, words) in enumerate(requests)}
        for done, future in enumerate(as_completed(futures), start=1):
            results[futures[future]] = future.result()
            if progress is not None:
                progress(done, len(requests))
    return [report for reports in results for report in reports]


def _card_num_sms() -> int | None:
    """SM count of the first visible card, asked of NVML, which does not initialise CUDA."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        handle, cores = ctypes.c_void_p(), ctypes.c_uint()
        if nvml.nvmlInit_v2() != 0:
            return None
        try:
            if visible.isdecimal():
                found = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(visible)), ctypes.byref(handle))
            else:
                found = nvml.nvmlDeviceGetHandleByUUID(visible.encode(), ctypes.byref(handle))
            if found != 0 or nvml.nvmlDeviceGetNumGpuCores(handle, ctypes.byref(cores)) != 0:
                return None
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return None
    return cores.value // _CORES_PER_SM or None


def get_num_sms() -> int:
    """SMs that kernels and schedules use: the value set, else the card's count, else 1. Never initialises CUDA."""
    return _C.num_sms() or _card_num_sms() or 1


def set_num_sms(num_sms: int) -> None:
    """Limits the SMs that kernels and schedules of this process use; 0 goes back to all of them."""
    if not isinstance(num_sms, int) or isinstance(num_sms, bool):
        raise TypeError(f"set_num_sms: num_sms must be an int, got {type(num_sms).__name__}")
    _C.set_num_sms(num_sms)


def get_pdl() -> bool:
    """Whether kernels are launched programmatically dependent on the one ahead of them in the stream."""
    return _C.pdl()


def set_pdl(enable: bool) -> None:
    """Lets a kernel's prologue overlap the end of the kernel ahead of it (sm90 on); off by default."""
    if not isinstance(enable, bool):
        raise TypeError(f"set_pdl: enable must be a bool, got {type(enable).__name__}")
    _C.set_pdl(enable)
