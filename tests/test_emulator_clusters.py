"""Clusters on the emulator: blocks that copy into each other's shared memory, and what must be caught of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulator import Emulator, EmulatorError, timeline
from emulator.fixtures import emulator_ready  # noqa: F401
from emulator.mini import Map, run_kernel

SEEDS = [0, 3, 11]
WHO = """
  const u32 base = ptx::smem_addr(&ptx::dynamic_smem<u8>());
  [[maybe_unused]] const i32 rank = ptx::cluster_rank();
"""
START = "  ptx::cluster_arrive_relaxed();\n  ptx::cluster_wait();\n"
END = "  ptx::sync_warp();\n  ptx::cluster_arrive_relaxed();\n  ptx::cluster_wait();\n"

# Each block loads its half of every tile into both; a stage is free when both have read it.
ROUNDS = 7
RING = (
    WHO
    + """
  const u32 full = base + 8192, empty = full + 64;
  if (thread == 0) {
    for (i32 i = 0; i < 2; ++i) {
      ptx::mbarrier_init(full + 8 * i, 1);
      ptx::mbarrier_init(empty + 8 * i, 2);
    }
    ptx::fence_mbarrier_init();
  }
"""
    + START
    + """
  if (thread == 0) {
    ptx::role("loads");
    auto ring = tile::Ring<2>::filler();
    for (i32 round = 0; round < 7; ++round, ring.next()) {
      ptx::mbarrier_wait(empty + 8 * ring.slot, ring.parity);
      ptx::mbarrier_arrive_expect_tx(full + 8 * ring.slot, 1024);
      ptx::tma_load_2d_multicast(base + 1024 * ring.slot + 512 * rank, maps.map[0], full + 8 * ring.slot, 0,
                                 8 * round + 4 * rank, 3);
    }
  }
  if (thread >= 32) {
    auto ring = tile::Ring<2>::drainer();
    for (i32 round = 0; round < 7; ++round, ring.next()) {
      ptx::mbarrier_wait(full + 8 * ring.slot, ring.parity);
      u32 words[4];
      for (i32 i = lane; i < 64; i += 32) {
        ptx::load_shared_x4(words, base + 1024 * ring.slot + 16 * i);
        ptx::store_global_x4(out0 + ((2 * (ptx::block_index() / 2) + rank) * 7 + round) * 1024 + 16 * i, words[0],
                             words[1], words[2], words[3]);
      }
      ptx::sync_warp();
      if (lane < 2) ptx::mbarrier_arrive_peer(ptx::peer_smem(empty + 8 * ring.slot, lane));
    }
  }
"""
    + END
)


def run_ring(body: str, seed: int, trace_file: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """What was loaded [bytes], and what every one of four blocks has found [4, bytes]."""
    tensor = (torch.arange(ROUNDS * 1024) % 251).to(torch.uint8)
    found = torch.zeros(4, ROUNDS * 1024, dtype=torch.uint8)
    run_kernel(
        body, threads=64, grid=4, cluster=2, inputs=[tensor], outputs=[found],
        maps=[Map(tensor.view(ROUNDS * 8, 128), [4, 128])],
        prelude='#include "deep_kernels/tile/pipeline.cuh"', emulator=Emulator(seed=seed, trace_file=trace_file),
    )  # fmt: skip
    return tensor, found


@pytest.mark.parametrize("seed", range(6))
def test_a_ring_filled_by_both_blocks(seed: int) -> None:
    tensor, found = run_ring(RING, seed)
    assert torch.equal(found, tensor.expand(4, -1))


def test_timeline_of_a_cluster(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    run_ring(RING, 0, str(trace))
    blocks = timeline.read_events(trace)
    assert [block.index for block in blocks] == [0, 1, 2, 3]
    for block in blocks:
        assert sorted(block.warps) == [0, 1]
        assert len(block.copies) == ROUNDS
        assert "the cluster's barrier" in timeline.describe(block, all_warps=True)
    assert "smem+0x2000 of rank 1" in timeline.page("ring", blocks)


# Every thread sends a word to the same thread of the other block, twice through one buffer.
EXCHANGE = (
    WHO
    + """
  const u32 filled = base + 4096, drained = filled + 8;
  const u32 there = ptx::peer_smem(base, 1 - rank);
  if (thread == 0) {
    ptx::mbarrier_init(filled, 1);
    ptx::mbarrier_init(drained, 64);
    ptx::fence_mbarrier_init();
  }
"""
    + START
    + """
  for (u32 round = 0; round < 2; ++round) {
    if (thread == 0) ptx::mbarrier_arrive_expect_tx(filled, 256);
    if (round > 0) ptx::mbarrier_wait(drained, 0);
    ptx::store_async(there + 4 * thread, 1000u * static_cast<u32>(rank) + 100u * round + static_cast<u32>(thread),
                     ptx::peer_smem(filled, 1 - rank));
    ptx::mbarrier_wait(filled, round);
    const i32 word = ptx::load_shared_i32(base + 4 * thread);
    if (round == 0) ptx::mbarrier_arrive_peer(ptx::peer_smem(drained, 1 - rank));
    ptx::store_global(reinterpret_cast<i32*>(out0) + (2 * ptx::block_index() + static_cast<i32>(round)) * 64 + thread,
                      word);
  }
"""
)


def run_exchange(body: str, seed: int) -> torch.Tensor:
    """What each thread has got, [block, round, thread]."""
    found = torch.zeros(4, 2, 64, dtype=torch.int32)
    run_kernel(body, threads=64, grid=4, cluster=2, outputs=[found], emulator=Emulator(seed=seed))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_an_exchange_of_words(seed: int) -> None:
    found = run_exchange(EXCHANGE, seed)
    sender = torch.tensor([1, 0, 1, 0]).view(4, 1, 1)
    wanted = 1000 * sender + 100 * torch.arange(2).view(1, 2, 1) + torch.arange(64)
    assert torch.equal(found, wanted.int())


@pytest.mark.parametrize("count", [2, 4])
def test_wider_stores(count: int) -> None:
    words = "".join(f", static_cast<u32>(thread) + {100 * i}" for i in range(count))
    body = (
        WHO
        + f"""
  if (thread == 0) {{
    ptx::mbarrier_init(base + 4096, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(base + 4096, {128 * count});
  }}
{START}
  const u32 there = ptx::peer_smem(base, 1 - rank);
  ptx::store_async_x{count}(there + {4 * count} * thread{words}, there + 4096);
  ptx::mbarrier_wait(base + 4096, 0);
  for (i32 i = 0; i < {count}; ++i)
    ptx::store_global(reinterpret_cast<i32*>(out0) + (rank * 32 + thread) * {count} + i,
                      ptx::load_shared_i32(base + 4 * ({count} * thread + i)));
"""
    )
    found = torch.zeros(2, 32, count, dtype=torch.int32)
    run_kernel(body, grid=2, cluster=2, outputs=[found])
    assert torch.equal(found, (torch.arange(32).view(32, 1) + 100 * torch.arange(count)).int().expand(2, -1, -1))


def test_a_box_of_five_dimensions_for_both() -> None:
    """From the one block, into both at one place."""
    body = (
        WHO
        + f"""
  const u32 barrier = base + 4096;
  if (thread == 0) {{
    ptx::mbarrier_init(barrier, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(barrier, 128);
  }}
{START}
  if (rank == 1 && thread == 0) ptx::tma_load_5d_multicast(base + 256, maps.map[0], barrier, 16, 1, 2, 1, 1, 3);
  ptx::mbarrier_wait(barrier, 0);
  ptx::store_global(reinterpret_cast<i32*>(out0) + 32 * rank + thread, ptx::load_shared_i32(base + 256 + 4 * thread));
"""
    )
    tensor = torch.arange(2 * 3 * 4 * 5 * 32).remainder(253).to(torch.uint8).view(2, 3, 4, 5, 32)
    found = torch.zeros(2, 128, dtype=torch.uint8)
    maps = [Map(tensor, [1, 2, 2, 2, 16])]
    run_kernel(body, grid=2, cluster=2, inputs=[tensor], outputs=[found.view(torch.int32)], maps=maps)
    box = tensor[1:2, 1:3, 2:4, 1:3, 16:32]
    assert torch.equal(found, box.flatten().expand(2, -1))


# (name, text replaced in the kernel, by what, kinds, words)
RING_FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("no word from the other block that it has read",
     "if (lane < 2) ptx::mbarrier_arrive_peer(ptx::peer_smem(empty + 8 * ring.slot, lane));",
     "if (lane < 2) ptx::mbarrier_arrive(empty + 8 * ring.slot);",
     "race pending-async mbarrier", ()),
    ("only one lane of the readers knows that all have read",
     "ptx::sync_warp();\n      if (lane < 2)", "if (lane < 2)", "race", ("overwrites", "rank")),
    ("use before all blocks have started", START, "ptx::sync_threads();", "cluster", ("may not have started",)),
    ("a block that may end before the last arrivals", END, "", "cluster", ("rank",)),
    ("mbarriers that the other block does not know", "ptx::fence_mbarrier_init();", "", "race proxy-fence", ()),
    ("too few bytes", "8 * ring.slot, 1024);", "8 * ring.slot, 512);", "mbarrier", ("rank",)),
    ("too many bytes", "8 * ring.slot, 1024);", "8 * ring.slot, 1040);", "deadlock",
     ("blocks 0 to 1", "block 0 (rank 0), warp", "block 1 (rank 1), warp", "16 bytes are expected")),
    ("both load the same half", "1024 * ring.slot + 512 * rank", "1024 * ring.slot", "pending-async race", ()),
    ("a copy for the own block alone", "4 * rank, 3);", "4 * rank, static_cast<u16>(1 << rank));", "deadlock",
     ("512 bytes are expected",)),
    ("a rank that is not there", "4 * rank, 3);", "4 * rank, 7);", "bounds", ("0x7", "cluster of 2")),
    ("nobody", "4 * rank, 3);", "4 * rank, 0);", "bounds", ("0x0",)),
    ("arrivals from one block alone", "if (lane < 2) ptx", "if (lane < 1 + rank) ptx", "deadlock",
     ("1 of 2 arrivals",)),
    ("another address than the own for the copy", "base + 1024 * ring.slot + 512",
     "ptx::peer_smem(base, 1 - rank) + 512", "bounds", ("another block: it takes addresses of rank",)),
]  # fmt: skip
EXCHANGE_FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("read without waiting", "ptx::mbarrier_wait(filled, round);", "", "pending-async race uninitialized mbarrier", ()),
    ("one thread waits for all", "ptx::mbarrier_wait(filled, round);",
     "if (thread == 0) ptx::mbarrier_wait(filled, round);", "pending-async race uninitialized", ()),
    ("the buffer again before it is read", "if (round > 0) ptx::mbarrier_wait(drained, 0);", "",
     "race pending-async mbarrier cluster", ()),
    ("too few bytes", "(filled, 256);", "(filled, 252);", "mbarrier", ("rank",)),
    ("too many bytes", "(filled, 256);", "(filled, 260);", "deadlock", ("4 bytes are expected", "(rank 1)")),
    ("counted on the own mbarrier", "ptx::peer_smem(filled, 1 - rank));", "filled);", "cluster", ("in one block",)),
    ("use before all blocks have started", START, "ptx::sync_threads();", "cluster", ("may not have started",)),
    ("an arrival that may come too late", "if (round == 0) ptx::mbarrier_arrive_peer",
     "ptx::mbarrier_arrive_peer", "cluster", ("mini",)),
    ("an ordinary store", "const i32 word", "ptx::store_shared_i32(there, 1); const i32 word", "bounds",
     ("another block: it takes addresses of rank",)),
    ("waits for the other block's mbarrier", "ptx::mbarrier_wait(filled, round);",
     "ptx::mbarrier_wait(ptx::peer_smem(filled, 1 - rank), round);", "bounds", ("mbarrier.wait",)),
    ("a rank that is not there", "ptx::peer_smem(base, 1 - rank)", "ptx::peer_smem(base, 2)", "bounds",
     ("rank 2 in a cluster of 2",)),
    ("not aligned", "there + 4 * thread", "there + 4 * thread + 2", "alignment", ("st.async",)),
    ("no mbarrier there", "ptx::peer_smem(filled, 1 - rank));", "ptx::peer_smem(filled + 64, 1 - rank));", "mbarrier",
     ("no mbarrier was initialised",)),
]  # fmt: skip


def broken(kernel: str, old: str, new: str) -> str:
    assert old in kernel
    return kernel.replace(old, new)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("old", "new", "kinds", "words"), [f[1:] for f in RING_FAULTS], ids=[f[0] for f in RING_FAULTS]
)
def test_fault_in_the_ring(old: str, new: str, kinds: str, words: tuple[str, ...], seed: int) -> None:
    with pytest.raises(EmulatorError) as caught:
        run_ring(broken(RING, old, new), seed)
    check(caught.value, kinds, words)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("old", "new", "kinds", "words"), [f[1:] for f in EXCHANGE_FAULTS], ids=[f[0] for f in EXCHANGE_FAULTS]
)
def test_fault_in_the_exchange(old: str, new: str, kinds: str, words: tuple[str, ...], seed: int) -> None:
    with pytest.raises(EmulatorError) as caught:
        run_exchange(broken(EXCHANGE, old, new), seed)
    check(caught.value, kinds, words)


def check(found: EmulatorError, kinds: str, words: tuple[str, ...]) -> None:
    assert found.kind in kinds.split(), str(found)
    for word in words:
        assert word in str(found), str(found)


BARRIER = """
  if (thread == 0) {
    ptx::mbarrier_init(base + 4096, 1);
    ptx::fence_mbarrier_init();
  }
"""
ARRIVE = "if (rank == 0 && thread == 0) ptx::mbarrier_arrive_peer(ptx::peer_smem(base + 4096, 1));\n"
FILL = """
  for (i32 i = thread; thread < 128 && i < 8192; i += 128)
    ptx::store_shared_i32(base + 4 * i, 0);
  ptx::fence_proxy_async();
  ptx::sync_threads();
"""
MULTIPLY = """
  float d[64] = {};
  const u64 a = tile::KMajorDescriptor<128>::make(%s), b = tile::KMajorDescriptor<128>::make(%s);
  ptx::wgmma_fence();
  ptx::wgmma_m64n128k32_e4m3(d, a, b, false);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<0>(d);
"""
UNMASKED = "(base >> 4) | 1u << 16"
LOW = "tile::KMajorDescriptor<128>::low(base%s)"
WGMMA = MULTIPLY % (LOW % "", LOW % " + 8192")
# The other block stores words of operand a.
STORED = (
    """
  if (thread == 0) {
    ptx::mbarrier_init(base + 65528, 1);
    ptx::fence_mbarrier_init();
    ptx::mbarrier_arrive_expect_tx(base + 65528, 512);
  }
"""
    + FILL
    + """
  ptx::cluster_arrive();
  ptx::cluster_wait();
  ptx::store_async(ptx::peer_smem(base, 1 - rank) + 4 * thread, 0, ptx::peer_smem(base + 65528, 1 - rank));
  ptx::mbarrier_wait(base + 65528, 0);
"""
)
REGISTERS = """
  if (thread < 128) ptx::set_max_registers_up<152>();
  else ptx::set_max_registers_down<104>();
"""

# (name, body, threads of a block, kind, words); kind "" is a kernel that is right.
CHECKS: list[tuple[str, str, int, str, tuple[str, ...]]] = [
    ("arrival at a block that ends at once",
     BARRIER + START + ARRIVE, 32, "cluster", ("block 1 (rank 1)",)),
    ("arrival at a block that waits for it",
     BARRIER + START + ARRIVE + "if (rank == 1) ptx::mbarrier_wait(base + 4096, 0);", 32, "", ()),
    ("arrival at a block that stays until all have come",
     BARRIER + START + ARRIVE + END, 32, "", ()),
    ("arrival after the last barrier",
     BARRIER + START + END + ARRIVE, 32, "cluster", ("rank 1",)),
    ("words for a block that does not wait for them",
     "if (thread == 0) { ptx::mbarrier_init(base + 4096, 1); ptx::fence_mbarrier_init();\n"
     "ptx::mbarrier_arrive_expect_tx(base + 4096, 4 * rank); }\n" + START
     + "if (rank == 0 && thread == 0) ptx::store_async(ptx::peer_smem(base, 1), 7, ptx::peer_smem(base + 4096, 1));\n"
     + END, 32, "cluster", ("block 1 (rank 1)",)),
    ("wgmma of words that another block has stored", STORED + WGMMA, 128, "proxy-fence", ("wgmma reads",)),
    ("wgmma of them behind a fence", STORED + "ptx::fence_proxy_async();" + WGMMA, 128, "", ()),
    ("words over what the other block has written, no knowledge of it",
     STORED.replace("cluster_arrive();", "cluster_arrive_relaxed();"), 128, "race", ("a store overwrites",)),
    ("a barrier that nobody has arrived at", START + "ptx::cluster_wait();", 32, "barrier", ("has not arrived",)),
    ("two arrivals in a row", "ptx::cluster_arrive(); ptx::cluster_arrive();", 32, "barrier", ("again",)),
    ("a block that leaves the barrier out", "if (rank == 0) {" + START + "}", 32, "", ()),  # it ends: that counts
    ("a warp that leaves the barrier out",
     "if (thread >= 32 || rank == 0) {" + START + "} else ptx::barrier_sync(1, 64);", 64,
     "deadlock", ("the cluster's barrier, phase 0: 3 of 4 warps", "block 1 (rank 1), warp")),
    ("half a warp at the barrier", "if (lane < 16) {" + START + "}", 32, "divergence", ()),
    ("a relaxed arrival orders no stores",
     "if (thread == 0) ptx::store_shared_i32(base, 1);\n" + START + "ptx::load_shared_i32(base);", 64, "race", ()),
    ("an arrival orders them",
     "if (thread == 0) ptx::store_shared_i32(base, 1);\n ptx::cluster_arrive(); ptx::cluster_wait();\n"
     "ptx::load_shared_i32(base);", 64, "", ()),
    ("sync_threads of one block alone", "if (rank == 1) ptx::sync_threads();", 64, "", ()),
    ("the same address in both blocks", "if (thread == 0) ptx::store_shared_i32(base, rank);", 32, "", ()),
    ("registers of one block for the other", "if (rank == 0) {" + REGISTERS + "}", 512, "", ()),
    ("registers that the own block does not give up",
     "if (rank == 0) ptx::set_max_registers_up<152>();\n else ptx::set_max_registers_down<104>();", 512, "deadlock",
     ("the block has 0 free",)),
    ("descriptors without the rank", FILL + WGMMA, 128, "", ()),
    ("a descriptor with the rank", FILL + MULTIPLY % (UNMASKED, LOW % " + 8192"), 128, "descriptor",
     ("operand a", "not masked", "rank 1")),
    ("stores of both blocks to one element",
     "if (thread == 0) ptx::store_global(reinterpret_cast<i32*>(out0), rank);", 32, "race", ("block 0",)),
]  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("body", "threads", "kind", "words"), [c[1:] for c in CHECKS], ids=[c[0] for c in CHECKS])
def test_check(body: str, threads: int, kind: str, words: tuple[str, ...], seed: int) -> None:
    def run() -> None:
        run_kernel(
            WHO + body, threads=threads, grid=2, cluster=2, outputs=[torch.zeros(4)], emulator=Emulator(seed=seed)
        )

    if not kind:
        run()
        return
    with pytest.raises(EmulatorError) as caught:
        run()
    check(caught.value, kind, words)


def test_a_cluster_of_four_and_one_of_one() -> None:
    body = WHO + START + "if (thread == 0) ptx::store_global(reinterpret_cast<i32*>(out0) + ptx::block_index(), rank);"
    for cluster in (1, 2, 4):
        found = torch.zeros(8, dtype=torch.int32)
        run_kernel(body, grid=8, cluster=cluster, outputs=[found])
        assert found.tolist() == [block % cluster for block in range(8)]


def test_a_warpgroup_does_not_reach_into_the_next_block() -> None:
    """Blocks of six warps: the last two of the first block are no warpgroup together with the next block's."""
    run_kernel(WHO + FILL + WGMMA, threads=128, grid=2, cluster=2)
    with pytest.raises(EmulatorError, match="fewer than four warps"):
        run_kernel(WHO + FILL + WGMMA, threads=192, grid=2, cluster=2)


def test_stores_to_another_block_need_one() -> None:
    body = WHO + BARRIER + START + "ptx::store_async(base + 4 * thread, 1, base + 4096);"
    with pytest.raises(EmulatorError, match="no cluster of several"):
        run_kernel(body)


@pytest.mark.parametrize(("grid", "cluster", "threads"), [(3, 2, 32), (4, 4, 1024)], ids=["grid", "threads"])
def test_launches_that_cannot_be(grid: int, cluster: int, threads: int) -> None:
    with pytest.raises(EmulatorError, match="launch") as caught:
        run_kernel("", grid=grid, cluster=cluster, threads=threads)
    assert f"clusters of {cluster}" in str(caught.value)
