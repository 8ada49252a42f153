"""Kernels of Transformer Engine that quantise and dequantise, in PyTorch: for tests without CUDA.

They follow the documented formats and not the code of the real kernels:

* FP8 (`Float8Quantizer`, `Float8CurrentScalingQuantizer`): codes are the values times `scale`, rounded to the
  nearest and saturated; one `scale_inv` for the tensor. Delayed scaling has its scale and records the largest
  value; current scaling computes the scale from the largest value.
* MXFP8 (`MXFP8Quantizer`): 32 values share a scale, which is a power of 2 with its biased exponent in a byte
  (E8M0), rounded up so that nothing saturates. Blocks lie along rows, and a second time along columns. Scales
  are padded to multiples of 128 and 4.
* NVFP4 (`NVFP4Quantizer`): 16 values, or 16 x 16 of a weight, share a scale in E4M3; the largest value of the
  tensor gives all scales a factor. Two codes of 4 bits (E2M1) are in a byte, the first in its lower half. The
  codes along columns are those of the transposed tensor. No Hadamard transform, no random rounding.

Source: OCP Microscaling Formats 1.0; TE docs, "FP8 primer", and `NVFP4BlockScaling`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

BLOCK = 32
PADDING = (128, 4)  # of the scales of rows: for each row, and for each block in it
FP4_BLOCK = 16
FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # of the codes without a sign


def quantize(source: Tensor, quantizer: Any, output: Any = None, noop: Any = None) -> Any:
    """Quantise a tensor into `output`, or into a new one."""
    if output is None:
        output = create_empty_quantized_tensor(quantizer, source.shape, source.dtype, source.device)
    values = source.detach().float()
    if type(quantizer).__name__ == "MXFP8Quantizer":
        _fill_mxfp8(output, values, quantizer)
    elif type(quantizer).__name__ == "NVFP4Quantizer":
        _fill_nvfp4(output, values, quantizer)
    else:
        _fill_float8(output, values, quantizer)
    return output


def dequantize(tensor: Any, dtype: Any) -> Tensor:
    """Return the values of a quantised tensor."""
    if hasattr(tensor, "_fp4_dtype"):
        return _fp4_to_values(tensor).to(_torch_dtype(dtype))
    fp8 = _torch_dtype(tensor._fp8_dtype)
    if hasattr(tensor, "_scale_inv"):
        values = tensor._data.view(fp8).float() * tensor._scale_inv
    else:
        values = _blocks_to_values(tensor._rowwise_data.view(fp8).float(), tensor._rowwise_scale_inv)
    return values.to(_torch_dtype(dtype))


def create_empty_quantized_tensor(
    quantizer: Any, shape: Any, dtype: torch.dtype, device: Any, pin_memory: bool = False
) -> Any:
    """Return a quantised tensor whose codes and scales are 0."""
    shape = torch.Size(shape)
    package = "transformer_engine.pytorch.tensor"
    if type(quantizer).__name__ == "NVFP4Quantizer":
        specs = quantizer.inner_tensor_specs(tuple(shape))
        return importlib.import_module(f"{package}.nvfp4_tensor").NVFP4Tensor(
            shape=shape,
            dtype=dtype,
            device=torch.device(device),
            fp4_dtype=quantizer.dtype,
            quantizer=quantizer,
            with_gemm_swizzled_scales=False,
            **{name[1:]: torch.zeros(size, dtype=of) for name, (size, of) in specs.items()},
            **({} if quantizer.columnwise_usage else _WITHOUT_COLUMNS),
        )
    common = {"shape": shape, "dtype": dtype, "fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    if _is_new():
        common["device"] = torch.device("cpu")
    codes = torch.zeros(shape, dtype=torch.uint8)
    if type(quantizer).__name__ != "MXFP8Quantizer":
        kind = importlib.import_module(f"{package}.float8_tensor").Float8Tensor
        transposed = torch.zeros(_transposed(codes).shape, dtype=torch.uint8)
        return kind(
            **common,
            data=codes,
            fp8_scale_inv=torch.zeros(1),
            data_transpose=transposed if quantizer.columnwise_usage else None,
        )
    kind = importlib.import_module(f"{package}.mxfp8_tensor").MXFP8Tensor
    columns = quantizer.columnwise_usage
    swizzled = {"with_gemm_swizzled_scales": False} if _is_new() else {}
    return kind(
        **common,
        **swizzled,
        rowwise_data=codes,
        rowwise_scale_inv=_empty_scales(shape),
        columnwise_data=torch.zeros_like(codes) if columns else None,
        columnwise_scale_inv=_empty_scales(shape[::-1]).t().contiguous() if columns else None,
    )


def fp8_transpose(data: Tensor, dtype: Any, out: Tensor | None = None) -> Tensor:
    """Return codes with their last dim first."""
    result = _transposed(data)
    return result if out is None else out.copy_(result)


def _fill_float8(output: Any, values: Tensor, quantizer: Any) -> None:
    largest, fp8 = values.abs().max(), _torch_dtype(quantizer.dtype)
    if type(quantizer).__name__ == "Float8Quantizer":  # delayed scaling
        scale = quantizer.scale
        quantizer.amax.copy_(torch.maximum(quantizer.amax, largest))
    else:
        scale = torch.where(largest > 0, torch.finfo(fp8).max / largest, 1.0)
    codes = _cast(values * scale, fp8)
    output._data.copy_(codes)
    output._scale_inv.copy_((1 / scale).view(1))
    if output._transpose is not None:
        output._transpose.copy_(_transposed(codes).view_as(output._transpose))
        output._transpose_invalid = False


def _fill_mxfp8(output: Any, values: Tensor, quantizer: Any) -> None:
    fp8 = _torch_dtype(quantizer.dtype)
    for direction, oriented in (("rowwise", values), ("columnwise", values.t())):
        data, scales = getattr(output, f"_{direction}_data"), getattr(output, f"_{direction}_scale_inv")
        if data is None:
            continue
        blocks = oriented.reshape(oriented.shape[0], -1, BLOCK)
        exponents = _exponents(blocks.abs().amax(-1) / torch.finfo(fp8).max)
        codes = _cast(blocks * torch.exp2(127.0 - exponents.float())[..., None], fp8).view(oriented.shape)
        if direction == "columnwise":
            codes, exponents = codes.t(), exponents.t()
        data.copy_(codes)
        scales[: exponents.shape[0], : exponents.shape[1]].copy_(exponents)


_WITHOUT_COLUMNS = dict.fromkeys(("columnwise_data", "columnwise_scale_inv", "amax_columnwise"))


def _fill_nvfp4(output: Any, values: Tensor, quantizer: Any) -> None:
    largest = values.abs().max()
    factor = torch.where(largest > 0, largest / (6 * 448), 1.0)  # of all scales
    for direction, oriented in (("rowwise", values), ("columnwise", values.t())):
        data, scales = getattr(output, f"_{direction}_data"), getattr(output, f"_{direction}_scale_inv")
        if data is None:
            continue
        blocks = oriented.reshape(oriented.shape[0], -1, FP4_BLOCK)
        of_block = blocks.abs().amax(-1)
        if quantizer.with_2d_quantization:
            square = of_block.view(-1, FP4_BLOCK, of_block.shape[1]).amax(1)
            of_block = square.repeat_interleave(FP4_BLOCK, 0)
        fp8 = (of_block / 6 / factor).to(torch.float8_e4m3fn)
        scaled = blocks / (fp8.float() * factor).clamp(min=1e-30)[..., None]
        distances = (scaled.abs()[..., None] - FP4_VALUES).abs()
        codes = (distances.argmin(-1) + 8 * (scaled < 0)).to(torch.uint8).view(oriented.shape)
        data.copy_(codes[:, ::2] | codes[:, 1::2] << 4)
        scales[: fp8.shape[0], : fp8.shape[1]].copy_(fp8.view(torch.uint8))
        getattr(output, f"_amax_{direction}").fill_(largest)


def _fp4_to_values(tensor: Any) -> Tensor:
    data, scales = tensor._rowwise_data, tensor._rowwise_scale_inv
    codes = torch.stack([data & 15, data >> 4], -1).view(data.shape[0], -1).long()
    values = FP4_VALUES[codes % 8] * torch.where(codes < 8, 1.0, -1.0)
    rows, columns = values.shape
    factor = tensor._amax_rowwise / (6 * 448)
    fp8 = scales.view(torch.float8_e4m3fn)[:rows, : columns // FP4_BLOCK].float() * factor
    return (values.view(rows, -1, FP4_BLOCK) * fp8[..., None]).view(rows, columns)


def _exponents(largest: Tensor) -> Tensor:
    """Return the biased exponents of the smallest powers of 2 that are not below these numbers."""
    mantissa, exponent = torch.frexp(largest)  # the mantissa is in [0.5, 1)
    return (exponent - (mantissa == 0.5).int() + 127).clamp(0, 254).to(torch.uint8)


def _blocks_to_values(codes: Tensor, scales: Tensor) -> Tensor:
    rows, columns = codes.shape
    powers = torch.exp2(scales[:rows, : columns // BLOCK].float() - 127)
    return (codes.view(rows, -1, BLOCK) * powers[..., None]).view(rows, columns)


def _cast(values: Tensor, fp8: torch.dtype) -> Tensor:
    limit = torch.finfo(fp8).max
    return values.clamp(-limit, limit).to(fp8).view(torch.uint8)


def _empty_scales(shape: torch.Size) -> Tensor:
    sizes = (shape[0], shape[1] // BLOCK)
    padded = [-(-size // multiple) * multiple for size, multiple in zip(sizes, PADDING, strict=True)]
    return torch.zeros(padded, dtype=torch.uint8)


def _transposed(codes: Tensor) -> Tensor:
    return codes.movedim(-1, 0).contiguous()


def _torch_dtype(dtype: Any) -> torch.dtype:
    known: dict[Any, torch.dtype] = importlib.import_module(
        "transformer_engine.pytorch.constants"
    ).TE_DType_To_Torch
    return known[dtype]


def _is_new() -> bool:
    return importlib.util.find_spec("transformer_engine.pytorch.quantized_tensor") is not None
