"""Makes the checkout usable with this interpreter, or with a virtual environment made from it.

A torch that this interpreter imports is reused if it is new enough; else torch is installed into .venv in the
checkout. Then come the packages that are missing and the extension, editable. Says what it does on standard error,
one line per step, and nothing where nothing is to do.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BUILD = ROOT / "build"
STATE = BUILD / "setup.json"  # what the last run found and made, so that the next one need not look again
LOG = BUILD / "setup.log"
MIN_TORCH = (2, 11)


class SetupError(Exception):
    """Ends the run with one sentence."""


def say(text: str) -> None:
    print(f"setup: {text}", file=sys.stderr, flush=True)


# --- what an interpreter has: asked of it by running this file with --facts --------------------------------


def requirements(extra: str) -> list[str]:
    """What pyproject.toml asks for to build, to run and for an extra, "demo" or "test"."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        from pip._vendor import tomli as tomllib
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    wanted += project["project"]["optional-dependencies"][extra]
    return [*dict.fromkeys(wanted), "pip>=22"]  # 22: editable installs by pyproject.toml


def unmet(wanted: Sequence[str]) -> list[str]:
    from pip._vendor.packaging.requirements import Requirement

    missing = []
    for text in wanted:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate():
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            missing.append(text)
    return missing


def installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_registered() -> bool:
    """Whether deep_kernels is installed editable from this checkout."""
    try:
        origin = importlib.metadata.distribution("deep_kernels").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return False
    found = json.loads(origin or "{}")
    return found.get("url") == ROOT.as_uri() and bool(found.get("dir_info", {}).get("editable"))


def facts(extra: str) -> dict[str, Any]:
    in_venv = sys.prefix != sys.base_prefix
    marker = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"  # PEP 668
    has_pip = importlib.util.find_spec("pip") is not None
    return {
        "python": sys.executable,
        "is_managed": marker.exists() and not in_venv,
        "is_writable": os.access(sysconfig.get_path("purelib"), os.W_OK),
        "has_pip": has_pip,
        "torch": installed("torch"),
        "is_registered": is_registered(),
        "scripts": sysconfig.get_path("scripts"),
        "extension": str(ROOT / "deep_kernels" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"),
        "missing": unmet(requirements(extra)) if has_pip else [],
    }


# --- choosing and making an environment ---------------------------------------------------------------------


def environment() -> dict[str, str]:
    """Variables of every command that is run here: pip asks nothing and writes nowhere it may not."""
    variables = dict(os.environ)
    variables.update(PIP_NO_INPUT="1", PIP_DISABLE_PIP_VERSION_CHECK="1", PIP_ROOT_USER_ACTION="ignore", PIP_USER="0")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    while not cache.exists():
        cache = cache.parent
    if not os.access(cache, os.W_OK):
        variables["PIP_NO_CACHE_DIR"] = "1"
    return variables


def call(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command outside the checkout's root, where its modules would hide installed ones."""
    BUILD.mkdir(exist_ok=True)
    return subprocess.run(
        [str(word) for word in command],
        **{"cwd": BUILD, "env": environment(), "stdin": subprocess.DEVNULL, "text": True, "check": False, **options},
    )


def ask(python: str | Path, extra: str) -> dict[str, Any] | None:
    """Facts of an interpreter; None if it does not run."""
    options = ["--no-tests"] if extra == "demo" else []
    try:
        done = call([python, __file__, "--facts", *options], capture_output=True)
    except OSError:
        return None
    if done.returncode != 0:
        return None
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def import_torch(python: str | Path) -> tuple[str | None, str]:
    """Version of the torch that an interpreter imports, or None and the reason."""
    done = call([python, "-c", "import torch; print(torch.__version__)"], capture_output=True)
    lines = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    last = lines[-1] if lines else f"exit status {done.returncode}"
    return (last, "") if done.returncode == 0 else (None, last)


def is_new_enough(version: str | None) -> bool:
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return match is not None and (int(match[1]), int(match[2])) >= MIN_TORCH


def make_venv(*options: str) -> None:
    done = call([sys.executable, "-m", "venv", *options, VENV], capture_output=True)
    if done.returncode != 0:
        reason = (done.stdout + done.stderr).strip().splitlines()
        raise SetupError(
            f"{sys.executable} cannot make a virtual environment ({reason[0] if reason else 'no reason given'}): "
            "install its venv module (Debian: python3-venv), or name another interpreter as PYTHON"
        )


def ensure_venv(*options: str) -> Path:
    """The interpreter of .venv, which is made, or made anew where it is broken."""
    python = VENV / "bin" / "python"
    if not VENV.exists() and not VENV.is_symlink():
        say(f"making a virtual environment in {VENV}")
        make_venv(*options)
    elif not runs(python):
        say(f"{VENV} is broken or half made: making it anew")
        if VENV.is_symlink() or not VENV.is_dir():
            VENV.unlink()
        make_venv("--clear", *options)
    elif call([python, "-c", "import sys; sys.exit(sys.version_info < (3, 10))"]).returncode != 0:
        raise SetupError(f"{VENV} has a Python older than 3.10: remove it, or name another interpreter as PYTHON")
    if call([python, "-m", "pip", "--version"], capture_output=True).returncode != 0:
        say(f"{VENV} has no working pip: adding it")
        if call([python, "-m", "ensurepip", "--upgrade"], capture_output=True).returncode != 0:
            make_venv("--clear", *options)
    return python


def runs(python: Path) -> bool:
    try:
        return call([python, "-c", ""], capture_output=True).returncode == 0
    except OSError:
        return False


def choose_python(extra: str) -> tuple[Path, str | None]:
    """The interpreter to set up, and its torch if it was looked at already."""
    version, _ = import_torch(sys.executable)
    if not is_new_enough(version):
        return ensure_venv(), None
    here = facts(extra)
    takes_packages = here["is_writable"] and not here["is_managed"]
    if takes_packages and not here["has_pip"]:
        takes_packages = call([sys.executable, "-m", "ensurepip"], capture_output=True).returncode == 0
    if takes_packages:
        return Path(sys.executable), version
    if sys.prefix != sys.base_prefix:
        raise SetupError(f"{sys.executable} has torch, but takes no packages: make it writable and give it pip")
    if not VENV.exists():
        say(f"{sys.executable} has torch {version}, but its packages are managed: adding a virtual environment to it")
    return ensure_venv("--system-site-packages"), None


# --- installing and building --------------------------------------------------------------------------------


def pip_install(python: Path, packages: Sequence[str]) -> None:
    if call([python, "-m", "pip", "install", "--quiet", *packages]).returncode != 0:
        raise SetupError(f"pip could not install {' '.join(packages)}")


def install_missing(python: Path, missing: Sequence[str], version: str | None) -> str:
    """Installs what is missing and returns the version of torch; `version` is that it had, if known."""
    reason = ""
    if version is None:
        version, reason = import_torch(python)
    names = {text: re.split(r"[<>=!~;\[ ]", text)[0] for text in missing}
    if is_new_enough(version):  # one without metadata too: built from source, or found by PYTHONPATH
        missing = [text for text in missing if names[text] != "torch"]
    if missing:
        note = " (some gigabytes, a minute or two)" if "torch" in (names[text] for text in missing) else ""
        say(f"installing {', '.join(names[text] for text in missing)}{note}")
        pip_install(python, missing)
        version, reason = import_torch(python)
    if is_new_enough(version):
        return str(version)
    say(f"torch cannot be imported ({reason}): installing it again")
    pip_install(python, ["--force-reinstall", "torch>={}.{}".format(*MIN_TORCH)])
    version, reason = import_torch(python)
    if not is_new_enough(version):
        raise SetupError(f"torch cannot be imported: {reason or f'version {version} is too old'}")
    return str(version)


def fingerprint() -> str:
    """Changes when a file that the extension is built from does."""
    digest = hashlib.sha256()
    folders = (ROOT / "csrc", ROOT / "deep_kernels" / "include")
    for path in sorted([ROOT / "setup.py", *(file for folder in folders for file in folder.rglob("*.*"))]):
        status = path.stat()
        digest.update(f"{path.relative_to(ROOT)} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def build(python: Path, found: dict[str, Any]) -> None:
    compiler = (os.environ.get("CXX") or "c++").split()[0]
    if shutil.which(compiler) is None:
        raise SetupError(f"a C++20 compiler is needed and {compiler} is not there: install g++ 11 or newer, or set CXX")
    is_first = not Path(found["extension"]).exists()
    say("building the extension" + (f" (a minute or more; {LOG} has the output)" if is_first else ""))
    command: list[str | Path] = [
        python,
        "-m",
        "pip",
        "install",
        "--verbose",
        "--no-build-isolation",
        "--no-deps",
        "--editable",
        ROOT,
    ]
    if found["is_registered"]:  # only the objects may be out of date: two seconds instead of ten
        command = [python, "setup.py", "build_ext", "--inplace"]
    variables = environment()
    variables["PATH"] = os.pathsep.join([found["scripts"], variables.get("PATH", os.defpath)])  # for ninja
    with LOG.open("w") as log:
        done = call(command, cwd=ROOT, env=variables, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode == 0:
        done = call([python, "-c", "import deep_kernels"], capture_output=True)
        if done.returncode == 0:
            return
        raise SetupError(f"the extension cannot be imported: {done.stderr.strip().splitlines()[-1]}")
    lines = LOG.read_text(errors="replace").splitlines()
    errors = [line for line in lines if re.search(r"\b(?:fatal )?error\b", line, re.IGNORECASE)]
    for line in errors[:5] or lines[-5:]:
        print(f"  {line.strip()}", file=sys.stderr)
    raise SetupError(f"the extension does not build; all of it is in {LOG}")


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two runs in one checkout take turns; a killed one leaves no lock behind."""
    BUILD.mkdir(exist_ok=True)
    with (BUILD / ".setup-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass
class State:
    """What a run found and made. A difference means that the next run looks again."""

    base: str = ""  # interpreter that was asked, and its torch as metadata has it
    base_torch: str | None = None
    python: str = ""  # interpreter that was chosen
    torch_package: str | None = None  # its torch, as metadata has it and as it calls itself
    torch: str = ""
    built: str = ""  # fingerprint of the sources and time stamp of the extension

    @staticmethod
    def load() -> State:
        try:
            return State(**json.loads(STATE.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return State()

    def save(self) -> None:
        temporary = STATE.with_suffix(".new")
        temporary.write_text(json.dumps(vars(self), indent=2), encoding="utf-8")
        temporary.replace(STATE)


def stamp(extension: str, torch: str) -> str:
    path = Path(extension)
    return f"{fingerprint()} {path.stat().st_mtime_ns if path.exists() else 0} torch {torch}"


def set_up(extra: str, with_build: bool) -> Path:
    state = State.load()
    base, base_torch = sys.executable, installed("torch")
    found = torch = None
    if (state.base, state.base_torch) == (base, base_torch):
        found = ask(state.python, extra)
    python = Path(state.python)
    if found is None or not found["has_pip"]:
        python, torch = choose_python(extra)
        found = ask(python, extra)
        if found is None:
            raise SetupError(f"{python} does not run this script")
        state = State(base, base_torch, str(python))
    did_something = False
    if found["missing"] or not state.torch or found["torch"] != state.torch_package:
        did_something = bool(found["missing"])
        state.torch = install_missing(python, found["missing"], torch)
        found = ask(python, extra) or found
        state.torch_package = found["torch"]
        state.save()
    if with_build and (not found["is_registered"] or state.built != stamp(found["extension"], state.torch)):
        did_something = True
        build(python, found)
        state.built = stamp(found["extension"], state.torch)
        state.save()
    if did_something:
        say(f"ready, with torch {state.torch}: {python}")
    return python


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/setup.sh", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-tests", action="store_true", help="what the demo needs, without tests and checks")
    parser.add_argument("--no-build", action="store_true", help="without building and registering deep_kernels")
    parser.add_argument("--print-python", action="store_true", help="print the interpreter that was set up")
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    extra = "demo" if args.no_tests else "test"
    if args.facts:
        print(json.dumps(facts(extra)))
        return 0
    try:
        with one_at_a_time():
            python = set_up(extra, not args.no_build)
    except (SetupError, OSError) as error:
        say(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    if args.print_python:
        print(python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
