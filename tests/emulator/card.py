"""What a card computed for the emulator's cases, as checksums: recorded by record_card.py, compared by the tests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import deep_kernels
from deep_kernels import _C

from .cases import (
    MQA_CASES,
    MQA_FOLDED_CASES,
    MQA_MX_CASES,
    MQA_SPECIAL_CASES,
    MqaCase,
    MqaInputs,
    digest,
    inside_of,
    logits_digest,
    mqa_schedule,
    run_mqa,
)
from .driver import installed
from .paged_cases import (
    PAGED_CASES,
    PAGED_SPREADS,
    PagedCase,
    PagedInputs,
    paged_inside_of,
    paged_schedule,
    run_paged,
)

FILE = Path(__file__).with_name("card_checksums.json")
# Arch on a Hopper card, and what stands for it on the emulator.
ARCHES = {"sm90": "emulator:sm90", "sm89:sm_90a": "emulator:sm89:sm_90a"}
# What prepares the operands of another kernel: its results are recorded by what that one makes of them.
_PRE_PASSES = ("mqa_rebase", "mqa_fold")

Case = MqaCase | PagedCase


@dataclass(frozen=True)
class Key:
    """What a checksum is kept under."""

    case: str
    arch: str
    spec: str  # JSON


def _serves(case: Case, arch: str) -> bool:
    """Whether the backend has a kernel that the case alone would show."""
    backend = arch.partition(":")[0]
    if isinstance(case, PagedCase):
        return deep_kernels.supported("fp8_fp4_paged_mqa_logits", backend, format=case.format) is None
    return case.reduction == "exact" or backend == "sm90"


_CASES: tuple[Case, ...] = (
    *MQA_CASES,
    *MQA_SPECIAL_CASES,
    *MQA_MX_CASES,
    *MQA_FOLDED_CASES,
    *PAGED_CASES,
    *PAGED_SPREADS,
)
CALLS = [(case, arch) for case in _CASES for arch in ARCHES if _serves(case, arch)]


def checksums(case: Case, inputs: MqaInputs | PagedInputs, arch: str) -> list[str]:
    """Of all that the call computes: the schedule, where the case asks for one, and the logits."""
    if isinstance(case, MqaCase):
        assert isinstance(inputs, MqaInputs)
        schedule = mqa_schedule(case, inputs, arch) if case.metadata else None
        logits = run_mqa(case, inputs, arch, schedule=schedule)
        promised = inside_of(case, inputs) if case.clean == "off" else None
    else:
        assert isinstance(inputs, PagedInputs)
        schedule = paged_schedule(case, inputs, arch) if case.metadata else None
        logits = run_paged(case, inputs, arch, schedule=schedule)
        promised = None if case.clean else paged_inside_of(case, inputs)
    return [*([] if schedule is None else [digest(schedule)]), logits_digest(logits, promised)]


def keys(case: Case, inputs: MqaInputs | PagedInputs, arch: str) -> list[Key]:
    """Keys of the checksums of a case, found out by the op layer itself; nothing runs."""
    specs: list[str] = []

    def note(launch: dict[str, Any]) -> None:
        if launch["op"] not in _PRE_PASSES:
            specs.append(launch["spec"])

    with installed(note, case.num_sms):
        checksums(case, inputs, ARCHES[arch])
    return [Key(str(case), arch, spec) for spec in specs]


@cache
def recorded() -> tuple[str, dict[Key, str]]:
    """Digest of the include tree at the time of the recording, and the checksums; empty if there are none."""
    if not FILE.exists():
        return "", {}
    content = json.loads(FILE.read_text())
    records = {
        Key(record["case"], record["arch"], json.dumps(record["spec"])): record["sha256"]
        for record in content["records"]
    }
    return content["include_digest"], records


def include_digest() -> str:
    """Of the headers as they are now."""
    return _C.include_digest()
