"""Fresh processes for tests. A server imports the package once; every child is forked from it, so that it has
imported the package and not used it yet, at a hundredth of the price of a new interpreter."""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SCHEDULE = {"op": "get_mqa_logits_metadata", "num_heads": 8}  # the case that compiles fastest
NOBODY = 65534


@dataclass(frozen=True)
class Outcome:
    """What became of a child: `status` as os.waitpid gives it, what its function returned, and what it printed."""

    status: int
    value: Any
    stdout: str
    stderr: str

    @property
    def signal(self) -> int:
        return os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else 0


class Child:
    def __init__(self, server: Fresh, pid: int, folder: tempfile.TemporaryDirectory[str]) -> None:
        self._server, self.pid, self._folder = server, pid, folder

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float = 60) -> Outcome:
        status = self._server.ask({"wait": self.pid, "timeout": timeout})
        assert status is not None, f"a child hung for {timeout} s: {self._text('stderr')}"
        value = self._text("value")
        outcome = Outcome(status, json.loads(value) if value else None, self._text("stdout"), self._text("stderr"))
        self._folder.cleanup()
        return outcome

    def _text(self, name: str) -> str:
        path = Path(self._folder.name, name)
        return path.read_text(errors="surrogateescape") if path.exists() else ""


class Fresh:
    """The server. `package_root` is the folder that holds the package; default: where this process has it from."""

    def __init__(self, package_root: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, package_root],
            env=dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(
        self,
        function: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str | Path] | None = None,
        cwd: Path | str = "/",
        using: tuple[Callable[..., Any], ...] = (),
    ) -> Child:
        """Runs the function, by its text and those of what it uses, with JSON arguments and only the given
        environment."""
        folder = tempfile.TemporaryDirectory()
        environment = {"PATH": os.environ.get("PATH", "")} | {name: str(value) for name, value in (env or {}).items()}
        source = "\n".join(textwrap.dedent(inspect.getsource(each)) for each in (*using, function))
        request = {"source": source, "name": function.__name__, "args": args, "env": environment}
        return Child(self, self.ask(request | {"cwd": str(cwd), "folder": folder.name}), folder)

    def run(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What the function returns."""
        timeout = options.pop("timeout", 60)
        outcome = self.start(function, *args, **options).wait(timeout)
        assert outcome.status == 0, f"status {outcome.status}: {outcome.stderr}"
        return outcome.value

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


def drop_root() -> None:
    """From here on file permissions count: nothing stops root, unless it was stripped of its capabilities."""
    if os.geteuid() == 0:
        with contextlib.suppress(PermissionError):
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)


@contextlib.contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Files may grow to `num_bytes` here: a full disk, for whoever ignores the signal (Python does)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def mount_small(folder: str, num_bytes: int) -> str:
    """A file system of that size over the folder, which this process alone sees; why not, or an empty text."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, new_users, private = 0x00020000, 0x10000000, 0x00040000 | 0x4000  # CLONE_NEWNS, ..., MS_PRIVATE|MS_REC
    uid, gid = os.geteuid(), os.getegid()
    if libc.unshare(new_mounts) != 0:
        if libc.unshare(new_mounts | new_users) != 0:
            return f"no mount of one's own: {os.strerror(ctypes.get_errno())}"
        try:
            for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
                Path("/proc/self", name).write_text(text)
        except OSError as error:
            return f"no user of one's own: {error}"
    if libc.mount(b"none", b"/", None, private, None) != 0:
        return f"no private mounts: {os.strerror(ctypes.get_errno())}"
    if libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, f"size={num_bytes}".encode()) != 0:
        return f"no small file system: {os.strerror(ctypes.get_errno())}"
    return ""


def run_threads(functions: list[Callable[[], Any]]) -> list[Any]:
    """Runs them at the same moment, one thread each; their results in order."""
    barrier = threading.Barrier(len(functions))
    results: list[Any] = [None] * len(functions)

    def run(index: int) -> None:
        barrier.wait()
        results[index] = functions[index]()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def wait_for(condition: Callable[[], Any], timeout: float = 30) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def _run_child(request: dict[str, Any], names: dict[str, Any]) -> int:
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        path = os.path.join(request["folder"], name)
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), descriptor)
    warnings.resetwarnings()
    result = os.open(os.path.join(request["folder"], "value"), os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        code = compile(request["source"], "<child>", "exec", annotations.compiler_flag)
        exec(code, names)
        os.write(result, json.dumps(names[request["name"]](*request["args"])).encode())
        return 0
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _wait(pid: int, timeout: float) -> int | None:
    end = time.monotonic() + timeout
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return status
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.005)


def _serve(package_root: str) -> None:
    sys.path.insert(0, package_root)
    import deep_kernels as dk
    from deep_kernels import _C

    tools = {
        "drop_root": drop_root,
        "file_size_limit": file_size_limit,
        "mount_small": mount_small,
        "run_threads": run_threads,
    }
    modules = {
        "json": json,
        "os": os,
        "pickle": pickle,
        "signal": signal,
        "sys": sys,
        "threading": threading,
        "time": time,
    }
    modules |= {"contextlib": contextlib, "resource": resource, "subprocess": subprocess, "warnings": warnings}
    names = {"dk": dk, "_C": _C, "Path": Path, "pytest": pytest, "wait_for": wait_for, **tools, **modules}
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = _wait(request["wait"], request["timeout"])
        else:
            answer = os.fork()
            if answer == 0:
                os._exit(_run_child(request, names))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1])
