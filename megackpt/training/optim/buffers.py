"""Flat buffers: parameters and their gradients, each in one contiguous tensor.

A buffer has the memory, the views of it that the model uses (`param.data`, `param.main_grad`) and the hooks
that move `param.grad` into the gradient buffer. The optimizers decide when gradients are exchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from megackpt.errors import OptimizerError
from megackpt.training.optim.grad_sync import groups_of, is_summed_over_model_ranks
from megackpt.training.optim.ranges import BufferLayout, plan_buffer
from megackpt.training.parallel.attributes import is_marked
from megackpt.training.parallel.groups import ParallelGroups

_HOOK = "_megackpt_grad_hook"  # where a parameter keeps the hook that the last buffer gave it


class _GradHook:
    """The hook of one parameter; a pickle of the parameter drops it, as torch drops all hooks."""

    def __init__(self, handle: RemovableHandle | None = None) -> None:
        self._handle = handle

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def __reduce__(self) -> tuple[type[_GradHook], tuple[()]]:
        return _GradHook, ()


class ParamGradBuffer:
    """Parameters of one dtype on one device, equal on one group of ranks, and their gradients.

    They are packed in two flat tensors.

    Building one re-points `param.data` to a view into `data`, sets `param.main_grad` to a view into `grad`,
    and registers a hook that adds `param.grad` to `main_grad` and frees it whenever autograd has
    accumulated it. A parameter that was in another buffer leaves that one.

    Raises:
        OptimizerError: a parameter is a quantised one of Transformer Engine.

    Attributes:
        params: the parameters, in order of registration.
        layout: where they are.
        groups: the ranks around this one as these parameters see them: `groups.experts` for experts. The
            buffer is cut over their `dp_cp`.
        data: the parameters `[layout.numel]`, in their dtype; zeros between them.
        grad: their gradients `[layout.numel]`, in `grad_dtype`; zeros between them.
        touched: for each parameter, whether it got a gradient since the last `zero_grad`.
        on_grad: called with the index of a parameter whenever it got a gradient, if not None.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        layout: BufferLayout,
        groups: ParallelGroups,
        *,
        grad_dtype: torch.dtype,
    ) -> None:
        self.params = tuple(params)
        self.layout = layout
        self.groups = groups
        first = self.params[0]
        self.data = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
        self.grad = torch.zeros(layout.numel, dtype=grad_dtype, device=first.device)
        self.touched = [False] * len(self.params)
        self.on_grad: Callable[[int], None] | None = None
        self._closed: set[int] = set()
        self._reduced = False
        for index, (param, flat_range) in enumerate(zip(self.params, layout.params, strict=True)):
            view = self.data[flat_range.as_slice()].view(param.shape)
            _move(param, view)
            param.main_grad = self.grad[flat_range.as_slice()].view(param.shape)  # type: ignore[attr-defined]
            _replace_hook(param, _AccumulateHook(self, index))

    def collect(self) -> None:
        """Add gradients that no hook saw, and close the gradients for reduction. Local.

        Those are a `param.grad` that was assigned by hand, and gradients that a kernel added to `main_grad`
        itself; it sets `param.grad_added_to_main_grad = True` (Megatron-Core's and Transformer Engine's
        name).

        Raises:
            OptimizerError: `zero_grad` was not called since the last reduction.
        """
        self._check_not_reduced("optimizer.step() was called again")
        for index, param in enumerate(self.params):
            if param.grad is not None:
                self.accumulate(index, param)
            if getattr(param, "grad_added_to_main_grad", False):
                self.touched[index] = True
                param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        self._reduced = True

    def close(self, bucket: int) -> None:
        """Let no more gradients be added to a bucket before `zero_grad`, as its reduction starts. Local."""
        self._closed.add(bucket)

    def zero_grad(self) -> None:
        """Set all gradients to zero, and reset which parameters have one. Local."""
        self.grad.zero_()
        self.touched = [False] * len(self.params)
        self._reduced = False
        self._closed = set()
        for param in self.params:
            param.grad = None

    def accumulate(self, index: int, param: Tensor) -> None:
        """Add `param.grad` to the gradient of a parameter, and free it. Local; called after backward.

        Raises:
            OptimizerError: the gradients, or those of the parameter's bucket, are being reduced.
        """
        self._check_not_reduced("a backward pass was run")
        self._check_open(index)
        assert param.grad is not None
        if getattr(param, "grad_added_to_main_grad", False):
            param.grad = None  # a placeholder: the kernel has added the real gradient already
        else:
            self._add(index, param)
        if self.on_grad is not None:
            self.on_grad(index)

    def _add(self, index: int, param: Tensor) -> None:
        assert param.grad is not None
        main_grad = self.grad[self.layout.params[index].as_slice()].view(param.shape)
        if self.touched[index]:
            main_grad.add_(param.grad)
        else:
            main_grad.copy_(param.grad)  # not 0 + grad, which would turn -0.0 into 0.0
        self.touched[index] = True
        param.grad = None

    def _check_open(self, index: int) -> None:
        if self.layout.bucket_of_param[index] in self._closed:
            raise OptimizerError(
                f"a parameter of shape {tuple(self.params[index].shape)} got a gradient after the reduction "
                f"of its bucket was started. With overlap_grad_reduce that is after optimizer.micro_batches "
                f"backward passes: set it to the number of backward passes before each step."
            )

    def _check_not_reduced(self, action: str) -> None:
        if self._reduced:
            raise OptimizerError(
                f"{action} after optimizer.step() without optimizer.zero_grad() between the two. The "
                f"gradient buffer then has averaged gradients of this rank's slices, to which no gradient "
                f"can be added. Call optimizer.zero_grad() after every optimizer.step()."
            )


def _move(param: Parameter, view: Tensor) -> None:
    """Copy the elements of a parameter to `view`, and let the parameter have them there.

    Raises:
        OptimizerError: it is a quantised one of Transformer Engine, which has no elements.
    """
    if hasattr(param, "_quantizer") or getattr(param, "quantizer", None) is not None:
        raise OptimizerError(
            f"a parameter of shape {tuple(param.shape)} is a {type(param).__name__}, which has codes and not "
            f"elements of its dtype. Build the model without quantized_model_init(), or use an optimizer of "
            f"Transformer Engine, which keeps masters of such parameters."
        )
    view.copy_(param.detach())
    if hasattr(param, "rowwise_data"):  # a grouped parameter of Transformer Engine has its elements there
        param.rowwise_data = view.flatten()
        param.quantized_tensors = None  # type: ignore[attr-defined] # its views of the former memory
    else:
        param.data = view


class _AccumulateHook:
    """Adds the gradient of a parameter to a buffer.

    It does not keep the buffer alive: the parameter refers to the hook from C++, where Python's garbage
    collector does not see it, so that model, buffer and process groups would never be freed.
    """

    def __init__(self, buffer: ParamGradBuffer, index: int) -> None:
        self._buffer, self._index = weakref.ref(buffer), index

    def __call__(self, param: Tensor) -> None:
        """Add the gradient, unless the optimizer is gone, whose buffer it was."""
        buffer = self._buffer()
        if buffer is not None:
            buffer.accumulate(self._index, param)


def make_buffers(
    params: Sequence[Parameter],
    groups: ParallelGroups,
    *,
    bucket_size: int,
    grad_dtype: torch.dtype,
    sums_apart: bool = False,
) -> tuple[ParamGradBuffer, ...]:
    """Pack parameters into buffers, in order of their first occurrence. Local.

    There is one for each dtype and device of the dense parameters, and of the experts' parameters, which are
    equal on other ranks. With sums_apart, parameters whose gradients are first summed over other ranks (norm
    weights, a tied embedding) have buffers of their own. The gradients of fp64 parameters are fp64 whatever
    grad_dtype is.
    """
    buffers = []
    for members in _by_kind(params, groups, sums_apart=sums_apart):
        dtype = members[0].dtype
        around = groups_of(members[0], groups)
        layout = plan_buffer([p.numel() for p in members], dp=around.dp_cp.size, bucket_size=bucket_size)
        wide = torch.float64 if dtype == torch.float64 else grad_dtype
        buffers.append(ParamGradBuffer(members, layout, around, grad_dtype=wide))
    return tuple(buffers)


def _by_kind(
    params: Sequence[Parameter], groups: ParallelGroups, *, sums_apart: bool
) -> list[list[Parameter]]:
    """Return the parameters of each buffer, in order of their first occurrence."""
    kinds: dict[tuple[torch.dtype, torch.device, bool, bool], list[Parameter]] = {}
    for param in params:
        is_apart = sums_apart and is_summed_over_model_ranks(param, groups)
        kind = (param.dtype, param.device, is_marked(param, "expert_parallel"), is_apart)
        kinds.setdefault(kind, []).append(param)
    return list(kinds.values())


def _replace_hook(param: Parameter, hook: Callable[[Tensor], None]) -> None:
    # Two hooks on one parameter would race for its gradient: the first one frees it.
    previous = getattr(param, _HOOK, None)
    if isinstance(previous, _GradHook):
        previous.remove()
    handle = param.register_post_accumulate_grad_hook(hook)  # torch's own
    setattr(param, _HOOK, _GradHook(handle))
