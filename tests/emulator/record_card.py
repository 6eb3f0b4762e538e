"""Records what a Hopper card computes for the emulator's cases: python tests/emulator/record_card.py

Writes tests/emulator/card_checksums.json, which the tests compare the emulator with. To be run again whenever a
kernel's arithmetic has changed on purpose.
"""

# ruff: noqa: E402  (the checkout has to be on the path first)
from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import torch

import deep_kernels
from deep_kernels import _C
from emulator import card
from emulator.cases import MqaCase, checksum, run_mqa


def _record(case: MqaCase, arch: str) -> list[dict[str, object]]:
    inputs = case.make_inputs().to("cuda")
    deep_kernels.set_num_sms(case.num_sms)
    sums = []
    if case.metadata:
        schedule = card.schedule_of(case, inputs.starts, inputs.ends, arch)
        sums.append(hashlib.sha256(schedule.cpu().numpy().tobytes()).hexdigest())
    sums.append(checksum(case, inputs, run_mqa(case, inputs, arch)))
    for _ in range(2):
        again = checksum(case, inputs, run_mqa(case, inputs, arch))
        assert again == sums[-1], f"{case} on {arch}: two launches give different bits"
    return [
        {"case": key.case, "arch": arch, "spec": json.loads(key.spec), "sha256": value}
        for key, value in zip(card.keys(case, arch), sums, strict=True)
    ]


def _compile(case: MqaCase, arch: str) -> None:
    _C.prepare(
        "fp8_fp4_mqa_logits",
        arch,
        {
            "num_heads": str(case.num_heads),
            "head_dim": str(case.head_dim),
            "logits_dtype": str(case.logits_dtype),
            "clean_logits": str(case.clean != "off"),
            "metadata": str(case.metadata),
            **({"clean_placement": case.clean} if case.clean != "off" else {}),
        },
        90,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=card.FILE, help="default: where the tests look")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("record_card: torch finds no GPU here", file=sys.stderr)
        return 2
    if torch.cuda.get_device_capability() != (9, 0):
        print(f"record_card: needs a Hopper card, this is {torch.cuda.get_device_name()}", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda pair: _compile(*pair), card.all_cases()))
    print(f"compiled in {time.perf_counter() - begin:.0f} s")
    records = [record for case, arch in card.all_cases() for record in _record(case, arch)]
    content = {
        "card": torch.cuda.get_device_name(),
        "driver": _C.driver_version(),
        "nvrtc": _C.nvrtc()[1],
        "include_digest": card.include_digest(),
        "records": records,
    }
    text = json.dumps(content, indent=1)
    # One line per record, so that a change of one is a change of one line.
    head, _, _ = text.partition(' "records"')
    lines = ",\n".join("  " + json.dumps(record) for record in records)
    args.out.write_text(f'{head} "records": [\n{lines}\n ]\n}}\n')
    print(f"{len(records)} checksums of {content['card']} in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
