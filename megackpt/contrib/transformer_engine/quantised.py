"""Quantised parameters of Transformer Engine (`quantized_model_init`): what is stored and how it is loaded.

Such a parameter has codes and scales. It is stored in one of three forms:

    values    what the codes stand for, in the parameter's own dtype, under its usual key. It can be loaded at
              every layout, and into parameters that are not quantised. A load quantises again.
    codes     the codes and scales as they are, for each shard of the parameter, bit for bit:
              <key>.Float8Tensor.kFloat8E4M3.data. A load needs shards of the same shapes.
    masters   nothing. Optimizers have the parameter's values as masters; see `quantise_parameters`.

A load writes with the parameter's `copy_`, which may replace memory. It changes no history of largest
values.

Source: TE `pytorch.tensor` (`Float8Tensor`, `MXFP8Tensor`, `NVFP4Tensor`: `get_metadata`, `copy_`, `data`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from megackpt.entities import (
    LocalNonpersistentObject,
    RankOffset,
    ReplicaId,
    ShardedBase,
    ShardedLayout,
    ShardedTensor,
    ShardedTensorFactory,
)
from megackpt.errors import DeclarationError

Quantised: TypeAlias = Literal["values", "codes", "masters"]

_CLASSES = ("QuantizedTensorStorage", "QuantizedTensor")  # of TE 2.20, of TE 2.2
_CACHE = "data_transpose"  # the codes of a Float8Tensor in another order
_TARGET = "parameter"


def is_quantised(value: Any) -> bool:
    """Return whether a tensor is a quantised one of TE (FP8, MXFP8, NVFP4)."""
    return any(base.__name__ in _CLASSES for base in type(value).__mro__)


def check_quantised(form: str) -> Quantised:
    """Return `form` if it is a choice.

    Raises:
        DeclarationError: it is not.
    """
    if form not in get_args(Quantised):
        raise DeclarationError(f"quantised is {form!r}. Give one of {list(get_args(Quantised))}.")
    return form  # type: ignore[return-value]


def without_codes(value: Tensor) -> Tensor:
    """Return a tensor of the shape of a quantised one, without data, to declare; other tensors themselves."""
    return torch.empty(value.shape, dtype=value.dtype, device="meta") if is_quantised(value) else value


def declare_quantised(
    plain: ShardedBase,
    value: Tensor,
    form: Quantised,
    shard: tuple[RankOffset, ...],
    *,
    in_group: bool = False,
) -> ShardedBase:
    """Declare a parameter that may be quantised. Local.

    Args:
        plain: the declaration of `without_codes(value)`; returned if the parameter is not quantised.
        value: the parameter.
        form: what is stored of a quantised one.
        shard: `(axis, index, fragments)` of leading axes that number the parameter's shards.
        in_group: whether it is one of `members_of` a parameter, whose memory must not be replaced.
    """
    if not is_quantised(value):
        return plain
    assert isinstance(plain, ShardedTensor | ShardedLayout)
    shape = plain.without_data()
    stored = _StoredForm(shape, form, shard, in_group)
    return ShardedTensorFactory(
        plain.key,
        value,
        stored.build,
        stored.merge,
        plain.replica_id,
        of_states=shape,
        how=_HOW[form].format(kind=type(value).__name__, dtype=str(value.dtype).removeprefix("torch.")),
        advice=_ADVICE if form == "codes" else "",
    )


def members_of(parameter: Any) -> list[Any]:
    """Return the quantised matrices of one grouped parameter, in its memory; none of another tensor."""
    split = getattr(parameter, "split_into_quantized_tensors", None)
    if split is None or parameter.quantizer is None:
        return []
    members: list[Any] = parameter.quantized_tensors or split()
    return members if all(is_quantised(member) for member in members) else []


def declare_group(
    shape: ShardedTensor | ShardedLayout, parameter: Tensor, members: Sequence[ShardedBase], form: Quantised
) -> ShardedTensorFactory:
    """Declare one quantised parameter of all experts by the declarations of its members. Local.

    Args:
        shape: the declaration of a plain tensor in its place.
        parameter: the grouped parameter, by which optimizers find its declaration.
        members: what `declare_quantised` returned for each of `members_of(parameter)`.
        form: what is stored of them.
    """
    factories = tuple(member for member in members if isinstance(member, ShardedTensorFactory))
    stored = _GroupForm(factories, form)
    return ShardedTensorFactory(
        shape.key,
        parameter,
        stored.build,
        stored.merge,
        shape.replica_id,
        of_states=shape.without_data(),
        how=factories[0].how,
        advice=factories[0].advice,
    )


def is_from_masters(entity: ShardedBase) -> bool:
    """Return whether an entity is a quantised parameter that is not stored: its values are the masters."""
    if not isinstance(entity, ShardedTensorFactory):
        return False
    stored = getattr(entity.build_fn, "__self__", None)
    return isinstance(stored, _StoredForm | _GroupForm) and stored.form == "masters"


@torch.no_grad()
def quantise_parameters(masters: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write masters into quantised parameters, with the parameters' own scales. Local.

    Call it after a load with `quantised="masters"`, with `(parameter, master)` of the whole shape, if the
    optimizer itself writes parameters only in its next step. The FP8 state has to be loaded before.
    `fused_adam.load_sharded_state_dict` does it for TE's FusedAdam.
    """
    for parameter, master in masters:
        members = members_of(parameter)
        for target, values in zip(members, master, strict=True) if members else [(parameter, master)]:
            _write(target, values)


_HOW: Mapping[str, str] = {
    "values": "{kind} quantised from {dtype} values",
    "codes": "{kind} from stored codes and scales",
    "masters": "{kind} not stored; its values are the optimizer's masters",
}


_ADVICE = (
    "Codes of quantised parameters load into shards of the same shapes and the same class, such as those of "
    'the same tp. Save and load quantised="values" for others, or take the values from the masters of the '
    'optimizer (quantised="masters").'
)


@dataclass(frozen=True)
class _StoredForm:
    """How a quantised parameter is stored: the functions of its factory.

    Attributes:
        shape: the declaration of a plain tensor in its place, without data.
        form: what is stored.
        shard: as for `declare_quantised`.
        in_group: likewise.
    """

    shape: ShardedTensor | ShardedLayout
    form: Quantised
    shard: tuple[RankOffset, ...]
    in_group: bool

    @torch.no_grad()
    def build(
        self, key: str, tensor: Any, replica_id: ReplicaId, flattened_range: slice | None
    ) -> dict[str, Any]:
        """Declare what is stored, with the parameter itself for `merge`. It copies values or codes."""
        del flattened_range  # of states only, which are declared by `shape`
        built: dict[str, Any] = {_TARGET: LocalNonpersistentObject(tensor)}
        if self.form == "values":
            values = tensor.dequantize(dtype=tensor.dtype).detach()
            built["values"] = self.shape.retarget(key=key, data=values, replica_id=replica_id)
        elif self.form == "codes":
            for name, buffer in buffers_of(tensor).items():
                built[name] = ShardedTensor.from_rank_offsets(
                    f"{key}.{_kind_of_codes(tensor)}.{name}",
                    buffer.detach().clone(),  # memory of its own: a load writes by the parameter's setter
                    *self.shard,
                    replica_id=replica_id,
                    prepend_axis_num=len(self.shard),
                )
        return built

    @torch.no_grad()
    def merge(self, loaded: dict[str, Any]) -> Any:
        """Write what was loaded into the parameter, and return it."""
        target = loaded[_TARGET]
        if self.form == "values":
            if not torch.equal(target.dequantize(dtype=target.dtype), loaded["values"]):
                _write(target, loaded["values"])  # equal values are not quantised again: codes could change
        elif self.form == "codes":
            codes = {name: value for name, value in loaded.items() if name != _TARGET}
            (_fill_codes if self.in_group else _write_codes)(target, codes)
        return target


@dataclass(frozen=True)
class _GroupForm:
    """How one quantised parameter of all experts is stored: the functions of its factory.

    Attributes:
        members: the factories of its matrices.
        form: what is stored.
    """

    members: tuple[ShardedTensorFactory, ...]
    form: Quantised

    def build(
        self, key: str, tensor: Any, replica_id: ReplicaId, flattened_range: slice | None
    ) -> dict[str, Any]:
        """Return the factories, with the parameter itself for `merge`."""
        del replica_id, flattened_range  # of the members
        return {
            _TARGET: LocalNonpersistentObject(tensor),
            "members": [replace(member, key=key) for member in self.members],
        }

    def merge(self, loaded: dict[str, Any]) -> Any:
        """Return the parameter, whose members their factories have written."""
        return loaded[_TARGET]


def buffers_of(tensor: Any) -> dict[str, Tensor]:
    """Return the codes and scales of a quantised tensor, by TE's names for them, without caches."""
    return {
        name: value
        for name, value in tensor.get_metadata().items()
        if isinstance(value, Tensor) and name != _CACHE
    }


def _kind_of_codes(tensor: Any) -> str:
    """Return what tells codes apart that mean something else: `MXFP8Tensor.kFloat8E4M3`.

    Flags that are set, such as `with_gemm_swizzled_scales`, are part of it.
    """
    metadata = tensor.get_metadata()
    fields = metadata.items()
    dtypes = [
        str(value.name) for _, value in fields if hasattr(value, "name") and not isinstance(value, Tensor)
    ]
    flags = [name for name, value in fields if value is True]
    if metadata.get("nvfp4_use_4over6"):  # then the scales have one of two bounds
        flags.append(f"nvfp4_e4m3_max_{metadata['nvfp4_e4m3_max']}")
    return ".".join([type(tensor).__name__, *dtypes, *flags])


def _write(target: Any, values: Tensor) -> None:
    """Quantise values into a parameter, and leave its FP8 state as it is."""
    largest = getattr(getattr(target, "_quantizer", None), "amax", None)
    before = None if largest is None else largest.clone()
    target.copy_(values)
    if largest is not None:
        # TE records the largest value in the history, which a load has just restored.
        largest.copy_(before)


def _write_codes(target: Any, codes: Mapping[str, Tensor]) -> None:
    own = target.get_metadata()
    if own.get(_CACHE) is not None:
        codes = {**codes, _CACHE: codes["data"].movedim(-1, 0).contiguous()}
    device = {"device": target.device} if "fake_dtype" in own else {}  # TE 2.2 does not take it
    source = type(target)(shape=target.shape, dtype=target.dtype, **device, **{**own, **codes})
    _write(target, source)
    if not _has_codes(target, codes):
        # TE 2.2 quantises again for MXFP8, TE 2.20 if a cache is out of date. The other setter takes codes.
        target.data = source


def _fill_codes(target: Any, codes: Mapping[str, Tensor]) -> None:
    """Write codes into a member of a group. The setters of a tensor may give it other memory."""
    for name, buffer in target.get_metadata().items():
        if name == _CACHE and buffer is not None:
            buffer.copy_(codes["data"].movedim(-1, 0))
        elif isinstance(buffer, Tensor):
            buffer.copy_(codes[name])


def _has_codes(target: Any, codes: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(value, codes[name]) for name, value in buffers_of(target).items())
