"""The runtime from Python: what can run, compiling ahead, and the compatibility knobs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from . import _C, _card

CompileError = _C.CompileError
UnsupportedError = _C.UnsupportedError


def _package_folders() -> list[str]:
    """Folders of installed packages that may hold NVRTC: torch's own, then nvidia's wheels."""
    folders = [str(Path(torch.__file__).parent / "lib")]
    try:
        spec = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):  # something else of that name was imported
        spec = None
    for root in (spec.submodule_search_locations or []) if spec else []:
        folders += [str(path) for path in sorted(Path(root).glob("cu1*/lib"), reverse=True)]
        folders.append(str(Path(root) / "cuda_nvrtc" / "lib"))
    return folders


_C.set_package_folders(_package_folders())

_MAX_BITS = 1024  # of a number that is written out
# As _C.num_sms(), 0 for None: a global of Python, so that programs compiled by torch are guarded by it.
_sms_limit = _C.num_sms() or 0


def _capability(arch: str | None) -> int | None:
    """The card that the answer depends on, or None; a named target and the CPU depend on none."""
    if arch is not None and (arch == "cpu" or "sm_" in arch):
        return None
    return _card.capability()


def _words(op: str, case: Mapping[str, Any]) -> dict[str, str]:
    """A case as text, the form in which the C++ side reads it."""
    _check_text("op", op)
    for name, value in case.items():
        _check_text(f"{op}: the name of a field", name)
        if value is not None and not isinstance(value, (str, bool, int, float, torch.dtype)):
            raise TypeError(
                f"{op}: {name} must be a str, bool, int, float, torch.dtype or None, got {type(value).__name__}"
            )
        if isinstance(value, int) and value.bit_length() > _MAX_BITS:
            raise ValueError(f"{op}: {name} must be an integer of 64 bits, got {_number(value)}")
        _check_text(f"{op}: {name}", str(value))
    return {name: str(value) for name, value in case.items()}


def _number(value: int) -> str:
    """In words: Python refuses to write very long numbers."""
    bits = value.bit_length()
    return str(value) if bits <= _MAX_BITS else f"one of {bits} bits"


def _check_text(what: str, value: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{what} must be a str, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} must be text that UTF-8 can write, got {value!a}") from None
    if "\0" in value:
        raise ValueError(f"{what} must be text without NUL, got {value!a}")


def _check_arch(name: str, arch: str | None) -> None:
    if arch is not None and not isinstance(arch, str):
        raise TypeError(f"{name}: arch must be a str or None, got {type(arch).__name__}")
    if arch is not None:
        _check_text(f"{name}: arch", arch)


def supported(op: str, arch: str | None = None, **case: Any) -> str | None:
    """Why a case cannot run, or None; nothing is compiled.

    Args:
        op: name of the op, for example "fp8_fp4_mqa_logits".
        arch: backend ("sm89", "sm90", "cpu"), target ("sm_90a") or both ("sm89:sm_90a"). Default: the card
            at hand, and the CPU where there is none.
        case: public argument names, and the words format ("fp8", "mxfp8", "mxfp4"), num_heads, head_dim,
            weights_dtype, logits_dtype, clean_logits, compressed, metadata, reduction; with paged ops also block_kv,
            next_n, indices (a bool); with the prefill MLP activation, clamp, alpha, up_offset, scale_fmt, round_bf16,
            fused, out_dtype, residual (a bool); with flash attention dtype, num_q_heads, num_kv_heads, num_q and num_kv
            (tokens of the longest member: few queries get kernels of their own, and where num_q is left out all are
            prepared), causal, num_splits, ex2_emu_freq, ex2_emu_res, ex2_emu_start_frg. dtypes are torch dtypes or
            their names. What is left out has the op's default.
    Returns:
        One sentence that begins with the op's name; None if it runs. The call itself says the same, unless it can
        name the tensor that is not as it must be, which is a ValueError.
    Raises:
        ValueError: no such op, field or word. TypeError: a value of another Python type.
    """
    _check_arch("supported", arch)
    return _C.supported(op, arch, _words(op, case), _capability(arch))


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
    if jobs is not None and (not isinstance(jobs, int) or isinstance(jobs, bool)):
        raise TypeError(f"prepare: jobs must be an int or None, got {type(jobs).__name__}")
    if jobs is not None and jobs < 1:
        raise ValueError(f"prepare: jobs must be 1 or more, got {_number(jobs)}")
    if progress is not None and not callable(progress):
        raise TypeError(f"prepare: progress must be callable or None, got {type(progress).__name__}")
    if not isinstance(cases, Iterable) or isinstance(cases, Mapping):
        raise TypeError(f"prepare: cases must be an iterable of dicts, got {type(cases).__name__}")
    requests = []
    for case in cases:
        if not isinstance(case, Mapping):
            raise TypeError(f"prepare: a case must be a dict, got {type(case).__name__}")
        fields = dict(case)
        if "op" not in fields:
            for name in fields:
                _check_text("prepare: the name of a field", name)
            raise ValueError(f"prepare: a case must name its op, got {', '.join(fields) or 'no field'}")
        op = fields.pop("op")
        requests.append((op, _words(op, fields)))
    capability = _capability(arch)
    for op, words in requests:
        if reason := _C.supported(op, arch, words, capability):
            raise UnsupportedError(reason)
    results: list[list[dict[str, Any]]] = [[] for _ in requests]
    pool = ThreadPoolExecutor(max_workers=jobs or len(os.sched_getaffinity(0)))
    try:
        futures = {pool.submit(_C.prepare, op, arch, words, capability): i for i, (op, words) in enumerate(requests)}
        for done, future in enumerate(as_completed(futures), start=1):
            results[futures[future]] = future.result()
            if progress is not None:
                progress(done, len(requests))
    finally:
        pool.shutdown(cancel_futures=True)  # a failure or Ctrl-C does not wait for what has not begun
    return [report for reports in results for report in reports]


def get_num_sms() -> int:
    """SMs that kernels and schedules use: the value set, else the card's count, else 1. Never initialises CUDA."""
    card = None if _C.num_sms() else _card.current_card()
    return _C.num_sms() or (card and card.num_sms) or 1


def _all_sms(device: torch.device, arch: str | None) -> int:
    """SMs of the device, or of the emulator that `arch` names; 0 on the CPU, which has any number."""
    if device.type != "cuda":
        return _C.emulator_sms(arch) or 0
    card = _card.current_card(device.index)
    return (card and card.num_sms) or 1


# A constant of compiled programs: what torch.compiler.assume_constant_result does, which would import the compiler.
_all_sms._dynamo_marked_constant = True  # type: ignore[attr-defined]


def schedule_sms(device: torch.device, arch: str | None) -> int:
    """How many SMs get_mqa_logits_metadata cuts for on a device, unless told."""
    present = _all_sms(device, arch)
    if present == 0:
        return _sms_limit or 1
    return min(_sms_limit or present, present)


def set_num_sms(num_sms: int) -> None:
    """Limits the SMs that kernels and schedules of this process use; 0 goes back to all of them."""
    global _sms_limit
    _C.set_num_sms(num_sms)
    _sms_limit = num_sms


def get_pdl() -> bool:
    """Whether kernels are launched programmatically dependent on the one ahead of them in the stream."""
    return _C.pdl()


def set_pdl(enable: bool) -> None:
    """Lets a kernel's prologue overlap the end of the kernel ahead of it (sm90 on); off by default."""
    _C.set_pdl(enable)
