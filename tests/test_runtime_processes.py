"""The runtime under threads, processes, fork, kill and warnings turned into errors."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from fresh import Fresh, run_threads, wait_for

import deep_kernels as dk
from deep_kernels import _C

pytest_plugins = ("runtime_fixtures",)

# Functions named *_in_child run in children of tests/fresh.py, by their text: they see `dk`, `_C` and the helpers of
# that module there. Their kernels are schedules, which compile fastest.


def read_log(path: Path) -> list[tuple[str, int]]:
    """What tests/nvrtc_shim.c noted: ("begin" or "end", ns)."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [(line.split()[0], int(line.split()[1])) for line in lines]


def num_compilations(path: Path) -> int:
    return sum(what == "begin" for what, _ in read_log(path))


# --- threads ---------------------------------------------------------------------------------------------


def same_key_in_child(num_threads: int) -> list[str]:
    def build() -> str:
        return _C.prepare("get_mqa_logits_metadata", "sm_89", {"num_heads": "8"}, None)[0]["origin"]

    warnings.simplefilter("ignore")
    return run_threads([build] * num_threads)


@pytest.mark.parametrize("folder", ["cache", "none"])
def test_threads_compile_a_key_once(fresh: Fresh, shim: dict[str, str], tmp_path: Path, folder: str) -> None:
    """Also where no folder takes it."""
    place = tmp_path / "cache" if folder == "cache" else Path("/dev/null/cache")
    env = shim | {"DEEP_KERNELS_CACHE_DIR": str(place), "SHIM_LOG": str(tmp_path / "log"), "SHIM_SLEEP": "200"}
    origins = fresh.run(same_key_in_child, 8, env=env)
    assert num_compilations(tmp_path / "log") == 1
    assert origins.count("compiled") == 1
    assert set(origins) <= {"compiled", "memory", "cache"}


def same_failure_in_child(num_threads: int) -> list[str]:
    def build() -> str:
        with pytest.raises(dk.CompileError) as error:
            _C.prepare("get_mqa_logits_metadata", "sm_99", {"num_heads": "8"}, None)
        return str(error.value)

    return [*run_threads([build] * num_threads), build()]


def test_a_failure_reaches_every_waiting_thread(fresh: Fresh, shim: dict[str, str], tmp_path: Path) -> None:
    env = shim | {"DEEP_KERNELS_CACHE_DIR": str(tmp_path / "c"), "SHIM_LOG": str(tmp_path / "log"), "SHIM_SLEEP": "300"}
    messages = fresh.run(same_failure_in_child, 4, env=env)
    assert all("compiling mqa_schedule for sm_99 failed" in message for message in messages)
    assert 2 <= num_compilations(tmp_path / "log") < 5, "shared by those who waited, and tried again later"


def different_keys_in_child() -> int:
    """Ticks of a Python thread while three others are inside NVRTC."""
    ticks, done = 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.01):
            ticks += 1

    def build(heads: int) -> None:
        _C.prepare("get_mqa_logits_metadata", "sm_89", {"num_heads": str(heads)}, None)

    ticker = threading.Thread(target=tick)
    ticker.start()
    run_threads([lambda heads=heads: build(heads) for heads in (8, 16, 32)])
    done.set()
    ticker.join()
    return ticks


def test_different_keys_compile_in_parallel_and_python_goes_on(
    fresh: Fresh, shim: dict[str, str], tmp_path: Path
) -> None:
    env = shim | {"DEEP_KERNELS_CACHE_DIR": str(tmp_path / "c"), "SHIM_LOG": str(tmp_path / "log"), "SHIM_SLEEP": "900"}
    ticks = fresh.run(different_keys_in_child, env=env)
    log = read_log(tmp_path / "log")
    assert max(when for what, when in log if what == "begin") < min(when for what, when in log if what == "end")
    assert len(log) == 6
    assert ticks > 20, "the lock of Python is free meanwhile"


# --- processes -------------------------------------------------------------------------------------------


def race_in_child(go: str) -> dict[str, Any]:
    wait_for(lambda: os.path.exists(go))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = dk.prepare([{"op": "get_mqa_logits_metadata", "num_heads": 8}], arch="sm_89", jobs=1)[0]
    return report | {"warnings": [str(warning.message) for warning in caught]}


def test_processes_race_on_one_key(fresh: Fresh, shim: dict[str, str], tmp_path: Path, entry: dict[str, Any]) -> None:
    cache = tmp_path / "cache"
    env = shim | {"DEEP_KERNELS_CACHE_DIR": str(cache), "SHIM_LOG": str(tmp_path / "log"), "SHIM_SLEEP": "300"}
    children = [fresh.start(race_in_child, str(tmp_path / "go"), env=env) for _ in range(4)]
    (tmp_path / "go").touch()
    outcomes = [child.wait() for child in children]
    assert [(outcome.status, outcome.value["warnings"]) for outcome in outcomes] == [(0, [])] * 4
    assert num_compilations(tmp_path / "log") >= 2, "it was a race"
    assert os.listdir(cache) == [Path(entry["file"]).name]
    assert fresh.run(race_in_child, "/", env=env)["origin"] == "cache"


def clear_in_child(folder: str, stop: str) -> int:
    removed = 0
    while not os.path.exists(stop):
        removed += _C.clear_cache(folder)
        if removed % 2:
            with contextlib.suppress(OSError):
                os.rmdir(folder)
    return removed


def prepare_often_in_child(num_times: int) -> list[str]:
    origins = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(num_times):
            origins.append(dk.prepare([{"op": "get_mqa_logits_metadata", "num_heads": 8}], arch="sm_89")[0]["origin"])
    return origins + [str(warning.message) for warning in caught]


def test_clearing_under_a_running_process(fresh: Fresh, tmp_path: Path, nvrtc: tuple[str, str]) -> None:
    """Another process removes entries, half-written files and the folder itself: no call is lost."""
    cache, stop = tmp_path / "cache", tmp_path / "stop"
    clearing = fresh.start(clear_in_child, str(cache), str(stop))
    try:
        results = fresh.run(prepare_often_in_child, 10, env={"DEEP_KERNELS_CACHE_DIR": cache})
    finally:
        stop.touch()
    assert clearing.wait().status == 0
    assert set(results[:10]) <= {"compiled", "cache", "memory"}
    unwritable = "cannot be written (No such file or directory): kernels are kept in memory only"
    assert all(message.endswith(unwritable) for message in results[10:])


# --- kill ------------------------------------------------------------------------------------------------


def test_kill_in_mid_compile_leaves_nothing(fresh: Fresh, shim: dict[str, str], tmp_path: Path) -> None:
    cache, log = tmp_path / "cache", tmp_path / "log"
    env = shim | {"DEEP_KERNELS_CACHE_DIR": str(cache), "SHIM_LOG": str(log)}
    child = fresh.start(race_in_child, "/", env=env | {"SHIM_SLEEP": "60000"})
    wait_for(lambda: num_compilations(log) == 1)
    child.kill()
    assert child.wait().signal == signal.SIGKILL
    assert not cache.exists() or os.listdir(cache) == []
    report = fresh.run(race_in_child, "/", env=env)
    assert (report["origin"], report["warnings"]) == ("compiled", [])


def die_while_writing_in_child() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # death at the byte after the limit
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
    dk.prepare([{"op": "get_mqa_logits_metadata", "num_heads": 8}], arch="sm_89")


def test_kill_in_mid_write_hurts_nobody(fresh: Fresh, tmp_path: Path, entry: dict[str, Any]) -> None:
    env = {"DEEP_KERNELS_CACHE_DIR": tmp_path}
    assert fresh.start(die_while_writing_in_child, env=env).wait().signal == signal.SIGXFSZ
    (half,) = tmp_path.iterdir()
    assert half.name.startswith(".writing-")
    assert half.stat().st_size == 5000
    assert _C.cache_files(tmp_path) == [], "it is no entry"
    reports = [fresh.run(race_in_child, "/", env=env) for _ in range(2)]
    assert [(report["origin"], report["warnings"]) for report in reports] == [("compiled", []), ("cache", [])]
    assert _C.cache_files(tmp_path) == [str(tmp_path / Path(entry["file"]).name)]
    assert _C.clear_cache(tmp_path) == 2
    assert os.listdir(tmp_path) == []


# --- fork ------------------------------------------------------------------------------------------------


def fork_in_child(cases: list[dict[str, Any]]) -> list[str]:
    """Compiles a kernel, forks, and compiles others in parent and child."""
    first, second, third = cases
    origins = [dk.prepare([first], arch="sm_89")[0]["origin"]]
    pid = os.fork()
    report = dk.prepare([second if pid else third], arch="sm_89")[0]
    again = dk.prepare([first], arch="sm_89")[0]
    if pid == 0:
        os._exit(40 + (report["origin"] == "compiled") + (again["origin"] == "cache"))
    status = os.waitpid(pid, 0)[1]
    return [*origins, report["origin"], again["origin"], str(os.waitstatus_to_exitcode(status))]


def test_fork_after_a_compile(fresh: Fresh, tmp_path: Path, nvrtc: tuple[str, str]) -> None:
    cases = [{"op": "get_mqa_logits_metadata", "num_heads": heads} for heads in (8, 16, 32)]
    origins = fresh.run(fork_in_child, cases, env={"DEEP_KERNELS_CACHE_DIR": tmp_path})
    assert origins == ["compiled", "compiled", "cache", "42"]


def fork_during_compile_in_child(log: str) -> dict[str, Any]:
    """A thread is inside NVRTC, whose lock it holds, while the main thread forks and the child compiles."""
    warnings.simplefilter("ignore")  # Python's own about fork with threads
    origins = []

    def build(heads: int) -> None:
        origins.append(_C.prepare("get_mqa_logits_metadata", "sm_89", {"num_heads": str(heads)}, None)[0]["origin"])

    thread = threading.Thread(target=build, args=(8,))
    thread.start()
    wait_for(lambda: os.path.exists(log))
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        build(16)
        build(8)  # what the parent has in flight, or has just written
        os._exit(7)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    build(32)
    thread.join()
    return {"child": status, "origins": origins}


def test_fork_while_a_thread_compiles(fresh: Fresh, shim: dict[str, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = shim | {"DEEP_KERNELS_CACHE_DIR": str(tmp_path / "c"), "SHIM_LOG": str(log)}
    env |= {"SHIM_SLEEP": "400", "SHIM_LOCK": "1"}
    result = fresh.run(fork_during_compile_in_child, str(log), env=env)
    assert result == {"child": 7, "origins": ["compiled", "compiled"]}


def fork_often_in_child(num_forks: int) -> list[int]:
    """Forks at many moments of compilations of the real NVRTC, of first uses and of warnings."""
    stop = False

    def build() -> None:
        heads = 0
        while not stop:
            heads = heads % 128 + 1
            _C.prepare("get_mqa_logits_metadata", "sm_89", {"num_heads": str(heads)}, None)

    warnings.simplefilter("ignore")
    threads = [threading.Thread(target=build) for _ in range(2)]
    for thread in threads:
        thread.start()
    statuses = []
    for index in range(num_forks):
        time.sleep(0.031 * index)
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            _C.prepare("get_mqa_logits_metadata", "sm_89", {"num_heads": "8"}, None)
            os._exit(7)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    stop = True
    for thread in threads:
        thread.join()
    return statuses


def test_forks_at_many_moments(fresh: Fresh, nvrtc: tuple[str, str]) -> None:
    assert fresh.run(fork_often_in_child, 6, env={"DEEP_KERNELS_CACHE_DIR": "/dev/null/none"}) == [7] * 6


def pool_in_child() -> list[str]:
    import multiprocessing

    warnings.simplefilter("ignore")
    dk.prepare([{"op": "get_mqa_logits_metadata", "num_heads": 8}], arch="sm_89")
    with multiprocessing.get_context("fork").Pool(2) as pool:
        cases = [([{"op": "get_mqa_logits_metadata", "num_heads": heads}], "sm_89") for heads in (8, 16)]
        return [reports[0]["origin"] for reports in pool.starmap(dk.prepare, cases)]


def test_worker_pools(fresh: Fresh, tmp_path: Path, nvrtc: tuple[str, str]) -> None:
    assert fresh.run(pool_in_child, env={"DEEP_KERNELS_CACHE_DIR": tmp_path}) == ["cache", "compiled"]


# --- warnings, exit --------------------------------------------------------------------------------------


def warnings_as_errors_in_child() -> list[str]:
    warnings.simplefilter("error")
    return [dk.prepare([{"op": "get_mqa_logits_metadata", "num_heads": 8}], arch="sm_89")[0]["origin"] for _ in "ab"]


def test_warnings_turned_into_errors_do_not_lose_a_call(fresh: Fresh, warm: Path) -> None:
    warm.write_bytes(b"broken")
    outcome = fresh.start(warnings_as_errors_in_child, env={"DEEP_KERNELS_CACHE_DIR": warm.parent}).wait()
    assert outcome.value == ["compiled", "cache"]
    assert f"RuntimeWarning: deep_kernels: ignoring the cache entry {warm}" in outcome.stderr
    outcome = fresh.start(warnings_as_errors_in_child, env={"DEEP_KERNELS_CACHE_DIR": "/dev/null/none"}).wait()
    assert outcome.value == ["compiled", "memory"]
    assert outcome.stderr.count("RuntimeWarning: deep_kernels: the cache folder /dev/null/none cannot be written") == 1


def test_a_warning_names_the_line_of_the_caller(warm: Path) -> None:
    warm.write_bytes(b"broken")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _C.prepare("get_mqa_logits_metadata", "sm_89", {"num_heads": "8"}, None)
    assert [warning.category for warning in caught] == [RuntimeWarning]


EXIT = """
import os, sys, threading, time
sys.path[:0] = {path!r}
from deep_kernels import _C
class Slow:
    def __del__(self):
        time.sleep(1.5)
sys.modules["slow"] = Slow()  # shutting down takes a while
def build():
    _C.prepare("get_mqa_logits_metadata", "sm_89", {{"num_heads": "8"}}, None)
threading.Thread(target=build, daemon=True).start()
while not os.path.exists(os.environ["SHIM_LOG"]):
    time.sleep(0.01)
"""


def test_exit_while_a_daemon_thread_compiles(shim: dict[str, str], tmp_path: Path) -> None:
    """It comes back from NVRTC while the interpreter shuts down, and must not abort the process."""
    env = shim | {"DEEP_KERNELS_CACHE_DIR": str(tmp_path / "c"), "SHIM_LOG": str(tmp_path / "log"), "SHIM_SLEEP": "500"}
    code = EXIT.format(path=sys.path)
    done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ, **env), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [what for what, _ in read_log(tmp_path / "log")] == ["begin", "end"], "it came back in time"


def exit_while_compiling_in_child(log: str) -> None:
    def build() -> None:
        _C.prepare("get_mqa_logits_metadata", "sm_89", {"num_heads": "8"}, None)

    threading.Thread(target=build, daemon=True).start()
    wait_for(lambda: os.path.exists(log))
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-c", "print('replaced')"])


def test_exec_while_compiling(fresh: Fresh, shim: dict[str, str], tmp_path: Path) -> None:
    env = shim | {"DEEP_KERNELS_CACHE_DIR": str(tmp_path / "c"), "SHIM_LOG": str(tmp_path / "log"), "SHIM_SLEEP": "500"}
    outcome = fresh.start(exit_while_compiling_in_child, str(tmp_path / "log"), env=env).wait()
    assert (outcome.status, outcome.stdout) == (0, "replaced\n")


def test_no_helper_program_and_no_lock_stays(warm: Path) -> None:
    """One kernel, one file; nothing else appears beside it."""
    dk.prepare([{"op": "get_mqa_logits_metadata", "num_heads": heads} for heads in (8, 16)], arch="sm_89")
    assert len(os.listdir(warm.parent)) == 2
    assert all(name.endswith(".dk") for name in os.listdir(warm.parent))
    shutil.rmtree(warm.parent)


# --- imported anew ---------------------------------------------------------------------------------------


def import_anew_in_child() -> list[Any]:
    import importlib

    import torch

    windows = torch.zeros(3, dtype=torch.int32)
    for name in [name for name in sys.modules if name.split(".")[0] == "deep_kernels"]:
        del sys.modules[name]
    warnings.simplefilter("error")
    again = importlib.import_module("deep_kernels")
    lengths = [
        one.get_mqa_logits_metadata(windows.to("meta"), windows.to("meta"), 9, 8).shape[0] for one in (dk, again)
    ]
    lengths.append(again.get_mqa_logits_metadata(windows, windows, 9, 8).shape[0])
    with pytest.raises(dk.UnsupportedError):  # the type of before
        odd = torch.zeros(3, 8, 48, dtype=torch.uint8).view(torch.float8_e4m3fn)
        again.fp8_mqa_logits(odd, (odd[:, 0], torch.ones(3)), torch.ones(3, 8), windows, windows)
    return [again is not dk, again.UnsupportedError is dk.UnsupportedError, lengths]


def test_the_package_may_be_imported_anew(fresh: Fresh) -> None:
    assert fresh.run(import_anew_in_child) == [True, True, [4, 4, 4]]
