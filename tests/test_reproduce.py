"""A caller's measurement of what cleaning costs: its calls in their forms, zero logits, the complete mask."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Backend
from script import load

import deep_kernels as dg

reproduce = load("reproduce_mqa_clean")

SMALL = ((70, 1000), (129, 4100), (8, 8))
FULL = ((2048, 32768), (8192, 65536))


@pytest.mark.parametrize("format", reproduce.FORMATS)
def test_zero_inside_and_a_complete_mask(backend: Backend, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    """At full size on a card: the caller names no arch, so the setting does."""
    if backend.arch:
        monkeypatch.setenv("DEEP_KERNELS_ARCH", backend.arch)
    if reason := dg.supported("fp8_fp4_mqa_logits", backend.supported_arch, format=format):
        pytest.skip(reason)
    dg.set_pdl(False)
    for num_q, num_kv in SMALL if backend.device == "cpu" else SMALL + FULL:
        calls, ends = reproduce.calls_of(num_q, num_kv, format, backend.device)
        assert set(calls) == {"clean0_meta0", "clean0_meta1", "clean1_meta0", "clean1_meta1"}
        for name, call in calls.items():
            logits = call()
            assert (logits.shape, logits.dtype) == ((num_q, num_kv), torch.float32)
            reproduce.check(logits, ends, clean=name.startswith("clean1"))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    (
        (lambda logits: logits[40].fill_(0), "the -inf pattern is wrong in one of the rows from 0"),
        (lambda logits: logits[140, 3:4].fill_(-torch.inf), "the -inf pattern is wrong in one of the rows from 128"),
        (lambda logits: logits[128, 0:1].fill_(1e-30), "a logit is not 0 in one of the rows from 128"),
        (lambda logits: logits[1, 0:1].fill_(torch.nan), "a logit is not 0 in one of the rows from 0"),
    ),
)
def test_the_check_sees_what_is_wrong(spoil: Callable[[torch.Tensor], Any], sentence: str) -> None:
    ends = torch.arange(150, dtype=torch.int32) + 50
    columns = torch.arange(200)
    logits = torch.zeros(150, 200).masked_fill(columns >= ends[:, None], -torch.inf)
    reproduce.check(logits, ends, clean=True)
    spoil(logits)
    with pytest.raises(RuntimeError, match=f"^{sentence}$"):
        reproduce.check(logits, ends, clean=True)


def test_the_script_runs_to_its_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "clean.json"
    words = ["reproduce_mqa_clean.py", "--device", "cpu", "--sizes", "9/300", "40/130", "--out", str(out)]
    monkeypatch.setattr("sys.argv", words)
    assert reproduce.main() == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines == [f"{size} {format}: right" for size in ("9/300", "40/130") for format in reproduce.FORMATS]
    assert len(json.loads(out.read_text())) == len(lines)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", words[:1])
    assert reproduce.main() == 2


# How callers of the established library write their calls: names, positions, defaults.
FORMS: dict[str, str] = {
    "fp8_fp4_mqa_logits": "q kv weights cu_seq_len_k_start cu_seq_len_k_end clean_logits=True max_seqlen_k=0 "
    "logits_dtype=torch.float32 schedule_meta=None",
    "get_mqa_logits_metadata": "cu_seq_len_k_start cu_seq_len_k_end num_kv_tokens num_heads",
    "fp8_mqa_logits": "q kv weights cu_seq_len_k_start cu_seq_len_k_end clean_logits=True max_seqlen_k=0",
    "fp8_fp4_paged_mqa_logits": "q kv_cache weights context_lens block_table schedule_meta max_context_len "
    "clean_logits=False logits_dtype=torch.float32 indices=None",
    "get_paged_mqa_logits_metadata": "context_lens block_kv num_sms indices=None",
    "fp8_paged_mqa_logits": "q kv_cache weights context_lens block_table schedule_meta max_context_len "
    "clean_logits=False",
    "get_num_sms": "",
    "set_num_sms": "num_sms",
    "get_pdl": "",
    "set_pdl": "enable",
}


@pytest.mark.parametrize("name", FORMS)
def test_names_and_order_of_arguments_are_those_of_callers(name: str) -> None:
    found = []
    for parameter in inspect.signature(getattr(dg, name)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:  # this project's own: arch, out, reduction
            assert parameter.default is not parameter.empty, "callers do not know it"
            continue
        default = "" if parameter.default is parameter.empty else f"={parameter.default}"
        found.append(f"{parameter.name}{default}")
    assert found == FORMS[name].split()


def test_knobs_come_back() -> None:
    for enable in (True, False):
        dg.set_pdl(enable)
        assert dg.get_pdl() is enable
    before = dg.get_num_sms()
    dg.set_num_sms(5)
    try:
        assert dg.get_num_sms() == 5
    finally:
        dg.set_num_sms(0)
    assert dg.get_num_sms() == before
