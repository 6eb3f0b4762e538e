"""The arithmetic of contract/attention.h: which elements are emulated, windows, splits and the list of Specs.

Proved by a host compiler, in constant expressions; cards and the CPU backend read the same header.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from attention_cases import is_emulated
from emulator import build

import deep_kernels

INCLUDE = Path(deep_kernels.__file__).parent / "include"


def failures(assertions: Sequence[str]) -> list[str]:
    """Those that do not hold."""
    try:
        compiler = build.compiler()
    except build.CompilerMissing as missing:
        pytest.skip(str(missing))
    lines = ["#include <initializer_list>", '#include "deep_kernels/contract/attention.h"']
    lines += ["using namespace deep_kernels;", *(f"static_assert({one});" for one in assertions)]
    done = subprocess.run(
        [compiler, "-std=c++20", "-fsyntax-only", f"-I{INCLUDE}", "-x", "c++", "-"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
    )
    found = [one for number, one in enumerate(assertions, 4) if f"<stdin>:{number}:" in done.stderr]
    assert found or done.returncode == 0, done.stderr
    return found


def boolean(value: bool) -> str:
    return "true" if value else "false"


def test_a_wrong_assertion_is_found() -> None:
    assert failures(["1 == 1", "kHeadPanel == 65", "true"]) == ["kHeadPanel == 65"]


# Those of sm89 and sm90 by the width of a tile, and the CPU's.
FRAGMENTS = ((8, 1), (16, 1), (20, 1), (32, 1), (32, 4))
RULES = ((0, 0, 0), (0, 7, 0), (4, 3, 0), (4, 3, 1), (4, 3, 3), (14, 6, 0), (16, 1, 0), (5, 2, 2), (1, 1, 0),
         (100, 90, 0), (1000, 10, 0), (2**40, 2**40 - 6, 0), (9, 0, 0), (3, 3, 300))  # fmt: skip


@pytest.mark.parametrize("length, count", FRAGMENTS)
def test_the_rule_in_its_shortest_form(length: int, count: int) -> None:
    """As words of a call become a Spec: every element of every fragment, and how many there are."""
    assertions = []
    for rule in RULES:
        words = "{}, {}, {}".format(*rule)
        canonical = f"ex2_canonical({words}, {{{length}, {count}}})"
        emulated = 0
        for fragment in range(count):
            for k in range(length):
                wanted = is_emulated(*rule, k, fragment, count)
                emulated += wanted
                assertions.append(f"ex2_is_emulated({canonical}, {k}, {fragment}, {count}) == {boolean(wanted)}")
        assertions.append(f"ex2_num_emulated({words}, {{{length}, {count}}}) == {emulated}")
        if emulated == 0:
            assertions.append(f"{canonical} == Ex2Emulation{{}}")
    assert failures(assertions) == []


def test_fragments_of_tiles() -> None:
    assertions = ["attention_fragments(Backend::cpu, kCpuTileKeys).length == 32",
                  "attention_fragments(Backend::cpu, kCpuTileKeys).count == 4"]  # fmt: skip
    for backend in ("sm89", "sm90"):
        for keys in (32, 64, 80, 128):
            found = f"attention_fragments(Backend::{backend}, {keys})"
            assertions += [f"{found}.length == {keys // 4}", f"{found}.count == 1"]
    assert failures(assertions) == []


def test_windows() -> None:
    assertions = []
    for num_q, num_kv in ((1, 1), (3, 7), (7, 3), (5, 0), (2**31 - 1025, 2**31 - 1025)):
        for query in {0, 1 % num_q, num_q // 2, num_q - 1}:
            end = min(max(query + 1 + num_kv - num_q, 0), num_kv)
            arguments = f"{query}, {num_q}, {num_kv}"
            assertions += [
                f"attention_visible_end({arguments}, true) == {end}",
                f"attention_visible_end({arguments}, false) == {num_kv}",
            ]
    assert failures(assertions) == []


def test_splits_cover_all_tiles_once() -> None:
    assertions = []
    for num_kv, tile in ((0, 128), (1, 128), (300, 80), (100_000, 64), (2**31 - 1025, 32)):
        tiles = -(-num_kv // tile)
        for num_splits in (1, 2, 7, 128):
            split = f"{num_splits}, {num_kv}, {tile}"
            assertions += [
                f"attention_split(0, {split}).begin == 0",
                f"attention_split({num_splits - 1}, {split}).end == {tiles}",
            ]
            assertions += [
                f"attention_split({i}, {split}).end == attention_split({i + 1}, {split}).begin"
                for i in range(num_splits - 1)
            ]
    assert failures(assertions) == []


def test_bad_sums_of_lengths_are_cut_to_what_is_there() -> None:
    """As a card reads them, which nobody has looked at before: (cu_seqlens, first, length) of 10 tokens."""
    assertions = []
    for values, first, length in (
        ((0, 4), 0, 4),
        ((4, 10), 4, 6),
        ((4, 11), 4, 6),
        ((6, 4), 6, 0),
        ((-5, 3), 0, 3),
        ((20, 30), 10, 0),
        ((-(2**31), 2**31 - 1), 0, 10),
    ):
        member = (
            f"[] {{ int sums[] = {{{values[0]}, {values[1]}}}; AttentionArgs args{{}}; args.cu_seqlens_q = sums; "
            "args.cu_seqlens_k = sums; args.total_q = args.total_kv = 10; return attention_member(args, 0); }()"
        )
        assertions += [f"{member}.first_q == {first}", f"{member}.num_q == {length}"]
        assertions += [f"{member}.first_kv == {first}", f"{member}.num_kv == {length}", f"{member}.batch == 0"]
    assert failures(assertions) == []


def test_specs() -> None:
    """A finite list, each of whose members fits; what does not is refused."""
    count = "[] {{ int count = 0; for_each_attention_spec(Backend::{}, [&](const AttentionSpec& s) {{ {} }}); " \
            "return count; }}()"  # fmt: skip
    assertions = [
        f"{count.format(backend, '++count; (void)s;')} == {number}"
        for backend, number in (("sm89", 144), ("sm90", 336))
    ]
    assertions += [
        f"{count.format(backend, 'count += s.smem_bytes() > limits_of(s.backend).max_smem_bytes;')} == 0"
        for backend in ("sm89", "sm90")
    ]
    fields = ", ".join(["Backend::{}", "DType::{}", "{}", "true", "false", "false", *3 * ["{}"], "0", *6 * ["{}"]])
    spec = f"AttentionSpec{{{{{fields}}}}}.invalid()"
    assertions += [
        f"{spec.format('sm90', 'bfloat16', 4, 'true', 250, 99, 128, 64, 3, 2, 1, 'true')} == nullptr",
        f"{spec.format('sm90', 'bfloat16', 4, 'false', 250, 99, 128, 64, 3, 2, 2, 'false')} == nullptr",
        *(
            f"{spec.format(*words, 'false')} != nullptr"
            for words in (
                ("cpu", "bfloat16", 4, "false", 0, 0, 128, 64, 3, 2, 1),
                ("sm90", "float32", 4, "false", 0, 0, 128, 64, 3, 2, 1),
                ("sm90", "bfloat16", 3, "false", 0, 0, 128, 64, 3, 2, 1),
                ("sm90", "bfloat16", 4, "false", 4, 5, 128, 64, 3, 2, 1),
                ("sm90", "bfloat16", 4, "false", 0, 0, 96, 64, 3, 2, 1),
                ("sm90", "bfloat16", 4, "false", 0, 0, 128, 72, 3, 2, 1),
                ("sm90", "bfloat16", 4, "false", 0, 0, 128, 64, 4, 2, 1),
                ("sm90", "bfloat16", 4, "false", 0, 0, 128, 64, 3, 0, 1),
                ("sm90", "bfloat16", 4, "false", 0, 0, 128, 64, 3, 2, 3),
                ("sm90", "bfloat16", 1, "false", 0, 0, 128, 64, 3, 2, 2),
                ("sm90", "bfloat16", 2, "false", 0, 0, 192, 80, 3, 3, 2),
                ("sm89", "bfloat16", 4, "false", 0, 0, 64, 32, 2, 2, 2),
                ("sm89", "bfloat16", 4, "true", 0, 0, 64, 32, 2, 2, 1),
            )
        ),
    ]
    assert failures(assertions) == []


def test_maps_say_where_heads_and_panels_lie() -> None:
    maps = (
        "[] { AttentionArgs args{}; args.batch = 3; args.num_q = 50; args.num_kv = 0; args.num_q_heads = 8; "
        "args.num_kv_heads = 2; args.q_token_stride = 1000; args.q_head_stride = 120; args.q_batch_stride = 70000; "
        "const AttentionSpec spec{Backend::sm90, DType::float16, 2, false, false, false, %s, 0, 0, 0, 192, 80, 3, 3}; "
        "return attention_maps(args, spec); }()"
    )
    alone = {"dims": (64, 50, 2, 8, 3), "strides": (1, 2000, 128, 240, 140_000), "box": (64, 64, 2, 1, 1)}
    packed = {"dims": (64, 8, 50, 2, 3), "strides": (1, 240, 2000, 128, 140_000), "box": (64, 4, 16, 1, 1)}
    assertions = []
    for packs, wanted in ((False, alone), (True, packed)):
        found = maps % boolean(packs)
        assertions += [
            f"{found}.q.{name}[{i}] == {value}" for name, values in wanted.items() for i, value in enumerate(values)
        ]
        assertions += [f"{found}.q.rank == 5", f"{found}.k.rank == 0", f"{found}.v.rank == 0"]
    assert failures(assertions) == []


def test_units_of_packed_heads() -> None:
    """What a group of 64 rows, a unit and a call have, where 64 is no multiple of the heads too."""
    assertions = []
    for heads, queries, units in ((1, 64, 2), (2, 32, 4), (3, 21, 5), (7, 9, 12), (64, 1, 100)):
        args = (
            f"[] {{ AttentionArgs args{{}}; args.batch = 3; args.num_q = 100; args.num_q_heads = {5 * heads}; "
            "args.num_kv_heads = 5; args.num_splits = 2; return args; }()"
        )
        spec = "AttentionSpec{.packs_heads = true, .tile_rows = 64, .cluster = 1}"
        assertions += [
            f"{spec}.group_queries({args}) == {queries}",
            f"with_tile({spec}, {{128, 64, 2, 2, 2, false}}).unit_queries({args}) == {4 * queries}",
            f"{spec}.num_units({args}) == {units} * 3 * 5 * 2",
        ]
    assert failures(assertions) == []


def test_how_many_splits() -> None:
    """(units, workers, tiles of keys, queries) and the parts, of at least four tiles."""
    assertions = []
    for arguments, splits in (
        ((1, 4, 32, 1), 4),
        ((1, 132, 15, 1), 3),  # no part is too small
        ((1, 132, 10_000, 1), 127),  # 79 tiles each, as of 128 parts
        ((8, 132, 103, 1), 15),  # seven tiles each
        ((66, 132, 100, 64), 2),
        ((131, 132, 1000, 64), 1),
        ((132, 132, 10_000, 1), 1),
        ((144, 132, 103, 1), 4),  # instead of two rounds, the second of 12 units
        ((144, 132, 103, 17), 1),
        ((4096, 132, 205, 16_384), 1),
        ((0, 132, 100, 1), 1),
        ((8, 132, 0, 1), 1),
    ):
        assertions.append(f"attention_num_splits({', '.join(map(str, arguments))}) == {splits}")
    assert failures(assertions) == []
