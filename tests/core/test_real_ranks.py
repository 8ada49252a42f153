"""A dozen cases with real ranks over gloo: what a simulated world cannot show.

Every test here has many siblings in `tests/system`, at more layouts, formats and moments.
"""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import megackpt
from megackpt import (
    AsyncOptions,
    Checkpointer,
    CheckpointError,
    IntegrityError,
    LoadOptions,
    RankFailedError,
    SaveOptions,
    ShardedTensor,
    ShardedTensorFactory,
    StorageError,
    load_plain_tensors,
)
from megackpt.engine.checkpoint.opening import open_checkpoint
from megackpt.storage import LocalStore
from megackpt.testing.faulty_store import FaultyStore
from megackpt.testing.ranks import RankPool
from megackpt.training.optim import DistributedOptimizer
from megackpt.training.parallel import (
    MicroBatch,
    ModelChunks,
    ParallelGroups,
    ParallelLayout,
    causal_attention,
    context_share,
    forward_backward,
)
from megackpt.training.parallel.context import gather_context, join_context
from models import GPTConfig, build_gpt, init_weights
from tests.support.counting import CountingStore
from tests.support.states import bits
from tests.support.writers import KilledStrategy, part, wait_for_writers

RANKS = 2
# Of saves in which a rank is lost: the others notice the broken connection at once, or wait so long.
TIMEOUT_S = 10.0


def save_step(root: Path, step: int, **state: Any) -> None:
    Checkpointer(root, timeout_s=TIMEOUT_S).save(step, {"w": part(float(step)), **state})


def load_step(root: Path) -> int:
    """Load the newest step at this rank, compare its elements, and return it."""
    checkpointer = Checkpointer(root)
    loaded = checkpointer.load({"w": part(0.0)})
    step = checkpointer.latest()
    assert step is not None
    assert torch.equal(loaded["w"], part(float(step)).data)
    return step


# Saves and loads.


def load_columns(root: Path) -> torch.Tensor:
    rank = dist.get_rank()
    column = ShardedTensor.from_rank_offsets("w", torch.zeros(2000, 5), (1, rank, RANKS))
    loaded: torch.Tensor = Checkpointer(root).load({"w": column})["w"]
    return loaded


def test_ranks_load_what_they_saved_and_other_shards_of_it(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(save_step, RANKS, tmp_path, 3)
    assert rank_pool.run(load_step, RANKS, tmp_path) == [3] * RANKS
    whole = torch.cat([torch.full((1000, 10), 3.0 + rank) for rank in range(RANKS)])
    assert torch.equal(torch.cat(rank_pool.run(load_columns, RANKS, tmp_path), dim=1), whole)


def save_and_train_on(root: Path) -> None:
    with Checkpointer(root, async_save=True) as checkpointer:
        state = {"w": part(1.0), "lr": [0.5]}
        checkpointer.save(1, state)
        state["w"].data.fill_(-1)
        state["lr"][0] = -1
        dist.all_reduce(torch.ones(1))  # training has collectives of its own
        loaded = checkpointer.load({"w": part(0.0)})  # waits for the save
        assert torch.equal(loaded["w"], part(1.0).data)
        assert loaded["lr"] == [0.5]


def test_an_asynchronous_save_has_the_state_at_the_call(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(save_and_train_on, RANKS, tmp_path)
    assert rank_pool.run(load_step, RANKS, tmp_path) == [1] * RANKS


NUMBERS = torch.arange(700 * 1000.0).reshape(700, 1000)


def replicated(data: torch.Tensor) -> dict[str, ShardedTensor]:
    return {"w": ShardedTensor.from_rank_offsets("w", data, replica_id=dist.get_rank())}


def save_replicated(directory: Path) -> None:
    megackpt.save(replicated(NUMBERS), directory)


def exchange(directory: Path) -> int:
    """Load what every rank has whole, and return how many bytes this one has read."""
    store, options = CountingStore(directory), LoadOptions(exchange="all_to_all", exchange_bytes=1 << 20)
    loaded = megackpt.load(replicated(torch.zeros_like(NUMBERS)), store, options=options)
    assert torch.equal(loaded["w"], NUMBERS)
    return store.nbytes


def test_ranks_that_exchange_read_each_byte_once_and_raise_what_one_of_them_finds_damaged(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(save_replicated, RANKS, tmp_path)
    nbytes = rank_pool.run(exchange, RANKS, tmp_path)
    assert sum(nbytes) == NUMBERS.nbytes
    assert min(nbytes) > 0
    file = max((tmp_path / "data").iterdir(), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    errors = [outcome.error for outcome in rank_pool.outcomes(exchange, RANKS, tmp_path)]
    assert len({str(error) for error in errors}) == 1
    assert isinstance(errors[0], IntegrityError)
    assert str(errors[0]).startswith(f"Rank {errors[0].rank} failed while reading: ")
    assert file.name in str(errors[0])


# A model and its optimizer.

LAYOUTS = {"DP2": ParallelLayout(dp=2), "TP2": ParallelLayout(tp=2)}
VOCAB = 16


def build(name: str, seed: int) -> tuple[ModelChunks, DistributedOptimizer, ParallelGroups]:
    groups = ParallelGroups.create(LAYOUTS[name])
    config = GPTConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        num_query_groups=2,
        ffn_hidden_size=8,
        seq_length=8,
        make_vocab_divisible=1,
        params_dtype=torch.bfloat16,
    )
    model = build_gpt(config, groups)
    init_weights(model, seed)
    optimizer = DistributedOptimizer(
        [{"params": list(model.parameters())}],
        lambda groups: torch.optim.AdamW(groups, lr=0.01),
        groups,
        bucket_size=1001,  # shards begin and end at odd places of parameters
    )
    return model, optimizer, groups


def save_model(model: ModelChunks, optimizer: DistributedOptimizer, to: Path, *, gathered: bool) -> None:
    sharded = model.sharded_state_dict()
    state = optimizer.sharded_state_dict(sharded, gathered=gathered)
    megackpt.save({"model": sharded, "optimizer": state}, to)


def train(directory: Path) -> None:
    model, optimizer, groups = build("DP2", seed=1)
    tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(groups.dp.rank))
    forward_backward(model, [MicroBatch(tokens[:, :-1], tokens[:, 1:])], groups)
    optimizer.step()
    save_model(model, optimizer, directory, gathered=False)


def pass_on(name: str, source: Path, target: Path, gathered: bool) -> None:
    """Load into a model of another seed, at another layout, and save again."""
    model, optimizer, _ = build(name, seed=2)
    sharded = model.sharded_state_dict()
    loaded = megackpt.load({"model": sharded, "optimizer": optimizer.sharded_state_dict(sharded)}, source)
    optimizer.load_sharded_state_dict(loaded["optimizer"])
    save_model(model, optimizer, target, gathered=gathered)


@pytest.fixture(scope="module")
def trained(rank_pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trained")
    rank_pool.run(train, RANKS, directory)
    return directory


def assert_same_arrays(first: Path, second: Path) -> None:
    ours, theirs = load_plain_tensors(first), load_plain_tensors(second)
    assert any("exp_avg_sq" in key and array.abs().sum() > 0 for key, array in ours.items())
    assert {key: bits(array) for key, array in ours.items()} == {k: bits(a) for k, a in theirs.items()}


def moment_chunks(directory: Path) -> int:
    contents = open_checkpoint(LocalStore(directory))
    return len(contents.chunks([key for key in contents.arrays if "exp_avg" in key]).table)


def test_the_state_of_an_optimizer_is_loaded_at_another_layout(
    rank_pool: RankPool, trained: Path, tmp_path: Path
) -> None:
    rank_pool.run(pass_on, RANKS, "TP2", trained, tmp_path, False)
    assert_same_arrays(trained, tmp_path)


def test_gathered_state_of_an_optimizer_is_the_same_checkpoint_in_fewer_chunks(
    rank_pool: RankPool, trained: Path, tmp_path: Path
) -> None:
    rank_pool.run(pass_on, RANKS, "DP2", trained, tmp_path, True)
    assert_same_arrays(trained, tmp_path)
    assert moment_chunks(tmp_path) < moment_chunks(trained)


# Shares of sequences.


def inputs() -> list[torch.Tensor]:
    """Queries, keys and values of whole sequences, whose heads share keys, and the gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, heads, 16, 8, generator=generator) for heads in (4, 2, 2, 4)]


def attend() -> list[torch.Tensor]:
    cp = ParallelGroups.create(ParallelLayout(cp=RANKS)).cp
    q, k, v, grad = (context_share(x, cp, dim=2) for x in inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = causal_attention(*leaves, cp)
    out.backward(grad)
    assert torch.equal(gather_context(q.detach(), cp, dim=2), inputs()[0])
    return [out.detach(), *(x.grad for x in leaves if x.grad is not None)]


def test_attention_over_shares_of_a_sequence_is_that_over_the_whole(rank_pool: RankPool) -> None:
    q, k, v, grad = inputs()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    out.backward(grad)
    expected = [out.detach(), *(x.grad for x in leaves)]
    for shares, whole in zip(zip(*rank_pool.run(attend, RANKS), strict=True), expected, strict=True):
        assert whole is not None
        # fp32, sums of 8 products and 16 keys in another order: sqrt(8 * 16) * 2^-24 = 7e-7 of the largest.
        assert (join_context(shares, dim=2) - whole).abs().max() <= 2e-6 * whole.abs().max()


# Trouble.


def in_the_save(act: Any) -> dict[str, ShardedTensorFactory]:
    """State of which rank 1 does something when a save asks it what it declares."""

    def build(key: str, data: torch.Tensor, replica_id: Any, flat: Any) -> ShardedTensor:
        if dist.get_rank() == 1:
            act()
        return part(2.0)

    return {"f": ShardedTensorFactory("f", torch.zeros(1), build, lambda x: x)}


def make_a_mistake() -> None:
    raise ValueError("the user's own mistake")


def die() -> None:
    os._exit(9)


def press_ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def save_in_trouble(root: Path, act: Any) -> None:
    save_step(root, 2, **in_the_save(act))


def test_an_error_of_one_rank_is_raised_on_all_and_names_it(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(save_step, RANKS, tmp_path, 1)
    outcomes = rank_pool.outcomes(save_in_trouble, RANKS, tmp_path, make_a_mistake)
    for outcome in outcomes:
        assert isinstance(outcome.error, RankFailedError)
        assert outcome.error.rank == 1
        assert "Rank 1 failed while preparing the save: ValueError: the user's own mistake" in str(
            outcome.error
        )
    assert "make_a_mistake" in outcomes[1].trace  # there the original stands behind it
    assert rank_pool.run(load_step, RANKS, tmp_path) == [1] * RANKS


@pytest.mark.parametrize(("act", "own"), [(die, EOFError), (press_ctrl_c, KeyboardInterrupt)])
def test_a_rank_that_dies_or_is_interrupted_in_a_save_is_named_and_the_step_before_is_loaded(
    rank_pool: RankPool, tmp_path: Path, act: Any, own: type[BaseException]
) -> None:
    rank_pool.run(save_step, RANKS, tmp_path, 1)
    survivor, victim = rank_pool.outcomes(save_in_trouble, RANKS, tmp_path, act)
    assert isinstance(victim.error, own), victim.trace
    assert isinstance(survivor.error, RankFailedError), survivor.trace
    assert survivor.error.rank == 1
    assert rank_pool.run(load_step, RANKS, tmp_path) == [1] * RANKS


def save_on_a_full_disk(root: Path) -> None:
    def full() -> OSError:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store: Any = LocalStore(root / "iter_0000001")
    if dist.get_rank() == 1:
        store = FaultyStore(store, fail_at=lambda operation: operation.kind == "writer.write", error=full)
    megackpt.save({"w": part(9.0)}, store)


def test_a_full_disk_on_one_rank_leaves_the_checkpoint_that_was_there(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(save_step, RANKS, tmp_path, 1)
    for outcome in rank_pool.outcomes(save_on_a_full_disk, RANKS, tmp_path):
        assert isinstance(outcome.error, StorageError)
        assert outcome.error.rank == 1
        assert "No space left" in str(outcome.error)
    assert rank_pool.run(load_step, RANKS, tmp_path) == [1] * RANKS


def lose_a_writer(root: Path) -> str:
    options = AsyncOptions(nice=0)
    checkpointer = Checkpointer(root, async_save=options, save_options=SaveOptions(timeout_s=TIMEOUT_S))
    wait_for_writers(checkpointer)
    checkpointer.save(2, {"w": part(2.0)}, sharded_strategy=KilledStrategy())
    with pytest.raises(CheckpointError) as raised:
        checkpointer.wait()
    checkpointer.close()
    return str(raised.value)


def test_a_writer_that_is_killed_is_named_on_all_ranks_and_the_step_before_is_loaded(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    rank_pool.run(save_step, RANKS, tmp_path, 1)
    first, second = rank_pool.run(lose_a_writer, RANKS, tmp_path)
    assert first == second
    assert "writer process of rank 1" in first
    assert rank_pool.run(load_step, RANKS, tmp_path) == [1] * RANKS
