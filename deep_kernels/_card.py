"""The card that calls would run on, asked without initialising CUDA: a process that has done so cannot fork."""

from __future__ import annotations

import ctypes
import functools
import os
from typing import NamedTuple

import torch


class Card(NamedTuple):
    capability: int  # major * 10 + minor
    num_sms: int | None
    is_certain: bool  # False: one of several unlike cards, and CUDA may count them in another order


_CAPABILITY_WITH_64_CORES = 80  # cores per SM; 128 on every other card from 8.6 on
_MAX_DEVICES = 64


def current_card(index: int | None = None) -> Card | None:
    """The device of that index, else the current one, once CUDA is initialised; until then the first visible card as
    NVML sees it, else None."""
    if torch.version.cuda is None:
        return None
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        properties = torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index)
        return Card(properties.major * 10 + properties.minor, int(properties.multi_processor_count), True)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    return _first_visible(visible, os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID")


def capability() -> int | None:
    """Compute capability of `current_card`; where NVML does not say, CUDA is asked."""
    card = current_card()
    if card is not None and card.is_certain:
        return card.capability
    if torch.version.cuda is None or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return major * 10 + minor


@functools.cache  # cards do not come and go, and asking takes milliseconds
def _first_visible(visible: str, by_bus: bool) -> Card | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
        try:
            if visible.isdecimal():
                return _card_by_index(nvml, int(visible), by_bus)
            device = ctypes.c_void_p()
            found = nvml.nvmlDeviceGetHandleByUUID(visible.encode(), ctypes.byref(device))
            return _card_of(nvml, device) if found == 0 else None
        finally:
            nvml.nvmlShutdown()
    except (OSError, AttributeError):  # no library, or one without these functions
        return None


def _card_by_index(nvml: ctypes.CDLL, index: int, by_bus: bool) -> Card | None:
    """NVML counts by bus address, CUDA by speed unless told otherwise: that differs only with unlike cards."""
    cards = [_card_of(nvml, device) for device in _devices(nvml)]
    card = cards[index] if index < len(cards) else None
    return card and card._replace(is_certain=by_bus or len(set(cards)) == 1)


def _devices(nvml: ctypes.CDLL) -> list[ctypes.c_void_p]:
    count = ctypes.c_uint()
    if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
        return []
    devices = []
    for index in range(min(count.value, _MAX_DEVICES)):
        device = ctypes.c_void_p()
        if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)) == 0:
            devices.append(device)
    return devices


def _card_of(nvml: ctypes.CDLL, device: ctypes.c_void_p) -> Card | None:
    major, minor, cores = ctypes.c_int(), ctypes.c_int(), ctypes.c_uint()
    if nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) != 0:
        return None
    number = major.value * 10 + minor.value
    if nvml.nvmlDeviceGetNumGpuCores(device, ctypes.byref(cores)) != 0:
        return Card(number, None, True)
    return Card(number, cores.value // (64 if number == _CAPABILITY_WITH_64_CORES else 128) or None, True)
