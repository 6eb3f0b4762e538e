"""The ops of the FP8 prefill MLP: every refusal, word for word, eagerly and while tracing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import BACKENDS, Backend
from silu_cases import Case, assert_same_pair, make_gate_up, make_inputs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import deep_kernels as dk
from deep_kernels import _C, environment

CPU = BACKENDS[0]
FOLD, GEMM, MUL = "fp8_silu_fold_prefill", "fp8_block_gemm_nt", "silu_mul_to_fp8_block128"
OPS = (FOLD, GEMM, MUL)
M, K, COLUMNS = 37, 272, 272  # 3 blocks of either
CASE = Case(M, K, COLUMNS)

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]  # returns what becomes of some of the arguments


def arguments(op: str, backend: Backend) -> Arguments:
    if op == MUL:
        return {"gate_up": make_gate_up(CASE, backend.device), "arch": backend.arch}
    inputs = make_inputs(CASE, backend.device)
    x = {"x": inputs.x, "x_scale": inputs.x_scale, "arch": backend.arch}
    if op == FOLD:
        return {**x, "w_gate_up": inputs.w, "w_scale": inputs.w_scale}
    w, w_scale = inputs.half(0)
    return {**x, "w": w, "w_scale": w_scale}


def call(op: str, values: Arguments) -> Any:
    return getattr(dk, op)(**values)


@dataclass(frozen=True)
class Refusal:
    name: str
    op: str
    change: Change
    sentence: str
    error: type[Exception] = ValueError


def change(name: str, function: Callable[[Tensor], Any]) -> Change:
    return lambda a: {name: function(a[name])}


def given(**values: Any) -> Change:
    return lambda a: values


def out(function: Callable[[str], Any]) -> Change:
    """A new `out` on the device of the arguments."""
    return lambda a: {"out": function(next(iter(a.values())).device.type)}


def pair(device: str, y: tuple[int, ...] = (M, COLUMNS), y_scale: tuple[int, ...] = (M, 3)) -> tuple[Tensor, Tensor]:
    return torch.empty(y, dtype=torch.float8_e4m3fn, device=device), torch.empty(y_scale, device=device)


def product(device: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape or (M, COLUMNS), dtype=dtype, device=device)


def every_second(x: Tensor) -> Tensor:
    """The same shape with stride 2 in the last dimension."""
    return torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)[..., ::2]


def row_stride_8(x: Tensor) -> Tensor:
    """The same shape with 8 bytes behind each row."""
    return torch.zeros(len(x), x.shape[1] + 8, dtype=x.dtype, device=x.device)[:, : x.shape[1]]


def at_byte_8(x: Tensor) -> Tensor:
    storage = torch.zeros(x.numel() + 16, dtype=torch.uint8, device=x.device).view(x.dtype)
    return storage[8 : 8 + x.numel()].view(x.shape)


def over_gate_up(a: Arguments) -> Arguments:
    """A y that lies in the memory of gate_up."""
    y = a["gate_up"].view(torch.uint8)[:, :COLUMNS].view(torch.float8_e4m3fn)
    return {"out": (y, pair(a["gate_up"].device.type)[1])}


def over_residual(a: Arguments) -> Arguments:
    """In place is not possible."""
    residual = product(a["x"].device.type)
    return {"residual": residual, "out": residual}


def scale_over_codes(a: Arguments) -> Arguments:
    y, _ = pair(a["x"].device.type, (M, COLUMNS))
    return {"out": (y, y.view(torch.uint8).view(-1)[: M * 12].view(torch.float32).view(M, 3))}


FORWARD_ONLY = "requires grad, but the op is forward only: call it under torch.no_grad() or detach the input"

OF_X = (
    ("x-dtype", change("x", lambda x: x.float()), "x must be float8_e4m3fn [num_tokens, k], got float32 [37, 272]"),
    ("x-e5m2", change("x", lambda x: x.view(torch.float8_e5m2)),
     "x must be float8_e4m3fn [num_tokens, k], got float8_e5m2 [37, 272]"),
    ("x-rank", change("x", lambda x: x[0]), "x must be float8_e4m3fn [num_tokens, k], got float8_e4m3fn [272]"),
    ("x-k", change("x", lambda x: x[:, :40]), "k of x must be a positive multiple of 16, got 40"),
    ("x-no-k", change("x", lambda x: x[:, :0]), "k of x must be a positive multiple of 16, got 0"),
    ("x-last-stride", change("x", every_second), "x must have stride 1 in its last dimension, got strides [544, 2]"),
    ("x-row-stride", change("x", row_stride_8),
     "x must have strides that are positive multiples of 16 bytes, got 280 bytes in dimension 0"),
    ("x-expanded", change("x", lambda x: x[:1].expand(M, K)),
     "x must have strides that are positive multiples of 16 bytes, got 0 bytes in dimension 0"),
    ("x-address", change("x", at_byte_8), "x must start at a multiple of 16 bytes, got an address 8 bytes past one"),
    ("x-a-list", change("x", lambda x: [1.0]), "x must be a torch.Tensor, got list"),
    ("x-scale-dtype", change("x_scale", lambda x: x.bfloat16()),
     "x_scale must be float32 [num_tokens=37, ceil(k / 128)=3], got bfloat16 [37, 3]"),
    ("x-scale-rows", change("x_scale", lambda x: x[:36]),
     "x_scale must be float32 [num_tokens=37, ceil(k / 128)=3], got float32 [36, 3]"),
    ("x-scale-blocks", change("x_scale", lambda x: x[:, :2]),
     "x_scale must be float32 [num_tokens=37, ceil(k / 128)=3], got float32 [37, 2]"),
    ("x-scale-transposed", change("x_scale", lambda x: x.T),
     "x_scale must be float32 [num_tokens=37, ceil(k / 128)=3], got float32 [3, 37]"),
    ("x-scale-grad", change("x_scale", lambda x: x.clone().requires_grad_()), f"x_scale {FORWARD_ONLY}"),
    ("w-scale-grad", change("w_scale", lambda x: x.clone().requires_grad_()), f"w_scale {FORWARD_ONLY}"),
    ("arch-a-number", given(arch=90), "arch must be a str or None, got int"),
)  # fmt: skip

OF_ACTIVATION = (
    ("activation", given(activation="relu"), "activation must be 'silu' or 'gelu_tanh', got 'relu'"),
    ("scale-fmt", given(scale_fmt="e8m0"), "scale_fmt must be 'fp32' or 'ue8m0', got 'e8m0'"),
    ("clamp-zero", given(clamp=0.0), "clamp must be greater than 0, got 0"),
    ("clamp-negative", given(clamp=-2.5), "clamp must be greater than 0, got -2.5"),
    ("clamp-nan", given(clamp=float("nan")), "clamp must be greater than 0, got nan"),
    ("alpha-of-gelu", given(activation="gelu_tanh", alpha=1.5),
     "alpha must be None with activation 'gelu_tanh', got 1.5"),
    ("alpha-inf", given(alpha=float("inf")), "alpha must be a finite float32, got inf"),
    ("alpha-too-large", given(alpha=1e39), "alpha must be a finite float32, got 1e+39"),
    ("offset-nan", given(up_offset=float("nan")), "up_offset must be a finite float32, got nan"),
    ("activation-none", given(activation=None), "activation must be a str, got NoneType"),
    ("clamp-a-str", given(clamp="7"), "clamp must be a float or None, got str"),
    ("offset-none", given(up_offset=None), "up_offset must be a float, got NoneType"),
    ("out-a-tensor", lambda a: {"out": pair("cpu")[0]}, "out must be a pair (values, scale), got Tensor"),
    ("out-of-one", lambda a: {"out": pair("cpu")[:1]}, "out must be a pair (values, scale), got a tuple of 1"),
    ("out-an-empty-list", lambda a: {"out": []}, "out must be a pair (values, scale), got a list of 0"),
    ("out-dtype", out(lambda device: (pair(device)[0].view(torch.uint8), pair(device)[1])),
     "out must be float8_e4m3fn [num_tokens=37, intermediate_size=272], got uint8 [37, 272]"),
    ("out-shape", out(lambda device: pair(device, (M, 288))),
     "out must be float8_e4m3fn [num_tokens=37, intermediate_size=272], got float8_e4m3fn [37, 288]"),
    ("out-scale-shape", out(lambda device: pair(device, y_scale=(M, 2))),
     "out scale must be float32 [num_tokens=37, ceil(intermediate_size / 128)=3], got float32 [37, 2]"),
    ("out-scale-dtype", lambda a: {**out(pair)(a), "scale_fmt": "ue8m0"},
     "out scale must be float8_e8m0fnu [num_tokens=37, ceil(intermediate_size / 128)=3], got float32 [37, 3]"),
    ("out-expanded", out(lambda device: (pair(device, (1, COLUMNS))[0].expand(M, COLUMNS), pair(device)[1])),
     "out must have rows that do not overlap, got row stride 0 for 272 columns"),
)  # fmt: skip

OWN = (
    Refusal("w-dtype", FOLD, change("w_gate_up", lambda x: x.view(torch.uint8)),
            "w_gate_up must be float8_e4m3fn [2 * intermediate_size, k=272], got uint8 [544, 272]"),
    Refusal("w-k", FOLD, change("w_gate_up", lambda x: x[:, :256]),
            "w_gate_up must be float8_e4m3fn [2 * intermediate_size, k=272], got float8_e4m3fn [544, 256]"),
    Refusal("w-rows", FOLD, change("w_gate_up", lambda x: x[:528]),
            "w_gate_up must have 2 * intermediate_size rows, intermediate_size a positive multiple of 16, "
            "got 528 rows"),
    Refusal("w-scale-rows", FOLD, change("w_scale", lambda x: x[:5]),
            "w_scale must be float32 or bfloat16 [2 * ceil(intermediate_size / 128)=6, ceil(k / 128)=3], "
            "got float32 [5, 3]"),
    Refusal("w-scale-dtype", FOLD, change("w_scale", lambda x: x.half()),
            "w_scale must be float32 or bfloat16 [2 * ceil(intermediate_size / 128)=6, ceil(k / 128)=3], "
            "got float16 [6, 3]"),
    Refusal("w-row-stride", FOLD, change("w_gate_up", row_stride_8),
            "w_gate_up must have strides that are positive multiples of 16 bytes, got 280 bytes in dimension 0"),
    Refusal("unrounded-two-launches", FOLD, given(round_bf16=False, fused=False),
            "round_bf16 must be True with fused=False, whose two launches meet in bfloat16, got False"),
    Refusal("fused-a-str", FOLD, given(fused="yes"), "fused must be a bool or None, got str", TypeError),
    Refusal("round-none", FOLD, given(round_bf16=None), "round_bf16 must be a bool, got NoneType", TypeError),
    Refusal("scale-over-codes", FOLD, scale_over_codes,
            "out must not share memory with another argument, got one that overlaps out scale"),
    Refusal("out-scale-rows-overlap", FOLD,
            out(lambda device: (pair(device)[0], torch.empty(1, 3, device=device).expand(M, 3))),
            "out scale must have rows that do not overlap, got row stride 0 for 3 columns"),
    Refusal("out-of-nones", FOLD, given(out=(None, None)), "out must be a torch.Tensor, got NoneType", TypeError),
    Refusal("w-dtype", GEMM, change("w", lambda x: x.float()),
            "w must be float8_e4m3fn [n, k=272], got float32 [272, 272]"),
    Refusal("w-rows", GEMM, change("w", lambda x: x[:100]), "n of w must be a positive multiple of 16, got 100"),
    Refusal("w-scale", GEMM, change("w_scale", lambda x: x[:2]),
            "w_scale must be float32 or bfloat16 [ceil(n / 128)=3, ceil(k / 128)=3], got float32 [2, 3]"),
    Refusal("out-dtype", GEMM, given(out_dtype=torch.float16), "out_dtype must be bfloat16 or float32, got float16"),
    Refusal("out-dtype-a-str", GEMM, given(out_dtype="float32"), "out_dtype must be a torch.dtype, got str", TypeError),
    Refusal("residual-float32", GEMM, lambda a: {"residual": product(a["x"].device.type, dtype=torch.float32)},
            "residual must be bfloat16 [num_tokens=37, n=272], got float32 [37, 272]"),
    Refusal("residual-shape", GEMM, lambda a: {"residual": product(a["x"].device.type, M, 256)},
            "residual must be bfloat16 [num_tokens=37, n=272], got bfloat16 [37, 256]"),
    Refusal("residual-stride", GEMM, lambda a: {"residual": every_second(product(a["x"].device.type))},
            "residual must have stride 1 in its last dimension, got strides [544, 2]"),
    Refusal("residual-grad", GEMM, lambda a: {"residual": product(a["x"].device.type).requires_grad_()},
            f"residual {FORWARD_ONLY}"),
    Refusal("out", GEMM, out(lambda device: product(device, dtype=torch.float32)),
            "out must be bfloat16 [num_tokens=37, n=272], got float32 [37, 272]"),
    Refusal("out-rows-overlap", GEMM,
            out(lambda device: product(device, M * COLUMNS).as_strided((M, COLUMNS), (200, 1))),
            "out must have rows that do not overlap, got row stride 200 for 272 columns"),
    Refusal("out-over-residual", GEMM, over_residual,
            "out must not share memory with another argument, got one that overlaps residual"),
    Refusal("gate-up-dtype", MUL, change("gate_up", lambda x: x.half()),
            "gate_up must be bfloat16 [num_tokens, 2 * intermediate_size], got float16 [37, 544]"),
    Refusal("gate-up-columns", MUL, change("gate_up", lambda x: x[:, :528]),
            "gate_up must have 2 * intermediate_size columns, intermediate_size a positive multiple of 16, "
            "got 528 columns"),
    Refusal("gate-up-stride", MUL, change("gate_up", every_second),
            "gate_up must have stride 1 in its last dimension, got strides [1088, 2]"),
    Refusal("gate-up-grad", MUL, change("gate_up", lambda x: x.clone().requires_grad_()), f"gate_up {FORWARD_ONLY}"),
    Refusal("out-over-gate-up", MUL, over_gate_up,
            "out must not share memory with another argument, got one that overlaps gate_up"),
)  # fmt: skip


def error_of(sentence: str) -> type[Exception]:
    """Python types are a TypeError."""
    words = (
        "a torch.Tensor, got",
        "a str, got",
        "a str or None, got",
        "a float, got",
        "a float or None, got",
        "a pair",
    )
    return TypeError if any(f"must be {word}" in sentence for word in words) else ValueError


REFUSALS = (
    *(Refusal(name, op, make, words, error_of(words)) for op in (FOLD, GEMM) for name, make, words in OF_X),
    *(Refusal(name, op, make, words, error_of(words)) for op in (FOLD, MUL) for name, make, words in OF_ACTIVATION),
    *OWN,
)


def assert_refused(error: type[Exception], sentence: str, function: Callable[[], Any]) -> None:
    with pytest.raises(error) as caught:
        function()
    assert str(caught.value) == sentence
    assert type(caught.value) is error


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: f"{refusal.op}-{refusal.name}")
def test_refusals(backend: Backend, refusal: Refusal) -> None:
    good = arguments(refusal.op, backend)
    bad = {**good, **refusal.change(good)}
    assert_refused(refusal.error, f"{refusal.op}: {refusal.sentence}", lambda: call(refusal.op, bad))


OF_MEMORY = {
    "x-address",
    "scale-over-codes",
    "out-over-residual",
    "out-over-gate-up",
}  # which fake tensors have none of


@pytest.mark.parametrize(
    "refusal",
    [one for one in REFUSALS if one.error is ValueError and one.name not in OF_MEMORY],
    ids=lambda refusal: f"{refusal.op}-{refusal.name}",
)
def test_fake_tensors_are_refused_in_the_same_words(refusal: Refusal) -> None:
    good = arguments(refusal.op, CPU)
    bad = {**good, **refusal.change(good)}
    with FakeTensorMode() as mode:
        fake = tree_map_only(Tensor, mode.from_tensor, bad)
        assert_refused(refusal.error, f"{refusal.op}: {refusal.sentence}", lambda: call(refusal.op, fake))


@pytest.mark.parametrize("op", OPS)
def test_what_is_not_refused(backend: Backend, op: str) -> None:
    """The arguments that the refusals change."""
    call(op, arguments(op, backend))


@pytest.mark.parametrize("name", ("x_scale", "w_gate_up", "w_scale"))
def test_devices_may_not_mix(backend: Backend, name: str) -> None:
    values = arguments(FOLD, backend)
    here = str(values["x"].device)
    values[name] = values[name].view(torch.uint8).to("meta").view(values[name].dtype)
    assert_refused(ValueError, f"{FOLD}: {name} must be on {here} like x, got meta", lambda: call(FOLD, values))


def test_grad_is_refused_in_grad_mode_alone(backend: Backend) -> None:
    values = arguments(FOLD, backend)
    wanted = call(FOLD, values)
    values["x_scale"] = values["x_scale"].clone().requires_grad_()
    assert_refused(ValueError, f"{FOLD}: x_scale {FORWARD_ONLY}", lambda: call(FOLD, values))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_same_pair(call(FOLD, values), wanted)


@pytest.mark.parametrize("op", OPS)
def test_supported_reads_its_case(op: str) -> None:
    for arch in ("cpu", "sm89", "sm90"):
        assert dk.supported(op, arch=arch) is None
    assert dk.supported(op, arch="sm100") == f"{op}: there are no sm100 kernels for it yet"
    assert_refused(ValueError, f"{op}: a case has no field named heads", lambda: dk.supported(op, heads=4))
    if op == GEMM:
        assert dk.supported(op, arch="sm90", out_dtype=torch.float32, residual=True) is None
        words = f"{op}: out_dtype must be bfloat16 or float32, got float16"
        assert dk.supported(op, arch="cpu", out_dtype=torch.float16) == words
    else:
        fields = {"activation": "gelu_tanh", "scale_fmt": "ue8m0"}
        assert dk.supported(op, arch="sm90", **fields) is None
        assert dk.supported(op, arch="sm90", clamp=7.0, alpha=1.702, up_offset=1.0, scale_fmt="fp32") is None
        assert dk.supported(op, arch="sm90", clamp=None, alpha=None) is None
        words = f"{op}: activation must be 'silu' or 'gelu_tanh', got 'relu'"
        assert_refused(ValueError, words, lambda: dk.supported(op, arch="sm90", activation="relu"))


def test_supported_refuses_what_the_fold_refuses() -> None:
    words = f"{FOLD}: round_bf16 must be True with fused=False, whose two launches meet in bfloat16, got False"
    for arch in ("cpu", "sm89", "sm90"):
        assert dk.supported(FOLD, arch=arch, fused=False, round_bf16=False) == words
        assert dk.supported(FOLD, arch=arch, fused=None, round_bf16=False) is None


TILES = {"sm89": "32, 64, 128", "sm90": "64, 128, 64x2, 128x2, 192x2"}


@pytest.mark.parametrize("arch", TILES)
@pytest.mark.parametrize("tile", ("96", "192", "32x2", "64x1", "64x"))
def test_a_tile_that_there_is_not(arch: str, tile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_KERNELS_SILU_TILE", tile)
    words = f"DEEP_KERNELS_SILU_TILE must be one of {TILES[arch]}, got '{tile}'"
    assert_refused(ValueError, words, lambda: _C.silu_fold_choice(arch, 64, 256, 132))


def test_env_knows_the_tiles() -> None:
    tiles = {tile for words in TILES.values() for tile in words.split(", ")}
    assert set(environment.WORDS["DEEP_KERNELS_SILU_TILE"]) == tiles
