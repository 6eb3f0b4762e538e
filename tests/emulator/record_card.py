"""Records what a Hopper card computes for the emulator's cases: python tests/emulator/record_card.py

Writes tests/emulator/card_checksums.json, which the tests compare the emulator with. To be run again whenever a
kernel's arithmetic has changed on purpose.
"""

# ruff: noqa: E402  (the checkout has to be on the path first)
from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import torch

import deep_kernels
from deep_kernels import _C
from emulator import Emulator, card, installed
from emulator.cases import MqaCase

_EMULATED = "no card, the emulator"


def _record(case: card.Case, arch: str, *, emulated: bool) -> list[dict[str, object]]:
    inputs = case.make_inputs()
    keys = card.keys(case, inputs, arch)
    launched = card.ARCHES[arch] if emulated else arch
    if not emulated:
        inputs = inputs.map(lambda tensor: tensor.to("cuda"))
        deep_kernels.set_num_sms(case.num_sms)
    with installed(Emulator(), case.num_sms) if emulated else nullcontext():
        sums = card.checksums(case, inputs, launched)
        for _ in range(0 if emulated else 2):
            again = card.checksums(case, inputs, launched)
            assert again == sums, f"{case} on {arch}: two launches give different bits"
    return [
        {"case": key.case, "arch": arch, "spec": json.loads(key.spec), "sha256": value}
        for key, value in zip(keys, sums, strict=True)
    ]


def _op_and_fields(case: card.Case) -> tuple[str, dict[str, str]]:
    """What `prepare` has to know of the call."""
    fields = {
        "format": case.format,
        "num_heads": str(case.num_heads),
        "head_dim": str(case.head_dim),
        "logits_dtype": str(case.logits_dtype),
        "metadata": str(case.metadata),
    }
    if isinstance(case, MqaCase):
        fields |= {"clean_logits": str(case.clean != "off"), "reduction": case.reduction}
        fields |= {"clean_placement": case.clean} if case.clean != "off" else {}
        return "fp8_fp4_mqa_logits", fields
    fields |= {"clean_logits": str(case.clean), "block_kv": str(case.block_kv), "next_n": str(case.next_n)}
    return "fp8_fp4_paged_mqa_logits", {**fields, "indices": str(case.lens == "indices")}


def _compile(calls: Sequence[tuple[card.Case, str]]) -> None:
    """Every kernel of the calls into the cache, side by side."""
    begin = time.perf_counter()
    wanted = {(arch, op, tuple(fields.items())) for case, arch in calls for op, fields in [_op_and_fields(case)]}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda kernel: _C.prepare(kernel[1], kernel[0], dict(kernel[2]), 90), sorted(wanted)))
    print(f"compiled in {time.perf_counter() - begin:.0f} s")


def _write(file: Path, name: str, records: Sequence[dict[str, object]]) -> None:
    content = {
        "card": name,
        "driver": "" if name == _EMULATED else _C.driver_version(),
        "nvrtc": _C.nvrtc()[1],
        "include_digest": card.include_digest(),
        "records": records,
    }
    names = [json.dumps({**record, "sha256": None}) for record in records]
    assert len(set(names)) == len(names), "two cases have one name and one Spec"
    # One line per record, so that a change of one is a change of one line.
    head, _, _ = json.dumps(content, indent=1).partition(' "records"')
    lines = ",\n".join("  " + json.dumps(record) for record in records)
    file.write_text(f'{head} "records": [\n{lines}\n ]\n}}\n')
    print(f"{len(records)} checksums of {name} in {file}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=card.FILE, help="default: where the tests look")
    parser.add_argument("--only", default="", metavar="WORDS", help="cases whose name holds the words")
    parser.add_argument("--emulated", action="store_true", help="try the program without a card; needs --out")
    args = parser.parse_args(argv)
    calls = [call for call in card.CALLS if args.only in str(call[0])]
    if args.emulated:
        if args.out == card.FILE:
            parser.error("--emulated needs --out: what the tests look at comes from a card")
        name = _EMULATED
    else:
        if not torch.cuda.is_available():
            print("record_card: torch finds no GPU here", file=sys.stderr)
            return 2
        name = torch.cuda.get_device_name()
        if torch.cuda.get_device_capability() != (9, 0):
            print(f"record_card: needs a Hopper card, this is {name}", file=sys.stderr)
            return 2
        _compile(calls)
    _write(args.out, name, [record for call in calls for record in _record(*call, emulated=args.emulated)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
