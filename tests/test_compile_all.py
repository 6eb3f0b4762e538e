"""scripts/compile_all.py: a covering part of all kernels for the known targets, and what it must find fault with."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import script

import deep_kernels
from deep_kernels import _C, CompileError, inspector

ROOT = Path(__file__).parent.parent
TARGETS = ("sm_89", "sm_90a")


compile_all = script.load("compile_all")


def run_python(*arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """In a process and a folder of its own, with the package that is tested, be it installed or not."""
    package = str(Path(deep_kernels.__file__).parent.parent)
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": package, **variables},
        cwd=cwd,
        capture_output=True,
        text=True,
    )


def has_nvrtc() -> bool:
    try:
        return bool(_C.nvrtc())
    except CompileError:
        return False


needs_nvrtc = pytest.mark.skipif(
    not has_nvrtc(), reason="no NVRTC: torch brings none and DEEP_KERNELS_NVRTC names none"
)
needs_disassembler = pytest.mark.skipif(
    inspector.disassembler() is None, reason="no nvdisasm or cuobjdump in the package triton or on PATH"
)


@pytest.fixture(autouse=True)
def settings_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script sets variables of its own process; they end with the test."""
    monkeypatch.delenv("DEEP_KERNELS_PREBUILT_DIR", raising=False)
    monkeypatch.setenv("DEEP_KERNELS_CACHE_DIR", os.environ.get("DEEP_KERNELS_CACHE_DIR", _C.cache_dir()))


# --- the covering part --------------------------------------------------------------------------------------


def pairs_of(spec: dict[str, Any]) -> set[Any]:
    return set(combinations(sorted((name, str(value)) for name, value in spec.items()), 2))


@pytest.mark.parametrize("arch", [*TARGETS, "sm89:sm_90a"])
def test_pairwise_subset_has_every_pair_and_is_small(arch: str) -> None:
    by_kernel: dict[str, list[dict[str, Any]]] = {}
    for kernel, spec, _ in _C.legal_specs(arch):
        by_kernel.setdefault(kernel, []).append(json.loads(spec))
    for specs in by_kernel.values():
        chosen = compile_all.pairwise(specs)
        assert chosen == compile_all.pairwise(specs) == sorted(set(chosen))
        every = set().union(*map(pairs_of, specs))
        assert set().union(*(pairs_of(specs[i]) for i in chosen)) == every
        assert {str(item) for spec in specs for item in spec.items()} == {
            str(item) for i in chosen for item in specs[i].items()
        }
        # No set can be smaller than the two widest fields multiplied; greedy comes close to that.
        widths = sorted(len({spec[name] for spec in specs}) for name in specs[0])
        assert len(chosen) <= max(2 * widths[-1] * (widths[-2] if len(widths) > 1 else 1), 1)


def test_pairwise_of_one_field_and_of_none() -> None:
    assert compile_all.pairwise([]) == []
    assert compile_all.pairwise([{"a": 1}]) == [0]
    assert compile_all.pairwise([{"a": 1}, {"a": 2}, {"a": 1}]) == [0, 1]


def test_collect_filters_by_kernel_and_names_what_there_is() -> None:
    assert {job.kernel for job in compile_all.collect("sm_89", ["mqa_schedule"])} == {"mqa_schedule"}
    assert len(compile_all.collect("sm_89")) == len(_C.legal_specs("sm_89"))
    with pytest.raises(ValueError, match=r"sm_89 has no kernel named mqa_logit; it has mqa_logits"):
        compile_all.collect("sm_89", ["mqa_logit"])


# --- the kernels --------------------------------------------------------------------------------------------


@dataclass
class Compiled:
    """The covering part of a target, in a folder of its own, and what the script said."""

    folder: Path
    done: subprocess.CompletedProcess[str]

    def entries(self) -> list[inspector.Entry]:
        return [inspector.read_entry(file) for file in sorted(self.folder.iterdir())]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Compiled]:
    @functools.cache
    def of(arch: str) -> Compiled:
        out = tmp_path_factory.mktemp("prebuilt") / arch
        script = str(ROOT / "scripts" / "compile_all.py")
        done = run_python(script, "--subset", "pairwise", "--arch", arch, "--out", str(out), cwd=out.parent)
        return Compiled(out, done)

    return of


@needs_nvrtc
@pytest.mark.parametrize("arch", TARGETS)
def test_covering_part_compiles_without_a_fault(arch: str, compiled: Callable[[str], Compiled]) -> None:
    result = compiled(arch)
    assert result.done.returncode == 0, result.done.stderr
    jobs = compile_all.collect(arch, subset="pairwise")
    assert len(result.entries()) == len(jobs)
    specs = {(job.kernel, json.dumps(job.spec)) for job in jobs}
    for entry in result.entries():
        about = entry.about
        assert not entry.fault
        assert (about["op"], json.dumps(about["spec"])) in specs
        assert about["target"] == arch
        assert 0 < about["registers"] <= 255
        assert max(about["spill_store_bytes"], about["spill_load_bytes"]) <= about["spill_limit_bytes"]
        assert about["wgmma_serialized"] is False
        assert entry.cubin.startswith(b"\x7fELF")
        assert about["entry"].encode() in entry.cubin


@needs_nvrtc
@needs_disassembler
def test_every_hopper_kernel_holds_the_wgmma_that_its_spec_implies(compiled: Callable[[str], Compiled]) -> None:
    counts = set()
    for entry in compiled("sm_90a").entries():
        counted = len(compile_all.WGMMA.findall(inspector.sass(entry)))
        assert counted == entry.about["num_wgmma"], entry.spec()
        counts.add(counted)
    assert len(counts) > 2  # none in the schedule, and several depths


@needs_nvrtc
def test_output_serves_where_there_is_no_nvrtc(compiled: Callable[[str], Compiled], tmp_path: Path) -> None:
    script = f"""
import sys
sys.path.insert(0, {str(ROOT / "scripts")!r})
import compile_all
for arch in {TARGETS!r}:
    for job in compile_all.collect(arch, subset="pairwise"):
        report = job.build()
        assert report["origin"] == "prebuilt", (str(job), report["origin"])
print("all prebuilt")
"""
    both = tmp_path / "both"
    both.mkdir()
    for arch in TARGETS:
        for file in compiled(arch).folder.iterdir():
            (both / file.name).write_bytes(file.read_bytes())
    both.chmod(0o500)
    done = run_python(
        *("-c", script),
        cwd=tmp_path,
        DEEP_KERNELS_PREBUILT_DIR=str(both),
        DEEP_KERNELS_NVRTC="/nonexistent/libnvrtc.so",
        DEEP_KERNELS_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert done.stdout.strip() == "all prebuilt", done.stderr
    assert not (tmp_path / "cache").exists()


# --- faults that were put there -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kernel(compiled: Callable[[str], Compiled]) -> inspector.Entry:
    """A Hopper kernel with wgmma and without a spill."""
    found = (entry for entry in compiled("sm_90a").entries() if entry.about["num_wgmma"] > 0)
    return next(entry for entry in found if entry.about["spill_store_bytes"] == 0)


def run_with(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    builds: list[Callable[[], dict[str, Any]]],
) -> tuple[int, str, list[str]]:
    """The script on jobs of ours: exit status, table, offenders."""
    jobs = [compile_all.Job("sm_90a", "mqa_logits", {"number": i}, build) for i, build in enumerate(builds)]
    monkeypatch.setattr(compile_all, "collect", lambda arch, only, subset: jobs)
    status = compile_all.main(["--arch", "sm_90a", "--jobs", "2"])
    said = capsys.readouterr()
    return status, said.out, said.err.splitlines()


def report_of(entry: inspector.Entry, **changes: Any) -> Callable[[], dict[str, Any]]:
    about = json.dumps({**entry.about, **changes})
    report = {"entry": entry.name, "origin": "cache", "file": str(entry.file), "about": about, "seconds": 0.25}
    return lambda: report


@needs_nvrtc
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spill_store_bytes": 8, "spill_limit_bytes": 0}, "spills 8 bytes, 0 are allowed"),
        ({"spill_load_bytes": 12, "spill_limit_bytes": 0}, "spills 12 bytes, 0 are allowed"),
        ({"spill_load_bytes": 12, "spill_limit_bytes": 8}, "spills 12 bytes, 8 are allowed"),
        ({"wgmma_serialized": True}, "its wgmma are serialized"),
    ],
)
def test_doctored_entry_is_an_offender(
    kernel: inspector.Entry,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    words: str,
) -> None:
    status, table, offenders = run_with(monkeypatch, capsys, [report_of(kernel), report_of(kernel, **changes)])
    assert status == 1
    assert offenders == [f"sm_90a mqa_logits number=1: {words}"]
    row = dict(zip(table.splitlines()[0].split(), table.splitlines()[1].split(), strict=True))
    assert row == {
        "arch": "sm_90a",
        "kernel": "mqa_logits",
        "kernels": "2",
        "compiled": "0",
        "cached": "2",
        "faulty": "1",
        "registers": str(kernel.about["registers"]),
        "seconds": "0.5",
    }


@needs_nvrtc
def test_spill_within_its_limit_is_none(
    kernel: inspector.Entry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = report_of(kernel, spill_store_bytes=8, spill_load_bytes=8, spill_limit_bytes=8)
    assert run_with(monkeypatch, capsys, [build])[::2] == (0, [])


@needs_nvrtc
@needs_disassembler
def test_missing_wgmma_is_an_offender(
    kernel: inspector.Entry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = kernel.about["num_wgmma"]
    build = report_of(kernel, num_wgmma=counted + 2, wgmma_serialized=True)
    status, _, offenders = run_with(monkeypatch, capsys, [build])
    assert status == 1
    words = f"its wgmma are serialized; holds {counted} wgmma, its Spec implies {counted + 2}"
    assert offenders == [f"sm_90a mqa_logits number=0: {words}"]


@needs_nvrtc
def test_without_a_disassembler_it_says_so_once(
    kernel: inspector.Entry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(inspector, "disassembler", lambda: None)
    builds = [report_of(kernel, num_wgmma=1), report_of(kernel, num_wgmma=2)]
    status, _, said = run_with(monkeypatch, capsys, builds)
    assert status == 0
    assert said == ["no disassembler in torch's triton package or on PATH: wgmma are not counted"]


@needs_nvrtc
def test_kernel_that_cannot_be_read_back_or_written_is_an_offender(
    kernel: inspector.Entry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    broken = tmp_path / kernel.file.name
    broken.write_bytes(kernel.file.read_bytes()[:-1])
    reports = [{**report_of(kernel)(), "file": str(broken)}, {**report_of(kernel)(), "file": ""}]
    status, _, offenders = run_with(monkeypatch, capsys, [lambda: reports[0], lambda: reports[1]])
    assert status == 1
    assert len(offenders) == 2 if inspector.disassembler() else 1
    assert offenders[-1] == "sm_90a mqa_logits number=1: could not be written"
    if inspector.disassembler():
        assert offenders[0].startswith("sm_90a mqa_logits number=0: cannot be read back: ")


@needs_nvrtc
def test_kernel_that_does_not_compile_is_one_line_and_the_others_go_on(
    kernel: inspector.Entry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> dict[str, Any]:
        raise CompileError("compiling mqa_logits failed\nNVRTC 13.0\nx.cuh(3): error: no such thing\nsource:\n ...")

    status, table, offenders = run_with(monkeypatch, capsys, [fail, report_of(kernel)])
    assert status == 1
    assert offenders == ["sm_90a mqa_logits number=0: does not compile: x.cuh(3): error: no such thing"]
    assert table.splitlines()[1].split()[2:6] == ["2", "0", "1", "1"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--arch", "sm_42x"], "arch must be a backend"),
        (["--arch", "sm_89", "--kernel", "none"], "sm_89 has no kernel named none; it has"),
    ],
)
def test_nothing_can_be_done(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_all.main(arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len(said.splitlines()) == 1


def test_list_compiles_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert compile_all.main(["--list", "--arch", "sm_90a,sm_89", "--out", str(tmp_path / "out")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(_C.legal_specs("sm_90a")) + len(_C.legal_specs("sm_89"))
    assert lines[0].startswith("sm_90a mqa_logits backend=sm90 ")
    assert not (tmp_path / "out").exists()
