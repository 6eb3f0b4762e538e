"""What arch= means, what supported() and prepare() answer, and the entries of every kind of kernel."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh import SCHEDULE

import deep_kernels as dk
from deep_kernels import _C

pytest_plugins = ("runtime_fixtures",)

OP = "fp8_fp4_mqa_logits"


# --- architectures ---------------------------------------------------------------------------------------


def planned(arch: str | None, capability: int | None = None, op: str = OP, **case: str) -> tuple[str, str, str]:
    """Backend, target and Spec that a case gets, from the refusal to compile it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEP_KERNELS_NO_COMPILE", "1")
        patch.setenv("DEEP_KERNELS_CACHE_DIR", "/nonexistent")
        patch.delenv("DEEP_KERNELS_PREBUILT_DIR", raising=False)
        with pytest.raises(dk.CompileError) as error:
            _C.prepare(op, arch, case, capability)
    found = re.fullmatch(r"\w+ for (\w+) is neither .* compiling it; spec: (backend=(\w+) .*)", str(error.value))
    assert found is not None, error.value
    return found[3], found[1], found[2]


@pytest.mark.parametrize(
    ("arch", "capability", "backend", "target"),
    [
        ("sm89", None, "sm89", "sm_89"),
        ("sm90", None, "sm90", "sm_90a"),
        ("sm_89", None, "sm89", "sm_89"),
        ("sm_90", None, "sm89", "sm_90"),  # wgmma is only in sm_90a
        ("sm_90a", None, "sm90", "sm_90a"),
        ("sm_120", None, "sm89", "sm_120"),
        ("sm_120a", None, "sm89", "sm_120a"),
        ("sm_120f", None, "sm89", "sm_120f"),
        ("sm89:sm_90a", None, "sm89", "sm_90a"),
        ("sm90:sm_90a", None, "sm90", "sm_90a"),
        (None, 89, "sm89", "sm_89"),
        (None, 90, "sm90", "sm_90a"),
        (None, 100, "sm89", "sm_100"),  # until there are sm100 kernels
        (None, 120, "sm89", "sm_120"),
        ("sm89", 89, "sm89", "sm_89"),
        ("sm89", 90, "sm89", "sm_90a"),  # the card's own target
        ("sm89", 121, "sm89", "sm_121"),
        ("sm90", 90, "sm90", "sm_90a"),
        ("sm_89", 90, "sm89", "sm_89"),  # a named target is compiled for, whatever the card
        ("sm_90a", 89, "sm90", "sm_90a"),
    ],
)
def test_arch_forms(arch: str | None, capability: int | None, backend: str, target: str, no_settings: Path) -> None:
    assert planned(arch, capability)[:2] == (backend, target)


def test_arch_setting(no_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_KERNELS_ARCH", "sm89:sm_90a")
    assert planned(None)[:2] == ("sm89", "sm_90a")
    assert planned(None, 90)[:2] == ("sm89", "sm_90a")
    assert planned("sm90", 90)[:2] == ("sm90", "sm_90a"), "the argument goes before the setting"
    monkeypatch.setenv("DEEP_KERNELS_ARCH", "sm_89")
    sentence = f"{OP}: this card (compute capability 9.0) cannot run sm89 for sm_89"
    assert _C.supported(OP, None, {}, 90) == sentence, "what a call would say"
    monkeypatch.setenv("DEEP_KERNELS_ARCH", "cpu")
    assert _C.supported(OP, None, {"format": "mxfp4"}, 90) is None
    assert _C.prepare(OP, None, {}, 90) == []
    monkeypatch.setenv("DEEP_KERNELS_ARCH", "")
    assert planned(None, 90)[:2] == ("sm90", "sm_90a"), "empty is not set"


BAD_ARCHS = ["", "sm", "SM_90A", "sm_", "sm_9", "sm_90b", "sm_90aa", "sm_90f", "sm_89a", "sm_99999", "sm90a", "90"]
BAD_ARCHS += [" sm_90a", "sm_90a ", ":", "sm89:", ":sm_89", "sm_90a:sm89", "sm89:sm89", "sm89:sm_90a:sm_90a", "cuda"]


@pytest.mark.parametrize("arch", BAD_ARCHS)
def test_arch_that_is_none(arch: str, no_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = "must be a backend (sm89, sm90, sm100), a target such as sm_90a, or both as sm89:sm_90a, got"
    for ask in (lambda: dk.supported(OP, arch), lambda: dk.prepare([{"op": OP}], arch)):
        with pytest.raises(ValueError) as error:
            ask()
        assert str(error.value) == f"{OP}: arch {rest} '{arch}'"
    if arch:
        monkeypatch.setenv("DEEP_KERNELS_ARCH", arch)
        with pytest.raises(ValueError) as error:
            dk.supported(OP)
        assert str(error.value) == f"{OP}: DEEP_KERNELS_ARCH {rest} '{arch}'"


@pytest.mark.parametrize(
    ("arch", "capability", "reason"),
    [
        (None, 86, "a card of compute capability 8.9 or newer is needed, this one has 8.6"),
        (None, 75, "a card of compute capability 8.9 or newer is needed, this one has 7.5"),
        ("sm90", 89, "this card (compute capability 8.9) cannot run sm90 for sm_90a"),
        ("sm90", 100, "this card (compute capability 10.0) cannot run sm90 for sm_90a"),
        ("sm100", 90, "this card (compute capability 9.0) cannot run sm100 for sm_100f"),
        ("sm100", None, "there are no sm100 kernels for it yet"),
        ("sm_100f", None, "there are no sm100 kernels for it yet"),
        ("sm_80", None, "backend sm89 cannot be compiled for target sm_80"),
        ("sm90:sm_89", None, "backend sm90 cannot be compiled for target sm_89"),
        ("sm90:sm_90", None, "backend sm90 cannot be compiled for target sm_90"),
        ("sm100:sm_90a", None, "backend sm100 cannot be compiled for target sm_90a"),
    ],
)
def test_arch_that_cannot_run(arch: str | None, capability: int | None, reason: str, no_settings: Path) -> None:
    assert _C.supported(OP, arch, {}, capability) == f"{OP}: {reason}"
    with pytest.raises(dk.UnsupportedError) as error:
        _C.prepare(OP, arch, {}, capability)
    assert str(error.value) == f"{OP}: {reason}"


def test_without_a_card_the_answer_is_the_cpus(no_settings: Path) -> None:
    assert _C.supported(OP, None, {"format": "mxfp4", "head_dim": "32"}, None) is None
    assert _C.prepare(OP, None, {}, None) == []


# --- supported() -----------------------------------------------------------------------------------------


def test_supported_defaults_and_spellings(no_settings: Path) -> None:
    full = {"format": "fp8", "num_heads": 64, "head_dim": 128, "weights_dtype": torch.float32}
    full |= {"logits_dtype": torch.float32, "clean_logits": True, "metadata": False, "compressed": False}
    full |= {"max_seqlen_k": 0, "reduction": "exact"}
    for arch in ("cpu", "sm89", "sm_90a", "sm89:sm_90a"):
        assert dk.supported(OP, arch, **full) is None
        assert dk.supported(OP, arch) is None
    words = {name: str(value) for name, value in full.items()}
    assert planned("sm_90a", **words) == planned("sm_90a")
    assert planned("sm_90a", **words | {"logits_dtype": "float32", "clean_logits": "1", "metadata": "false"}) == (
        planned("sm_90a")
    )
    other = planned("sm_90a", logits_dtype="torch.bfloat16", clean_logits="False", metadata="true", head_dim="64")[2]
    assert "head_dim=64" in other
    assert "logits_dtype=bfloat16 clean=off schedule=metadata" in other


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"num_heads": 0}, "num_heads must be from 1 to 128, got 0"),
        ({"num_heads": -1}, "num_heads must be from 1 to 128, got -1"),
        ({"num_heads": 129}, "num_heads must be from 1 to 128, got 129"),
        ({"num_heads": 1 << 40}, f"num_heads must be from 1 to 128, got {1 << 40}"),
        ({"head_dim": 96}, "head_dim must be 32, 64 or 128, got 96"),
        ({"logits_dtype": torch.float16}, "logits_dtype must be float32 or bfloat16, got float16"),
        ({"format": "mxfp4", "head_dim": 32}, "head_dim must be 64 or 128 with mxfp4, got 32"),
    ],
)
def test_supported_refuses_in_one_sentence(case: dict[str, Any], reason: str, no_settings: Path) -> None:
    assert dk.supported(OP, "sm_90a", **case) == f"{OP}: {reason}"
    with pytest.raises(dk.UnsupportedError) as error:
        dk.prepare([{"op": OP}, {"op": OP} | case], arch="sm_90a")
    assert str(error.value) == f"{OP}: {reason}"
    assert not no_settings.exists(), "nothing is compiled before every case is known to be right"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"colour": "red"}, "a case has no field named colour"),
        ({"b": 1, "a": 2}, "a case has no field named a, b"),
        ({"format": "fp4"}, "format must be fp8, mxfp8 or mxfp4, got 'fp4'"),
        ({"num_heads": "many"}, "num_heads must be an integer, got 'many'"),
        ({"num_heads": True}, "num_heads must be an integer, got 'True'"),
        ({"num_heads": 1 << 64}, f"num_heads must be an integer of 64 bits, got '{1 << 64}'"),
        ({"num_heads": 1 << 99999}, "num_heads must be an integer of 64 bits, got one of 100000 bits"),
        ({"max_seqlen_k": -5}, "max_seqlen_k must be from 0 to 2147482623, got -5"),
        ({"max_seqlen_k": 1 << 31}, "max_seqlen_k must be from 0 to 2147482623, got 2147483648"),
        ({"head_dim": "64 "}, "head_dim must be an integer, got '64 '"),
        ({"clean_logits": "maybe"}, "clean_logits must be a bool, got 'maybe'"),
        ({"weights_dtype": torch.int8}, "weights_dtype must be float32, bfloat16 or float16, got 'torch.int8'"),
        ({"reduction": "sum"}, "reduction must be 'exact' or 'folded', got 'sum'"),
        ({"clean_placement": "late"}, "clean_placement must be concurrent or deferred, got 'late'"),
    ],
)
def test_words_that_do_not_exist(case: dict[str, Any], message: str, no_settings: Path) -> None:
    for arch in ("cpu", "sm_90a"):
        with pytest.raises(ValueError) as error:
            dk.supported(OP, arch, **case)
        assert str(error.value) == f"{OP}: {message}"
    with pytest.raises(ValueError, match=re.escape(message)):
        dk.prepare([{"op": OP} | case], arch="sm_90a")


def test_ops_that_do_not_exist(no_settings: Path) -> None:
    for ask in (lambda: dk.supported("relu"), lambda: dk.prepare([{"op": "relu"}], arch="sm_90a")):
        with pytest.raises(ValueError) as error:
            ask()
        assert str(error.value) == f"op must be one of {', '.join(_C.ops())}, got 'relu'"


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: dk.supported(3), "op must be a str, got int"),
        (lambda: dk.supported(None), "op must be a str, got NoneType"),
        (lambda: dk.supported(OP, 90), "supported: arch must be a str or None, got int"),
        (
            lambda: dk.supported(OP, num_heads=[64]),
            f"{OP}: num_heads must be a str, bool, int, float, torch.dtype or None, got list",
        ),
        (lambda: dk.prepare(None), "prepare: cases must be an iterable of dicts, got NoneType"),
        (lambda: dk.prepare({"op": OP}), "prepare: cases must be an iterable of dicts, got dict"),
        (lambda: dk.prepare([OP]), "prepare: a case must be a dict, got str"),
        (lambda: dk.prepare([{"op": 1}]), "op must be a str, got int"),
        (lambda: dk.prepare([{"op": OP, 1: 2}]), f"{OP}: the name of a field must be a str, got int"),
        (lambda: dk.prepare([], 90), "prepare: arch must be a str or None, got int"),
        (lambda: dk.prepare([], jobs=1.5), "prepare: jobs must be an int or None, got float"),
        (lambda: dk.prepare([], jobs=True), "prepare: jobs must be an int or None, got bool"),
        (lambda: dk.prepare([], progress=3), "prepare: progress must be callable or None, got int"),
    ],
)
def test_wrong_python_types(ask: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError) as error:
        ask()
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: dk.prepare([], jobs=0), "prepare: jobs must be 1 or more, got 0"),
        (lambda: dk.prepare([], jobs=-4), "prepare: jobs must be 1 or more, got -4"),
        (lambda: dk.prepare([{"num_heads": 8}]), "prepare: a case must name its op, got num_heads"),
        (lambda: dk.prepare([{}]), "prepare: a case must name its op, got no field"),
        (lambda: dk.prepare([], jobs=-(1 << 99999)), "prepare: jobs must be 1 or more, got one of 100000 bits"),
        (lambda: dk.set_num_sms(1 << 99999), "set_num_sms: num_sms must fit into 64 bits, got one of 100000 bits"),
        (lambda: dk.supported("a\0"), "op must be text without NUL, got 'a\\x00'"),
        (lambda: dk.supported(OP, "sm89\0"), "supported: arch must be text without NUL, got 'sm89\\x00'"),
        (lambda: dk.supported(OP, format="fp8\0"), f"{OP}: format must be text without NUL, got 'fp8\\x00'"),
        (
            lambda: _C.cache_files("/tmp\0/x"),
            "a file name must be text that the file system can write, without NUL",
        ),
        (lambda: _C.compile_options("\udc80"), "compile: arch must be text that UTF-8 can write, without NUL"),
        (lambda: dk.supported("\udc80"), "op must be text that UTF-8 can write, got '\\udc80'"),
        (lambda: dk.supported(OP, "\udc80"), "supported: arch must be text that UTF-8 can write, got '\\udc80'"),
        (
            lambda: dk.supported(OP, format="\udc80"),
            f"{OP}: format must be text that UTF-8 can write, got '\\udc80'",
        ),
    ],
)
def test_wrong_values(ask: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        ask()
    assert str(error.value) == message


def test_every_op_answers(no_settings: Path) -> None:
    for op in _C.ops():
        for arch in ("cpu", "sm_89", "sm_90a", "sm_100f"):
            reason = dk.supported(op, arch)
            assert reason is None or re.fullmatch(rf"{op}: [^\n.]+", reason), reason
            assert reason is None or not re.match(r"\w+: (is|are|has|needs|must|cannot)\b", reason), "it has a subject"
        assert hasattr(dk, op) or dk.supported(op, "cpu") is not None


# --- prepare() -------------------------------------------------------------------------------------------


def test_prepare_follows_the_settings_that_calls_follow(no_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for placement in ("concurrent", "deferred"):  # of which one is the table's
        monkeypatch.setenv("DEEP_KERNELS_MQA_CLEAN", placement)
        assert f"clean={placement}" in planned("sm_90a")[2]


def test_prepare_reports(no_settings: Path, nvrtc: tuple[str, str]) -> None:
    counts: list[tuple[int, int]] = []
    cases = ({"op": SCHEDULE["op"], "num_heads": heads} for heads in (8, 16, 8, 5))  # any iterable; two kernels
    reports = dk.prepare(cases, arch="sm_89", jobs=2, progress=lambda done, total: counts.append((done, total)))
    assert counts == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert all(set(report) == {"entry", "origin", "file", "about", "seconds"} for report in reports)
    first, second, *again = (report["entry"] for report in reports)
    assert first != second
    assert again == [first, first], "reports come in the order of the cases"
    assert sorted(report["origin"] for report in reports).count("compiled") == 2, "each key compiles once"
    assert len(os.listdir(no_settings)) == 2
    assert [json.loads(report["about"])["spec"]["num_heads"] for report in reports] == [8, 16, 8, 8]


def test_prepare_of_a_case_with_metadata_brings_its_schedule(no_settings: Path, nvrtc: tuple[str, str]) -> None:
    case = {"op": OP, "num_heads": 8, "head_dim": 32, "metadata": True}
    reports = dk.prepare([case], arch="sm_89", jobs=1)
    assert [json.loads(report["about"])["op"] for report in reports] == ["mqa_logits", "mqa_schedule"]
    assert reports[1]["entry"] == dk.prepare([SCHEDULE], arch="sm_89")[0]["entry"]


def test_prepare_of_paged_cases(no_settings: Path, nvrtc: tuple[str, str]) -> None:
    """A request's query tokens share tiles by one, two or four; page sizes run in one kernel."""
    case = {"op": "fp8_fp4_paged_mqa_logits", "num_heads": 64, "head_dim": 64}
    small = dk.prepare([case | {"block_kv": size} for size in (16, 256)], arch="sm_89", jobs=1)
    assert small[0]["entry"] == small[1]["entry"]
    several = [{"next_n": next_n} for next_n in (1, 2, 3, 9)] + [{"indices": True}]
    reports = dk.prepare([case | fields for fields in several], arch="sm_89", jobs=1)
    assert [json.loads(report["about"])["spec"]["unit_rows"] for report in reports] == [1, 2, 4, 4, 2]
    schedule = dk.prepare([{"op": "get_paged_mqa_logits_metadata"}], arch="sm_89")
    both = dk.prepare([case | {"metadata": True}], arch="sm_89", jobs=1)
    assert [report["entry"] for report in both] == [small[0]["entry"], schedule[0]["entry"]]


def test_prepare_of_nothing() -> None:
    assert dk.prepare([]) == []
    assert dk.prepare([{"op": OP}], arch="cpu") == []


def test_prepare_stops_at_the_first_failure(no_settings: Path, nvrtc: tuple[str, str]) -> None:
    def fail(done: int, total: int) -> None:
        raise KeyboardInterrupt

    cases = [{"op": SCHEDULE["op"], "num_heads": heads} for heads in (8, 16, 32, 64, 128)]
    with pytest.raises(KeyboardInterrupt):
        dk.prepare(cases, arch="sm_89", jobs=1, progress=fail)
    assert len(os.listdir(no_settings)) <= 3, "what had not begun is dropped"


# --- entries of every kind of kernel ---------------------------------------------------------------------


def covering_specs(arch: str) -> Iterator[tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Legal Specs in which every value of every field of every kernel occurs."""
    seen: set[tuple[str, str, Any]] = set()
    specs = [(kernel, json.loads(text), build) for kernel, text, build in _C.legal_specs(arch)]
    while True:
        new = [{(kernel, *field) for field in spec.items()} - seen for kernel, spec, _ in specs]
        best = max(range(len(specs)), key=lambda index: len(new[index]))
        if not new[best]:
            return
        seen |= new[best]
        yield specs[best]


@pytest.mark.parametrize("arch", ["sm_89", "sm_90a"])
def test_entries_of_a_covering_subset(arch: str, no_settings: Path, nvrtc: tuple[str, str]) -> None:
    """Spec, JSON and source agree; no spill, no serialized wgmma, registers that fit."""
    keys = set()
    for kernel, spec, build in covering_specs(arch):
        report = build()
        about = json.loads(report["about"])
        keys.add(report["entry"])
        assert report["entry"].startswith(f"dk_{kernel}_{arch}_")
        assert (about["op"], about["target"], about["spec"]) == (kernel, arch, spec)
        source = _C.read_entry(report["file"])["source"]
        fields = dict(re.findall(r"^ +\.(\w+) = (?:dk::\w+::)?(\w+),$", source, re.MULTILINE))
        assert fields == {name: str(value) for name, value in spec.items()}
        assert list(fields) == list(spec), "in one order"
        assert len(source.split("\n")) < 30
        assert 16 <= about["registers"] <= 255
        assert max(about["spill_store_bytes"], about["spill_load_bytes"]) <= about["spill_limit_bytes"], spec
        assert about["wgmma_serialized"] is False, spec
        assert (about["num_wgmma"] > 0) == (spec["backend"] == "sm90" and kernel != "attention_join")
    assert len(keys) == len(os.listdir(no_settings))


def test_legal_specs_are_few_and_distinct() -> None:
    for arch in _C.known_targets():
        specs = [(kernel, text) for kernel, text, _ in _C.legal_specs(arch)]
        assert len(set(specs)) == len(specs)
        for kernel in {kernel for kernel, _ in specs}:
            assert sum(name == kernel for name, _ in specs) <= 400


def test_spec_in_words_is_the_spec_in_json(no_settings: Path) -> None:
    words = dict(field.split("=") for field in planned("sm_90a")[2].split())
    matches = [json.loads(text) for kernel, text, _ in _C.legal_specs("sm_90a") if kernel == "mqa_logits"]
    assert words in [{name: str(value) for name, value in spec.items()} for spec in matches]
