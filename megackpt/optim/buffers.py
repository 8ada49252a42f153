"""Flat buffers: parameters and their gradients, each in one contiguous tensor.

Owns the memory, the views of it that the model sees (`param.data`, `param.main_grad`) and the hooks that move
`param.grad` into the gradient buffer. When gradients are exchanged, and what is done with them, is for the
optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from megackpt.errors import OptimizerError
from megackpt.optim.ranges import BufferLayout, plan_buffer

_HOOK = "_megackpt_grad_hook"  # where a parameter keeps the hook that the last buffer gave it


class _GradHook:
    """The hook of one parameter; left behind when the parameter is pickled, as torch does with all hooks."""

    def __init__(self, handle: RemovableHandle | None = None) -> None:
        self._handle = handle

    def remove(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def __reduce__(self) -> tuple[type[_GradHook], tuple[()]]:
        return _GradHook, ()


class ParamGradBuffer:
    """Parameters of one dtype on one device, and their gradients, packed in two flat tensors.

    Building one re-points `param.data` to a view into `data`, sets `param.main_grad` to a view into `grad`,
    and registers a hook that adds `param.grad` to `main_grad` and frees it whenever autograd has
    accumulated it. A parameter that another buffer held before leaves that one.

    Attributes:
        params: the parameters, in order of registration.
        layout: where they lie.
        data: the parameters `[layout.numel]`, in their dtype; zeros between them.
        grad: their gradients `[layout.numel]`, in `grad_dtype`; zeros between them.
        touched: for each parameter, whether a gradient came since the last `zero_grad`.
    """

    def __init__(self, params: Sequence[Parameter], layout: BufferLayout, *, grad_dtype: torch.dtype) -> None:
        self.params = tuple(params)
        self.layout = layout
        first = self.params[0]
        self.data = torch.zeros(layout.numel, dtype=first.dtype, device=first.device)
        self.grad = torch.zeros(layout.numel, dtype=grad_dtype, device=first.device)
        self.touched = [False] * len(self.params)
        self._reduced = False
        for index, (param, span) in enumerate(zip(self.params, layout.params, strict=True)):
            view = self.data[span.as_slice()].view(param.shape)
            view.copy_(param.detach())
            param.data = view
            param.main_grad = self.grad[span.as_slice()].view(param.shape)  # type: ignore[attr-defined]
            _replace_hook(param, self._hook(index))

    def collect(self) -> None:
        """Take in gradients that no hook saw, and close the gradients for reduction. Local.

        Those are a `param.grad` that was assigned by hand, and a kernel that added to `main_grad` by itself
        and said so with `param.grad_added_to_main_grad = True` (Megatron-Core's and Transformer Engine's
        name).

        Raises:
            OptimizerError: nothing was done since the last reduction that could be reduced.
        """
        self._refuse_if_reduced("optimizer.step() was called again")
        for index, param in enumerate(self.params):
            if param.grad is not None:
                self._accumulate(index, param)
            if getattr(param, "grad_added_to_main_grad", False):
                self.touched[index] = True
                param.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        self._reduced = True

    def zero_grad(self) -> None:
        """Make all gradients zero, and forget which parameters had one. Local."""
        self.grad.zero_()
        self.touched = [False] * len(self.params)
        self._reduced = False
        for param in self.params:
            param.grad = None

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        return lambda param: self._accumulate(index, param)

    def _accumulate(self, index: int, param: Tensor) -> None:
        self._refuse_if_reduced("a backward pass was run")
        assert param.grad is not None
        if getattr(param, "grad_added_to_main_grad", False):
            param.grad = None  # a placeholder: the kernel has added the real gradient already
            return
        main_grad = self.grad[self.layout.params[index].as_slice()].view(param.shape)
        if self.touched[index]:
            main_grad.add_(param.grad)
        else:
            main_grad.copy_(param.grad)  # not 0 + grad, which would turn -0.0 into 0.0
        self.touched[index] = True
        param.grad = None

    def _refuse_if_reduced(self, what: str) -> None:
        if self._reduced:
            raise OptimizerError(
                f"{what} after optimizer.step() without optimizer.zero_grad() between the two. The gradient "
                f"buffer holds averaged gradients of this rank's slices then, to which no gradient can be "
                f"added. Call optimizer.zero_grad() after every optimizer.step()."
            )


def make_buffers(
    params: Sequence[Parameter], *, dp: int, bucket_size: int, grad_dtype: torch.dtype
) -> tuple[ParamGradBuffer, ...]:
    """Pack parameters into one buffer for each dtype and device, in order of their first occurrence. Local.

    The gradients of fp64 parameters are fp64 whatever grad_dtype is.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[Parameter]] = {}
    for param in params:
        kinds.setdefault((param.dtype, param.device), []).append(param)
    buffers = []
    for (dtype, _), members in kinds.items():
        layout = plan_buffer([p.numel() for p in members], dp=dp, bucket_size=bucket_size)
        wide = torch.float64 if dtype == torch.float64 else grad_dtype
        buffers.append(ParamGradBuffer(members, layout, grad_dtype=wide))
    return tuple(buffers)


def _replace_hook(param: Parameter, hook: Callable[[Tensor], None]) -> None:
    # Two hooks on one parameter would race for its gradient: the first one frees it.
    previous = getattr(param, _HOOK, None)
    if isinstance(previous, _GradHook):
        previous.remove()
    handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's own
    setattr(param, _HOOK, _GradHook(handle))
