"""deep_kernels.nn: what the module computes, how its weights come in and stay as they are, and the fold's switch."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Backend
from fresh import Fresh
from torch import Tensor
from torch.nn import functional

import deep_kernels as dk
from deep_kernels import formats
from deep_kernels.nn import SwiGLUMLP

pytest_plugins = ("runtime_fixtures",)

VARIABLE = "DEEP_KERNELS_SILU_FOLD_PREFILL"
SIZES = ((256, 384), (272, 208), (128, 16))  # the second: gate and up have block grids of their own
ADJUSTED: dict[str, Any] = {"clamp": 2.0, "alpha": 1.702, "up_offset": 1.0}
BUFFERS = ("gate_up_weight", "gate_up_scale", "down_weight", "down_scale")


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def on(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of a backend, whose kernels calls then take; modules name none."""
    if backend.arch:
        monkeypatch.setenv("DEEP_KERNELS_ARCH", backend.arch)
    return backend.device


@dataclass(frozen=True)
class Weights:
    """bfloat16, with blocks of 128 x 128 that differ by powers of two: a scale in the wrong place is a wrong result."""

    gate: Tensor  # [intermediate_size, hidden_size]
    up: Tensor  # [intermediate_size, hidden_size]
    down: Tensor  # [hidden_size, intermediate_size]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.gate, self.up, self.down


def make_weights(
    hidden_size: int, intermediate_size: int, device: str = "cpu", seed: int = 0, spread: int = 3
) -> Weights:
    """Blocks are between 2^-spread and 2^spread as large as what keeps the size of x."""
    generator = torch.Generator().manual_seed(seed)

    def blocked(rows: int, columns: int) -> Tensor:
        weight = torch.randn(rows, columns, generator=generator) / columns**0.5
        powers = torch.randint(-spread, spread + 1, (-(-rows // 128), -(-columns // 128)), generator=generator)
        factors = torch.exp2(powers.float()).repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (weight * factors[:rows, :columns]).to(device, torch.bfloat16)

    sizes = (intermediate_size, hidden_size)
    return Weights(blocked(*sizes), blocked(*sizes), blocked(*sizes[::-1]))


def make_x(*shape: int, device: str = "cpu", seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))


def deviation(actual: Tensor, expected: Tensor) -> float:
    """Relative, of all elements together."""
    difference = actual.cpu().double() - expected.cpu().double()
    return float(difference.norm() / expected.cpu().double().norm())


# ------------------------------------------------------------------------------------------ what it computes


def after_quantization(x: Tensor) -> Tensor:
    return formats.dequantize_fp8_block128(*formats.quantize_fp8_block128(x), torch.float64)


def expected_of(weights: Weights, x: Tensor, **options: Any) -> Tensor:
    """By the formula, in float64."""
    gate, up, down = (
        formats.dequantize_fp8_128x128(*formats.quantize_fp8_128x128(weight.cpu()), torch.float64)
        for weight in weights.tensors()
    )
    x = after_quantization(x.cpu())
    g, u = x @ gate.T, x @ up.T
    if limit := options.get("clamp"):
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    if options.get("activation") == "gelu_tanh":
        g = functional.gelu(g, approximate="tanh")
    else:
        g = g * torch.sigmoid(options.get("alpha", 1.0) * g)
    return after_quantization(g * (u + options.get("up_offset", 0.0))) @ down.T


@pytest.mark.parametrize("fold", (False, True), ids=("two-launches", "fold"))
@pytest.mark.parametrize("options", ({}, ADJUSTED, {"activation": "gelu_tanh"}), ids=("silu", "adjusted", "gelu"))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_agrees_with_the_formula(on: str, sizes: tuple[int, int], options: dict[str, Any], fold: bool) -> None:
    weights = make_weights(*sizes, on)
    module = SwiGLUMLP.from_weights(*weights.tensors(), use_silu_fold_prefill=fold, **options)
    x = make_x(3, 7, sizes[0], device=on)
    result = module(x)
    assert result.shape == x.shape and result.dtype == torch.bfloat16 and result.device == x.device
    # bf16 roundings on the way move a few codes to their neighbours.
    assert deviation(result, expected_of(weights, x, **options)) < 0.03


@pytest.mark.parametrize("options", ({}, ADJUSTED), ids=("silu", "adjusted"))
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_off_has_the_bits_of_two_launches(on: str, sizes: tuple[int, int], options: dict[str, Any]) -> None:
    weights = make_weights(*sizes, on)
    x = make_x(21, sizes[0], device=on)
    codes, scale = formats.quantize_fp8_block128(x)
    gate, up, down = (formats.quantize_fp8_128x128(weight) for weight in weights.tensors())
    gate_up = torch.cat([dk.fp8_block_gemm_nt(codes, scale, *part) for part in (gate, up)], dim=1)
    wanted = dk.fp8_block_gemm_nt(*dk.silu_mul_to_fp8_block128(gate_up, **options), *down)
    assert same_bits(SwiGLUMLP.from_weights(*weights.tensors(), **options)(x), wanted)


@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
def test_the_fold_differs_within_tolerance(on: str, sizes: tuple[int, int]) -> None:
    """It does not round gate and up to bfloat16 before the activation."""
    weights = make_weights(*sizes, on)
    x = make_x(150, sizes[0], device=on)
    off, folded = (SwiGLUMLP.from_weights(*weights.tensors(), use_silu_fold_prefill=fold)(x) for fold in (False, True))
    assert deviation(folded, off) < 0.03
    if on == "cpu":  # elsewhere a table decides what the fold is
        codes = formats.quantize_fp8_block128(x)
        module = SwiGLUMLP.from_weights(*weights.tensors())
        y = dk.fp8_silu_fold_prefill(*codes, module.gate_up_weight, module.gate_up_scale, fused=True)
        assert same_bits(folded, dk.fp8_block_gemm_nt(*y, module.down_weight, module.down_scale))
        assert not same_bits(folded, off)


def test_shapes_of_x(on: str) -> None:
    module = SwiGLUMLP.from_weights(*make_weights(128, 16, on).tensors())
    rows = make_x(6, 128, device=on)
    wanted = module(rows)
    assert same_bits(module(rows.view(1, 2, 3, 128)), wanted.view(1, 2, 3, 128))
    assert same_bits(module(rows[4]), wanted[4])
    assert same_bits(module(rows.repeat(1, 2)[:, 128:]), wanted), "rows that are apart"
    assert same_bits(module(rows.t().contiguous().t()), wanted), "columns that are apart"
    for shape in ((0, 128), (2, 0, 128)):
        assert module(make_x(*shape, device=on)).shape == shape


def test_a_new_module_is_zero() -> None:
    module = SwiGLUMLP(128, 256)
    assert all(getattr(module, name).device.type == "cpu" for name in BUFFERS)
    assert same_bits(module(make_x(3, 128)), torch.zeros(3, 128, dtype=torch.bfloat16))
    assert SwiGLUMLP(128, 256, device="meta").down_weight.is_meta


@pytest.mark.parametrize("fold", (False, True), ids=("two-launches", "fold"))
@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
def test_compile(on: str, sizes: tuple[int, int], fold: bool) -> None:
    module = SwiGLUMLP.from_weights(*make_weights(*sizes, on).tensors(), use_silu_fold_prefill=fold, **ADJUSTED)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for num_tokens in (5, 9, 17):  # sizes that change make them symbols
        x = make_x(2, num_tokens, sizes[0], device=on)
        assert same_bits(compiled(x), module(x))


def test_compile_with_the_default_compiler(on: str) -> None:
    """Generates code for the quantization of x."""
    module = SwiGLUMLP.from_weights(*make_weights(256, 384, on).tensors(), use_silu_fold_prefill=True)
    x = make_x(40, 256, device=on)
    assert same_bits(torch.compile(module, fullgraph=True)(x), module(x))


@pytest.mark.parametrize("fold", (False, True), ids=("two-launches", "fold"))
def test_cuda_graph(on: str, fold: bool) -> None:
    """Captured once, replayed with other contents."""
    if on != "cuda":
        pytest.skip("of CUDA devices alone")
    module = SwiGLUMLP.from_weights(*make_weights(256, 384, on).tensors(), use_silu_fold_prefill=fold)
    x, other = (make_x(33, 256, device=on, seed=seed) for seed in (1, 2))
    wanted = [module(one) for one in (x, other)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = module(x)
    for one, expected in zip((x.clone(), other), wanted, strict=True):
        x.copy_(one)
        result.fill_(7.0)
        graph.replay()
        assert same_bits(result, expected)


# ------------------------------------------------------------------------------------------ its buffers


def module_and_buffers() -> tuple[SwiGLUMLP, dict[str, Tensor]]:
    module = SwiGLUMLP.from_weights(*make_weights(272, 208).tensors())
    return module, {name: getattr(module, name).clone() for name in BUFFERS}


def assert_holds(module: SwiGLUMLP, buffers: dict[str, Tensor]) -> None:
    for name, buffer in buffers.items():
        assert same_bits(getattr(module, name).cpu(), buffer), name


def test_shapes_of_buffers() -> None:
    module, _ = module_and_buffers()
    shapes = {name: (buffer.dtype, tuple(buffer.shape)) for name, buffer in module.named_buffers()}
    assert shapes == {
        "gate_up_weight": (torch.float8_e4m3fn, (416, 272)),
        "gate_up_scale": (torch.float32, (4, 3)),
        "down_weight": (torch.float8_e4m3fn, (272, 208)),
        "down_scale": (torch.float32, (3, 2)),
    }
    assert list(module.parameters()) == []
    assert set(module.state_dict()) == set(BUFFERS)


CONVERSIONS: dict[str, Callable[[torch.nn.Module], object]] = {
    "to-bfloat16": lambda module: module.to(torch.bfloat16),
    "to-device-and-half": lambda module: module.to("cpu", torch.float16),
    "half": lambda module: module.half(),
    "float": lambda module: module.float(),
    "double": lambda module: module.double(),
    "type": lambda module: module.type(torch.float64),
    "like": lambda module: module.to(torch.zeros(1, dtype=torch.float16)),
}


@pytest.mark.parametrize("convert", CONVERSIONS.values(), ids=CONVERSIONS)
def test_conversions_of_a_model_pass_it_by(convert: Callable[[torch.nn.Module], object]) -> None:
    module, buffers = module_and_buffers()
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.complex64), torch.nn.LayerNorm(272), module)
    model[0] = torch.nn.Identity()
    before = model[1].weight.dtype
    convert(model)
    assert_holds(module, buffers)
    changed = model[1].weight.dtype != before
    assert changed == (convert is not CONVERSIONS["float"]), "the others are converted"


def test_parts_that_a_subclass_adds_are_converted() -> None:
    class WithNorm(SwiGLUMLP):
        def __init__(self) -> None:
            super().__init__(128, 16)
            self.norm = torch.nn.LayerNorm(128)
            self.gain = torch.nn.Parameter(torch.ones(1))

    module = WithNorm().to(torch.bfloat16)
    assert module.norm.weight.dtype == module.gain.dtype == torch.bfloat16
    assert module.gate_up_weight.dtype == torch.float8_e4m3fn and module.down_scale.dtype == torch.float32


def test_moving(on: str) -> None:
    module, buffers = module_and_buffers()
    x = make_x(5, 272)
    assert module.to(on, torch.bfloat16) is module
    assert_holds(module, buffers)
    assert all(getattr(module, name).device.type == on for name in BUFFERS)
    moved = SwiGLUMLP.from_weights(*make_weights(272, 208, on).tensors())
    assert same_bits(module(x.to(on)), moved(x.to(on)))
    assert all(
        buffer.is_meta and buffer.dtype == buffers[name].dtype for name, buffer in module.to("meta").named_buffers()
    )
    emptied = module.to_empty(device=on)
    assert {name: buffer.dtype for name, buffer in emptied.named_buffers()} == {
        name: buffer.dtype for name, buffer in buffers.items()
    }


def test_copies_and_state_dicts(tmp_path: Path) -> None:
    module, buffers = module_and_buffers()
    assert_holds(copy.deepcopy(module), buffers)
    torch.save(module.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    for assign in (False, True):
        other = SwiGLUMLP(272, 208)
        other.load_state_dict(state, assign=assign)
        assert_holds(other, buffers)
        x = make_x(5, 272)
        assert same_bits(other(x), module(x))
    with pytest.raises(RuntimeError, match=r"Missing key.*down_scale"):
        module.load_state_dict({name: state[name] for name in BUFFERS[:3]})


def test_state_dicts_of_others_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"size mismatch for gate_up_weight"):
        SwiGLUMLP(272, 208).load_state_dict(SwiGLUMLP(272, 224).state_dict())
    module, buffers = module_and_buffers()
    model = torch.nn.ModuleDict({"mlp": module})
    floats = {name: buffer.float() for name, buffer in model.state_dict().items()}
    for assign in (False, True):
        with pytest.raises(RuntimeError) as error:
            model.load_state_dict(floats, assign=assign)
        for name, shape in (("gate_up_weight", [416, 272]), ("down_weight", [272, 208])):
            sentence = f"SwiGLUMLP: mlp.{name} must be float8_e4m3fn {shape}, got float32 {shape}"
            assert sentence in str(error.value)
        assert "down_scale" not in str(error.value)
    assert_holds(module, buffers)


def test_what_it_prints() -> None:
    text = repr(SwiGLUMLP(128, 256, clamp=7.0, use_silu_fold_prefill=True))
    assert "hidden_size=128, intermediate_size=256, activation='silu', clamp=7.0" in text
    assert text.endswith("use_silu_fold_prefill=True)")


# ------------------------------------------------------------------------------------------ the switch


def result_in_child(argument: bool | None) -> list[int]:
    """The bytes of a result; the variable counts no more once the module is there."""
    import torch

    from deep_kernels.nn import SwiGLUMLP

    torch.manual_seed(0)
    weights = [torch.randn(*size).bfloat16() for size in ((384, 256), (384, 256), (256, 384))]
    module = SwiGLUMLP.from_weights(*weights, use_silu_fold_prefill=argument)
    os.environ["DEEP_KERNELS_SILU_FOLD_PREFILL"] = "wrong"
    return module(torch.randn(40, 256).bfloat16()).view(torch.uint8).flatten().tolist()


def test_the_fold_is_opt_in(fresh: Fresh) -> None:
    off, folded = fresh.run(result_in_child, False), fresh.run(result_in_child, True)
    assert off != folded
    for text, argument, wanted in (
        (None, None, off),
        ("", None, off),
        ("0", None, off),
        ("1", None, folded),
        ("1", False, off),
        ("0", True, folded),
        ("wrong", True, folded),
    ):
        env = {} if text is None else {VARIABLE: text}
        assert fresh.run(result_in_child, argument, env=env) == wanted, (text, argument)


@pytest.mark.parametrize("text", ("yes", "2", "true", " 1"))
def test_the_variable_must_be_0_or_1(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=f"^{VARIABLE} must be 0 or 1, got '{text}'$"):
        SwiGLUMLP(128, 16)
    assert not SwiGLUMLP(128, 16, use_silu_fold_prefill=False).use_silu_fold_prefill


def test_importing_the_package_imports_neither_module_nor_safetensors(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path[:0] = {[str(Path(dk.__file__).parents[1])]!r}
import deep_kernels
print("deep_kernels.nn" in sys.modules)
import deep_kernels.nn
print("safetensors" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "False\nFalse\n"


# ------------------------------------------------------------------------------------------ refusals


def refused(kind: type[Exception], sentence: str) -> Any:
    return pytest.raises(kind, match=f"^{re.escape(sentence)}$")


@pytest.mark.parametrize(
    ("kind", "options", "sentence"),
    (
        (TypeError, {"hidden_size": 128.0}, "hidden_size must be an int, got float"),
        (TypeError, {"intermediate_size": True}, "intermediate_size must be an int, got bool"),
        (ValueError, {"hidden_size": 0}, "hidden_size must be a positive multiple of 16, got 0"),
        (ValueError, {"intermediate_size": 200}, "intermediate_size must be a positive multiple of 16, got 200"),
        (ValueError, {"intermediate_size": 1 << 80}, "intermediate_size must be below 2^30, got about 2^80"),
        (ValueError, {"activation": "relu"}, "activation must be 'silu' or 'gelu_tanh', got 'relu'"),
        (TypeError, {"activation": 3}, "activation must be a str, got int"),
        (ValueError, {"clamp": 0.0}, "clamp must be greater than 0, got 0"),
        (
            ValueError,
            {"activation": "gelu_tanh", "alpha": 2.5},
            "alpha must be None with activation 'gelu_tanh', got 2.5",
        ),
        (TypeError, {"use_silu_fold_prefill": 1}, "use_silu_fold_prefill must be a bool or None, got int"),
    ),
)
def test_arguments_of_the_module(kind: type[Exception], options: dict[str, Any], sentence: str) -> None:
    with refused(kind, f"SwiGLUMLP: {sentence}"):
        SwiGLUMLP(**{"hidden_size": 128, "intermediate_size": 16} | options)


def test_wrong_x() -> None:
    module = SwiGLUMLP(128, 16)
    for x, got in (
        (make_x(3, 112), "bfloat16 [3, 112]"),
        (make_x(3, 128).float(), "float32 [3, 128]"),
        (make_x(128)[0], "bfloat16 []"),
    ):
        with refused(ValueError, f"SwiGLUMLP: x must be bfloat16 [.., hidden_size=128], got {got}"):
            module(x)
    with refused(TypeError, "SwiGLUMLP: x must be a torch.Tensor, got list"):
        module([1.0])
    with pytest.raises(
        ValueError, match=r"^SwiGLUMLP: x requires grad, but rounding has no gradient: call it under torch\.no_grad"
    ):
        module(make_x(3, 128).requires_grad_())
    with torch.no_grad():
        assert module(make_x(3, 128).requires_grad_()).shape == (3, 128)


def test_wrong_weights() -> None:
    gate, up, down = make_weights(128, 256).tensors()
    name = "SwiGLUMLP.from_weights"
    any_sizes = "[intermediate_size >= 1, hidden_size >= 1]"
    for weights, sentence in (
        ((gate.float(), up, down), f"gate must be bfloat16 {any_sizes}, got float32 [256, 128]"),
        ((gate[0], up, down), f"gate must be bfloat16 {any_sizes}, got bfloat16 [128]"),
        ((gate[:0], up[:0], down[:, :0]), f"gate must be bfloat16 {any_sizes}, got bfloat16 [0, 128]"),
        ((gate, up[:240], down), "up must be bfloat16 [256, 128], got bfloat16 [240, 128]"),
        ((gate, up, down.T), "down must be bfloat16 [128, 256], got bfloat16 [256, 128]"),
        ((gate, up, down.half()), "down must be bfloat16 [128, 256], got float16 [128, 256]"),
        ((gate, up, down.to("meta")), "down must be on cpu like gate, got meta"),
    ):
        with refused(ValueError, f"{name}: {sentence}"):
            SwiGLUMLP.from_weights(*weights)
    with refused(TypeError, f"{name}: up must be a torch.Tensor, got NoneType"):
        SwiGLUMLP.from_weights(gate, None, down)  # type: ignore[arg-type]
    with refused(ValueError, "SwiGLUMLP: hidden_size must be a positive multiple of 16, got 120"):
        SwiGLUMLP.from_weights(gate[:, :120], up[:, :120], down[:120])
    with pytest.raises(TypeError, match="unexpected keyword argument 'bias'"):
        SwiGLUMLP.from_weights(gate, up, down, bias=True)


def test_parameters_as_weights() -> None:
    """Those of a model's own modules require grad."""
    layers = [torch.nn.Linear(*size, bias=False, dtype=torch.bfloat16) for size in ((128, 32), (128, 32), (32, 128))]
    module = SwiGLUMLP.from_weights(*(layer.weight for layer in layers), activation="gelu_tanh")
    assert module.activation == "gelu_tanh" and not module(make_x(3, 128)).requires_grad


# ------------------------------------------------------------------------------------------ checkpoints

PREFIX = "model.layers.3.mlp"


def checkpoint_of(weights: Weights, scale_dtype: torch.dtype | None) -> dict[str, Tensor]:
    """What a checkpoint holds: FP8 with scales of that dtype, or bfloat16, and other layers' tensors."""
    tensors = {f"{PREFIX}0.gate_proj.weight": torch.zeros(4)}
    for name, weight in zip(("gate", "up", "down"), weights.tensors(), strict=True):
        key = f"{PREFIX}.{name}_proj.weight"
        if scale_dtype is None:
            tensors[key] = weight
        else:
            tensors[key], scale = formats.quantize_fp8_128x128(weight)
            tensors[f"{key}_scale_inv"] = scale.to(scale_dtype)
    return tensors


@pytest.fixture
def save(tmp_path: Path) -> Callable[[dict[str, Tensor]], Path]:
    safetensors = pytest.importorskip("safetensors.torch")

    def save_file(tensors: dict[str, Tensor]) -> Path:
        path = tmp_path / "model.safetensors"
        safetensors.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
        return path

    return save_file


Save = Callable[[dict[str, Tensor]], Path]


@pytest.mark.parametrize("scale_dtype", (torch.float32, torch.bfloat16, None), ids=str)
@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
def test_checkpoint(save: Save, sizes: tuple[int, int], scale_dtype: torch.dtype | None) -> None:
    weights = make_weights(*sizes)
    module = SwiGLUMLP.from_safetensors(save(checkpoint_of(weights, scale_dtype)), PREFIX, clamp=3.0)
    assert (module.hidden_size, module.intermediate_size, module.clamp) == (*sizes, 3.0)
    wanted = SwiGLUMLP.from_weights(*weights.tensors())
    for name in BUFFERS:
        buffer, expected = getattr(module, name), getattr(wanted, name)
        if name.endswith("scale") and scale_dtype == torch.bfloat16:
            expected = expected.bfloat16().float()
        assert same_bits(buffer, expected), name


def test_checkpoint_of_two_kinds(save: Save) -> None:
    """Layers that a checkpoint leaves unquantized may be some of these three."""
    weights = make_weights(272, 208)
    tensors = checkpoint_of(weights, torch.float32)
    del tensors[f"{PREFIX}.down_proj.weight_scale_inv"]
    tensors[f"{PREFIX}.down_proj.weight"] = weights.down
    module = SwiGLUMLP.from_safetensors(str(save(tensors)), PREFIX)
    wanted = SwiGLUMLP.from_weights(*weights.tensors())
    assert all(same_bits(getattr(module, name), getattr(wanted, name)) for name in BUFFERS)


def test_checkpoint_to_a_device(on: str, save: Save) -> None:
    path = save(checkpoint_of(make_weights(256, 384), torch.bfloat16))
    module = SwiGLUMLP.from_safetensors(path, PREFIX, on, use_silu_fold_prefill=True)
    assert {getattr(module, name).device.type for name in BUFFERS} == {on}
    x = make_x(3, 256)
    assert same_bits(
        module(x.to(on)), SwiGLUMLP.from_safetensors(path, PREFIX, use_silu_fold_prefill=True).to(on)(x.to(on))
    )


@pytest.mark.parametrize("kind", (torch.float32, None), ids=("fp8", "bfloat16"))
@pytest.mark.parametrize("name", ("gate", "up", "down"))
def test_missing_keys(save: Save, name: str, kind: torch.dtype | None) -> None:
    tensors = checkpoint_of(make_weights(128, 256), kind)
    for key in (f"{PREFIX}.{name}_proj.weight", f"{PREFIX}.{name}_proj.weight_scale_inv"):
        if key in tensors:
            rest = {other: tensor for other, tensor in tensors.items() if other != key}
            sentence = f"SwiGLUMLP.from_safetensors: the file must have the key {key}, got {len(rest)} keys: "
            with pytest.raises(ValueError, match=f"^{re.escape(sentence)}"):
                SwiGLUMLP.from_safetensors(save(rest), PREFIX)


@pytest.mark.parametrize(
    ("key", "change", "sentence"),
    (
        (
            "gate_proj.weight",
            lambda x: x[0],
            "float8_e4m3fn [intermediate_size >= 1, hidden_size >= 1], got float8_e4m3fn [128]",
        ),
        ("up_proj.weight", lambda x: x[:128], "float8_e4m3fn [208, 128], got float8_e4m3fn [128, 128]"),
        ("up_proj.weight", lambda x: x.bfloat16(), "float8_e4m3fn [208, 128], got bfloat16 [208, 128]"),
        ("down_proj.weight", lambda x: x.mT, "float8_e4m3fn [128, 208], got float8_e4m3fn [208, 128]"),
        (
            "down_proj.weight",
            lambda x: x.float().to(torch.float8_e5m2),
            "float8_e4m3fn [128, 208], got float8_e5m2 [128, 208]",
        ),
        ("gate_proj.weight_scale_inv", lambda x: x.half(), "float32 or bfloat16 [2, 1], got float16 [2, 1]"),
        ("up_proj.weight_scale_inv", lambda x: x[:1], "float32 or bfloat16 [2, 1], got float32 [1, 1]"),
        ("down_proj.weight_scale_inv", lambda x: x.mT, "float32 or bfloat16 [1, 2], got float32 [2, 1]"),
    ),
)
def test_wrong_tensors(save: Save, key: str, change: Callable[[Tensor], Tensor], sentence: str) -> None:
    tensors = checkpoint_of(make_weights(128, 208), torch.float32)
    key = f"{PREFIX}.{key}"
    tensors[key] = change(tensors[key])
    with refused(ValueError, f"SwiGLUMLP.from_safetensors: {key} must be {sentence}"):
        SwiGLUMLP.from_safetensors(save(tensors), PREFIX)


def test_wrong_unquantized_tensors(save: Save) -> None:
    tensors = checkpoint_of(make_weights(128, 208), None)
    key = f"{PREFIX}.up_proj.weight"
    sentence = f"SwiGLUMLP.from_safetensors: {key} must be bfloat16 [208, 128], got float32 [208, 128]"
    with refused(ValueError, sentence):
        SwiGLUMLP.from_safetensors(save(tensors | {key: tensors[key].float()}), PREFIX)


def test_wrong_arguments_of_a_checkpoint(save: Save, tmp_path: Path) -> None:
    with refused(TypeError, "SwiGLUMLP.from_safetensors: prefix must be a str, got int"):
        SwiGLUMLP.from_safetensors(save(checkpoint_of(make_weights(128, 16), None)), 3)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError):
        SwiGLUMLP.from_safetensors(tmp_path / "nothing.safetensors", PREFIX)


def test_without_safetensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"^SwiGLUMLP\.from_safetensors: .*pip install safetensors"):
        SwiGLUMLP.from_safetensors("model.safetensors", PREFIX)


# ------------------------------------------------------------------------------------------ a small model


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, weight.shape, weight, 1e-6)


class Attention(torch.nn.Module):
    """Grouped queries, each head's query and key normalized."""

    def __init__(self, hidden_size: int, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        heads = num_heads + 2 * num_kv_heads
        self.counts = (num_heads, num_kv_heads, num_kv_heads)
        self.qkv = torch.nn.Parameter(torch.randn(heads * head_dim, hidden_size) / hidden_size**0.5)
        self.out = torch.nn.Parameter(torch.randn(hidden_size, num_heads * head_dim) / (num_heads * head_dim) ** 0.5)
        self.q_norm = torch.nn.Parameter(torch.rand(head_dim) + 0.5)
        self.k_norm = torch.nn.Parameter(torch.rand(head_dim) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        heads = functional.linear(x, self.qkv).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split(self.counts, dim=1)
        q, k = rms_norm(q, self.q_norm), rms_norm(k, self.k_norm)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return functional.linear(mixed.transpose(1, 2).flatten(2), self.out)


class Layer(torch.nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, gate_factor: float, fold: bool) -> None:
        super().__init__()
        self.attention_norm = torch.nn.Parameter(torch.rand(hidden_size) + 0.5)
        self.mlp_norm = torch.nn.Parameter(torch.rand(hidden_size) + 0.5)
        self.attention = Attention(hidden_size, num_heads=4, num_kv_heads=2, head_dim=64)
        weights = make_weights(hidden_size, intermediate_size, seed=int(torch.randint(1 << 30, ())), spread=0)
        self.gate = gate_factor * weights.gate
        down = weights.down / (2 * gate_factor)
        self.mlp = SwiGLUMLP.from_weights(self.gate, weights.up, down, use_silu_fold_prefill=fold)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(rms_norm(x, self.attention_norm))
        self.mlp_input = rms_norm(x, self.mlp_norm)
        return x + self.mlp(self.mlp_input)


class Decoder(torch.nn.Module):
    """A small decoder as Qwen3's, random, whose gates saturate."""

    def __init__(self, fold: bool, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = torch.nn.Parameter(torch.randn(256, 256))
        self.layers = torch.nn.ModuleList(Layer(256, 384, gate_factor=8.0, fold=fold) for _ in range(2))
        self.norm = torch.nn.Parameter(torch.rand(256) + 0.5)
        self.head = torch.nn.Parameter(torch.randn(256, 256) / 16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding[tokens]
        for layer in self.layers:
            x = layer(x)
        return functional.linear(rms_norm(x, self.norm), self.head)


@pytest.fixture
def prompts() -> Tensor:
    """The seed is one whose next tokens are ahead of the others by several times what the fold changes."""
    return torch.randint(256, (4, 40), generator=torch.Generator().manual_seed(106))


@pytest.fixture
def decoders(on: str) -> Iterator[tuple[Decoder, Decoder]]:
    with torch.no_grad():
        yield tuple(Decoder(fold).to(on, torch.bfloat16) for fold in (False, True))  # type: ignore[misc]


def worst_cosine(one: Tensor, other: Tensor) -> float:
    return float(functional.cosine_similarity(one.double(), other.double(), dim=-1).min())


def test_a_decoder_prefills_alike(on: str, decoders: tuple[Decoder, Decoder], prompts: Tensor) -> None:
    """Every token's logits point the same way, and the tokens that would come next are the same."""
    off, folded = (model(prompts.to(on)) for model in decoders)
    assert off.isfinite().all()
    assert worst_cosine(off, folded) >= 0.999
    assert torch.equal(off[:, -1].argmax(-1), folded[:, -1].argmax(-1))
    if on == "cpu":  # elsewhere a table may have chosen two launches
        assert not torch.equal(off, folded)


def test_the_gates_of_the_decoder_saturate(on: str, decoders: tuple[Decoder, Decoder], prompts: Tensor) -> None:
    """Where silu is 0 to bfloat16, and where it is its argument."""
    model, _ = decoders
    model(prompts.to(on))
    for layer in model.layers:
        gates = layer.mlp_input.double() @ layer.gate.to(on).double().T
        assert (gates > 8).double().mean() > 0.1
        assert (gates < -8).double().mean() > 0.1
        assert (gates.abs() < 2).double().mean() > 0.1


def test_the_decoder_shows_a_wrong_scale(on: str, decoders: tuple[Decoder, Decoder], prompts: Tensor) -> None:
    """The greatest of a layer: the cosine above would not survive it."""
    model, folded = decoders
    wanted = model(prompts.to(on))
    for name in ("gate_up_scale", "down_scale"):
        scale = getattr(folded.layers[1].mlp, name).view(-1)
        scale[scale.argmax()] *= 2
        assert worst_cosine(folded(prompts.to(on)), wanted) < 0.999, name
        scale[scale.argmax()] /= 2
