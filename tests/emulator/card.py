"""What a card computed for the emulator's cases, as checksums: recorded by record_card.py, compared by the tests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

import deep_kernels
from deep_kernels import _C

from .cases import MQA_CASES, MQA_SPECIAL_CASES, MqaCase, run_mqa
from .driver import installed

FILE = Path(__file__).with_name("card_checksums.json")
# Arch on a Hopper card, and what stands for it on the emulator.
ARCHES = {"sm90": "emulator:sm90", "sm89:sm_90a": "emulator:sm89:sm_90a"}
CASES = MQA_CASES + MQA_SPECIAL_CASES


@dataclass(frozen=True)
class Key:
    """What a checksum is kept under."""

    case: str
    arch: str
    spec: str  # JSON


@cache
def keys(case: MqaCase, arch: str) -> tuple[Key, ...]:
    """Keys of the launches of a case, found out by the op layer itself; nothing runs."""
    specs: list[str] = []

    def note(launch: dict[str, Any]) -> None:
        specs.append(launch["spec"])

    with installed(note, case.num_sms):
        run_mqa(case, case.make_inputs(), ARCHES[arch])
    return tuple(Key(str(case), arch, spec) for spec in specs)


def all_cases() -> Iterator[tuple[MqaCase, str]]:
    """Every case on every arch of the card."""
    for case in CASES:
        for arch in ARCHES:
            yield case, arch


def schedule_of(case: MqaCase, starts: Tensor, ends: Tensor, arch: str) -> Tensor:
    """The metadata of a case."""
    return deep_kernels.get_mqa_logits_metadata(starts, ends, case.num_kv, case.num_heads, arch=arch)


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
