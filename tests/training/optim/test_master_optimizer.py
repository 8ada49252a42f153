"""Optimizers with masters: against plain torch bit for bit, what a load restores, and freed memory."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from megackpt import DeclarationError, MismatchError, MissingKeyError, ShardedTensor
from megackpt.errors import OptimizerError
from megackpt.training.optim import DistributedOptimizer, MixedPrecisionOptimizer
from megackpt.training.optim.master_optimizer import MasterOptimizer
from megackpt.training.parallel import ParallelGroups, ParallelLayout
from tests.support.optimizers import (
    KINDS,
    OPTIMIZERS,
    SINGLE_PROCESS,
    Kind,
    PlainOptimizer,
    backward,
    declare,
    gather,
    loaded,
    scatter,
    train,
)


class Lamb(PlainOptimizer):
    """Scales by the norm of the whole parameter: not elementwise."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        return p.norm() * grad / grad.norm()


class RowMoments(Optimizer):
    """Keeps two numbers for each row, and has no learning rate."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["row"] = p.grad.new_zeros(p.shape[0], 2)


class Named(PlainOptimizer):
    """Keeps a text."""

    def update(self, p: Tensor, grad: Tensor, state: dict[str, Any]) -> Tensor:
        state["kind"] = "matrix"
        return grad


def make_small_model(dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 5))
    model.register_parameter("scale", Parameter(torch.tensor(1.5)))
    return model.to(dtype)


def assert_same_weights(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name


def move(model: nn.Module, source: MasterOptimizer, fresh: nn.Module, target: MasterOptimizer) -> None:
    """Save model and optimizer, and load them into others."""
    stored = [{"model": declare(model), "optimizer": source.sharded_state_dict(declare(model))}]
    request = {"model": declare(fresh), "optimizer": target.sharded_state_dict(declare(fresh))}
    scatter(request, gather(stored))
    answer = loaded(request["optimizer"])
    answer["param_groups"] = stored[0]["optimizer"]["param_groups"]
    target.load_sharded_state_dict(answer)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_training_equals_plain_torch_bit_for_bit(kind: Kind, name: str) -> None:
    model, reference = make_small_model(), make_small_model()
    optimizer = kind(model.parameters(), OPTIMIZERS[name], SINGLE_PROCESS)
    train(model, optimizer, range(4))
    train(reference, OPTIMIZERS[name](reference.parameters()), range(4))
    assert_same_weights(model, reference)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parameter_without_gradient_is_left_alone_and_starts_later_as_new(kind: Kind) -> None:
    model, reference = make_small_model(), make_small_model()
    factory = OPTIMIZERS["sgd_dampening"]  # whose first step differs from later ones
    optimizer, plain = kind(model.parameters(), factory, SINGLE_PROCESS), factory(reference.parameters())
    for step in range(4):
        for m in (model, reference):
            first = m[0].requires_grad_(step >= 2)
            backward(m, step)
            assert all((p.grad is None) or m is reference for p in first.parameters())
        optimizer.step()
        optimizer.zero_grad()
        plain.step()
        plain.zero_grad()
        assert_same_weights(model, reference)
    state = gather([optimizer.sharded_state_dict(declare(model))])
    assert state["optimizer.state.step.0.weight"] == 2
    assert state["optimizer.state.step.2.weight"] == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_parameter_has_no_state_and_does_not_move(kind: Kind) -> None:
    model = make_small_model()
    model[2].requires_grad_(False)
    before = model[2].weight.clone()
    optimizer = kind(model.parameters(), OPTIMIZERS["adamw"], SINGLE_PROCESS)
    train(model, optimizer, range(2))
    assert torch.equal(model[2].weight, before)
    keys = gather([optimizer.sharded_state_dict(declare(model))])
    assert not [key for key in keys if "2.weight" in key]
    assert "optimizer.state.step.0.weight" in keys


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_weights_are_the_rounded_masters_of_an_fp32_run_on_the_same_gradients(kind: Kind) -> None:
    model = make_small_model(torch.bfloat16)
    masters = [p.detach().float() for p in model.parameters()]
    reference = OPTIMIZERS["adamw"](masters)
    optimizer = kind(model.parameters(), OPTIMIZERS["adamw"], SINGLE_PROCESS)
    for step in range(5):
        for micro in range(2):  # two micro-batches: their bf16 gradients are added in fp32
            twin = make_small_model(torch.bfloat16)
            twin.load_state_dict(model.state_dict())
            backward(twin, 10 * step + micro)
            backward(model, 10 * step + micro)
            for master, p in zip(masters, twin.parameters(), strict=True):
                assert p.grad is not None
                master.grad = p.grad.float() if micro == 0 else master.grad + p.grad.float()
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        for master, p in zip(masters, model.parameters(), strict=True):
            assert torch.equal(master.bfloat16(), p)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clipping_equals_that_of_torch(kind: Kind, max_norm: float) -> None:
    model, reference = make_small_model(), make_small_model()
    optimizer = kind(model.parameters(), OPTIMIZERS["sgd"], SINGLE_PROCESS, clip_grad=max_norm)
    plain = OPTIMIZERS["sgd"](reference.parameters())
    for step in range(3):
        backward(model, step)
        norm = optimizer.step()
        optimizer.zero_grad()
        backward(reference, step)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        plain.step()
        plain.zero_grad()
        # torch sums the squares in fp32; ours are in fp64.
        torch.testing.assert_close(norm.float(), expected, rtol=1e-6, atol=0)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def test_a_learning_rate_scheduler_drives_the_inner_optimizer() -> None:
    model, reference = make_small_model(), make_small_model()
    optimizer = DistributedOptimizer(model.parameters(), OPTIMIZERS["sgd"], SINGLE_PROCESS)
    plain = OPTIMIZERS["sgd"](reference.parameters())
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (optimizer.inner, plain)]
    for step in range(3):
        for m, o, schedule in zip((model, reference), (optimizer, plain), schedules, strict=True):
            train(m, o, range(step, step + 1))
            schedule.step()
    assert_same_weights(model, reference)
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("factory", "match"),
    [
        (lambda g: torch.optim.LBFGS(g[0]["params"]), r"LBFGS cannot be used here.*closure"),
        (lambda g: torch.optim.SparseAdam(g), r"SparseAdam cannot be used here.*dense gradients"),
        (Named, r"Named keeps a state 'kind' of type str.*Use an optimizer without"),
    ],
)
def test_an_optimizer_whose_state_cannot_be_declared_is_rejected(
    kind: Kind, factory: Callable[[Any], Optimizer], match: str
) -> None:
    with pytest.raises(OptimizerError, match=match):
        kind(make_small_model().parameters(), factory, SINGLE_PROCESS)


@pytest.mark.parametrize(
    ("factory", "match"),
    [
        (RowMoments, r"RowMoments keeps state that is neither.*'row'.*Use MixedPrecisionOptimizer"),
        (Lamb, r"Lamb is not elementwise.*Use MixedPrecisionOptimizer"),
        (
            lambda g: torch.optim.Adafactor(g, lr=0.1),
            r"Adafactor is not elementwise.*Use MixedPrecisionOptimizer",
        ),
    ],
)
def test_an_optimizer_that_is_not_elementwise_is_rejected_for_shards(
    factory: Callable[[Any], Optimizer], match: str
) -> None:
    with pytest.raises(OptimizerError, match=match):
        DistributedOptimizer(make_small_model().parameters(), factory, SINGLE_PROCESS)


def test_an_optimizer_that_is_not_elementwise_trains_on_whole_masters() -> None:
    model, reference = make_small_model(), make_small_model()
    optimizer = MixedPrecisionOptimizer(model.parameters(), Lamb, SINGLE_PROCESS)
    train(model, optimizer, range(2))
    train(reference, Lamb(reference.parameters()), range(2))
    assert_same_weights(model, reference)


def test_gradients_may_not_be_added_to_reduced_ones() -> None:
    model = make_small_model()
    optimizer = DistributedOptimizer(model.parameters(), OPTIMIZERS["sgd"], SINGLE_PROCESS)
    backward(model, 0)
    optimizer.step()
    with pytest.raises(OptimizerError, match=r"step\(\) was called again.*Call optimizer.zero_grad\(\)"):
        optimizer.step()
    with pytest.raises(OptimizerError, match=r"a backward pass was run after optimizer.step\(\)"):
        backward(model, 1)


def test_gradients_set_by_hand_or_added_by_a_kernel_are_taken_in() -> None:
    w, v = Parameter(torch.zeros(3)), Parameter(torch.zeros(2))
    optimizer = DistributedOptimizer([w, v], lambda g: torch.optim.SGD(g, lr=1.0), SINGLE_PROCESS)
    w.grad = torch.ones(3)
    v.main_grad.add_(2.0)  # type: ignore[attr-defined]
    v.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    optimizer.step()
    assert w.tolist() == [-1.0] * 3
    assert v.tolist() == [-2.0] * 2


def test_parameters_and_gradients_live_in_the_buffers() -> None:
    model = make_small_model(torch.bfloat16)
    optimizer = DistributedOptimizer(model.parameters(), OPTIMIZERS["sgd"], SINGLE_PROCESS)
    (buffer,) = optimizer.buffers
    backward(model, 0)
    for p in model.parameters():
        assert p.grad is None
        assert p.untyped_storage().data_ptr() == buffer.data.untyped_storage().data_ptr()
        assert p.main_grad.dtype == torch.float32
        assert p.main_grad.shape == p.shape
        assert p.main_grad.untyped_storage().data_ptr() == buffer.grad.untyped_storage().data_ptr()


def test_a_new_optimizer_takes_over_the_gradients_of_its_parameters() -> None:
    model, reference = make_small_model(), make_small_model()
    DistributedOptimizer(model.parameters(), OPTIMIZERS["sgd"], SINGLE_PROCESS)
    train(model, DistributedOptimizer(model.parameters(), OPTIMIZERS["sgd"], SINGLE_PROCESS), range(2))
    train(reference, OPTIMIZERS["sgd"](reference.parameters()), range(2))
    assert_same_weights(model, reference)


def test_a_model_under_an_optimizer_can_be_pickled_and_copied() -> None:
    model = make_small_model()
    DistributedOptimizer(model.parameters(), OPTIMIZERS["sgd"], SINGLE_PROCESS)
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert_same_weights(model, twin)
        train(twin, DistributedOptimizer(twin.parameters(), OPTIMIZERS["sgd"], SINGLE_PROCESS), range(1))


def test_parameters_of_several_dtypes_train_together() -> None:
    half, single, double = (
        Parameter(torch.ones(3, dtype=d)) for d in (torch.bfloat16, torch.float32, torch.float64)
    )
    optimizer = DistributedOptimizer(
        [half, single, double], lambda g: torch.optim.SGD(g, lr=0.5), SINGLE_PROCESS
    )
    assert [p.main_grad.dtype for p in (half, single, double)] == [
        torch.float32,
        torch.float32,
        torch.float64,
    ]  # type: ignore[attr-defined]
    (half.sum() + single.sum() + double.sum()).backward()
    norm = optimizer.step()
    assert norm.item() == pytest.approx(3.0)
    assert [p.tolist() for p in (half, single, double)] == [[0.5] * 3] * 3


def test_a_rank_that_owns_nothing_and_a_group_without_parameters_are_fine() -> None:
    groups = ParallelGroups.offline(ParallelLayout(dp=8), 7)
    w = Parameter(torch.ones(3))
    param_groups = [{"params": [w], "name": "all"}, {"params": [], "name": "none"}]
    optimizer = DistributedOptimizer(param_groups, OPTIMIZERS["adamw"], groups)
    state = optimizer.sharded_state_dict({"w": ShardedTensor.from_rank_offsets("w", w)})
    assert state["state"] == {}
    assert list(state["param_groups"]) == ["all", "none"]
    optimizer.load_sharded_state_dict(loaded(state))


W = Parameter(torch.zeros(2))


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ([], r"got no parameters. Pass model.parameters\(\)"),
        ([W, W], r"The parameter of shape \(2,\) in group '0' occurs twice. List each"),
        ([{"params": [W]}, W], r"parameters and groups in one list. Give either"),
        ([{"lr": 1.0}], r"group 0 has no 'params'. Put"),
        ([torch.zeros(2)], r"group 0 has a Tensor.*Pass model.parameters\(\)"),
        ([{"params": [W], "name": "a"}, {"params": [], "name": "a"}], r"name 'a' occurs twice. Give each"),
        ([{"params": [W], "name": 3}], r"group 0 has the name 3. Give a non-empty string"),
    ],
)
def test_parameters_that_make_no_sense_are_rejected(params: Any, match: str) -> None:
    with pytest.raises(DeclarationError, match=match):
        DistributedOptimizer(params, OPTIMIZERS["sgd"], SINGLE_PROCESS)


def test_a_step_without_communication_is_rejected_where_ranks_must_communicate() -> None:
    groups = ParallelGroups.offline(ParallelLayout(dp=2), 1)
    optimizer = DistributedOptimizer([Parameter(torch.zeros(2))], OPTIMIZERS["sgd"], groups)
    with pytest.raises(DeclarationError, match=r"ranks \(0, 1\).*offline.*ParallelGroups.create"):
        optimizer.step()


def test_grads_of_main_grad_dtype_bf16_are_cast_for_the_masters() -> None:
    w = Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = DistributedOptimizer(
        [w], lambda g: torch.optim.SGD(g, lr=1.0), SINGLE_PROCESS, grad_dtype=torch.bfloat16
    )
    (w * torch.tensor(0.25, dtype=torch.bfloat16)).sum().backward()
    main_grad: Tensor = w.main_grad  # type: ignore[attr-defined]
    assert main_grad.dtype == torch.bfloat16
    optimizer.step()
    assert w.tolist() == [0.75] * 4


def build(micro_batches: int) -> tuple[nn.Module, DistributedOptimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = DistributedOptimizer(
        model.parameters(),
        lambda g: torch.optim.SGD(g, lr=1.0),
        SINGLE_PROCESS,
        bucket_size=10,
        overlap_grad_reduce=True,
        overlap_param_gather=[model],
    )
    if micro_batches != 1:  # which is the default
        optimizer.micro_batches = micro_batches
    return model, optimizer


def backward_once(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def test_a_copy_of_a_model_does_not_wait_for_the_optimizer_of_the_model() -> None:
    model, optimizer = build(micro_batches=1)
    optimizer._gathers._waiting = lambda: None  # type: ignore[union-attr]  # cannot be copied or pickled
    for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(twin(torch.ones(3)), model(torch.ones(3)))


def test_a_gradient_after_the_reduction_of_its_bucket_is_rejected() -> None:
    model, _ = build(micro_batches=1)
    backward_once(model)
    with pytest.raises(OptimizerError, match=r"shape \(3,\) got a gradient after .*optimizer.micro_batches"):
        backward_once(model)


def test_gradients_are_not_set_to_zero_while_they_are_reduced() -> None:
    model, optimizer = build(micro_batches=1)
    backward_once(model)
    with pytest.raises(OptimizerError, match=r"zero_grad\(\) was called while .*optimizer.step\(\) before"):
        optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.skip_step()
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_step_after_fewer_backward_passes_reduces_what_is_there() -> None:
    model, optimizer = build(micro_batches=3)
    twin, plain = build(micro_batches=1)
    for m, o in ((model, optimizer), (twin, plain)):
        backward_once(m)
        o.step()
        o.zero_grad()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_trained_model_is_freed() -> None:
    model = torch.nn.Linear(3, 2)
    groups = ParallelGroups.offline(ParallelLayout(), 0)
    optimizer = DistributedOptimizer(model.parameters(), lambda p: torch.optim.Adam(p, lr=0.1), groups)
    model(torch.ones(4, 3)).sum().backward()
    buffer = weakref.ref(optimizer.buffers[0])
    alive = weakref.ref(model)
    del model, optimizer, groups
    gc.collect()
    assert alive() is None
    assert buffer() is None


@pytest.mark.parametrize("saved_after", [0, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("source", "target"), [KINDS, KINDS[::-1], KINDS[:1] * 2])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    source: Kind, target: Kind, name: str, saved_after: int
) -> None:
    model, fresh = make_small_model(), make_small_model(seed=7)
    optimizer = source(model.parameters(), OPTIMIZERS[name], SINGLE_PROCESS)
    train(model, optimizer, range(saved_after))
    resumed = target(fresh.parameters(), OPTIMIZERS[name], SINGLE_PROCESS)
    move(model, optimizer, fresh, resumed)
    train(fresh, resumed, range(saved_after, saved_after + 3))
    train(model, optimizer, range(saved_after, saved_after + 3))
    assert_same_weights(model, fresh)


@pytest.mark.parametrize("kind", KINDS)
def test_loading_into_an_optimizer_that_has_trained_makes_it_the_saved_one(kind: Kind) -> None:
    for saved_after in (0, 2):
        model, other = make_small_model(), make_small_model(seed=7)
        optimizer = kind(model.parameters(), OPTIMIZERS["sgd_dampening"], SINGLE_PROCESS)
        train(model, optimizer, range(saved_after))
        trained = kind(other.parameters(), OPTIMIZERS["sgd_dampening"], SINGLE_PROCESS)
        train(other, trained, range(50, 53))
        move(model, optimizer, other, trained)
        train(model, optimizer, range(10, 12))
        train(other, trained, range(10, 12))
        assert_same_weights(model, other)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_keep_their_own_options_and_are_restored_by_name(kind: Kind) -> None:
    def grouped(model: nn.Sequential) -> list[dict[str, Any]]:
        return [
            {"params": [model[0].weight, model[2].weight], "weight_decay": 0.5, "name": "matrices"},
            {"params": [model[0].bias, model[2].bias, model.scale], "weight_decay": 0.0},
        ]

    model, reference, fresh = make_small_model(), make_small_model(), make_small_model(seed=7)
    optimizer = kind(grouped(model), OPTIMIZERS["adamw"], SINGLE_PROCESS)
    train(model, optimizer, range(3))
    train(reference, torch.optim.AdamW(grouped(reference), lr=0.01), range(3))
    assert_same_weights(model, reference)

    optimizer.param_groups[0]["lr"] = 0.125
    stored = optimizer.sharded_state_dict(declare(model))["param_groups"]
    assert list(stored) == ["matrices", "1"]
    assert stored["matrices"]["lr"] == 0.125
    assert stored["matrices"]["betas"] == (0.9, 0.999)
    assert not {"params", "foreach", "fused", "capturable", "name"} & set(stored["1"])
    resumed = kind(grouped(fresh), OPTIMIZERS["adamw"], SINGLE_PROCESS)
    resumed.load_state_dict(optimizer.state_dict())
    assert [g["lr"] for g in resumed.param_groups] == [0.125, 0.01]
    assert [g["weight_decay"] for g in resumed.param_groups] == [0.5, 0.0]


def test_groups_of_another_name_are_rejected_and_nothing_is_changed() -> None:
    model = make_small_model()
    optimizer = DistributedOptimizer(
        [{"params": model.parameters(), "name": "all"}], OPTIMIZERS["adamw"], SINGLE_PROCESS
    )
    with pytest.raises(
        MismatchError, match=r"only in the checkpoint: \['0'\], only here: \['all'\].*same 'name'"
    ):
        optimizer.load_state_dict({"param_groups": {"0": {"lr": 3.0}}})
    assert optimizer.param_groups[0]["lr"] == 0.01
    with pytest.raises(MissingKeyError, match=r"'param_groups' is not in.*\['state'\].*Pass what state_dict"):
        optimizer.load_state_dict({"state": {}})


def test_weights_that_are_not_the_rounded_masters_are_rejected_after_load() -> None:
    model, other = make_small_model(torch.bfloat16), make_small_model(torch.bfloat16, seed=7)
    optimizer = DistributedOptimizer(model.parameters(), OPTIMIZERS["adamw"], SINGLE_PROCESS)
    resumed = DistributedOptimizer(other.parameters(), OPTIMIZERS["adamw"], SINGLE_PROCESS)
    request = resumed.sharded_state_dict(declare(other))
    scatter(request, gather([optimizer.sharded_state_dict(declare(model))]))
    with pytest.raises(
        MismatchError,
        match=r"not the torch.bfloat16 values(.|\n)*'0.weight' of shape(.|\n)*Load the model from",
    ):
        resumed.load_sharded_state_dict(loaded(request))
    resumed.sync_params()
    assert_same_weights(model, other)


def test_masters_that_a_checkpoint_lacks_are_made_from_the_weights() -> None:
    model = make_small_model(torch.bfloat16)
    optimizer = DistributedOptimizer(model.parameters(), OPTIMIZERS["adamw"], SINGLE_PROCESS)
    answer = loaded(optimizer.sharded_state_dict(declare(model)))
    for states in answer["state"].values():
        del states["fp32_param"]
    model[0].weight.detach().fill_(3.0)
    optimizer.load_sharded_state_dict(answer)
    assert [bool((m == 3.0).all()) for m in optimizer.param_groups[0]["params"]] == [
        False,
        True,
        False,
        False,
        False,
    ]


def test_states_loaded_without_their_step_are_kept() -> None:
    w = Parameter(torch.ones(3))
    optimizer = DistributedOptimizer([w], lambda g: torch.optim.Adam(g, lr=0.0), SINGLE_PROCESS)
    answer = loaded(optimizer.sharded_state_dict({"w": ShardedTensor.from_rank_offsets("w", w)}))
    del answer["state"][0]["step"]
    answer["state"][0]["exp_avg"].fill_(8.0)
    optimizer.load_sharded_state_dict(answer)
    w.grad = torch.zeros(3)
    optimizer.step()
    (state,) = optimizer.inner.state.values()
    assert state["exp_avg"].tolist() == pytest.approx([7.2] * 3)


def test_reload_model_params_trains_on_from_loaded_weights() -> None:
    model = make_small_model(torch.bfloat16)
    optimizer = DistributedOptimizer(model.parameters(), lambda g: torch.optim.SGD(g, lr=0.0), SINGLE_PROCESS)
    model.load_state_dict(make_small_model(torch.bfloat16, seed=7).state_dict())
    optimizer.reload_model_params()
    train(model, optimizer, range(1))
    assert_same_weights(model, make_small_model(torch.bfloat16, seed=7))


def test_loaded_tensors_of_another_size_are_rejected() -> None:
    model = make_small_model()
    optimizer = DistributedOptimizer(model.parameters(), OPTIMIZERS["adamw"], SINGLE_PROCESS)
    answer = loaded(optimizer.sharded_state_dict(declare(model)))
    answer["state"][0]["exp_avg"] = torch.zeros(7)
    with pytest.raises(
        MismatchError, match=r"'exp_avg' of 'scale' of shape \(\) has 1 el.* but 7 were loaded. Load"
    ):
        optimizer.load_sharded_state_dict(answer)


def test_tensors_that_were_not_filled_in_place_are_copied() -> None:
    model, fresh = make_small_model(), make_small_model()
    optimizer = DistributedOptimizer(model.parameters(), OPTIMIZERS["adamw"], SINGLE_PROCESS)
    resumed = DistributedOptimizer(fresh.parameters(), OPTIMIZERS["adamw"], SINGLE_PROCESS)
    train(model, optimizer, range(2))
    fresh.load_state_dict(model.state_dict())
    resumed.load_sharded_state_dict(loaded(optimizer.sharded_state_dict(declare(model))))
    train(model, optimizer, range(2, 4))
    train(fresh, resumed, range(2, 4))
    assert_same_weights(model, fresh)
