"""Modules that take the place of a model's own: the gated MLP, with block-scaled FP8 weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _C, formats
from .silu_ops import fp8_block_gemm_nt, fp8_silu_fold_prefill

__all__ = ["SwiGLUMLP"]

_VARIABLE = "DEEP_KERNELS_SILU_FOLD_PREFILL"
_ALIGN = 16  # what hidden_size and intermediate_size are multiples of
_END = 1 << 30  # of both: the ops count 2 * intermediate_size rows in 32 bits
_NAME = "SwiGLUMLP"
_BUFFERS = ("gate_up_weight", "gate_up_scale", "down_weight", "down_scale")


class _Quantized(NamedTuple):
    """A weight as it is kept."""

    codes: Tensor  # float8_e4m3fn [rows, columns]
    scale: Tensor  # float32 or bfloat16 [ceil(rows / 128), ceil(columns / 128)]


class SwiGLUMLP(torch.nn.Module):
    """down(act(gate(x)) * up(x)) with FP8 weights and activations, made for prefill; forward only.

    g, u = x8 @ gate^T, x8 @ up^T;  y8 = quantized(act(g) * u);  result = bf16(y8 @ down^T)

    x8 is x, quantized by formats.quantize_fp8_block128. Without the fold, gate_up is one launch of
    fp8_block_gemm_nt (two where intermediate_size is no multiple of 128) and one of silu_mul_to_fp8_block128; with it,
    fp8_silu_fold_prefill does both in one where that was measured to be faster.

    Buffers, all part of the state dict: gate_up_weight float8_e4m3fn [2 * intermediate_size, hidden_size];
    gate_up_scale float32 [2 * ceil(intermediate_size / 128), ceil(hidden_size / 128)]; down_weight float8_e4m3fn
    [hidden_size, intermediate_size]; down_scale float32 [ceil(hidden_size / 128), ceil(intermediate_size / 128)]. A new
    module has weights of 0; they are filled by load_state_dict, or made by from_weights and from_safetensors.
    Conversions of a model's dtype, `.to(torch.bfloat16)` and `.half()`, pass them by: codes have no other dtype.

    Args:
        hidden_size, intermediate_size: positive multiples of 16.
        activation, clamp, alpha, up_offset: as in fp8_silu_fold_prefill.
        use_silu_fold_prefill: True, False, or None for what DEEP_KERNELS_SILU_FOLD_PREFILL says now, 0 or 1; off
            where neither says anything.
        device: of the buffers; default: torch's.
    Raises:
        ValueError: a size or a word is not as above, or the variable has another text.
        TypeError: an argument of another Python type.
    Source: block scales of 1 x 128 and 128 x 128 as in the DeepSeek-V3 report (arXiv 2412.19437), section 3.3; the
        gated MLP of "GLU Variants Improve Transformer" (arXiv 2002.05202).
    """

    gate_up_weight: Tensor
    gate_up_scale: Tensor
    down_weight: Tensor
    down_scale: Tensor

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str = "silu",
        clamp: float | None = None,
        alpha: float | None = None,
        up_offset: float = 0.0,
        use_silu_fold_prefill: bool | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = _checked_size("hidden_size", hidden_size)
        self.intermediate_size = _checked_size("intermediate_size", intermediate_size)
        _check_activation(intermediate_size, activation, clamp, alpha, up_offset)
        self.activation = activation
        self.clamp = clamp
        self.alpha = alpha
        self.up_offset = up_offset
        self.use_silu_fold_prefill = _is_fold_wanted(use_silu_fold_prefill)
        hidden_blocks, intermediate_blocks = _num_blocks(hidden_size), _num_blocks(intermediate_size)
        shapes = {
            "gate_up": ((2 * intermediate_size, hidden_size), (2 * intermediate_blocks, hidden_blocks)),
            "down": ((hidden_size, intermediate_size), (hidden_blocks, intermediate_blocks)),
        }
        for name, (codes, blocks) in shapes.items():
            weight = torch.zeros(codes, dtype=torch.float8_e4m3fn, device=device)
            self.register_buffer(f"{name}_weight", weight)
            self.register_buffer(f"{name}_scale", torch.ones(blocks, dtype=torch.float32, device=device))

    @classmethod
    def from_weights(
        cls, gate: Tensor, up: Tensor, down: Tensor, *, device: torch.device | str | int | None = None, **options: Any
    ) -> SwiGLUMLP:
        """A module of unquantized weights, quantized by formats.quantize_fp8_128x128.

        Args:
            gate, up: bfloat16 [intermediate_size, hidden_size].
            down: bfloat16 [hidden_size, intermediate_size].
            device: of the module; default: that of gate.
            options: further arguments of the module.
        Returns:
            The module. Weights may require grad; the module does not.
        Raises:
            ValueError: a dtype, shape or device is not as above; what the module's own arguments raise.
            TypeError: a weight is not a tensor; an option that the module does not have.
        Source: as formats.quantize_fp8_128x128.
        """
        name = f"{_NAME}.from_weights"
        _check_weight(name, "gate", gate, torch.bfloat16, None)
        _check_weight(name, "up", up, torch.bfloat16, gate.shape)
        _check_weight(name, "down", down, torch.bfloat16, gate.shape[::-1])
        for argument, weight in (("up", up), ("down", down)):
            if weight.device != gate.device:
                raise ValueError(f"{name}: {argument} must be on {gate.device} like gate, got {weight.device}")
        device = gate.device if device is None else device
        return cls._of_parts(_quantized(gate), _quantized(up), _quantized(down), device, options)

    @classmethod
    def from_safetensors(
        cls,
        path: str | os.PathLike[str],
        prefix: str,
        device: torch.device | str | int | None = None,
        **options: Any,
    ) -> SwiGLUMLP:
        """A module of the weights in a checkpoint, block-128 FP8 or bfloat16; needs the package safetensors.

        Keys, of which those with _scale_inv are there for FP8 weights alone; bfloat16 ones are quantized as by
        from_weights. The name notwithstanding, codes are multiplied by the scales.

            {prefix}.gate_proj.weight, {prefix}.up_proj.weight            [intermediate_size, hidden_size]
            {prefix}.down_proj.weight                                     [hidden_size, intermediate_size]
            {prefix}.gate_proj.weight_scale_inv, and of up_proj, down_proj   [ceil(rows / 128), ceil(columns / 128)]

        Args:
            path: a safetensors file that holds all of them.
            prefix: "model.layers.0.mlp", for example.
            device: of the module; default: torch's.
            options: further arguments of the module.
        Returns:
            The module.
        Raises:
            ImportError: safetensors is not installed.
            ValueError: a key is missing; its dtype is not float8_e4m3fn with a scale of float32 or bfloat16, or
                bfloat16 without one; its shape is not as above; what the module's own arguments raise.
            TypeError: prefix is not a str; an option that the module does not have.
        Source: the layout of the DeepSeek-V3 and Qwen3-FP8 checkpoints.
        """
        name = f"{_NAME}.from_safetensors"
        if not isinstance(prefix, str):
            raise TypeError(f"{name}: prefix must be a str, got {type(prefix).__name__}")
        try:
            from safetensors import safe_open
        except ImportError:
            raise ImportError(
                f"{name}: the package safetensors must be installed (pip install safetensors), got no such module"
            ) from None
        device = torch.get_default_device() if device is None else device
        with safe_open(path, framework="pt") as file:
            checkpoint = _Checkpoint(name, file, device)
            gate = checkpoint.projection(f"{prefix}.gate_proj", None)
            up = checkpoint.projection(f"{prefix}.up_proj", gate.codes.shape)
            down = checkpoint.projection(f"{prefix}.down_proj", gate.codes.shape[::-1])
        return cls._of_parts(gate, up, down, device, options)

    @classmethod
    def _of_parts(
        cls,
        gate: _Quantized,
        up: _Quantized,
        down: _Quantized,
        device: torch.device | str | int,
        options: Mapping[str, Any],
    ) -> SwiGLUMLP:
        intermediate_size, hidden_size = gate.codes.shape
        module = cls(hidden_size, intermediate_size, device=device, **options)
        for half, part in enumerate((gate, up)):
            module.gate_up_weight.chunk(2)[half].copy_(part.codes)
            module.gate_up_scale.chunk(2)[half].copy_(part.scale)
        module.down_weight.copy_(down.codes)
        module.down_scale.copy_(down.scale)
        return module

    def forward(self, x: Tensor) -> Tensor:
        """bfloat16 [.., hidden_size] -> bfloat16 [.., hidden_size], on the device of the buffers.

        Raises:
            ValueError: dtype, shape or device is not as above, or x requires grad in grad mode (forward only).
            TypeError: x is not a tensor. UnsupportedError, CompileError: as fp8_silu_fold_prefill.
        """
        formats._check_tensor(_NAME, "x", x)
        if x.dtype != torch.bfloat16 or x.dim() == 0 or x.size(-1) != self.hidden_size:
            wanted = f"bfloat16 [.., hidden_size={self.hidden_size}]"
            raise ValueError(f"{_NAME}: x must be {wanted}, got {formats._describe(x)}")
        formats._check_roundable(_NAME, x)
        codes, scale = formats._quantized_fp8_block128(x.reshape(-1, self.hidden_size), "fp32")
        y, y_scale = fp8_silu_fold_prefill(
            codes,
            scale,
            self.gate_up_weight,
            self.gate_up_scale,
            activation=self.activation,
            clamp=self.clamp,
            alpha=self.alpha,
            up_offset=self.up_offset,
            fused=None if self.use_silu_fold_prefill else False,
        )
        return fp8_block_gemm_nt(y, y_scale, self.down_weight, self.down_scale).view(x.shape)

    def extra_repr(self) -> str:
        names = ("hidden_size", "intermediate_size", "activation", "clamp", "alpha", "up_offset")
        words = [f"{name}={getattr(self, name)!r}" for name in (*names, "use_silu_fold_prefill")]
        return ", ".join(words)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> SwiGLUMLP:
        """What is behind `to`, `cuda`, `half` and the like. torch takes float8 buffers for numbers to be converted."""
        own = [getattr(self, name) for name in _BUFFERS]

        def moved(tensor: Tensor) -> Tensor:
            applied = fn(tensor)
            if applied.dtype != tensor.dtype and any(tensor is one for one in own):
                return tensor.to(applied.device)
            return applied

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        """torch refuses other shapes; here are other dtypes, which it would convert without their scales."""
        refusals = []
        for name in _BUFFERS:
            buffer, loaded = getattr(self, name), state_dict.get(prefix + name)
            if isinstance(loaded, Tensor) and loaded.dtype != buffer.dtype:
                wanted, got = formats._describe(buffer), formats._describe(loaded)
                refusals.append(f"{_NAME}: {prefix}{name} must be {wanted}, got {got}")
        error_msgs += refusals
        if not refusals:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )


class _Checkpoint:
    """An open safetensors file."""

    def __init__(self, name: str, file: Any, device: torch.device | str | int) -> None:
        self._name = name  # of the function, for messages
        self._file = file
        self._keys = set(file.keys())
        self._device = device

    def projection(self, key: str, shape: tuple[int, ...] | None) -> _Quantized:
        """A weight of [rows, columns], of any size if shape is None, as it is kept."""
        weight_key, scale_key = f"{key}.weight", f"{key}.weight_scale_inv"
        weight = self._tensor(weight_key)
        if weight.dtype != torch.float8_e4m3fn and scale_key not in self._keys:
            _check_weight(self._name, weight_key, weight, torch.bfloat16, shape)
            return _quantized(weight)
        _check_weight(self._name, weight_key, weight, torch.float8_e4m3fn, shape)
        scale = self._tensor(scale_key)
        wanted = [_num_blocks(size) for size in weight.shape]
        if scale.dtype not in (torch.float32, torch.bfloat16) or list(scale.shape) != wanted:
            got = formats._describe(scale)
            raise ValueError(f"{self._name}: {scale_key} must be float32 or bfloat16 {wanted}, got {got}")
        return _Quantized(weight, scale)

    def _tensor(self, key: str) -> Tensor:
        if key not in self._keys:
            raise ValueError(f"{self._name}: the file must have the key {key}, got {_few(self._keys)}")
        tensor: Tensor = self._file.get_tensor(key)
        return tensor.to(self._device)


def _quantized(weight: Tensor) -> _Quantized:
    return _Quantized(*formats.quantize_fp8_128x128(weight.detach()))


def _num_blocks(size: int) -> int:
    return -(-size // formats.SCALE_BLOCK)


def _is_fold_wanted(argument: bool | None) -> bool:
    if argument is not None and not isinstance(argument, bool):
        raise TypeError(f"{_NAME}: use_silu_fold_prefill must be a bool or None, got {type(argument).__name__}")
    if argument is not None:
        return argument
    text = os.environ.get(_VARIABLE) or "0"
    if text not in ("0", "1"):
        raise ValueError(f"{_VARIABLE} must be 0 or 1, got '{text}'")
    return text == "1"


# --- refusals ----------------------------------------------------------------------------------------------


def _checked_size(argument: str, size: int) -> int:
    if not isinstance(size, int) or isinstance(size, bool):
        raise TypeError(f"{_NAME}: {argument} must be an int, got {type(size).__name__}")
    if size < _ALIGN or size % _ALIGN != 0:
        raise ValueError(f"{_NAME}: {argument} must be a positive multiple of {_ALIGN}, got {size}")
    if size >= _END:
        raise ValueError(f"{_NAME}: {argument} must be below 2^30, got about 2^{size.bit_length() - 1}")
    return size


def _check_activation(
    intermediate_size: int, activation: str, clamp: float | None, alpha: float | None, up_offset: float
) -> None:
    """By the op's own rules, when the module is made and not when it is first called."""
    gate_up = torch.empty((0, 2 * intermediate_size), dtype=torch.bfloat16, device="meta")
    try:
        _C.check_silu_mul_to_fp8_block128(gate_up, activation, clamp, alpha, up_offset, "fp32", None, None)
    except (TypeError, ValueError) as error:
        _, sentence = str(error).split(": ", 1)  # without the name of the op
        raise type(error)(f"{_NAME}: {sentence}") from None


def _check_weight(name: str, argument: str, weight: Tensor, dtype: torch.dtype, shape: tuple[int, ...] | None) -> None:
    """A matrix of dtype; of shape, or of any that a module may have."""
    if not isinstance(weight, Tensor):
        raise TypeError(f"{name}: {argument} must be a torch.Tensor, got {type(weight).__name__}")
    fits = weight.dim() == 2 and weight.numel() > 0 if shape is None else weight.shape == shape
    if weight.dtype != dtype or not fits:
        sizes = "[intermediate_size >= 1, hidden_size >= 1]" if shape is None else list(shape)
        raise ValueError(f"{name}: {argument} must be {formats._word(dtype)} {sizes}, got {formats._describe(weight)}")


def _few(keys: set[str]) -> str:
    """Some keys of a file, which may have thousands."""
    shown = sorted(keys)[:4]
    return f"{len(keys)} keys: {', '.join(shown)}{', ...' if len(keys) > len(shown) else ''}"
