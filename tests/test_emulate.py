"""The command `python -m deep_kernels emulate`."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from emulator import CompilerMissing, build
from emulator.fixtures import emulator_ready  # noqa: F401

from deep_kernels import __main__, emulate


def emulated(*words: str) -> int:
    return __main__.main(["emulate", *words])


class Page(HTMLParser):
    """Counts what the page holds and refuses what it would have to load."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.titles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        assert not {"src", "href"} & {name for name, _ in attrs}


@pytest.mark.parametrize("arch", ["sm90", "sm89"])
def test_text_and_picture(arch: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "picture.html"
    status = emulated("fp8_fp4_mqa_logits", "--shape", "9,600,64,64", "--arch", arch, "--html", str(picture))
    text = capsys.readouterr().out
    assert status == 0, text
    assert '"head_dim": 64' in text
    if arch == "sm90":
        for role in ("math (warps 0-15", "kv (warp 16)", "scheduler (warp 17)", "cleaner (warps 18-19"):
            assert role in text
        assert re.search(r"\d+ +\d+  smem\.kv_filled\[1\] phase 0  \[kernels/mqa_math_sm90\.cuh:\d+\]", text)
        assert "arrives at smem.kv_drained[0] phase 0" in text
        assert re.search(r"tensor cores busy \d+%", text)
    else:
        assert re.search(r"cp\.async  \[kernels/mqa_logits_sm89\.cuh:\d+\]", text)
    page = Page()
    page.feed(picture.read_text())
    assert page.counts["svg"] == 2  # blocks
    assert page.counts["rect"] > 50


def test_every_warp(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--shape", "3,40,8,32", "--all-warps", "--sms", "1", "--html", str(tmp_path / "picture.html"))
    assert emulated("fp8_fp4_mqa_logits", *words) == 0
    text = capsys.readouterr().out
    assert all(f"(warp {warp})" in text for warp in range(20))


@pytest.mark.parametrize(
    ("words", "kernel"),
    [
        (("fp8_fp4_paged_mqa_logits", "--shape", "3,200,64,64"), "paged_mqa_logits on sm90, fp8-b3"),
        (("fp8_fp4_mqa_logits", "--format", "mxfp4", "--shape", "5,300,17,128"), "mqa_logits on sm90, 5x300-h17-d128"),
        (("fp8_fp4_mqa_logits", "--reduction", "folded", "--shape", "5,300,64,128"), '"reduction": "folded"'),
    ],
)
def test_other_kernels(words: tuple[str, ...], kernel: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert emulated(*words, "--html", str(tmp_path / "picture.html")) == 0
    text = capsys.readouterr().out
    assert kernel in text and "math (warps 0-15" in text


def test_metadata(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--shape", "9,600,64,64", "--sms", "3", "--html", str(tmp_path / "picture.html"))
    assert emulated("get_mqa_logits_metadata", *words) == 0
    assert "of each cut: [[0, 0], [" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--shape", "9,600,64"), "--shape must be four integers M,N,H,D, got '9,600,64'"),
        (("--shape", "9,600,64,96"), "head_dim must be 32, 64 or 128, got 96"),
        (
            ("--shape", "9,600,64,100", "--format", "mxfp8"),
            "head_dim must be a multiple of 32 with MX formats, got 100",
        ),
        (("--arch", "sm77"), "arch must be a backend"),
        (("--sms", "0"), "--sms must be at least 1, got 0"),
        (("--block", "9"), "--block must be below the number of blocks, 2, got 9"),
        (("--shape", "0,5,8,32"), "there is nothing to compute"),
    ],
)
def test_refusals(words: tuple[str, ...], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert emulated("fp8_fp4_mqa_logits", *words, "--html", str(tmp_path / "picture.html")) == 2
    message = capsys.readouterr().err
    assert message.startswith("emulate: ") and sentence in message and message.count("\n") == 1


def test_without_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(emulate, "_CHECKOUT", tmp_path)
    assert emulated("fp8_fp4_mqa_logits") == 2
    assert capsys.readouterr().err == (
        "emulate: needs a checkout of the project; an installed package does not hold the emulator\n"
    )


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing() -> str:
        raise CompilerMissing("the emulator needs a C++20 compiler")

    monkeypatch.setattr(build, "compiler", missing)
    assert emulated("fp8_fp4_mqa_logits") == 2
    assert capsys.readouterr().err == "emulate: the emulator needs a C++20 compiler\n"
