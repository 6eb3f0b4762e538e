"""What is built and installed: wheel, source archive, libraries, headers that were read, and the setup script."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import script

import deep_kernels
from deep_kernels import _C

ROOT = Path(__file__).parent.parent
PACKAGE = Path(deep_kernels.__file__).parent
HEADERS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "deep_kernels" / "include").rglob("*")
    if path.suffix in (".h", ".cuh")
)
SCRIPTS = os.pathsep.join([sysconfig.get_path("scripts"), str(Path(sys.executable).parent), os.environ["PATH"]])


def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done  # type: ignore[no-any-return]


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, "PATH": SCRIPTS, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **changes}


# --- wheel --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in the checkout, where the objects of its last build are reused."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this Python has no pip")
    folder = tmp_path_factory.mktemp("wheel")
    # What an earlier build left behind must not get into a wheel.
    stale = (
        ROOT / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "deep_kernels" / "include"
    )
    stale.mkdir(parents=True, exist_ok=True)
    (stale / "stale.h").touch()
    options = ["--no-build-isolation", "--no-deps", "--wheel-dir", str(folder)]
    run([sys.executable, "-m", "pip", "wheel", *options, str(ROOT)], env=environment(), cwd=folder)
    return next(folder.glob("deep_kernels-*.whl"))


def test_wheel_has_headers_stubs_and_marker_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert HEADERS
    modules = [path.relative_to(ROOT).as_posix() for path in (ROOT / "deep_kernels").rglob("*.py")]
    extension = f"deep_kernels/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    expected = [*HEADERS, *modules, extension, "deep_kernels/_C.pyi", "deep_kernels/py.typed"]
    assert sorted(names) == sorted(expected)


def test_wheel_is_tagged_for_this_python_and_says_what_it_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    python, abi, platform = wheel.stem.split("-")[-3:]
    assert python == abi == f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert platform != "any"
    assert "Requires-Python: >=3.10" in text
    assert re.search(r"^Requires-Dist: torch>=2\.11$", text, re.MULTILINE)
    assert f"Version: {deep_kernels.__version__}" in text


@pytest.fixture(scope="module")
def installed_wheel(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel was installed into, which PYTHONPATH has to name."""
    folder = tmp_path_factory.mktemp("installed")
    site = folder / "site packages"
    options = ["--quiet", "--no-deps", "--no-index", "--target", str(site)]
    run([sys.executable, "-m", "pip", "install", *options, str(wheel)], env=environment(), cwd=folder)
    return site


def test_wheel_works_from_another_folder(installed_wheel: Path, tmp_path: Path) -> None:
    script = """
import json, sys, torch
import deep_kernels as dk
from deep_kernels import _C, formats
kv = formats.quantize_fp8(torch.randn(40, 64))
q = torch.randn(3, 8, 64).to(torch.float8_e4m3fn)
ends = torch.tensor([1, 20, 40], dtype=torch.int32)
logits = dk.fp8_fp4_mqa_logits((q, None), kv, torch.ones(3, 8), torch.zeros(3, dtype=torch.int32), ends)
try:
    origin = dk.prepare([{"op": "get_mqa_logits_metadata", "num_heads": 8}], arch="sm_89")[0]["origin"]
except dk.CompileError as error:
    origin = str(error)
facts = {"file": dk.__file__, "finite": logits.isfinite().sum().item(), "digest": _C.include_digest(), "origin": origin}
print(json.dumps(facts))
"""
    variables = environment(PYTHONPATH=str(installed_wheel), DEEP_KERNELS_CACHE_DIR=str(tmp_path / "cache"))
    variables.pop("DEEP_KERNELS_PREBUILT_DIR", None)
    facts = json.loads(run([sys.executable, "-c", script], env=variables, cwd=tmp_path).stdout)
    assert facts["file"] == str(installed_wheel / "deep_kernels" / "__init__.py")
    assert facts["finite"] == 61
    assert facts["digest"] == _C.include_digest()
    assert facts["origin"] == "compiled" or "NVRTC" in facts["origin"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    (
        (
            ("emulate", "fp8_fp4_mqa_logits"),
            "emulate: needs a checkout of the project; an installed package does not hold the emulator\n",
        ),
        (("tune", "mqa_logits"), "tune: needs a checkout of the project, whose tables it writes\n"),
    ),
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_wheel_says_what_needs_a_checkout(
    installed_wheel: Path, tmp_path: Path, words: tuple[str, ...], sentence: str
) -> None:
    command = [sys.executable, "-m", "deep_kernels", *words]
    variables = environment(PYTHONPATH=str(installed_wheel))
    done = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", sentence)


def test_a_package_without_its_extension_says_so(tmp_path: Path) -> None:
    """As a checkout's, in whose folder somebody who has installed the package starts Python."""
    package = tmp_path / "deep_kernels"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(Path(deep_kernels.__file__).parent, package, ignore=ignored)
    command = [sys.executable, "-S", "-c", "import deep_kernels"]  # without the finder of an editable installation
    changed = environment(PYTHONPATH=str(tmp_path))
    done = subprocess.run(command, cwd=tmp_path, env=changed, text=True, capture_output=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: deep_kernels: {package} must hold a built extension, got none: run scripts/setup.sh if it is a "
        "checkout's, or leave that checkout to import an installed package"
    )


# --- source archive -----------------------------------------------------------------------------------------


def test_source_archive_has_all_that_a_build_reads(tmp_path: Path) -> None:
    script = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, env=environment())
    archive = next(tmp_path.glob("deep_kernels-*.tar.gz"))
    with tarfile.open(archive) as content:
        names = {name.partition("/")[2] for name in content.getnames()}
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp")]
    needed = {path.relative_to(ROOT).as_posix() for path in sources}
    needed |= {*HEADERS, "setup.py", "pyproject.toml", "README.md", "deep_kernels/_C.pyi", "deep_kernels/py.typed"}
    assert needed <= names
    assert not [name for name in names if name.endswith((".so", ".pyc", ".o"))]


# --- the extension ------------------------------------------------------------------------------------------


def test_extension_links_nothing_of_cuda() -> None:
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("no readelf")
    text = run([readelf, "--dynamic", "--wide", _C.__file__]).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", text)
    assert "libtorch_cpu.so" in needed
    assert [name for name in needed if re.search(r"cuda|cudart|nvrtc|cublas|cudnn|nvidia", name)] == []
    # Nor any folder of this machine to look for libraries in.
    assert re.findall(r"\((?:RPATH|RUNPATH)\)", text) == []


@pytest.fixture(scope="module")
def dependencies() -> dict[str, list[str]]:
    """Object of the last build in the checkout -> files that it was made of, as the compiler wrote them down."""
    ninja = shutil.which("ninja", path=SCRIPTS)
    folders = sorted((ROOT / "build").glob("temp-*"), key=lambda path: path.stat().st_mtime)
    if ninja is None or not folders:
        pytest.skip("deep_kernels was not built in this checkout, or not by ninja")
    found: dict[str, list[str]] = {}
    files: list[str] = []
    for line in run([ninja, "-t", "deps"], cwd=folders[-1]).stdout.splitlines():
        if line.startswith(" "):
            files.append(line.strip())
        elif ": #deps" in line:
            files = found.setdefault(line.partition(": #deps")[0].removeprefix(f"{folders[-1]}/"), [])
    return found


def test_no_header_of_cuda_is_read(dependencies: dict[str, list[str]]) -> None:
    cuda = re.compile(r"/(?:cuda\w*|nvrtc|driver_types|cublas\w*|vector_types|nvToolsExt)\.h$|/(?:c10|ATen|csrc)/cuda/")
    ours = str(ROOT / "csrc")
    read = {name for files in dependencies.values() for name in files if not name.startswith(ours)}
    assert read
    assert sorted(name for name in read if cuda.search(name)) == []


def test_headers_are_dependencies_of_objects(dependencies: dict[str, list[str]]) -> None:
    sources = {path.relative_to(ROOT).with_suffix(".o").as_posix() for path in (ROOT / "csrc").rglob("*.cpp")}
    assert sources <= set(dependencies)
    contract = ROOT / "deep_kernels/include/deep_kernels/contract/mqa_logits.h"
    for name in ("csrc/ops/mqa_logits.o", "csrc/ops/registry.o", "csrc/cpu/mqa_logits.o"):
        assert str(contract) in dependencies[name]
    assert str(ROOT / "csrc/runtime/store.h") in dependencies["csrc/ops/mqa_logits.o"]
    assert any("/ATen/" in name for name in dependencies["csrc/ops/mqa_logits.o"])


# --- metadata and stubs -------------------------------------------------------------------------------------


def test_versions_agree() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    match = re.search(r'^version = "(.*)"$', text, re.MULTILINE)
    assert match is not None and match[1] == deep_kernels.__version__


def test_installed_version_is_this_one() -> None:
    try:
        installed = importlib.metadata.version("deep_kernels")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("deep_kernels is importable, not installed")
    assert installed == deep_kernels.__version__


def test_stubs_name_what_the_extension_has() -> None:
    body = ast.parse((PACKAGE / "_C.pyi").read_text(encoding="utf-8")).body
    stubs = {node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    assert stubs == {name for name in vars(_C) if not name.startswith("_")}


def test_stubs_have_as_many_parameters_as_the_extension() -> None:
    body = ast.parse((PACKAGE / "_C.pyi").read_text(encoding="utf-8")).body
    for node in body:
        if isinstance(node, ast.FunctionDef):
            signature = (getattr(_C, node.name).__doc__ or "").partition("(")[2].rpartition(") ->")[0]
            parameters = re.findall(r"(?:^|, )(?:arg\d+|\w+): ", signature)
            arguments = node.args.posonlyargs + node.args.args
            assert len(arguments) == len(parameters), f"{node.name}({signature})"


def test_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


# --- scripts/setup.sh ---------------------------------------------------------------------------------------


@pytest.fixture
def setup_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """scripts/environment.py on a checkout of its own."""
    module = script.load("environment")
    root = tmp_path / "a checkout"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "pyproject.toml", root)
    for name, path in {"ROOT": root, "VENV": root / ".venv", "BUILD": root / "build"}.items():
        monkeypatch.setattr(module, name, path)
    monkeypatch.setattr(module, "STATE", root / "build" / "setup.json")
    monkeypatch.setattr(module, "LOG", root / "build" / "setup.log")
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """As much of a checkout as setting up without a build takes, in a folder with a space in its name."""
    root = tmp_path / "a checkout"
    (root / "scripts").mkdir(parents=True)
    for name in ("setup.sh", "environment.py"):
        shutil.copy(ROOT / "scripts" / name, root / "scripts")
    shutil.copy(ROOT / "pyproject.toml", root)
    return root


def set_up(checkout: Path, *options: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(checkout / "scripts" / "setup.sh"), *options]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False)


def can_install_here() -> bool:
    facts = script.load("environment").facts("test")
    return facts["has_pip"] and facts["is_writable"] and not facts["is_managed"] and not facts["missing"]


reuses_this_python = pytest.mark.skipif(
    not can_install_here(), reason="this Python takes no packages, or not all of the test extra is there"
)
QUICK = ("--no-build", "--print-python")


@reuses_this_python
@pytest.mark.parametrize("home", ["none", "read-only", "not there"])
def test_setup_reuses_a_python_with_torch_from_anywhere(checkout: Path, tmp_path: Path, home: str) -> None:
    variables = {"PATH": os.environ["PATH"], "PYTHON": sys.executable}
    if home != "none":
        folder = tmp_path / "home"
        variables["HOME"] = str(folder)
        if home == "read-only":
            folder.mkdir(mode=0o500)
    for _ in range(2):  # the second run has the first one's notes
        done = set_up(checkout, *QUICK, cwd=tmp_path, **variables)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{sys.executable}\n", "")
    assert not (checkout / ".venv").exists()
    if home == "read-only":
        assert list((tmp_path / "home").iterdir()) == []


@reuses_this_python
def test_setup_passes_over_a_python_that_is_too_old(checkout: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("bash", "dirname"):
        (tools / tool).symlink_to(shutil.which(tool) or "")
    for name, text in {"python3": "exit 1", "python3.12": f'exec "{sys.executable}" "$@"'}.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    done = set_up(checkout, *QUICK, cwd=tmp_path, PATH=str(tools))
    assert done.returncode == 0, done.stderr
    assert done.stderr == "setup: python3 is missing or older than 3.10, using python3.12\n"
    assert done.stdout == f"{sys.executable}\n"
    (tools / "python3.12").unlink()
    done = set_up(checkout, *QUICK, cwd=tmp_path, PATH=str(tools))
    assert done.returncode == 1
    assert done.stderr.startswith("setup: Python 3.10 or newer is needed") and done.stderr.count("\n") == 1


def test_setup_refuses_a_python_that_is_none(checkout: Path, tmp_path: Path) -> None:
    done = set_up(checkout, cwd=tmp_path, PATH=os.environ["PATH"], PYTHON=str(tmp_path / "python"))
    assert done.returncode == 1
    assert done.stderr == f"setup: PYTHON={tmp_path / 'python'} is not a Python 3.10 or newer\n"


@pytest.mark.parametrize("notes", ["", "{", "[1]", "1", '{"base": 1, "other": 2}', None])
def test_setup_survives_notes_that_are_broken(setup_module: ModuleType, notes: str | None) -> None:
    if notes is not None:
        setup_module.BUILD.mkdir()
        setup_module.STATE.write_text(notes)
    assert setup_module.State.load() == setup_module.State()


@reuses_this_python
def test_setup_looks_again_when_its_python_is_gone(checkout: Path, tmp_path: Path) -> None:
    (checkout / "build").mkdir()
    notes = {"base": sys.executable, "base_torch": importlib.metadata.version("torch"), "python": "/nonexistent/python"}
    (checkout / "build" / "setup.json").write_text(json.dumps(notes))
    done = set_up(checkout, *QUICK, cwd=tmp_path, PATH=os.environ["PATH"], PYTHON=sys.executable)
    assert (done.returncode, done.stdout) == (0, f"{sys.executable}\n"), done.stderr


def test_setup_brings_numpy_without_the_test_extra_too(setup_module: ModuleType) -> None:
    """torch warns where it is missing."""
    wanted = setup_module.requirements("demo")
    assert "numpy" in wanted
    assert not [name for name in wanted if name.startswith(("pytest", "ruff", "mypy"))]
    assert set(wanted) < set(setup_module.requirements("test"))


def test_half_made_virtual_environment_is_made_anew(
    setup_module: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    venv = setup_module.VENV
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").touch()
    (venv / "bin" / "python").symlink_to("/nonexistent/python")
    python = setup_module.ensure_venv()
    assert capfd.readouterr().err == f"setup: {venv} is broken or half made: making it anew\n"
    assert setup_module.ask(python, "demo")["has_pip"]
    # One that works is left as it is.
    before = os.stat(venv / "pyvenv.cfg")
    assert setup_module.ensure_venv() == python
    assert os.stat(venv / "pyvenv.cfg")[stat.ST_MTIME] == before[stat.ST_MTIME]
    assert capfd.readouterr().err == ""


def test_managed_python_with_torch_gets_a_virtual_environment_beside_it(
    setup_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, ...]] = []
    monkeypatch.setattr(setup_module, "ensure_venv", lambda *options: made.append(options) or Path("venv"))
    monkeypatch.setattr(setup_module, "import_torch", lambda python: ("2.11.0", ""))
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    facts = {"is_writable": True, "is_managed": False, "has_pip": True}
    monkeypatch.setattr(setup_module, "facts", lambda extra: facts)
    assert setup_module.choose_python("test") == (Path(sys.executable), "2.11.0")
    assert made == []
    for change in ({"is_managed": True}, {"is_writable": False}):
        monkeypatch.setattr(setup_module, "facts", lambda extra, change=change: facts | change)
        assert setup_module.choose_python("test") == (Path("venv"), None)
    assert made == [("--system-site-packages",)] * 2


@pytest.mark.parametrize(
    ("version", "good"),
    [("2.11.0+cu130", True), ("2.15.0", True), ("3.0.0a0+git", True), ("2.9.1", False), (None, False)],
)
def test_torch_is_new_enough_from_2_11_on(
    setup_module: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str | None, good: bool
) -> None:
    monkeypatch.setattr(setup_module, "ensure_venv", lambda: Path("venv"))
    monkeypatch.setattr(setup_module, "import_torch", lambda python: (version, ""))
    monkeypatch.setattr(
        setup_module, "facts", lambda extra: {"is_writable": True, "is_managed": False, "has_pip": True}
    )
    expected = (Path(sys.executable), version) if good else (Path("venv"), None)
    assert setup_module.choose_python("test") == expected


def test_torch_that_cannot_be_imported_is_installed_again(
    setup_module: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    answers = [(None, "ImportError: libx.so"), ("2.15.0+cu132", "")]
    installed: list[list[str]] = []
    monkeypatch.setattr(setup_module, "import_torch", lambda python: answers.pop(0))
    monkeypatch.setattr(setup_module, "pip_install", lambda python, packages: installed.append(packages))
    assert setup_module.install_missing(Path("python"), [], None) == "2.15.0+cu132"
    assert installed == [["--force-reinstall", "torch>=2.11"]]
    assert "torch cannot be imported (ImportError: libx.so): installing it again" in capfd.readouterr().err


def test_failing_build_shows_the_errors_of_the_compiler(
    setup_module: ModuleType, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def call(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        options["stdout"].write("x.cpp: In function\nx.cpp:3:1: error: no such thing\nmore\n")  # type: ignore[attr-defined]
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(setup_module, "call", call)
    setup_module.BUILD.mkdir()
    found = {"extension": "/nonexistent", "is_registered": True, "scripts": "/bin"}
    with pytest.raises(setup_module.SetupError, match=r"does not build; all of it is in .*setup\.log"):
        setup_module.build(Path(sys.executable), found)
    assert "  x.cpp:3:1: error: no such thing\n" in capfd.readouterr().err
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(setup_module.SetupError, match=r"C\+\+20 compiler is needed and no-such-compiler is not there"):
        setup_module.build(Path(sys.executable), found)


@pytest.mark.parametrize("path", [*sorted((ROOT / "scripts").glob("*.sh")), ROOT / ".ci" / "run"], ids=lambda p: p.name)
def test_shell_script_parses_and_is_executable(path: Path) -> None:
    run(["bash", "-n", str(path)])
    assert os.access(path, os.X_OK)
