"""Values that Megatron-Bridge, torchtitan and NeMo (Lightning) put into common state load as they were saved.

Source: the state dicts of megatron-bridge 0.3.1, torchtitan 0.1 and 0.3.0, and Lightning 2 as NeMo uses it.
"""

from __future__ import annotations

import datetime
import io
import pathlib
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megackpt
from megackpt.contrib.megatron import dist_checkpointing
from megackpt.testing.identical import difference


def _of_bridge() -> dict[str, Any]:
    """TrainState.state_dict(), and the random states of a rank, as Megatron-LM has them, too."""
    rng = {
        "random_rng_state": random.Random(1).getstate(),
        "np_rng_state": np.random.RandomState(1).get_state(),
        "torch_rng_state": torch.Generator().manual_seed(1).get_state(),
        "cuda_rng_state": torch.arange(16, dtype=torch.uint8),
        "rng_tracker_states": {"model-parallel-rng": torch.arange(16, dtype=torch.uint8)},
    }
    train_state = {
        "step": torch.tensor(7, dtype=torch.int32),
        "floating_point_operations_so_far": torch.tensor(1e21, dtype=torch.float64),
        "do_train": torch.tensor(True),
    }
    scheduler = {"max_lr": 3e-4, "lr_decay_style": "cosine", "num_steps": 512, "start_wd": None}
    of_run = {"distrib_optim_sharding_type": "dp_reshardable", "singleton_local_shards": True}
    state = {"train_state_metadata": train_state, "opt_param_scheduler": scheduler, "rng": [rng]}
    return {**state, "checkpoint_version": 3.0, "iteration": 7, "content_metadata_of_run": of_run}


def _of_torchtitan() -> dict[str, Any]:
    """TrainState with losses in BytesIO, as 0.1 has it; the data loader with pickled bytes; its data sets."""
    losses = io.BytesIO()
    torch.save([2.5, 1.25], losses)
    generator = random.Random(2)
    return {
        "train_state": {
            "step": torch.tensor(3, dtype=torch.int32),
            "global_avg_losses": losses,
            "log_steps": io.BytesIO(b""),
            "ntokens_seen": 1 << 40,
        },
        "dataloader": {"dp_rank_0": pickle.dumps({"_snapshot": {"worker_0": 5}}), "world_size": 1},
        "lr_scheduler": {"last_epoch": 3},
        "dataset": {
            "rng_state": generator.getstate(),
            "sources": {0: {"sample_idx": 4, "inputs_buffer": [1, 2, 3]}, 1: {"data": {"epoch": 0}}},
            "packer_state": {"packed_samples": [{"input_ids": torch.arange(4)}], "sample_buffer": [[1, 2]]},
        },
    }


def _of_nemo() -> dict[str, Any]:
    """What Lightning's trainer dumps besides weights: loops, callbacks, schedulers, hyperparameters."""
    progress = {"total": {"ready": 3, "started": 3, "completed": 3}, "current": {"ready": 3, "completed": 3}}
    checkpoints = {
        "monitor": "val_loss",
        "best_model_score": torch.tensor(0.5),
        "best_k_models": {"/results/step=1.ckpt": torch.tensor(0.5)},
        "kth_value": torch.tensor(float("inf")),
        "dirpath": pathlib.Path("/results"),
    }
    return {
        "epoch": 0,
        "global_step": 3,
        "pytorch-lightning_version": "2.5.0",
        "loops": {"fit_loop": {"state_dict": {}, "epoch_loop.batch_progress": progress}},
        "callbacks": {"ModelCheckpoint{'monitor': 'val_loss'}": checkpoints},
        "lr_schedulers": [{"_step_count": 4, "base_lrs": [1e-4], "_last_lr": [np.float64(1e-5)]}],
        "hparams_name": "kwargs",
        "hyper_parameters": {"layers": 2, "betas": (0.9, 0.95), "activation": None},
        "MixedPrecision": {"scale": 65536.0, "_growth_tracker": 0},
    }


def _of_times_and_paths() -> dict[str, Any]:
    zone = datetime.timezone(datetime.timedelta(hours=2))
    return {
        "times": [datetime.datetime(2026, 1, 2, 3, tzinfo=zone), datetime.date(2026, 1, 2), datetime.time(4)],
        "paths": [pathlib.PurePosixPath("a/b"), pathlib.PureWindowsPath("c:/d"), pathlib.Path("e")],
        "elapsed": {datetime.timedelta(seconds=i): i for i in range(1100)},  # so many that keys are checked
    }


STATES = {"bridge": _of_bridge, "torchtitan": _of_torchtitan, "nemo": _of_nemo, "times": _of_times_and_paths}


@pytest.mark.parametrize("backend", ["megackpt", "torch_dist"])
@pytest.mark.parametrize("name", STATES)
def test_values_of_frameworks_survive_a_save_and_conversions(name: str, backend: Any, tmp_path: Path) -> None:
    other = "megackpt" if backend == "torch_dist" else "torch_dist"
    dist_checkpointing.save(STATES[name](), str(tmp_path / "a"), (backend, 1))
    assert difference(STATES[name](), dist_checkpointing.load({}, str(tmp_path / "a"))) is None
    megackpt.save(STATES[name](), tmp_path / "b", (backend, 1))
    megackpt.convert(tmp_path / "b", tmp_path / "c", to=other)
    megackpt.convert(tmp_path / "c", tmp_path / "d", to=backend)
    for step in "bcd":
        assert difference(STATES[name](), megackpt.load_common_state_dict(tmp_path / step)) is None
