"""State of Transformer Engine's FusedAdam, in every form that it keeps moments and masters in.

    from megackpt.contrib.transformer_engine import fused_adam

    state = {"model": model_state, "optimizer": fused_adam.sharded_state_dict(optimizer, model_state)}
    megackpt.save(state, path)

Moments and masters are stored as float32 arrays under the keys of `megackpt.training.optim`, whatever their
form: float32, bfloat16, float16 or float8 with a scale for each tensor, int16 remainders. TE's own state dict
has no scales, and int16 remainders under the name of float32 masters. The scales are stored too, for each
slice of a parameter. At the same slices a load restores codes and scales bit for bit; at others there are no
scales for the new slices, and TE takes new ones from the largest values.

Quantised parameters that were declared with `quantised="masters"` are written from the loaded masters.

With `moments="codes"`, states of fewer than 32 bits are stored as their codes instead:
half or a quarter of the bytes. They load at the same slices only.

The optimizer is known by its attributes. TE is not imported.

Source: TE `pytorch/optimizers/fused_adam.py`, 2.2 and 2.20.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from megackpt.contrib.group_settings import declare_settings, restore_settings
from megackpt.contrib.transformer_engine.quantised import is_from_masters, quantise_parameters
from megackpt.entities import (
    LocalNonpersistentObject,
    ReplicaId,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)
from megackpt.errors import DeclarationError
from megackpt.training.optim.inner_optimizer import MASTER
from megackpt.training.optim.param_groups import WhenDifferent
from megackpt.training.optim.remainders import join_master, split_master
from megackpt.training.optim.sharded_state import (
    ParamEntity,
    cuts_of_entity,
    find_param_entities,
    make_own_array,
    make_sharded_optimizer_tensor,
)

# Moments and masters of Transformer Engine's FusedAdam as the codes that it keeps, with their scales.
#
# The codes are stored as they are in memory, in arrays of their own dtype, so a moment of 8 bits has a byte
# for each element. A scale belongs to the slice of a parameter that a rank has. The keys are
#
#     optimizer.codes.<state>.<dtype>.<model key>            of the shape of the parameter
#     optimizer.scale_of_codes.<state>.<dtype>.<model key>   [layers, slices]
#
# so that codes never load as values, or as codes of another dtype.

Moments: TypeAlias = Literal["portable", "codes"]


class MomentCodes(NamedTuple):
    """What a load returns for a state that is stored as codes.

    Attributes:
        codes: of the parameter's shape; float8 as uint8.
        scale: 0-dim float32, by which codes are multiplied; None for bfloat16.
    """

    codes: Tensor
    scale: Tensor | None


def check_moments(form: str) -> Moments:
    """Return `form` if it is a choice.

    Raises:
        DeclarationError: it is not.
    """
    if form not in get_args(Moments):
        raise DeclarationError(f"moments is {form!r}. Give one of {list(get_args(Moments))}.")
    return form  # type: ignore[return-value]


def declare_codes(entity: ParamEntity, codes: MomentCodes, *, state: str, dtype: str) -> ShardedTensorFactory:
    """Declare codes, which a load fills in place, and their scale. Local.

    Args:
        entity: of the parameter.
        codes: as the optimizer has them, with a copy of the scale.
        state: name of the state in keys.
        dtype: name of the codes' dtype in keys.

    Raises:
        DeclarationError: the parameter is cut into slices of different sizes, whose scales have no numbers.
    """
    cuts = cuts_of_entity(entity)
    if cuts is None and codes.scale is not None:
        raise DeclarationError(
            f"{entity.key!r}: its slices have different sizes, so that the scales of their {dtype} codes "
            f'have no places in an array. Declare the optimizer with moments="portable".',
            key=entity.key,
        )
    stored = _StoredCodes(entity, codes.scale, f"{state}.{dtype}", cuts or ())
    return ShardedTensorFactory(
        f"optimizer.codes.{state}.{dtype}.{entity.key}",
        codes.codes,
        stored.build,
        stored.merge,
        entity.replica_id,
        how=f"{state} of FusedAdam from stored {dtype} codes",
        advice=(
            "Codes of FusedAdam load into states of the same dtype, and if they have scales, at the same tp "
            'and ep. Save and load moments="portable" (float32 values) for others.'
        ),
    )


@dataclass(frozen=True)
class _StoredCodes:
    """What is stored of one state: the functions of its factory.

    Attributes:
        entity: of the parameter.
        scale: of this rank's slice, or None.
        name: state and dtype, as they are in keys.
        cuts: which slice it is, as for `make_own_array`.
    """

    entity: ParamEntity
    scale: Tensor | None
    name: str
    cuts: Sequence[tuple[int, int]]

    def build(
        self, key: str, codes: Tensor, replica_id: ReplicaId, flattened_range: slice | None
    ) -> dict[str, Any]:
        """Declare the codes and their scale."""
        del key, replica_id, flattened_range  # those of the entity
        built: dict[str, Any] = {
            "codes": make_sharded_optimizer_tensor(self.entity, codes, f"optimizer.codes.{self.name}")
        }
        if self.scale is not None:
            prefix = f"optimizer.scale_of_codes.{self.name}"
            built["scale"] = make_own_array(self.entity, self.scale, prefix=prefix, cuts=self.cuts)
        return built

    def merge(self, loaded: dict[str, Tensor]) -> MomentCodes:
        """Return what was loaded."""
        return MomentCodes(loaded["codes"], loaded.get("scale"))


_STORED_AS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "master_param": MASTER}
_SCALED = (torch.float16, torch.uint8)
"""Dtypes that have a scale; uint8 is TE's name of float8."""
_CODES = {torch.float16: "float16", torch.bfloat16: "bfloat16", torch.uint8: "float8_e4m3"}
"""Dtypes of states that can be stored as codes, and their names in keys."""


def is_fused_adam(optimizer: Any) -> bool:
    """Return whether this is Transformer Engine's FusedAdam, by its attributes. Local."""
    names = ("get_unscaled_state", "set_scaled_state", "initialize_state", "name_to_dtype_map", "_scales")
    return all(hasattr(optimizer, name) for name in names)


@torch.no_grad()
def sharded_state_dict(
    optimizer: Optimizer,
    model_sharded_state_dict: ShardedStateDict,
    is_loading: bool = False,
    *,
    moments: Moments = "portable",
) -> ShardedStateDict:
    """Declare moments, masters, scales, and the settings of the groups with their `step`. Local.

    State that does not exist yet is created as TE's first step creates it. Data of moments and masters that
    are stored as float32 and are not is a new tensor.

    Args:
        optimizer: Transformer Engine's FusedAdam.
        model_sharded_state_dict: of the model; its entities wrap the parameters.
        is_loading: for the signature of others; it has no effect.
        moments: "portable" for float32 values, which load at every layout and into every form; or "codes" of
            float16, bfloat16 and float8 states (masters too) with their scales, bit for bit, for slices of
            the same number. The load has to ask for what was saved.

    Returns:
        `state` and `scales` by position of the parameter and name; `from_masters`, by position, which
        parameters a load writes from their masters; `param_groups` by name of the group. The
        keys are `optimizer.state.<state>.<model key>` and `optimizer.scale.<state>.<slices>.<model key>`.
        After a load, `LoadReport.loaded` has the keys of restored scales, and `LoadReport.excluded` those
        that the checkpoint does not have: these moments are scaled anew. `LoadReport.transformed` has the
        states that were loaded as codes.

    Raises:
        DeclarationError: the optimizer is another one, has a parameter that is not declared, or codes are
            asked for of a parameter that is cut into slices of different sizes; or quantised parameters are
            not stored, and the optimizer has no masters.
    """
    del is_loading
    form = check_moments(moments)
    if not is_fused_adam(optimizer):
        raise DeclarationError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} is not the FusedAdam of Transformer "
            f"Engine. Use megackpt.training.optim, or megackpt.contrib.apex for Apex's."
        )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    _create_states(optimizer, params)
    entities = find_param_entities(model_sharded_state_dict, params)
    state: dict[int, dict[str, ParamEntity]] = {}
    scales: dict[int, dict[str, ShardedTensor]] = {}
    from_masters: dict[int, LocalNonpersistentObject] = {}
    for position, (param, entity) in enumerate(zip(params, entities, strict=True)):
        state[position] = {
            stored_as: _declare_state(optimizer, param, entity, name, stored_as, form)
            for name, stored_as in _names(optimizer, param)
        }
        if form == "portable":
            scales[position] = dict(_declare_scales(optimizer, param, entity))
        if is_from_masters(entity):
            _check_master(state[position], entity)
            from_masters[position] = LocalNonpersistentObject(True)
    settings = declare_settings(optimizer.param_groups, params, model_sharded_state_dict)
    written = {"from_masters": from_masters} if from_masters else {}
    return {"state": state, "scales": scales, **written, **settings}


@torch.no_grad()
def load_sharded_state_dict(
    optimizer: Optimizer, loaded: StateDict, *, when_different: WhenDifferent = "checkpoint"
) -> None:
    """Restore what a load of `sharded_state_dict` returned. Local; after the model was loaded.

    With remainders it writes the weights, too (see `megackpt.training.optim.remainders`), and with
    `quantised="masters"` the quantised ones. Masters that were not loaded are copied from the weights.
    when_different is as for the optimizers of `megackpt.training.optim`.

    Raises:
        MismatchError: the groups do not belong to those of the checkpoint, or are configured otherwise.
    """
    is_capturable = getattr(optimizer, "capturable", False)
    restore_settings(
        optimizer.param_groups, loaded, is_capturable=is_capturable, when_different=when_different
    )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    scales = loaded.get("scales", {})
    for position, param in enumerate(params):
        values = loaded["state"].get(position, {})
        for name, stored_as in _names(optimizer, param):
            value = values.get(stored_as)
            if value is None and name == "master_param":
                value = param.detach().float()
            if value is not None:
                _restore(optimizer, param, name, value, scales.get(position, {}).get(stored_as))
        if position in loaded.get("from_masters", {}):
            quantise_parameters([(param, _float32_of(optimizer, param, "master_param"))])


def _create_states(optimizer: Any, params: Sequence[Parameter]) -> None:
    """Create the states of parameters that have none, as TE's first step does."""
    for param in params:
        if not optimizer.state.get(param):
            has_remainders = optimizer.store_param_remainders and param.dtype == torch.bfloat16
            optimizer.initialize_state(param, has_remainders)


def _check_master(state: Mapping[str, ParamEntity], entity: ParamEntity) -> None:
    if MASTER not in state:
        raise DeclarationError(
            f'{entity.key!r}: the model was declared with quantised="masters", so that this parameter is not '
            f"stored, and this FusedAdam has no masters. Make it with master_weights=True, or declare the "
            f'model with quantised="values" or "codes".',
            key=entity.key,
        )


def _names(optimizer: Optimizer, param: Parameter) -> Iterator[tuple[str, str]]:
    """Yield TE's names of the states that a parameter has, and those in checkpoints."""
    return ((name, as_) for name, as_ in _STORED_AS.items() if optimizer.state[param].get(name) is not None)


def _declare_state(
    optimizer: Any, param: Parameter, entity: ParamEntity, name: str, stored_as: str, form: Moments
) -> ParamEntity:
    dtype = _CODES.get(optimizer.name_to_dtype_map[name])
    if form == "codes" and dtype is not None:
        stored = optimizer.state[param][name]
        codes = MomentCodes(getattr(stored, "_data", stored), _scale_of(optimizer, param, name))
        return declare_codes(entity, codes, state=stored_as, dtype=dtype)
    value = _float32_of(optimizer, param, name)
    return make_sharded_optimizer_tensor(entity, value, f"optimizer.state.{stored_as}")


def _declare_scales(
    optimizer: Optimizer, param: Parameter, entity: ParamEntity
) -> Iterator[tuple[str, ShardedTensor]]:
    """Yield name and declaration of the scales, under keys that say how many slices the parameter has."""
    cuts = cuts_of_entity(entity)
    if cuts is None:  # slices of different sizes have no numbers
        return
    slices = "x".join(str(size) for _, size in cuts) or "whole"
    for name, stored_as in _names(optimizer, param):
        scale = _scale_of(optimizer, param, name)
        if scale is not None:
            prefix = f"optimizer.scale.{stored_as}.{slices}"
            array = make_own_array(entity, scale, prefix=prefix, cuts=cuts)
            yield stored_as, replace(array, if_missing="keep")


def _float32_of(optimizer: Any, param: Parameter, name: str) -> Tensor:
    stored = optimizer.state[param][name]
    if stored.dtype == torch.int16:
        return join_master(param.detach(), stored)
    value: Tensor = optimizer.get_unscaled_state(param, name).float()  # the state itself, if it is float32
    return value


def _scale_of(optimizer: Any, param: Parameter, name: str) -> Tensor | None:
    """Return a copy of the number by which codes are multiplied, 0-dim float32; None if there is none."""
    stored, dtype = optimizer.state[param][name], optimizer.name_to_dtype_map[name]
    if dtype not in _SCALED:
        return None
    scale = stored._scale_inv if dtype == torch.uint8 else optimizer._scales[param][name]
    copy: Tensor = scale.detach().clone().view(())
    return copy


def _restore(
    optimizer: Any, param: Parameter, name: str, value: Tensor | MomentCodes, scale: Tensor | None
) -> None:
    stored = optimizer.state[param][name]
    if isinstance(value, MomentCodes):
        _write_codes(optimizer, param, name, value)
    elif stored.dtype == torch.int16:
        split_master(value, weight=param.detach(), remainder=stored)
    elif stored.dtype == torch.float32 and optimizer.name_to_dtype_map[name] == torch.float32:
        if value.data_ptr() != stored.data_ptr():
            stored.copy_(value)
    elif scale is None or not _restore_codes(optimizer, param, name, value, scale):
        optimizer.set_scaled_state(param, name, value.clone())  # TE scales its argument in place


def _restore_codes(optimizer: Any, param: Parameter, name: str, value: Tensor, scale: Tensor) -> bool:
    """Write the codes whose products with the scale are the values; return whether there are such codes.

    There are, if the scale is the one that the values were stored with. A product is rounded to float32, and
    so is the quotient here; both errors are far below the distance of two codes.
    """
    is_float8 = optimizer.name_to_dtype_map[name] == torch.uint8
    dtype = torch.float8_e4m3fn if is_float8 else torch.float16
    codes = torch.where(scale > 0, value / scale, torch.zeros_like(value)).to(dtype)
    if not torch.equal(codes.float() * scale, value):
        return False
    _write_codes(optimizer, param, name, MomentCodes(codes.view(torch.uint8) if is_float8 else codes, scale))
    return True


def _write_codes(optimizer: Any, param: Parameter, name: str, loaded: MomentCodes) -> None:
    stored = optimizer.state[param][name]
    target = getattr(stored, "_data", stored)
    if loaded.codes.data_ptr() != target.data_ptr():
        target.copy_(loaded.codes)
    if loaded.scale is None:  # bfloat16
        return
    optimizer._scales[param][name].fill_(loaded.scale)
    if target is not stored:  # float8
        stored._scale_inv.fill_(loaded.scale)
        stored._quantizer.scale.fill_(1 / loaded.scale)
        if getattr(stored, "_transpose", None) is not None:
            stored._transpose_invalid = True
