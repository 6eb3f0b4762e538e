"""What every tuner's command does with times that were kept: the same steps for each table."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from script import ROOT

from deep_kernels.__main__ import main

# Of a tuner that is not that of mqa_logits.
by_what_cannot_be_measured = pytest.mark.parametrize(
    ("words", "sentence"),
    (
        ([], "tune: a CUDA device is needed, torch sees none"),
        (["--formats", "fp8"], "tune: --formats is for mqa_logits alone"),
    ),
)


def header_holds(header: str, text: str, facts: Sequence[str], folder: Path) -> None:
    """Requires C++ expressions to be true where the header, as the library includes it, has this text."""
    compiler = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    (folder / header).parent.mkdir()
    (folder / header).write_text(text)
    source = folder / "find.cpp"
    program = "\n".join(f"static_assert({fact});" for fact in facts)
    source.write_text(f'#include "{header}"\nusing namespace deep_kernels;\n{program}\n')
    includes = [f"-I{path}" for path in (folder, ROOT / "csrc", ROOT / "deep_kernels" / "include")]
    command = [compiler, "-std=c++20", "-Wall", "-Werror", "-fsyntax-only", *includes, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def makes_the_table(name: str, copy: Path, original: Path, saved: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """A dry run, a run, the same run again and a check; returns what the first run said beside the table."""
    words = ["tune", name, "--table", str(copy), "--load", str(saved)]
    assert main([*words, "--dry-run"]) == 0
    text = capsys.readouterr().out
    assert copy.read_text() == original.read_text(), "a dry run writes nothing"
    assert main(words) == 0
    assert copy.read_text() == text != original.read_text()
    errors = capsys.readouterr().err
    assert "build the extension again" in errors
    assert main(words) == 0
    assert copy.read_text() == text, "the same times make the same bytes"
    assert main([*words[:4], "--check"]) == 0
    capsys.readouterr()
    return errors


def finds_what_was_changed_by_hand(name: str, copy: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert text != copy.read_text()
    copy.write_text(text)
    assert main(["tune", name, "--table", str(copy), "--check"]) == 2
    assert "it was changed by hand" in capsys.readouterr().err


def cannot_measure(
    name: str,
    copy: Path,
    original: Path,
    words: list[str],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["tune", name, "--table", str(copy), *words]) == 2
    assert capsys.readouterr().err == f"deep_kernels: {sentence}\n"
    assert copy.read_text() == original.read_text()
