"""Codecs of torch and numpy values.

Every dtype becomes a tensor that every safetensors reader can load: dtypes that all of them know are stored
unchanged, all others as raw bytes, with dtype and shape in the tree.

Values are kept bit by bit. Strides, shared memory and the device are not: a tensor that occurs twice is
stored twice.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megackpt.codec.kinds import Kind, ValueDecoder, ValueEncoder, fields_of, integer_of, list_of, text_of
from megackpt.codec.tree import Json

# dtype -> name in safetensors. Without complex and newer eight-bit floats, which only recent readers know.
PORTABLE_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
# Other dtypes that can be viewed as bytes. Some releases of torch lack some of them.
_RAW_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "complex32", "complex64", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    )
    if hasattr(torch, name)
}  # fmt: skip
_RAW_NAMES = {dtype: name for name, dtype in _RAW_DTYPES.items()}
_ALL_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
MAX_DIMS = 64

# All numpy dtypes but structures, objects and dtypes of other packages.
_NUMPY_DTYPE = re.compile(
    r"[<>|](b1|[iu][1248]|f(2|4|8|12|16)|c(8|16|24|32)|[SU]\d{1,9}|[mM]8(\[\d{0,9}[a-zA-Z]{1,2}\])?)"
)
_PORTABLE_NUMPY = frozenset(
    np.dtype(kind) for kind in ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?")
)
_NUMPY_SCALARS = tuple(
    sorted(
        {cls for cls in np.sctypeDict.values() if not issubclass(cls, np.flexible | np.object_)},
        key=lambda cls: cls.__name__,
    )
)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor of any dtype, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def tensor_of_bytes(data: bytes | bytearray | memoryview) -> torch.Tensor:
    """Return a new uint8 tensor, `[len(data)]`, with a copy of `data`."""
    tensor = torch.empty(memoryview(data).nbytes, dtype=torch.uint8)
    if len(tensor):
        tensor.numpy()[:] = np.frombuffer(data, np.uint8)
    return tensor


_MAX_REPEATED_BYTES = 1 << 30
_MAX_REPEATS = 64


def _encode_tensor(value: torch.Tensor, encoder: ValueEncoder) -> Json:
    fault = tensor_fault(value)
    if fault:
        raise encoder.error(fault)
    plain = _compact(value.detach().resolve_conj().resolve_neg().cpu())
    if plain.dtype in PORTABLE_DTYPES:
        return encoder.add(plain)
    raw = plain.reshape(-1).view(torch.uint8)
    return {"dtype": _RAW_NAMES[plain.dtype], "shape": list(plain.shape), "bytes": encoder.add(raw)}


def _compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the strides of a new one, without a copy if it has them."""
    # With one element or none, torch calls any strides contiguous, but cannot view all of them as bytes.
    return tensor.contiguous() if tensor.numel() > 1 else tensor.clone(memory_format=torch.contiguous_format)


def has_own_operations(tensor: torch.Tensor) -> bool:
    """Return whether the class of a tensor does its operations, as one that wraps other tensors. Local."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a strided tensor, if it has any, are in memory of its storage. Local.

    FSDP frees the storage of parameters and keeps the tensors. Who reads or fills one uses memory of others.
    Tensors inside of functional transformations of torch have no memory that code may reach, either.
    """
    length = tensor.numel()
    if not length or has_own_operations(tensor) or not (tensor.is_cpu or tensor.is_cuda):
        return True
    try:
        if not tensor.is_contiguous():
            length = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        nbytes = (tensor.storage_offset() + length) * tensor.element_size()
        return tensor.data_ptr() != 0 and nbytes <= tensor.untyped_storage().nbytes()
    except RuntimeError:  # a transformation of torch.func does not let code reach the memory
        return False


def tensor_fault(value: torch.Tensor) -> str | None:
    """Return why a checkpoint cannot hold a tensor, and what to do; None if it can."""
    if value.is_meta:
        return (
            "A meta tensor has no values. Materialise it (to_empty, then load or initialise) before saving."
        )
    if value.is_quantized:
        return "A quantized tensor is not supported. Save value.int_repr() with its scale and zero point."
    if value.is_nested:
        return "A nested tensor is not supported. Save value.unbind()."
    if value.layout is not torch.strided:
        return f"A tensor of layout {value.layout} is not supported. Save value.to_dense() or its components."
    if not has_memory(value):
        return "A tensor without memory has no values. Save it while its memory is there (FSDP frees it)."
    if value.requires_grad:
        return "A tensor that requires grad would load without it. Save value.detach()."
    if value.dtype not in PORTABLE_DTYPES and value.dtype not in _RAW_NAMES:
        return f"Tensors of {value.dtype} are not supported. Save value.view(torch.uint8), or convert it."
    nbytes = value.numel() * value.element_size()
    if nbytes > max(_MAX_REPEATED_BYTES, _MAX_REPEATS * value.untyped_storage().nbytes()):
        return f"A tensor that repeats its elements would take {nbytes:,} bytes. Save the elements once."
    if value.dim() > MAX_DIMS:
        return f"A tensor of {value.dim()} dims is more than {MAX_DIMS}. Save value.flatten() and its shape."
    return None


def _decode_tensor(tree: Json, decoder: ValueDecoder) -> torch.Tensor:
    if type(tree) is int:
        return decoder.take(tree)
    name, dims, position = fields_of(tree, "dtype", "shape", "bytes")
    dtype = _RAW_DTYPES.get(text_of(name))
    if dtype is None:
        raise ValueError(f"this PyTorch ({torch.__version__}) knows no tensors of dtype {name!r}")
    raw = take_bytes(position, decoder)
    shape = _shape_for(dims, itemsize=dtype.itemsize, nbytes=len(raw))
    return raw.view(dtype).reshape(shape)


def take_bytes(position: Json, decoder: ValueDecoder) -> torch.Tensor:
    """Return the tensor at a position, which must be raw bytes: uint8, `[nbytes]`."""
    raw = decoder.take(position)
    if raw.dtype is not torch.uint8 or raw.dim() != 1:
        raise ValueError(f"raw bytes are stored as {raw.dtype} of {raw.dim()} dims, not as uint8 of one")
    return raw.contiguous()


def _shape_for(tree: Json, *, itemsize: int, nbytes: int) -> tuple[int, ...]:
    """Return a shape from a file, after checking that nbytes bytes fill it exactly."""
    shape = tuple(map(integer_of, list_of(tree)))
    if len(shape) > MAX_DIMS or any(extent < 0 for extent in shape) or math.prod(shape) * itemsize != nbytes:
        raise ValueError(
            f"the shape {list(shape[:MAX_DIMS])} of {itemsize}-byte elements does not fit {nbytes} bytes"
        )
    return shape


def _encode_array(value: npt.NDArray[Any], encoder: ValueEncoder) -> Json:
    if not _NUMPY_DTYPE.fullmatch(value.dtype.str) or value.dtype.hasobject or not value.dtype.itemsize:
        raise encoder.error(
            f"A numpy array of dtype {value.dtype} is not supported: structures, objects and dtypes of "
            f"other packages are not portable. Save its fields, a list, or a view with a plain dtype."
        )
    if value.dtype in _PORTABLE_NUMPY and value.dtype.isnative:
        # torch warns about read-only arrays, and rejects negative strides.
        usable = value if value.flags.writeable and value.flags.c_contiguous else value.copy(order="C")
        return encoder.add(_compact(torch.from_numpy(usable)))
    raw = tensor_of_bytes(value.tobytes())
    return {"dtype": value.dtype.str, "shape": list(value.shape), "bytes": encoder.add(raw)}


def _decode_array(tree: Json, decoder: ValueDecoder) -> npt.NDArray[Any]:
    if type(tree) is int:
        return decoder.take(tree).numpy()
    name, dims, position = fields_of(tree, "dtype", "shape", "bytes")
    dtype = _numpy_dtype(name)
    raw = take_bytes(position, decoder)
    shape = _shape_for(dims, itemsize=dtype.itemsize, nbytes=len(raw))
    return raw.numpy().view(dtype).reshape(shape) if len(raw) else np.empty(shape, dtype)


def _encode_numpy_scalar(value: np.generic, encoder: ValueEncoder) -> Json:
    return {"dtype": value.dtype.str, "hex": value.tobytes().hex()}


def _decode_numpy_scalar(tree: Json, decoder: ValueDecoder) -> np.generic:
    name, digits = fields_of(tree, "dtype", "hex")
    dtype = _numpy_dtype(name)
    data = bytes.fromhex(text_of(digits))
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for a {name}")
    scalar: np.generic = np.frombuffer(data, dtype)[0]
    return scalar


def _numpy_dtype(tree: Json) -> np.dtype[Any]:
    name = text_of(tree)
    if not _NUMPY_DTYPE.fullmatch(name):
        raise ValueError(f"the numpy dtype {name!r} is not one that megackpt stores")
    dtype: np.dtype[Any] = np.dtype(name)
    if not dtype.itemsize:
        raise ValueError(f"the numpy dtype {name!r} has no bytes")
    return dtype


def _encode_numpy_str(value: np.str_, encoder: ValueEncoder) -> Json:
    return encoder.child("value", str.__str__(value))  # str(value) would cut NULs off the end


def _decode_numpy_str(tree: Json, decoder: ValueDecoder) -> np.str_:
    text: np.str_ = np.str_(decoder.child("value", text_of(tree)))
    return text


def _encode_numpy_bytes(value: np.bytes_, encoder: ValueEncoder) -> Json:
    return encoder.binary(bytes(value))


def _decode_numpy_bytes(tree: Json, decoder: ValueDecoder) -> np.bytes_:
    data: np.bytes_ = np.bytes_(decoder.binary(tree))
    return data


def _encode_dtype(value: torch.dtype, encoder: ValueEncoder) -> Json:
    return str(value).removeprefix("torch.")


def _decode_dtype(tree: Json, decoder: ValueDecoder) -> torch.dtype:
    name = text_of(tree)
    if name not in _ALL_DTYPES:
        raise ValueError(f"this PyTorch ({torch.__version__}) has no dtype {name!r}")
    return _ALL_DTYPES[name]


def _encode_device(value: torch.device, encoder: ValueEncoder) -> Json:
    return str(value)


def _decode_device(tree: Json, decoder: ValueDecoder) -> torch.device:
    return torch.device(text_of(tree))


def _encode_size(value: torch.Size, encoder: ValueEncoder) -> Json:
    return list(value)


def _decode_size(tree: Json, decoder: ValueDecoder) -> torch.Size:
    return torch.Size(map(integer_of, list_of(tree)))


def _encode_generator(value: torch.Generator, encoder: ValueEncoder) -> Json:
    return {"device": str(value.device), "state": encoder.child("state", value.get_state())}


def _decode_generator(tree: Json, decoder: ValueDecoder) -> torch.Generator:
    device, state = fields_of(tree, "device", "state")
    state_tensor = decoder.child("state", state)
    generator = torch.Generator(device=text_of(device))  # RuntimeError where there is no such device
    generator.set_state(state_tensor)
    return generator


@dataclass(frozen=True, slots=True)
class ArrayReference:
    """Stands for a tensor of common state that is stored as a global array.

    A save makes such references and a load replaces them; users see none.

    Attributes:
        key: the key of the array.
    """

    key: str


def _encode_reference(value: ArrayReference, encoder: ValueEncoder) -> Json:
    return value.key


def _decode_reference(tree: Json, decoder: ValueDecoder) -> ArrayReference:
    return ArrayReference(text_of(tree))


KINDS = (
    Kind("$tensor", (torch.Tensor,), _encode_tensor, _decode_tensor),
    Kind("$ndarray", (np.ndarray,), _encode_array, _decode_array),
    Kind("$npscalar", _NUMPY_SCALARS, _encode_numpy_scalar, _decode_numpy_scalar),
    Kind("$npstr", (np.str_,), _encode_numpy_str, _decode_numpy_str),
    Kind("$npbytes", (np.bytes_,), _encode_numpy_bytes, _decode_numpy_bytes),
    Kind("$dtype", (torch.dtype,), _encode_dtype, _decode_dtype),
    Kind("$device", (torch.device,), _encode_device, _decode_device),
    Kind("$size", (torch.Size,), _encode_size, _decode_size),
    Kind("$generator", (torch.Generator,), _encode_generator, _decode_generator),
    Kind("$array", (ArrayReference,), _encode_reference, _decode_reference),
)
