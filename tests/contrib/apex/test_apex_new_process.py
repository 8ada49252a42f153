"""Apex's optimizers, saved here and resumed in another process."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from megackpt import load, save
from megackpt.integrations.apex import load_sharded_state_dict, sharded_state_dict
from megackpt.testing.ranks import RankPool
from tests.contrib.apex.test_apex import WHOLE
from tests.support.apex_training import declare, make_params, train


def resume(name: str, path: Path) -> list[Tensor]:
    build, dtype = WHOLE[name]
    params = make_params(1, dtype)
    optimizer = build(params)
    model = declare(params)
    request = {"model": model, "optimizer": sharded_state_dict(optimizer, model, is_loading=True)}
    load_sharded_state_dict(optimizer, load(request, path)["optimizer"])
    train(params, optimizer, range(5, 6))
    return [p.detach() for p in params]


def test_one_step_in_a_new_process_equals_that_of_the_uninterrupted_run(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    for name, (build, dtype) in WHOLE.items():
        params = make_params(0, dtype)
        optimizer = build(params)
        train(params, optimizer, range(5))
        model = declare(params)
        save({"model": model, "optimizer": sharded_state_dict(optimizer, model)}, tmp_path / name)
        train(params, optimizer, range(5, 6))
        ((*weights,),) = rank_pool.run(resume, 1, name, tmp_path / name)
        assert all(weight.equal(p) for weight, p in zip(weights, params, strict=True)), name
