"""README.md: its Python runs, and its commands and links are those of the project."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

import deep_kernels
from deep_kernels.__main__ import main

pytest_plugins = ("runtime_fixtures",)

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]


def fenced(page: Path, language: str) -> list[str]:
    """The blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """The words of every `python -m deep_kernels` line."""
    lines = "".join(fenced(ROOT / "README.md", "sh")).splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    return [line[3:] for line in words if line[:3] == ["python", "-m", "deep_kernels"]]


def after(count: int) -> dict[str, Any]:
    """The names that the first snippets of Python leave."""
    names: dict[str, Any] = {}
    for snippet in fenced(ROOT / "README.md", "python")[:count]:
        exec(snippet, names)
    return names


def test_the_snippet_of_the_op_runs() -> None:
    names = after(1)
    logits, start, end = names["logits"], names["start"], names["end"]
    assert logits.shape == (names["num_q"], names["num_kv"])
    columns = torch.arange(names["num_kv"], dtype=torch.int32)
    inside = (columns >= start[:, None]) & (columns < end[:, None])
    assert torch.equal(logits.isfinite(), inside)
    assert bool((logits[~inside] == -torch.inf).all())


def test_the_snippets_of_other_formats_and_folded_sums_run() -> None:
    names = after(3)
    assert names["q_mx"].shape == (names["num_q"], names["num_heads"], names["head_dim"] // 2)
    assert torch.equal(names["mx_logits"].isfinite(), names["logits"].isfinite())
    assert torch.equal(names["folded"], names["logits"]), "on the CPU folded means exact"


def test_the_snippet_of_the_paged_op_runs() -> None:
    names = after(4)
    for paged in ("paged_logits", "mx_paged"):
        assert names[paged].shape == (2, 1024)
    assert torch.equal(names["paged_logits"].isfinite().sum(dim=1), names["lens"])
    # The same tokens as in the dense snippets, whose first row sees more of them.
    assert torch.equal(names["paged_logits"][0, :700], names["logits"][0, :700])
    assert torch.equal(names["mx_paged"][0, :700], names["mx_logits"][0, :700])


def test_the_snippet_of_the_mlp_runs() -> None:
    names = after(5)
    assert names["y"].shape == (names["num_q"], names["intermediate_size"])
    assert names["mlp_out"].shape == names["hidden"].shape and names["mlp_out"].dtype == torch.bfloat16
    assert torch.equal(names["mlp_out"], names["by_hand"])
    gated = torch.nn.functional.silu(names["hidden"] @ names["gate"].T) * (names["hidden"] @ names["up"].T)
    expected = (gated @ names["down"].T).float()
    assert (names["mlp_out"] - expected).norm() < 0.08 * expected.norm(), "two roundings to e4m3, and weights in it"


def test_the_snippet_of_attention_runs() -> None:
    names = after(6)
    q, k, v, packed = (names[name] for name in ("q", "k", "v", "packed"))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).float() for x in (q[:, -1:], *(x.repeat_interleave(4, 2) for x in (k, v))))
    ).transpose(1, 2)
    assert (names["attended"][:, -1:].float() - wanted).abs().max() < 0.01
    assert (names["emulated"] - names["attended"]).abs().max() < 0.02 and names["share"] == 0.375
    alone = deep_kernels.flash_attn_fwd(q[:1, 10:], k[:1, 200:], v[:1, 200:], causal=True)
    assert torch.equal(packed[10:], alone[0])


def test_the_snippet_that_compiles_ahead_runs(no_settings: Path, nvrtc: tuple[str, str]) -> None:
    *_, ahead = fenced(ROOT / "README.md", "python")
    exec(ahead, {"dk": deep_kernels})
    assert len(list(no_settings.glob("*.dk"))) == 2  # the logits and their schedule


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_commands_are_known(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever does its work elsewhere is asked for its help alone."""
    with pytest.raises(SystemExit) as stop:
        main([*words, "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m deep_kernels {words[0]}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target
