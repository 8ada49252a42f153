"""State dicts of local checkpoints: tensors are taken out and put back, as nvidia-resiliency-ext does."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import Any

import pytest
import torch

import megackpt
from megackpt.compat.megatron.dist_checkpointing import mapping
from megackpt.compat.megatron.dist_checkpointing.tensor_aware_state_dict import MCoreTensorAwareStateDict
from megackpt.errors import DeclarationError, MissingKeyError
from megackpt.testing.ranks import RankPool
from tests.contrib.megatron.small_state import small_state

S = mapping.ShardedTensor


def _check_small(loaded: dict[str, Any]) -> None:
    assert loaded["step"] == 7
    assert loaded["local"] == "mine"
    assert loaded["model"]["extra"] == {"seen": 1.0}
    assert loaded["model"]["w"].tolist() == [[1.0] * 3] * 2
    assert loaded["model"]["fused"].tolist() == [1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("algo", ["atomic", "fully_parallel"])
def test_a_state_dict_survives_without_its_tensors(algo: str) -> None:
    original = small_state()
    kept, cached = MCoreTensorAwareStateDict.from_state_dict(original, algo)
    assert kept.common_state_dict == {"step": 7}
    kept.copy_tensors_to_cpu(non_blocking=True)
    original["model"]["w"].data.zero_()
    assert [t.sum().item() for t in kept.tensors] == [6.0, 2.0, 4.0], "a copy must not change with the model"
    copies = list(kept.tensors)
    kept.copy_tensors_to_cpu()
    assert all(a is b for a, b in zip(kept.tensors, copies, strict=True)), "copied twice"
    tensors = kept.pop_tensors()
    assert kept.is_hollow
    assert original["model"]["w"].data is not None, "the caller's entities must stay as they are"
    with pytest.raises(DeclarationError, match="were taken out"):
        kept.pop_tensors()
    file = io.BytesIO()
    torch.save(kept, file)
    file.seek(0)
    loaded: MCoreTensorAwareStateDict = torch.load(file, weights_only=False)
    loaded.init_tensors()
    assert [t.shape for t in loaded.tensors] == [t.shape for t in tensors]
    loaded.pop_tensors()
    loaded.insert_tensors(tensors)
    loaded.restore_tensor_device()
    _check_small(loaded.to_state_dict(small_state(0.0), algo=algo))
    assert loaded.to_state_dict({}) == {"step": 7}
    again, same = MCoreTensorAwareStateDict.from_state_dict(small_state(), algo, cached_metadata=cached)
    assert same is cached
    _check_small(again.to_state_dict(small_state(0.0)))


def test_what_a_local_checkpoint_lacks_is_an_error_or_a_reported_key() -> None:
    kept, _ = MCoreTensorAwareStateDict.from_state_dict(small_state(), "atomic")
    other = {"new": S.from_rank_offsets("new", torch.zeros(1))}
    with pytest.raises(MissingKeyError, match=r"'new' among them.*the layout that wrote it"):
        kept.to_state_dict(other)
    cut = {"w": S.from_rank_offsets("w", torch.zeros(1, 3), (0, 0, 2))}
    with pytest.raises(megackpt.CheckpointingException, match="'w' among them"):
        kept.to_state_dict(cut)
    state, missing, unexpected = kept.to_state_dict(other, strict="log_all", return_mismatch_keys=True)
    assert (state, unexpected) == ({"step": 7}, {"new"})
    assert missing == {"w", "fused.0", "fused.1", "extra"}
    empty = {"w": S.from_rank_offsets("w", torch.ones(1)).without_data()}
    for call in (
        lambda: kept.insert_tensors([]),
        kept.init_tensors,
        lambda: kept.to_state_dict(other, algo="pigeons"),
        MCoreTensorAwareStateDict.from_state_dict(empty, "atomic")[0].pop_tensors,
    ):
        with pytest.raises(DeclarationError):
            call()


def _state(rank: int, fill: float) -> dict[str, Any]:
    return {
        "w": S.from_rank_offsets("w", torch.full((2, 2), fill + rank), (0, rank, 2)),
        "same": S.from_rank_offsets("same", torch.full((3,), fill), replica_id=rank),
        "rng": mapping.ShardedObject("rng", [fill + rank], (2,), (rank,)),
        "iteration": int(fill),
    }


def _save_and_load_local(path: str, is_async: bool) -> tuple[int, list[float], int]:
    from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

    from megackpt.compat.megatron.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    rank = torch.distributed.get_rank()
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    manager, queue = LocalCheckpointManager(path), AsyncCallsQueue()
    for iteration in (1, 2):
        kept, _ = MCoreTensorAwareStateDict.from_state_dict(_state(rank, float(iteration)))
        request = manager.save(kept, iteration, is_async=is_async)
        if request is not None:
            queue.schedule_async_request(request)
            queue.maybe_finalize_async_calls(blocking=True)
    queue.close()
    reader = LocalCheckpointManager(path)
    latest = reader.find_latest()
    loaded, _ = reader.load()
    state = loaded.to_state_dict({k: v for k, v in _state(rank, 0.0).items() if k != "iteration"})
    values = [*state["w"].flatten().tolist(), *state["same"].tolist(), *state["rng"]]
    return latest, values, state["iteration"]


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.skipif(
    importlib.util.find_spec("nvidia_resiliency_ext") is None,
    reason="nvidia-resiliency-ext is not installed: pip install nvidia-resiliency-ext",
)
def test_the_manager_of_nvidia_resiliency_ext_saves_finds_and_loads(
    rank_pool: RankPool, tmp_path: Path, is_async: bool
) -> None:
    results = rank_pool.run(_save_and_load_local, 2, str(tmp_path), is_async)
    for rank, (latest, values, iteration) in enumerate(results):
        assert (latest, iteration) == (2, 2)
        assert values == [2.0 + rank] * 4 + [2.0] * 3 + [2.0 + rank]
