"""Transformer Engine's own Python classes on a machine without CUDA.

The wheel `transformer-engine`, installed with `--no-deps`, has the Python classes of the library. Its
compiled extension, `transformer_engine_torch`, needs a CUDA toolkit: a module of empty functions and of
enumerations stands in for it. Modules can then be built on `cpu` and `meta`, and their FP8 state can be read
and written. FP8 and MXFP8 parameters work in `quantised_on_cpu()`, with the kernels of `te_kernels`. A
forward pass needs the real extension.

The wheel belongs into a folder of its own on PYTHONPATH (see .ci/run), not into the environment of the other
tests: Megatron-Core tries to import what is installed, and fails without CUDA.

    te = transformer_engine()              # skips the test module where the wheel is not installed
    with cpu_for_cuda():
        layer = te.Linear(4, 8, device="cpu")
"""

from __future__ import annotations

import enum
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.contrib.transformer_engine import te_kernels

EXTENSION = "transformer_engine_torch"

# What torch.cuda says in addition while TE builds modules.
_WITH_DEVICE = {"is_available": True, "synchronize": None, "is_current_stream_capturing": False}

# Enumerations whose members TE compares with its own, or uses as numbers, when it is imported.
ENUMERATIONS = {
    "DType": (
        "kByte", "kInt32", "kFloat32", "kFloat16", "kBFloat16", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1",
    ),
    "NVTE_Fused_Attn_Backend": ("NVTE_No_Backend", "NVTE_F16_arbitrary_seqlen", "NVTE_FP8"),
    "FP8FwdTensors": (
        "GEMM1_INPUT", "GEMM1_WEIGHT", "GEMM1_OUTPUT", "GEMM2_INPUT", "GEMM2_WEIGHT", "GEMM2_OUTPUT",
        "GEMM3_INPUT", "GEMM3_WEIGHT", "GEMM3_OUTPUT",
    ),
    "FP8BwdTensors": (
        "GRAD_OUTPUT1", "GRAD_INPUT1", "GRAD_OUTPUT2", "GRAD_INPUT2", "GRAD_OUTPUT3", "GRAD_INPUT3",
    ),
}  # fmt: skip
KERNELS = ("quantize", "dequantize", "create_empty_quantized_tensor", "fp8_transpose")
OLD_MEMBERS = {"NVTE_Fused_Attn_Backend": ("NVTE_F16_max512_seqlen",)}


def te_version() -> tuple[int, ...]:
    """Return the version of the wheel, its first two numbers."""
    return tuple(int(number) for number in metadata.version("transformer-engine").split(".")[:2])


class _AnyMembers(type):
    """The class of enumerations whose members nothing depends on: each is 0."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return 0


class _Extension(types.ModuleType):
    """The compiled extension: enumerations, classes that do nothing, functions that return None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = lambda *args, **kwargs: None  # noqa: E731
        if name in ENUMERATIONS:
            members = (*ENUMERATIONS[name], *(OLD_MEMBERS.get(name, ()) if te_version() < (2, 20) else ()))
            value = enum.IntEnum(name, {member: i for i, member in enumerate(members)})
        elif name[:1].isupper():
            value = _AnyMembers(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(self, name, value)
        return value


class _Loader:
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Extension(EXTENSION)

    def exec_module(self, module: Any) -> None:
        module.get_cudnn_version = lambda: 92000
        for kernel in KERNELS:
            setattr(module, kernel, getattr(te_kernels, kernel))


class _CpuForCuda(TorchFunctionMode):
    """Tensors that TE makes on `cuda` are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return isinstance(device, int) or (device is not None and torch.device(device).type == "cuda")


def _device_answers() -> dict[str, Any]:
    """What `torch.cuda` says about a device that is not there."""
    properties = types.SimpleNamespace(
        name="none", major=9, minor=0, multi_processor_count=132, total_memory=1 << 36
    )
    return {
        "current_device": torch.device("cpu"),
        "get_device_capability": (9, 0),
        "get_device_properties": properties,
    }


@contextmanager
def _answers(answers: dict[str, Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, return_value=answer))
        yield


@contextmanager
def cpu_for_cuda() -> Iterator[None]:
    """Let TE build modules and read and write their state as if there were a CUDA device. It is the CPU.

    It changes `torch.cuda` for all threads: build the modules of all ranks before their threads start.
    """
    with _answers({**_device_answers(), **_WITH_DEVICE}), _CpuForCuda(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def quantised_on_cpu() -> Iterator[None]:
    """Let FP8 tensors be read and written on the CPU, in this thread: `device_answers` in the main one."""
    with _CpuForCuda():
        yield


@contextmanager
def device_answers() -> Iterator[None]:
    """Answer TE's questions about the device, in all threads."""
    with _answers(_device_answers()):
        yield


def transformer_engine() -> Any:
    """Return `transformer_engine.pytorch`; skip where the wheel is not installed."""
    if "transformer_engine.pytorch" not in sys.modules:
        if importlib.util.find_spec("transformer_engine") is None:
            pytest.skip(
                "transformer-engine is not installed: see test-te in pyproject.toml", allow_module_level=True
            )
        if not torch.cuda.is_available():
            return _import_without_extension()
    return importlib.import_module("transformer_engine.pytorch")


def _import_without_extension() -> Any:
    located = importlib.util.spec_from_file_location

    def locate(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == EXTENSION:
            return importlib.machinery.ModuleSpec(name, _Loader())  # type: ignore[arg-type]
        return located(name, *args, **kwargs)

    glob_of_path = Path.glob

    def glob(folder: Path, pattern: str, *args: Any, **kwargs: Any) -> Any:
        return (
            iter([Path(EXTENSION)])
            if pattern.startswith(EXTENSION)
            else glob_of_path(folder, pattern, *args, **kwargs)
        )

    with (
        # With this variable set, transformer_engine.common loads no libraries.
        mock.patch.dict(os.environ, {"NVTE_PROJECT_BUILDING": "1"}),
        mock.patch.object(importlib.util, "spec_from_file_location", locate),
        mock.patch.object(Path, "glob", glob),  # where TE before 2.4 looks for the extension
        _answers(_device_answers()),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        common = importlib.import_module("transformer_engine.common")
        with mock.patch.object(common, "_get_shared_object_file", return_value=Path(EXTENSION), create=True):
            return importlib.import_module("transformer_engine.pytorch")
