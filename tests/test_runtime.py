"""The runtime without a GPU: import, the cache folder, settings, knobs, the card, the extension."""

from __future__ import annotations

import ast
import ctypes
import inspect
import os
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh import Fresh

import deep_kernels as dk
from deep_kernels import _C, _card, _runtime

pytest_plugins = ("runtime_fixtures",)

OP = "fp8_fp4_mqa_logits"

# --- import ----------------------------------------------------------------------------------------------

IMPORT = """
import sys
sys.path[:0] = {path!r}
def libraries():
    with open("/proc/self/maps") as maps:
        paths = {{line.split()[-1] for line in maps if "/" in line}}
    return {{path for path in paths if any(word in path.lower() for word in ("nvrtc", "cuda", "nvidia"))}}
import torch
before = libraries()  # a CUDA build of torch maps some itself
import deep_kernels
print(sorted(libraries() - before), torch.cuda.is_initialized())
"""


@pytest.mark.parametrize("home", [True, False], ids=["home", "no_home"])
def test_import_touches_neither_cuda_nor_nvrtc(tmp_path: Path, home: bool) -> None:
    env = {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(tmp_path)}
    env |= {"HOME": str(tmp_path)} if home else {}
    code = IMPORT.format(path=[str(Path(dk.__file__).parents[1])])
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[] False\n", "")
    assert os.listdir(tmp_path) == [], "and writes nothing"


def test_import_survives_another_package_named_nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia", types.ModuleType("nvidia"))  # find_spec raises ValueError
    assert _runtime._package_folders() == [str(Path(torch.__file__).parent / "lib")]


def exercise_cpu() -> list[Any]:
    import torch

    q = torch.ones(2, 4, 32).to(torch.float8_e4m3fn)
    kv = torch.ones(5, 32).to(torch.float8_e4m3fn)
    bounds = torch.tensor([0, 0], dtype=torch.int32), torch.tensor([3, 5], dtype=torch.int32)
    logits = dk.fp8_fp4_mqa_logits((q, None), (kv, torch.ones(5)), torch.ones(2, 4), *bounds)
    dk.get_mqa_logits_metadata(*bounds, 5, 4)
    return [logits[1, 4].item(), dk.supported("fp8_fp4_mqa_logits", arch="cpu"), _C.driver_version()]


def test_cpu_ops_need_no_nvrtc_no_home_no_cache(fresh: Fresh) -> None:
    env = {"DEEP_KERNELS_NVRTC": "/nonexistent", "DEEP_KERNELS_CACHE_DIR": "/proc/none", "CUDA_VISIBLE_DEVICES": ""}
    assert fresh.run(exercise_cpu, env=env)[:2] == [128.0, None]


# --- where the cache folder is ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({"DEEP_KERNELS_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h", "TMPDIR": "/t"}, "/c"),
        ({"DEEP_KERNELS_CACHE_DIR": "", "XDG_CACHE_HOME": "/x", "HOME": "/h", "TMPDIR": "/t"}, "/x/deep_kernels"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h", "TMPDIR": "/t"}, "/h/.cache/deep_kernels"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/deep_kernels"),  # XDG: to be ignored
        ({"HOME": "/h", "TMPDIR": "/t"}, "/h/.cache/deep_kernels"),
        ({"HOME": "", "TMPDIR": "/t"}, f"/t/deep_kernels-{os.geteuid()}"),
        ({"TMPDIR": ""}, f"/tmp/deep_kernels-{os.geteuid()}"),
        ({}, f"/tmp/deep_kernels-{os.geteuid()}"),
    ],
)
def test_cache_folder(monkeypatch: pytest.MonkeyPatch, env: dict[str, str], expected: str) -> None:
    for name in ("DEEP_KERNELS_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert _C.cache_dir() == expected


def prepare_at(folders: list[str]) -> list[str]:
    files = []
    for folder in folders:
        os.environ["DEEP_KERNELS_CACHE_DIR"] = folder
        files.append(dk.prepare([{"op": "get_mqa_logits_metadata", "num_heads": 8}], arch="sm_89")[0]["file"])
    return files


def test_settings_are_read_at_use(fresh: Fresh, tmp_path: Path, nvrtc: tuple[str, str]) -> None:
    """The child has imported the package under other settings; a later change counts as well."""
    folders = [str(tmp_path / "a"), str(tmp_path / "b")]
    files = fresh.run(prepare_at, folders, env={"DEEP_KERNELS_CACHE_DIR": tmp_path / "import"})
    assert [str(Path(file).parent) for file in files] == folders
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("DEEP_KERNELS_NO_COMPILE", "yes", "DEEP_KERNELS_NO_COMPILE must be 0 or 1, got 'yes'"),
        ("DEEP_KERNELS_LINEINFO", "2", "DEEP_KERNELS_LINEINFO must be 0 or 1, got '2'"),
        (
            "DEEP_KERNELS_MQA_CLEAN",
            "both",
            "DEEP_KERNELS_MQA_CLEAN must be concurrent or deferred, got 'both'",
        ),
    ],
)
def test_settings_with_bad_text(
    no_settings: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str, nvrtc: tuple[str, str]
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError) as error:
        dk.prepare([{"op": OP}], arch="sm_89")
    assert str(error.value) == message
    assert not no_settings.exists()


# --- knobs -----------------------------------------------------------------------------------------------


@pytest.fixture
def knobs() -> Iterator[None]:
    yield
    dk.set_num_sms(0)
    dk.set_pdl(False)


def test_num_sms(knobs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = torch.zeros(4, dtype=torch.int32), torch.full((4,), 9, dtype=torch.int32)
    monkeypatch.setattr(_card, "current_card", lambda: _card.Card(90, 132, True))
    assert dk.get_num_sms() == 132
    assert dk.set_num_sms(7) is None
    assert dk.get_num_sms() == 7
    assert dk.get_mqa_logits_metadata(*bounds, 9, 8).shape == (16,)
    dk.set_num_sms(0)
    assert dk.get_num_sms() == 132
    assert dk.get_mqa_logits_metadata(*bounds, 9, 8).shape == (4,), "on CPU tensors 1 unless set"
    monkeypatch.setattr(_card, "current_card", lambda: None)
    assert dk.get_num_sms() == 1
    dk.set_num_sms(65535)
    assert dk.get_mqa_logits_metadata(*bounds, 9, 8).shape == (131072,)


def test_pdl(knobs: None) -> None:
    assert dk.get_pdl() is False
    assert dk.set_pdl(True) is None
    assert dk.get_pdl() is True
    dk.set_pdl(False)
    assert dk.get_pdl() is False


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: dk.set_num_sms(-1), ValueError, "set_num_sms: num_sms must be 0 (all) or up to 65535, got -1"),
        (lambda: dk.set_num_sms(65536), ValueError, "set_num_sms: num_sms must be 0 (all) or up to 65535, got 65536"),
        (
            lambda: dk.set_num_sms(1 << 70),
            ValueError,
            f"set_num_sms: num_sms must fit into 64 bits, got {1 << 70}",
        ),
        (lambda: dk.set_num_sms(1.0), TypeError, "set_num_sms: num_sms must be an int, got float"),
        (lambda: dk.set_num_sms(True), TypeError, "set_num_sms: num_sms must be an int, got bool"),
        (lambda: dk.set_num_sms(None), TypeError, "set_num_sms: num_sms must be an int, got NoneType"),
        (lambda: dk.set_pdl(1), TypeError, "set_pdl: enable must be a bool, got int"),
    ],
)
def test_knobs_refuse(knobs: None, call: Callable[[], None], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind) as error:
        call()
    assert str(error.value) == message
    assert (_C.num_sms(), dk.get_pdl()) == (None, False)


# --- the card, asked of NVML -----------------------------------------------------------------------------


class FakeNvml:
    """libnvidia-ml with cards of (major, minor, cores), by index, and by "GPU-<index>"."""

    def __init__(self, cards: list[tuple[int, int, int]]) -> None:
        self.cards = cards
        self.open = 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = len(self.cards)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: ctypes.c_uint, device: Any) -> int:
        device._obj.value = index.value + 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, device: Any) -> int:
        if not re.fullmatch(rb"GPU-\d", uuid):
            return 2
        device._obj.value = int(uuid[4:]) + 1
        return 0

    def nvmlDeviceGetCudaComputeCapability(self, device: ctypes.c_void_p, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value, _ = self.cards[(device.value or 0) - 1]
        return 0

    def nvmlDeviceGetNumGpuCores(self, device: ctypes.c_void_p, cores: Any) -> int:
        cores._obj.value = self.cards[(device.value or 0) - 1][2]
        return 0


H200, L4, A100 = (9, 0, 16896), (8, 9, 7424), (8, 0, 6912)


@pytest.mark.parametrize(
    ("cards", "visible", "order", "num_sms", "capability"),
    [
        ([H200], None, None, 132, 90),
        ([H200, H200], "1,0", None, 132, 90),
        ([L4], "0", None, 58, 89),
        ([A100], None, None, 108, 80),
        ([H200, L4], "GPU-1", None, 58, 89),
        ([H200, L4], "1", "PCI_BUS_ID", 58, 89),
        ([H200, L4], "1", None, 58, "asks CUDA"),  # CUDA counts by speed there
        ([H200], "1", None, 1, "asks CUDA"),
        ([H200], "", None, 1, "asks CUDA"),
        ([H200], "-1", None, 1, "asks CUDA"),
        ([H200], "MIG-0", None, 1, "asks CUDA"),
        ([], None, None, 1, "asks CUDA"),
        (None, None, None, 1, "asks CUDA"),
    ],
)
def test_card_is_found_without_cuda(
    monkeypatch: pytest.MonkeyPatch,
    cards: list[tuple[int, int, int]] | None,
    visible: str | None,
    order: str | None,
    num_sms: int,
    capability: int | str,
) -> None:
    nvml = FakeNvml(cards or [])

    def load(name: str) -> FakeNvml:
        if cards is None:
            raise OSError(name)
        return nvml

    def ask_cuda() -> bool:
        raise RuntimeError("asks CUDA")

    for name, value in (("CUDA_VISIBLE_DEVICES", visible), ("CUDA_DEVICE_ORDER", order)):
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", ask_cuda)
    monkeypatch.setattr(ctypes, "CDLL", load)
    _card._first_visible.cache_clear()
    try:
        assert dk.get_num_sms() == num_sms
        if isinstance(capability, int):
            assert _card.capability() == capability
        else:
            with pytest.raises(RuntimeError, match=capability):
                _card.capability()
            assert _runtime._capability("sm_90a") is None, "a named target asks nobody"
            assert _runtime._capability("cpu") is None
        assert nvml.open == 0
    finally:
        _card._first_visible.cache_clear()


def test_a_torch_without_cuda_has_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: pytest.fail(f"{name} was loaded"))
    assert (_card.capability(), dk.get_num_sms()) == (None, 1)


# --- the extension ---------------------------------------------------------------------------------------


def num_parameters(function: Any) -> int:
    """Of a pybind11 function, from the signature that it writes into its docstring."""
    signature = function.__doc__.split("\n")[0]
    return len(re.findall(r"\barg\d+\b", signature))


def test_stubs_list_what_the_module_has() -> None:
    stub = ast.parse(Path(_C.__file__).with_name("_C.pyi").read_text())
    declared = {node.name: node for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    live = {name: value for name, value in vars(_C).items() if not name.startswith("__")}
    assert set(declared) == set(live)
    for name, node in declared.items():
        if isinstance(node, ast.ClassDef):
            assert inspect.isclass(live[name])
            assert [ast.unparse(base) for base in node.bases] == [base.__name__ for base in live[name].__bases__]
            continue
        arguments = node.args
        assert not (arguments.args or arguments.kwonlyargs or arguments.vararg), "all are positional"
        assert len(arguments.posonlyargs) == num_parameters(live[name]), name


def test_error_classes() -> None:
    for name in ("CompileError", "UnsupportedError"):
        error = getattr(dk, name)
        assert error is getattr(_C, name)
        assert (error.__module__, error.__bases__) == ("deep_kernels", (RuntimeError,))


def test_no_inner_types_of_another_libstdcxx() -> None:
    """torch's libraries export the folder iterators of the libstdc++ they were built with."""
    sources = Path(__file__).parents[1] / "csrc"
    if not sources.is_dir():
        pytest.skip("needs the checkout")
    used = {word for file in sources.rglob("*.*") for word in re.findall(r"std::filesystem::(\w+)", file.read_text())}
    assert used == {"path"}
