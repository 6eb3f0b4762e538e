"""What of the runtime needs a GPU: captures, streams, devices, threads that never touched CUDA, cards and arch=."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh import Fresh, run_threads

import deep_kernels as dk
from deep_kernels import _C, formats

pytest_plugins = ("runtime_fixtures",)


def _skip_reason(num_gpus: int) -> str:
    if not torch.cuda.is_available():
        return "there is no GPU"
    if torch.cuda.device_count() < num_gpus:
        return f"there are fewer than {num_gpus} GPUs"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 9):
        return f"compute capability 8.9 or newer is needed, this card has {major}.{minor}"
    return ""


def needs_gpus(num_gpus: int) -> Callable[[Any], Any]:
    reason = _skip_reason(num_gpus)
    return pytest.mark.skipif(bool(reason), reason=reason)


one_gpu, two_gpus = needs_gpus(1), needs_gpus(2)

# Functions named *_in_child run in children of tests/fresh.py, by their text, with make_call() before them; the
# children have imported the package and not touched CUDA.


def make_call(device: str, seed: int = 0, format: str = "fp8", **options: Any) -> Any:
    """Inputs of one op call on a device, the same values everywhere, and a function that calls it.

    With MX formats, blocks of every third seed spread further than any 8-bit format can hold.
    """
    import torch

    from deep_kernels import formats

    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator)

    num_q, num_kv = 70, 700
    values = {"q": random(num_q, 8, 64), "kv": random(num_kv, 64)}
    if format == "fp8":
        inputs = {name: value.to(torch.float8_e4m3fn) for name, value in values.items()}
        inputs["kv_scale"] = random(num_kv).abs()
    else:
        inputs = {}
        for name, value in values.items():
            if seed % 3 == 2:  # large blocks of q meet small ones of kv
                value[..., :32] *= 2.0**30 if name == "q" else 2.0**-30
            inputs[name], inputs[f"{name}_scale"] = getattr(formats, f"quantize_{format}")(value)
    inputs |= {
        "weights": random(num_q, 8),
        "start": torch.arange(num_q, dtype=torch.int32) * 3,
        "end": torch.arange(num_q, dtype=torch.int32) * 3 + 400,
    }
    tensors = {name: value.to(device) for name, value in inputs.items()}

    def call(**more: Any) -> Any:
        q, kv = (tensors["q"], tensors.get("q_scale")), (tensors["kv"], tensors["kv_scale"])
        bounds = tensors["start"], tensors["end"]
        return dk.fp8_fp4_mqa_logits(q, kv, tensors["weights"], *bounds, **options, **more)

    call.tensors = tensors  # type: ignore[attr-defined]
    return call


def assert_close(logits: Any, seed: int = 0, format: str = "fp8") -> None:
    """To what the CPU says of the same values: -inf in the same places, and little difference elsewhere."""
    import torch

    expected = make_call("cpu", seed, format)()
    got = logits.cpu()
    assert torch.equal(got.isinf(), expected.isinf())
    inside = ~expected.isinf()
    assert torch.isfinite(got[inside]).all()
    error = (got[inside] - expected[inside]).abs().max() / expected[inside].abs().max()
    assert error < 5e-4, error  # FP8 tensor cores keep 13 bits of a partial sum


CHILD = {"using": (make_call, assert_close), "timeout": 120}


# --- captures --------------------------------------------------------------------------------------------


def capture_in_child(mode: str, use_schedule: bool, format: str) -> int:
    """The first call ever of the process is inside a capture; replays see new content of the inputs."""
    import torch

    call, other = make_call("cuda", 1, format), make_call("cuda", 2, format)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        schedule = None
        if use_schedule:
            bounds = call.tensors["start"], call.tensors["end"]
            schedule = dk.get_mqa_logits_metadata(*bounds, call.tensors["kv"].shape[0], 8)
        logits = call(schedule_meta=schedule)
    logits.fill_(7)
    graph.replay()
    torch.cuda.synchronize()
    assert_close(logits, 1, format)
    for name, tensor in call.tensors.items():
        tensor.copy_(other.tensors[name])
    graph.replay()
    torch.cuda.synchronize()
    assert_close(logits, 2, format)
    return len(_C.cache_files(_C.cache_dir()))


@one_gpu
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("use_schedule", [False, True], ids=["derived", "metadata"])
@pytest.mark.parametrize("format", formats.FORMATS)
def test_first_call_ever_inside_a_capture(
    fresh: Fresh, tmp_path: Path, mode: str, use_schedule: bool, format: str
) -> None:
    if reason := dk.supported("fp8_fp4_mqa_logits", format=format, num_heads=8, head_dim=64):
        pytest.skip(reason)
    env = {"DEEP_KERNELS_CACHE_DIR": tmp_path}
    cold, warm = (fresh.run(capture_in_child, mode, use_schedule, format, env=env, **CHILD) for _ in range(2))
    assert cold == warm > use_schedule


# --- streams and threads ---------------------------------------------------------------------------------


def side_stream_in_child() -> None:
    """The inputs become right on the side stream only after a long wait there: a call elsewhere sees others."""
    import torch

    call, wanted = make_call("cuda", 1), make_call("cuda", 2)
    call()  # compiled and loaded: from here on the call is fast
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        for name, tensor in call.tensors.items():
            tensor.copy_(wanted.tensors[name])
        out = torch.zeros(70, 700, device="cuda")
        logits = call(out=out)
    stream.synchronize()
    assert logits is out
    assert_close(logits, 2)


@one_gpu
def test_side_stream(fresh: Fresh, tmp_path: Path) -> None:
    fresh.run(side_stream_in_child, env={"DEEP_KERNELS_CACHE_DIR": tmp_path}, **CHILD)


def threads_in_child(num_threads: int) -> None:
    """First calls of a cold process, at one moment, from threads that never touched CUDA, each on its stream."""
    import torch

    call = make_call("cuda")
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(num_threads)]

    def run(stream: Any) -> Any:
        with torch.cuda.stream(stream):
            logits = call()
        stream.synchronize()
        return logits

    results = run_threads([lambda stream=stream: run(stream) for stream in streams])
    assert_close(results[0])
    assert all(torch.equal(logits, results[0]) for logits in results)


@one_gpu
@pytest.mark.parametrize("folder", ["cache", "none"])
def test_racing_first_calls_compile_once(fresh: Fresh, shim: dict[str, str], tmp_path: Path, folder: str) -> None:
    place = tmp_path / "cache" if folder == "cache" else Path("/dev/null/cache")
    env = shim | {"DEEP_KERNELS_CACHE_DIR": str(place), "SHIM_LOG": str(tmp_path / "log"), "SHIM_SLEEP": "200"}
    fresh.run(threads_in_child, 8, env=env, **CHILD)
    assert (tmp_path / "log").read_text().count("begin") == 1


def prepared_in_child() -> list[str]:
    """prepare(), then the call, where no folder takes the kernel: it is compiled once."""
    warnings.simplefilter("ignore")
    reports = dk.prepare([{"op": "fp8_fp4_mqa_logits", "num_heads": 8, "head_dim": 64}])
    assert_close(make_call("cuda")())
    return [report["origin"] for report in reports]


@one_gpu
def test_what_no_folder_takes_is_kept_for_the_call(fresh: Fresh, shim: dict[str, str], tmp_path: Path) -> None:
    env = shim | {"DEEP_KERNELS_CACHE_DIR": "/dev/null/none", "SHIM_LOG": str(tmp_path / "log")}
    assert fresh.run(prepared_in_child, env=env, **CHILD) == ["compiled"]
    assert (tmp_path / "log").read_text().count("begin") == 1


# --- devices ---------------------------------------------------------------------------------------------


def second_device_in_child(first: int) -> None:
    """Calls on both devices, beginning with `first`, while device 0 is the current one."""
    import torch

    results = {}
    for index in (first, 1 - first, first):
        call = make_call(f"cuda:{index}")
        logits = call()
        assert torch.cuda.current_device() == 0
        assert logits.device == torch.device("cuda", index)
        torch.cuda.synchronize(index)
        assert_close(logits)
        results.setdefault(index, logits.cpu())
        schedule = dk.get_mqa_logits_metadata(call.tensors["start"], call.tensors["end"], 700, 8)
        assert schedule.device == logits.device
        assert torch.equal(call(schedule_meta=schedule), logits)
    assert torch.equal(results[0], results[1])

    stream = torch.cuda.Stream(device=1)
    with torch.cuda.stream(stream):  # makes device 1 the current one
        logits = make_call("cuda:1")()
    stream.synchronize()
    assert torch.equal(logits.cpu(), results[1])

    outputs: list[Any] = []
    thread = threading.Thread(target=lambda: outputs.append(make_call("cuda:1")()))
    thread.start()
    thread.join()
    assert torch.equal(outputs[0].cpu(), results[1])


@two_gpus
@pytest.mark.parametrize("first", [0, 1])
def test_second_device(fresh: Fresh, tmp_path: Path, first: int) -> None:
    fresh.run(second_device_in_child, first, env={"DEEP_KERNELS_CACHE_DIR": tmp_path}, **CHILD)


def second_device_capture_in_child() -> None:
    import torch

    with torch.cuda.device(1):
        call = make_call("cuda:1")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = call()
        logits.fill_(7)
        graph.replay()
        torch.cuda.synchronize()
    assert_close(logits)


@two_gpus
def test_first_call_inside_a_capture_on_the_second_device(fresh: Fresh, tmp_path: Path) -> None:
    fresh.run(second_device_capture_in_child, env={"DEEP_KERNELS_CACHE_DIR": tmp_path}, **CHILD)


INPUTS = {
    "kv": "kv",
    "kv_scale": "kv scale",
    "weights": "weights",
    "start": "cu_seq_len_k_start",
    "end": "cu_seq_len_k_end",
}


def assert_refused(first: str, second: str) -> None:
    for name, argument in INPUTS.items():
        call = make_call(first)
        call.tensors[name] = call.tensors[name].to(second)
        with pytest.raises(ValueError) as error:
            call()
        assert str(error.value) == f"fp8_fp4_mqa_logits: {argument} must be on {first} like q, got {second}"
    call = make_call(first)
    with pytest.raises(ValueError, match=f"out must be on {first} like q, got {second}"):
        call(out=torch.zeros(70, 700, device=second))
    with pytest.raises(ValueError, match=f"schedule_meta must be on {first} like q, got {second}"):
        call(schedule_meta=torch.zeros(4, dtype=torch.int32, device=second))
    bounds = call.tensors["start"], call.tensors["end"].to(second)
    with pytest.raises(ValueError, match=f"cu_seq_len_k_end must be on {first} like cu_seq_len_k_start, got {second}"):
        dk.get_mqa_logits_metadata(*bounds, 700, 8)


@one_gpu
@pytest.mark.parametrize(("first", "second"), [("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_host_and_device_tensors_are_refused(first: str, second: str) -> None:
    assert_refused(first, second)


@two_gpus
@pytest.mark.parametrize(("first", "second"), [("cuda:0", "cuda:1"), ("cuda:1", "cuda:0")])
def test_tensors_on_two_devices_are_refused(first: str, second: str) -> None:
    assert_refused(first, second)
    assert torch.cuda.current_device() == 0


# --- the card and arch= ----------------------------------------------------------------------------------


@one_gpu
def test_arch_of_a_call() -> None:
    major, minor = torch.cuda.get_device_capability()
    call = make_call("cuda")
    assert_close(call(arch="sm89"))
    backend, target = _C.arch_of_card(major * 10 + minor)
    assert torch.equal(call(arch=f"{backend}:{target}"), call())
    card = f"this card (compute capability {major}.{minor}) cannot run"
    refused = {"cpu": "backend cpu runs on CPU tensors only", "sm_80": "backend sm89 cannot be compiled for"}
    refused |= {"sm_90a": f"{card} sm90 for sm_90a"} if (major, minor) != (9, 0) else {"sm_89": f"{card} sm89 for"}
    for arch, sentence in refused.items():
        with pytest.raises(dk.UnsupportedError) as error:
            call(arch=arch)
        assert str(error.value).startswith(f"fp8_fp4_mqa_logits: {sentence}")
    with pytest.raises(ValueError, match="fp8_fp4_mqa_logits: arch must be a backend"):
        call(arch="gpu")
    assert torch.equal(make_call("cpu")(arch="gpu"), make_call("cpu")()), "ignored for CPU tensors"


@one_gpu
def test_arch_setting_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_KERNELS_ARCH", "gpu")
    with pytest.raises(ValueError, match="fp8_fp4_mqa_logits: DEEP_KERNELS_ARCH must be a backend"):
        make_call("cuda")()
    assert_close(make_call("cuda")(arch="sm89"))
    assert_close(make_call("cpu")())


@one_gpu
def test_supported_says_what_the_call_says() -> None:
    for format in ("mxfp8", "mxfp4"):
        if reason := dk.supported("fp8_fp4_mqa_logits", format=format):
            values = torch.zeros(2, 8, 64, device="cuda").to(torch.float8_e4m3fn)
            if format == "mxfp4":
                values = torch.zeros(2, 8, 64, device="cuda", dtype=torch.uint8)
            scale, bounds = torch.zeros(2, 8, dtype=torch.int32, device="cuda"), torch.zeros(2, device="cuda")
            weights = torch.zeros(2, 8, device="cuda")
            with pytest.raises(dk.UnsupportedError) as error:
                dk.fp8_fp4_mqa_logits(
                    (values, scale), (values[:, 0], scale[:, 0].contiguous()), weights, bounds.int(), bounds.int()
                )
            assert str(error.value) == reason


def no_cuda_in_child() -> list[Any]:
    """Questions about the card leave CUDA alone, so that a child of fork can still use it."""
    import torch

    op = "fp8_fp4_mqa_logits"
    answers = [dk.supported(op), dk.get_num_sms(), _C.num_sms(), dk.prepare([{"op": op, "num_heads": 8}])[0]["entry"]]
    assert not torch.cuda.is_initialized()
    pid = os.fork()
    if pid == 0:
        assert_close(make_call("cuda")())
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    properties = torch.cuda.get_device_properties(0)
    assert dk.get_num_sms() == answers[1] == properties.multi_processor_count
    assert dk.supported(op) == answers[0]
    target = _C.arch_of_card(properties.major * 10 + properties.minor)[1]
    assert f"_{target}_" in answers[3]
    # And after CUDA was initialised, a child that cannot use it still compiles.
    make_call("cuda")()
    pid = os.fork()
    if pid == 0:
        os._exit(40 + len(dk.prepare([{"op": op, "num_heads": 16}, {"op": op, "num_heads": 16}], arch=target)))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
    return answers


@one_gpu
def test_questions_do_not_initialise_cuda(fresh: Fresh, tmp_path: Path) -> None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    env = {"DEEP_KERNELS_CACHE_DIR": tmp_path} | ({"CUDA_VISIBLE_DEVICES": visible} if visible else {})
    fresh.run(no_cuda_in_child, env=env, **CHILD)


# --- no compiling at a call ------------------------------------------------------------------------------


def no_compile_in_child() -> list[str]:
    call = make_call("cuda")
    with pytest.raises(dk.CompileError) as error:
        call()
    del os.environ["DEEP_KERNELS_NO_COMPILE"]
    assert_close(call())  # the failure is not kept
    os.environ["DEEP_KERNELS_NO_COMPILE"] = "1"
    assert_close(call())  # and the kernel is
    return [str(error.value)]


@one_gpu
def test_no_compile_at_a_call(fresh: Fresh, tmp_path: Path) -> None:
    env = {"DEEP_KERNELS_CACHE_DIR": str(tmp_path), "DEEP_KERNELS_NO_COMPILE": "1"}
    (message,) = fresh.run(no_compile_in_child, env=env, **CHILD)
    assert "DEEP_KERNELS_NO_COMPILE=1 forbids compiling it; spec: backend=sm" in message
    assert "head_dim=64 num_heads=8" in message


def call_in_child() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_close(make_call("cuda")())
    return [str(warning.message) for warning in caught if "deep_kernels" in str(warning.message)]


@one_gpu
def test_prebuilt_kernels_run_without_nvrtc(fresh: Fresh, tmp_path: Path) -> None:
    cache, prebuilt = tmp_path / "cache", tmp_path / "prebuilt"
    assert fresh.run(call_in_child, env={"DEEP_KERNELS_CACHE_DIR": cache}, **CHILD) == []
    cache.rename(prebuilt)
    for file in prebuilt.iterdir():
        file.rename(file.with_name(f"{file.name.split('-')[0]}-nvrtc12.0.dk"))
    env = {"DEEP_KERNELS_PREBUILT_DIR": prebuilt, "DEEP_KERNELS_CACHE_DIR": cache, "DEEP_KERNELS_NO_COMPILE": "1"}
    assert fresh.run(call_in_child, env=env | {"DEEP_KERNELS_NVRTC": "/nonexistent"}, **CHILD) == []
    assert not cache.exists()


# --- knobs -----------------------------------------------------------------------------------------------


@one_gpu
def test_knobs_change_no_bit() -> None:
    call = make_call("cuda")
    plain = call()
    try:
        for num_sms in (1, 3, 65535):
            dk.set_num_sms(num_sms)
            assert torch.equal(call(), plain)
            schedule = dk.get_mqa_logits_metadata(call.tensors["start"], call.tensors["end"], 700, 8)
            assert schedule.shape == (
                2 * (min(num_sms, torch.cuda.get_device_properties(0).multi_processor_count) + 1),
            )
            assert torch.equal(call(schedule_meta=schedule), plain)
        dk.set_num_sms(0)
        dk.set_pdl(True)
        for _ in range(20):
            assert torch.equal(call(), plain)
    finally:
        dk.set_num_sms(0)
        dk.set_pdl(False)
