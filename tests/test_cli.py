"""The command line: what each command shows, writes and refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh import SCHEDULE

import deep_kernels as dk
from deep_kernels import _C, environment, inspector
from deep_kernels.__main__ import main

pytest_plugins = ("runtime_fixtures",)

ROOT = Path(__file__).parents[1]
COMPILE = ["compile", "--op", "get_mqa_logits_metadata"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], no_settings: Path) -> Run:
    """Runs a command; exit code, stdout and stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        try:
            code = main(words)
        except SystemExit as stop:  # argparse
            code = int(stop.code or 0)
        output = capsys.readouterr()
        assert "Traceback" not in output.err
        return code, output.out, output.err

    return call


@pytest.fixture
def two(warm: Path) -> tuple[Path, Path]:
    """Two entries in the cache folder."""
    other = dk.prepare([SCHEDULE | {"num_heads": 16}], arch="sm_89")[0]
    return warm, Path(other["file"])


# --- the commands as users start them --------------------------------------------------------------------


def python_m(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DEEP_KERNELS_")}
    environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(dk.__file__).parents[1]), environ.get("PYTHONPATH")])
    )
    command = [sys.executable, "-m", "deep_kernels", *words]
    return subprocess.run(command, env=environ | env, cwd="/", capture_output=True, text=True, check=False)


def test_as_a_command(tmp_path: Path) -> None:
    done = python_m("list", DEEP_KERNELS_CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"no entries in {tmp_path}\n", "")


def test_a_refusal_as_a_command(tmp_path: Path) -> None:
    done = python_m(*COMPILE, "--arch", "sm_7", DEEP_KERNELS_CACHE_DIR=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "deep_kernels: get_mqa_logits_metadata: arch must be a backend (sm89, sm90, sm100), a target such as sm_90a, "
        "or both as sm89:sm_90a, got 'sm_7'\n"
    )


def test_a_reader_that_has_seen_enough(two: tuple[Path, Path]) -> None:
    code = f"from deep_kernels.__main__ import main; import sys; sys.path[:0] = {sys.path!r}; sys.exit(main(['list']))"
    read, write = os.pipe()
    os.close(read)
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run([sys.executable, "-c", code], env=env, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, b"")


# --- help and words --------------------------------------------------------------------------------------


def test_help_of_every_command(run: Run) -> None:
    code, text, _ = run("--help")
    assert code == 0
    commands = re.findall(r"^    (\w+) ", text, re.MULTILINE)
    assert {"env", "list", "show", "dump", "compile", "clear", "demo"} <= set(commands)
    for command in commands:
        code, text, errors = run(command, "--help")
        assert (code, errors) == (0, "")
        assert 3 < len(text.split("\n")) < 50, "one page"


@pytest.mark.parametrize(
    "words",
    [[], ["shew"], ["show"], ["dump"], ["compile"], ["env", "--all"], ["list", "x"], ["clear", "--jobs", "2"]],
)
def test_words_that_are_no_command(run: Run, words: list[str]) -> None:
    code, out, errors = run(*words)
    assert (code, out) == (2, "")
    assert errors.startswith("usage: python -m deep_kernels")


def test_demo_is_imported_for_the_demo_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "deep_kernels.demo", raising=False)
    monkeypatch.delattr(dk, "demo", raising=False)
    assert run("list")[0] == 0
    assert "deep_kernels.demo" not in sys.modules
    code, out, errors = run("demo")
    assert "deep_kernels.demo" in sys.modules
    assert (code, out) == (2, "")
    assert errors.startswith("demo: ")


# --- env -------------------------------------------------------------------------------------------------


def test_env(run: Run, two: tuple[Path, Path], nvrtc: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_KERNELS_PREBUILT_DIR", "/nonexistent")
    code, text, errors = run("env")
    assert (code, errors) == (0, "")
    for fact in (dk.__version__, torch.__version__, sys.version.split()[0], *nvrtc):
        assert fact in text
    assert re.search(rf"cache +{two[0].parent} +2 entries, \d+\.\d kB", text)
    assert re.search(r"prebuilt +/nonexistent +does not exist", text)
    assert "wrong: there is no such folder" in text
    for name, meaning in environment.SETTINGS.items():
        assert re.search(rf"{name} +.*{re.escape(meaning)}", text)
    if not torch.cuda.is_available():
        assert re.search(r"GPUs\n  none: \w+", text)
    for row in _C.tuning_rows():
        measured = f"measured on {row['gpu']}, {row['date']}" if row["gpu"] else "not measured"
        words = [row["backend"], row["op"], row["cases"], row["choice"], measured]
        words += [f"gains {row['gain']:.1%}"] * bool(row["gain"]) + [row["reason"]]
        assert re.search(" +".join(map(re.escape, words)), text), row


def test_env_without_nvrtc_and_with_bad_settings(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise dk.CompileError("NVRTC was not found: of the test")

    monkeypatch.setattr(_C, "nvrtc", missing)
    for name, value in (
        ("NO_COMPILE", "yes"),
        ("LINEINFO", "no"),
        ("ARCH", "sm_1"),
        ("MQA_CLEAN", "x"),
        ("SILU_FOLD_PREFILL", "y"),
        ("SILU_TILE", "96"),
    ):
        monkeypatch.setenv(f"DEEP_KERNELS_{name}", value)
    monkeypatch.setenv("DEEP_KERNELS_CACHEDIR", "/typo")
    code, text, errors = run("env")
    assert (code, errors) == (0, "")
    assert re.search(r"NVRTC +none +NVRTC was not found: of the test", text)
    assert len(re.findall(r"DEEP_KERNELS_\w+ .*\(wrong: ", text)) == 6
    assert re.search(r"DEEP_KERNELS_CACHEDIR +/typo +unknown", text)


H200 = ("NVIDIA H200", 90, 132)


@pytest.mark.parametrize(
    ("facts", "lines"),
    [
        (H200, ["0: NVIDIA H200, compute capability 9.0, 132 SMs", "calls use sm90 for sm_90a; tuning rows measured"]),
        (
            ("NVIDIA H100 PCIe", 90, 114),
            ["calls use sm90 for sm_90a; tuning was not measured on this card: it takes the sm90 rows, those of NVID"],
        ),
        (("NVIDIA L4", 89, 58), ["calls use sm89 for sm_89; tuning was not measured on this card"]),
        (("NVIDIA A100", 80, 108), ["a card of compute capability 8.9 or newer is needed, this one has 8.0"]),
    ],
)
def test_env_with_a_card(
    run: Run, monkeypatch: pytest.MonkeyPatch, facts: tuple[str, int, int], lines: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(_C, "device_facts", lambda index: facts)
    monkeypatch.setattr(_C, "driver_version", lambda: "13.0")
    _, text, _ = run("env")
    assert all(line in text for line in lines), text


def test_settings_are_those_of_the_sources() -> None:
    if not (ROOT / "csrc").is_dir():
        pytest.skip("needs the checkout")
    pattern = re.compile(r'"(DEEP_KERNELS_[A-Z_]+)"')
    sources = [*(ROOT / "csrc").rglob("*.cpp"), ROOT / "deep_kernels" / "nn.py"]
    read = {name for file in sources for name in pattern.findall(file.read_text())}
    assert read == set(environment.SETTINGS)
    readme = (ROOT / "README.md").read_text()
    assert set(re.findall(r"^\| `(DEEP_KERNELS_[A-Z_]+)", readme, re.MULTILINE)) == read


# --- list and show ---------------------------------------------------------------------------------------


def test_list(run: Run, two: tuple[Path, Path]) -> None:
    code, text, errors = run("list")
    assert (code, errors) == (0, "")
    header, *rows = [re.split(r"  +", line) for line in text.splitlines()]
    assert header == ["key", "op", "target", "spec", "registers", "spills", "size", "seconds", "folder"]
    for file, row in zip(sorted(two), rows, strict=True):
        about = json.loads(_C.read_entry(file)["about"])
        heads = about["spec"]["num_heads"]
        assert row[:4] == [file.stem.split("-")[0][-16:], "mqa_schedule", "sm_89", f"sm89 num_heads={heads}"]
        assert row[4:6] == [str(about["registers"]), "0"]
        assert row[6] == f"{file.stat().st_size / 1e3:.1f} kB"
        assert row[7:] == [f"{about['compile_seconds']:.2f}", "cache"]


def test_list_shows_the_spills_that_the_limit_compares(run: Run, warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = _C.read_entry(warm)
    about = json.loads(content["about"]) | {"spill_store_bytes": 8, "spill_load_bytes": 12}
    monkeypatch.setattr(_C, "read_entry", lambda file: content | {"about": json.dumps(about)})
    header, row = (re.split(r"  +", line) for line in run("list")[1].splitlines())
    assert row[header.index("spills")] == "12"


def test_list_shows_what_is_broken(run: Run, two: tuple[Path, Path], entry: dict[str, Any]) -> None:
    two[0].write_bytes(b"x")
    foreign = two[0].with_name("dk_strange.dk")
    foreign.write_bytes(b"x" * 100)
    (two[0].parent / "notes.txt").write_text("nothing of ours")
    code, text, _ = run("list")
    assert code == 0
    assert len(text.splitlines()) == 4
    assert text.count("broken: truncated header") == 1
    assert text.count("broken: not an entry of deep_kernels") == 1
    code, out, errors = run("show", two[0].stem)
    assert (code, out, errors) == (2, "", f"deep_kernels: {two[0]}: truncated header\n")


def test_list_of_both_folders(
    run: Run, two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prebuilt = tmp_path / "prebuilt"
    prebuilt.mkdir()
    shutil.copy(two[1], prebuilt)
    monkeypatch.setenv("DEEP_KERNELS_PREBUILT_DIR", str(prebuilt))
    rows = [line.split() for line in run("list")[1].splitlines()[1:]]
    assert sorted(row[-1] for row in rows) == ["cache", "prebuilt"], "one line a kernel: the one that calls use"
    assert re.search(rf"^file +{prebuilt}", run("show", two[1].stem)[1], re.MULTILINE)


def test_show(run: Run, two: tuple[Path, Path]) -> None:
    about = json.loads(_C.read_entry(two[0])["about"])
    name = two[0].stem
    for key in (name, name[5:40], about["entry"][-16:], about["entry"][-16:-6]):
        code, text, errors = run("show", key)
        assert (code, errors) == (0, "")
    facts = dict(re.split(r"  +", line.strip(), maxsplit=1) for line in text.splitlines())
    assert facts["entry"] == about["entry"]
    assert facts["file"] == str(two[0])
    assert (facts["op"], facts["target"], facts["NVRTC"]) == ("mqa_schedule", "sm_89", about["nvrtc"])
    assert (facts["backend"], facts["num_heads"]) == ("sm89", "8")
    assert facts["options"].split() == _C.compile_options("sm_89")
    assert facts["headers"] == f"{_C.include_digest()} (as installed)"
    assert facts["registers"] == str(about["registers"])
    assert facts["spills"] == f"0 bytes stored, 0 loaded, {about['spill_limit_bytes']} allowed"


@pytest.mark.parametrize("command", ["show", "dump"])
def test_keys_that_name_no_single_entry(run: Run, two: tuple[Path, Path], command: str) -> None:
    code, out, errors = run(command, "relu")
    sentence = f"deep_kernels: no entry in {two[0].parent} has 'relu' in its name\n"
    assert (code, out, errors) == (2, "", sentence)
    code, out, errors = run(command, "mqa_schedule")
    names = ", ".join(sorted(file.stem for file in two))
    assert (code, out) == (2, "")
    assert errors == f"deep_kernels: 2 entries have 'mqa_schedule' in their names: {names}\n"


# --- dump ------------------------------------------------------------------------------------------------


def test_dump_source(run: Run, warm: Path) -> None:
    source = _C.read_entry(warm)["source"]
    for words in ([], ["--src"]):
        assert run("dump", warm.stem, *words) == (0, source + "\n", "")


def test_dump_ptx(run: Run, warm: Path, entry: dict[str, Any]) -> None:
    code, text, errors = run("dump", warm.stem, "--ptx")
    assert (code, errors) == (0, "")
    assert ".target sm_89" in text
    assert f".visible .entry {entry['entry']}(" in text
    assert "\0" not in text


def test_dump_ptx_says_when_it_is_of_other_headers(run: Run, warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "include_digest", lambda: "0" * 16)
    monkeypatch.setattr(_C, "nvrtc", lambda: ("/lib", "99.1"))
    code, text, errors = run("dump", warm.stem, "--ptx")
    assert (code, ".entry" in text) == (0, True)
    assert "the headers have changed since the entry was made" in errors
    assert "this is PTX of NVRTC 99.1" in errors
    monkeypatch.setattr(_C, "compile_to_ptx", lambda source, options: (False, "", "an error of the compiler"))
    code, text, errors = run("dump", warm.stem, "--ptx")
    assert (code, text) == (2, "")
    assert f"{warm.stem} does not compile any more: an error of the compiler" in errors


def test_dump_sass(run: Run, warm: Path, entry: dict[str, Any], tmp_path: Path) -> None:
    if inspector.disassembler() is None:
        pytest.skip("needs nvdisasm or cuobjdump, of the package triton")
    code, text, errors = run("dump", warm.stem, "--sass")
    assert (code, errors) == (0, "")
    assert entry["entry"] in text
    assert re.search(r"\bEXIT\b", text)


def test_dump_sass_by_cuobjdump(run: Run, warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = inspector.disassembler()
    other = tool and tool.with_name("cuobjdump")
    if other is None or not other.exists():
        pytest.skip("needs cuobjdump, of the package triton")
    monkeypatch.setattr(inspector, "disassembler", lambda: other)
    code, text, errors = run("dump", warm.stem, "--sass")
    assert (code, errors) == (0, "")
    assert re.search(r"\bEXIT\b", text)


def test_dump_sass_without_a_disassembler(run: Run, warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspector.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "/nonexistent")
    code, out, errors = run("dump", warm.stem, "--sass")
    sentence = "deep_kernels: machine code needs nvdisasm or cuobjdump, of the package triton or on the PATH\n"
    assert (code, out, errors) == (2, "", sentence)


def test_dump_sass_when_the_disassembler_fails(
    run: Run, warm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvdisasm"
    tool.write_text("#!/bin/sh\necho no good >&2\nexit 3\n")
    tool.chmod(0o755)
    monkeypatch.setattr(inspector.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert run("dump", warm.stem, "--sass") == (2, "", f"deep_kernels: {tool} failed: no good\n")


def test_dump_to_a_folder(run: Run, warm: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    code, text, errors = run("dump", warm.stem, "--src", "--ptx", "--out", str(out))
    assert (code, errors) == (0, "")
    assert text.splitlines() == [str(out / f"{warm.stem}.cu"), str(out / f"{warm.stem}.ptx")]
    assert (out / f"{warm.stem}.cu").read_text() == _C.read_entry(warm)["source"]
    assert ".entry" in (out / f"{warm.stem}.ptx").read_text()
    code, text, errors = run("dump", warm.stem, "--out", "/dev/null/no")
    assert (code, text) == (2, "")
    assert errors.startswith("deep_kernels: ")


# --- compile ---------------------------------------------------------------------------------------------


def test_compile_of_a_product(run: Run, no_settings: Path, nvrtc: tuple[str, str]) -> None:
    words = [*COMPILE, "--num-heads", "8", "16", "--arch", "sm_89", "--num-heads", "32", "--jobs", "2"]
    code, text, errors = run(*words)
    assert (code, errors) == (0, "")
    lines = text.splitlines()
    assert len(lines) == 3
    assert all(re.fullmatch(r"compiled +\d+\.\d\d s  dk_mqa_schedule_sm_89_[0-9a-f]{16}", line) for line in lines)
    assert len(os.listdir(no_settings)) == 3
    code, text, _ = run(*words)
    assert [line.split()[0] for line in text.splitlines()] == ["cache"] * 3
    code, text, _ = run(*COMPILE, "--arch", "sm_89", "sm_90a", "--num-heads=16", "--num-heads=8", "--arch", "sm_89")
    origins = {line.split()[-1][:-17]: [] for line in text.splitlines()}
    for line in text.splitlines():
        origins[line.split()[-1][:-17]].append(line.split()[0])
    assert origins == {"dk_mqa_schedule_sm_89": ["cache"] * 2, "dk_mqa_schedule_sm_90a": ["compiled"] * 2}


def test_compile_takes_every_field_of_a_case(run: Run, no_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def prepare(cases: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
        asked.append((cases, options["arch"], options["jobs"]))
        return [{"entry": "dk_x", "origin": "cache", "seconds": 0.5, "file": "/x"}]

    monkeypatch.setattr(dk._runtime, "prepare", prepare)
    words = "--op a b --arch sm89 sm_90a --format fp8 mxfp8 --clean-logits false --metadata --max-seqlen-k=-1 --jobs 3"
    assert run("compile", *words.split()) == (0, "cache       0.50 s  dk_x\n", "")
    rest = {"clean_logits": "false", "metadata": "true", "max_seqlen_k": "-1"}
    cases = [{"op": op, "format": format} | rest for op in "ab" for format in ("fp8", "mxfp8")]
    assert asked == [(cases, "sm89", 3), (cases, "sm_90a", 3)]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--arch", "sm_90a", "--op", "relu"], "op must be one of "),
        (["--arch", "sm_90a", "--colour", "red"], "get_mqa_logits_metadata: a case has no field named colour"),
        (["--arch", "sm_90a", "--num-heads", "x"], "get_mqa_logits_metadata: num_heads must be an integer, got 'x'"),
        (["--arch", "sm_90a", "--num-heads", "8", "200"], "get_mqa_logits_metadata: num_heads must be from 1 to 128"),
        (["--arch", "sm_90a", "--jobs", "0"], "prepare: jobs must be 1 or more, got 0"),
        (["--arch", "sm90:sm_89"], "get_mqa_logits_metadata: backend sm90 cannot be compiled for target sm_89"),
        (["--arch", "cpu"], "nothing to compile for the CPU; name a target, for example --arch sm_90a"),
    ],
)
def test_compile_refuses_in_one_sentence(run: Run, no_settings: Path, words: list[str], sentence: str) -> None:
    code, out, errors = run(*COMPILE, *words)
    assert (code, out) == (2, "")
    assert errors.startswith(f"deep_kernels: {sentence}")
    assert errors.count("\n") == 1
    assert not no_settings.exists()


def test_compile_of_what_cannot_be_compiled(run: Run, nvrtc: tuple[str, str]) -> None:
    code, out, errors = run(*COMPILE, "--arch", "sm_999")
    assert (code, out) == (2, "")
    assert errors.startswith("deep_kernels: compiling mqa_schedule for sm_999 failed\nspec: ")


def test_compile_says_when_nothing_was_saved(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nvrtc: tuple[str, str]
) -> None:
    monkeypatch.setenv("DEEP_KERNELS_CACHE_DIR", "/dev/null/none")
    # A kernel of no other test: it stays in the memory of this process.
    code, out, errors = run(*COMPILE, "--arch", "sm_89", "--num-heads", "128")
    assert code == 2
    assert len(out.splitlines()) == 1
    assert errors.endswith("deep_kernels: 1 of 1 kernels could not be saved\n")


# --- clear -----------------------------------------------------------------------------------------------


def test_clear(run: Run, two: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = two[0].parent
    prebuilt = Path(shutil.copytree(folder, tmp_path / "prebuilt"))
    monkeypatch.setenv("DEEP_KERNELS_PREBUILT_DIR", str(prebuilt))
    (folder / f".writing-1-00c0ffee-{two[0].name}").write_bytes(b"half")
    of_others = ("mine.txt", "drawing.dk", "dk_notes.dk", ".writing-1-x-dk_y.dk", ".writing-diary", ".moved-out")
    for name in of_others:
        (folder / name).write_text("of the user")
    folders = (f".moved-1-00c0ffee-{two[0].name}", ".moved-in", f".writing-2-00c0ffee-{two[0].name}", "dk_x-nvrtc1.dk")
    for name in folders:
        (folder / name).mkdir()
        (folder / name / "file").touch()
    size = inspector.size_text(inspector.total_size([Path(file) for file in _C.removable_files(folder)]))
    assert run("clear", "--dry-run") == (0, f"3 files, {size}, would be removed from {folder}\n", "")
    assert len(os.listdir(folder)) == 3 + len(of_others) + len(folders)
    assert run("clear") == (0, f"3 files, {size}, removed from {folder}\n", "")
    assert sorted(os.listdir(folder)) == sorted(of_others + folders)
    assert all(os.listdir(folder / name) == ["file"] for name in folders)
    assert len(os.listdir(prebuilt)) == 2
    assert run("clear") == (0, f"0 files, 0.0 kB, removed from {folder}\n", "")


def test_clear_of_nothing(run: Run, no_settings: Path) -> None:
    assert run("clear") == (0, f"0 files, 0.0 kB, removed from {no_settings}\n", "")
    assert not no_settings.exists()


def test_folder_names_in_a_locale_without_them(tmp_path: Path, entry: dict[str, Any]) -> None:
    """Python then hands bytes beyond ASCII around in its own way, and takes them back in no other."""
    folder = tmp_path / "café"
    folder.mkdir()
    shutil.copy(entry["file"], folder)
    env = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    env["DEEP_KERNELS_CACHE_DIR"] = os.fspath(folder)
    for words in (["show", entry["entry"]], ["clear"]):
        done = subprocess.run([sys.executable, "-m", "deep_kernels", *words], env=env, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, b"")
    assert list(folder.iterdir()) == []
