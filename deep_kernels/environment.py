"""What `python -m deep_kernels env` shows: versions, cards, tuning, folders and settings."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

import deep_kernels

from . import _C, _runtime, inspector

SETTINGS = {
    "DEEP_KERNELS_CACHE_DIR": "folder of compiled kernels",
    "DEEP_KERNELS_PREBUILT_DIR": "read-only folder of compiled kernels that is asked first",
    "DEEP_KERNELS_NO_COMPILE": "1: a missing kernel is an error that names its Spec",
    "DEEP_KERNELS_ARCH": "backend, target or both for calls that name no arch=",
    "DEEP_KERNELS_NVRTC": "the NVRTC library to load",
    "DEEP_KERNELS_LINEINFO": "1: source lines for profilers",
    "DEEP_KERNELS_MQA_CLEAN": "concurrent or deferred: overrules the measured placement of the -inf fill",
    "DEEP_KERNELS_SILU_TILE": "tokens of a tile: 64, 128, 32 (sm89), 64x2, 128x2, 192x2 (sm90); overrules the choice",
    "DEEP_KERNELS_SILU_ALGORITHM": "interleaved or two_pass: how sm89 works a fold",
    "DEEP_KERNELS_SILU_STAGES": "1 or 2: stages of the fold's tile of 32 tokens",
    "DEEP_KERNELS_SILU_FOLD_PREFILL": "1: nn.SwiGLUMLP uses the fold, where the module is not told",
}
WORDS = {  # of settings that have some
    "DEEP_KERNELS_NO_COMPILE": ("0", "1"),
    "DEEP_KERNELS_LINEINFO": ("0", "1"),
    "DEEP_KERNELS_MQA_CLEAN": ("concurrent", "deferred"),
    "DEEP_KERNELS_SILU_FOLD_PREFILL": ("0", "1"),
    "DEEP_KERNELS_SILU_TILE": ("32", "64", "128", "64x2", "128x2", "192x2"),
    "DEEP_KERNELS_SILU_ALGORITHM": ("interleaved", "two_pass"),
    "DEEP_KERNELS_SILU_STAGES": ("1", "2"),
}


def environment() -> Iterator[str]:
    """Sections of `env`."""
    yield inspector.aligned(
        [
            ["deep_kernels", deep_kernels.__version__, str(Path(__file__).parent)],
            ["torch", torch.__version__, f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"],
            ["Python", sys.version.split()[0], sys.executable],
            ["NVRTC", *_nvrtc_facts()],
            ["driver", *_driver_facts()],
        ]
    )
    yield "GPUs\n" + "\n".join(f"  {line}" for line in _gpu_lines())
    yield "tuning rows\n" + inspector.aligned([["", *row] for row in _tuning_lines()])
    yield "folders\n" + inspector.aligned([["", *row] for row in _folder_lines()])
    yield "settings\n" + inspector.aligned([["", *row] for row in _setting_lines()])


def _nvrtc_facts() -> tuple[str, str]:
    try:
        path, version = _C.nvrtc()
    except _runtime.CompileError as error:
        return "none", str(error)
    return version, path


def _driver_facts() -> tuple[str, str]:
    if version := _C.driver_version():
        return version, "newest CUDA it knows"
    try:
        _C.device_facts(0)
    except RuntimeError as error:
        return "none", str(error)
    return "unknown", ""


def _gpu_lines() -> Iterator[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        if torch.version.cuda is None:
            reason = "this torch was built without CUDA"
        elif caught:
            reason = str(caught[0].message).split("\n")[0]
        elif not _C.driver_version():
            reason = "there is no CUDA driver"
        elif os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
            reason = f"CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']} shows none"
        else:
            reason = "torch finds no device"
        yield f"none: {reason}"
        return
    for index in range(torch.cuda.device_count()):
        name, capability, num_sms = _C.device_facts(index)
        yield f"{index}: {name}, compute capability {capability // 10}.{capability % 10}, {num_sms} SMs"
        try:
            backend, target = _C.arch_of_card(capability)
        except (ValueError, RuntimeError) as error:
            yield f"   {str(error).removeprefix('arch_of_card: ')}"
            continue
        yield f"   calls use {backend} for {target}; {_tuning_of(name, backend)}"


def _tuning_of(name: str, backend: str) -> str:
    measured = sorted({row["gpu"] for row in _C.tuning_rows() if row["backend"] == backend and row["gpu"]})
    if any(name.startswith(gpu) for gpu in measured):
        return "tuning rows measured on this card"
    source = f"those of {' and '.join(measured)}" if measured else "unmeasured ones"
    return f"tuning was not measured on this card: it takes the {backend} rows, {source}"


def _tuning_lines() -> Iterator[list[str]]:
    for row in _C.tuning_rows():
        measured = f"measured on {row['gpu']}, {row['date']}" if row["gpu"] else "not measured"
        gain = f"gains {row['gain']:.1%}" if row["gain"] else ""
        yield [row["backend"], row["op"], row["cases"], row["choice"], measured, gain, row["reason"]]


def _folder_lines() -> Iterator[list[str]]:
    for place, folder in inspector.folders().items():
        files = [Path(file) for file in _C.cache_files(folder)]
        state = (
            f"{len(files)} entries, {inspector.size_text(inspector.total_size(files))}"
            if folder.is_dir()
            else "does not exist"
        )
        yield [place, str(folder), state]
    if _C.prebuilt_dir() is None:
        yield ["prebuilt", "not set", ""]


def _setting_lines() -> Iterator[list[str]]:
    for name, meaning in SETTINGS.items():
        problem = _problem(name)
        yield [name, os.environ.get(name) or "not set", f"{meaning}{problem and f' ({problem})'}"]
    for name in sorted(os.environ):
        if name.startswith("DEEP_KERNELS_") and name not in SETTINGS:
            yield [name, os.environ[name], "unknown: there is no such setting"]


def _problem(name: str) -> str:
    """What is wrong with a setting's text, if anything."""
    value = os.environ.get(name)
    if not value:
        return ""
    if name in WORDS and value not in WORDS[name]:
        return f"wrong: it must be {' or '.join(WORDS[name])}"
    if name == "DEEP_KERNELS_ARCH" and value != "cpu":
        try:
            _C.compile_options(value)
        except (ValueError, RuntimeError) as error:
            return f"wrong: {str(error).removeprefix('compile: ')}"
    if name == "DEEP_KERNELS_PREBUILT_DIR" and not os.path.isdir(value):
        return "wrong: there is no such folder"
    return ""
