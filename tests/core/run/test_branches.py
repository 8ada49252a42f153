"""A run that goes back: which step a restart takes, and what becomes of the steps that were left behind."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megackpt import (
    Checkpointer,
    DeclarationError,
    LoadOptions,
    MemoryTier,
    ShardedTensor,
    StorageError,
    Tiers,
)
from megackpt.comm import Group
from megackpt.engine.checkpoint import manifest
from megackpt.engine.checkpoint.origins import FIELD, PlacedStep, StepOrigin, step_tree
from megackpt.errors import CheckpointError
from megackpt.run.checkpointer.branches import decide_branch
from megackpt.testing.world import SimulatedWorld
from megackpt.whole.verify import verify
from tests.support.effort import few


def state(group: Group, value: float) -> dict[str, Any]:
    share = torch.full((4,), value)
    return {"w": ShardedTensor.from_rank_offsets("w", share, (0, group.rank, group.size)), "value": value}


def saved(root: Path, *steps: int, **options: Any) -> Checkpointer:
    """A run with these steps; the value of each is its number."""
    checkpointer = Checkpointer(root, **options)
    for step in steps:
        checkpointer.save(step, {"value": step})
    return checkpointer


def value(root: Path, step: int | None = None) -> int:
    return int(Checkpointer(root).load({}, step)["value"])


def forget_origins(root: Path) -> None:
    """Make all steps those of a version that records no origin."""
    for path in root.glob("iter_*/metadata.json"):
        document = json.loads(path.read_text())
        document.pop(FIELD, None)
        path.write_text(json.dumps(document))


def test_a_restart_takes_the_step_of_the_run_that_went_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 300, 400, 5000)
    forget_origins(tmp_path)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.load({}, 300)
    with caplog.at_level(logging.WARNING):
        for step in (400, 500):
            checkpointer.save(step, {"value": -step})
    where = f"these steps of {tmp_path} behind: 400, 5000"
    assert caplog.text.count(f"Step 400 continues step 300 and leaves {where}") == 1
    assert "a restart takes step 400 or one that follows it" in caplog.text
    assert "Step 500" not in caplog.text
    assert (value(tmp_path), Checkpointer(tmp_path).latest()) == (-500, 500)
    assert Checkpointer(tmp_path).steps() == (300, 400, 500, 5000)
    assert value(tmp_path, 5000) == 5000
    record = json.loads((tmp_path / "iter_0000500" / "metadata.json").read_text())[FIELD]
    assert record == {
        "branch": 1,
        "continues": 400,
        "continues_run": record["run"],
        "earlier": [[0, 300]],
        "run": record["run"],
        "xxh3_128": record["xxh3_128"],
    }


def test_a_changed_record_is_damage(tmp_path: Path) -> None:
    checkpointer = saved(tmp_path, 1)
    path = tmp_path / "iter_0000001" / "metadata.json"
    document = json.loads(path.read_text())
    document[FIELD]["branch"] = 7
    path.write_text(json.dumps(document))
    (damage,) = verify(checkpointer.directory(1)).damages
    assert "The record of the origin of a step is" in damage.what
    assert value(tmp_path) == 1


def test_a_new_run_in_the_root_of_an_old_one_is_loaded_and_keeps_to_itself(tmp_path: Path) -> None:
    saved(tmp_path, 50, 300, 5000)
    saved(tmp_path, 100, 200, keep_last=1)
    assert Checkpointer(tmp_path).steps() == (50, 200, 300, 5000)
    assert value(tmp_path) == 200
    for path in (tmp_path / "iter_0000200").glob("common*"):
        path.write_bytes(b"damaged")
    # A step of another run is no step to fall back to.
    with pytest.raises(CheckpointError, match="iter_0000200"):
        Checkpointer(tmp_path, load_options=LoadOptions(on_corrupt="fallback")).load({})


def test_a_run_that_loads_nothing_and_has_greater_numbers_gets_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 10)
    with caplog.at_level(logging.WARNING):
        saved(tmp_path, 20, 30)
    assert caplog.text.count("has steps up to 10, and this Checkpointer has loaded none of them") == 1
    assert value(tmp_path) == 30


def test_on_newer_steps_error_saves_nothing_on_any_rank(tmp_path: Path) -> None:
    saved(tmp_path, 300, 400, 500, 600, 700, 800, 900)

    def act(group: Group) -> str:
        checkpointer = Checkpointer(tmp_path, group=group, on_newer_steps="error", on_error="warn")
        checkpointer.load({}, 300)
        with pytest.raises(DeclarationError) as caught:
            checkpointer.save(350, state(group, 1.0))
        checkpointer.load({})
        checkpointer.save(1000 * group.size, state(group, 1.0))  # continues the newest
        return str(caught.value)

    (text, *others) = SimulatedWorld(3).run(act)
    assert others == [text, text]
    assert text == (
        f"Step 350 continues step 300 and leaves these steps of {tmp_path} behind: 6 steps from 400 to 900. "
        f"Nothing is saved, because of on_newer_steps='error'. Load the newest step; or move other steps "
        f"aside with `megackpt rollback {tmp_path} 300`; or give a new run its own root; or choose "
        f"on_newer_steps='keep'."
    )
    assert Checkpointer(tmp_path).steps() == (300, 400, 500, 600, 700, 800, 900, 3000)


def test_on_newer_steps_discard_removes_them_after_the_commit_and_no_pinned_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 200, 300, 400, 500, 5000).pin(500)
    checkpointer = Checkpointer(tmp_path, on_newer_steps="discard")
    checkpointer.load({}, 300)
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "commit", _reject)
        with pytest.raises(StorageError):
            checkpointer.save(400, {"value": -400})
    assert checkpointer.steps() == (200, 300, 400, 500, 5000)
    assert checkpointer.find_latest() == 5000
    checkpointer.save(400, {"value": -400})
    assert checkpointer.steps() == (200, 300, 400, 500)
    assert value(tmp_path) == -400
    saved(tmp_path, 250, on_newer_steps="discard")  # a new run
    assert Checkpointer(tmp_path).steps() == (200, 250, 500)


def _reject(*_: object, **__: object) -> None:
    raise StorageError("the disk is full")


def test_a_step_that_a_load_skips_as_damaged_does_not_stop_the_run(tmp_path: Path) -> None:
    saved(tmp_path, 300, 400)
    for path in (tmp_path / "iter_0000400").glob("common*"):
        path.write_bytes(b"damaged")
    options = LoadOptions(on_corrupt="fallback")
    checkpointer = Checkpointer(tmp_path, load_options=options, on_newer_steps="error")
    assert checkpointer.load({})["value"] == 300
    checkpointer.save(350, {"value": 350})
    assert value(tmp_path) == 350


@pytest.mark.parametrize("format", [None, "torch_dist", ("zarr", 3)])
def test_every_format_records_the_origin_of_a_step(tmp_path: Path, format: Any) -> None:
    saved(tmp_path, 1, 2)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.load({}, 1)
    tensor = ShardedTensor.from_rank_offsets("w", torch.ones(4))
    checkpointer.save(2, {"w": tensor, "value": -2}, sharded_strategy=format)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.load({}, 1)
    checkpointer.save(3, {"w": tensor, "value": 3}, sharded_strategy=format)
    tree = step_tree([*checkpointer._root.tree().line, *checkpointer._root.tree().abandoned])
    assert [(p.step, p.origin and p.origin.branch) for p in tree.line] == [(1, 0), (3, 2)]
    assert [(p.step, p.origin and p.origin.branch) for p in tree.abandoned] == [(2, 1)]


def test_a_damaged_commit_is_loaded_as_an_error_and_hides_no_newer_branch(tmp_path: Path) -> None:
    saved(tmp_path, 300, 400, 5000)
    checkpointer = Checkpointer(tmp_path)
    checkpointer.load({}, 300)
    checkpointer.save(350, {"value": 350})
    (tmp_path / "iter_0000300" / "metadata.json").write_text("{")
    assert value(tmp_path) == 350
    (tmp_path / "iter_0005000" / "metadata.json").write_text("{")
    with pytest.raises(CheckpointError, match="iter_0005000"):  # perhaps it belongs to the run
        value(tmp_path)


def test_the_branch_of_a_save_leaves_the_line_behind_the_step_that_it_continues() -> None:
    steps = [PlacedStep(n, StepOrigin(run="a"), "") for n in (100, 200, 300)]
    decided = decide_branch(400, steps, run="b", loaded=300)
    assert (decided.branch, decided.left, decided.continues_run) == (0, [], "a")
    decided = decide_branch(400, steps, run="b", loaded=200)
    assert (decided.branch, decided.earlier, decided.left) == (1, [(0, 200)], [300])
    decided = decide_branch(200, steps, run="b", loaded=300)
    assert (decided.branch, decided.earlier, decided.left) == (1, [(0, 199)], [200, 300])
    decided = decide_branch(200, steps, run="a", loaded=None)
    assert (decided.continues, decided.earlier, decided.left) == (300, [(0, 199)], [200, 300])
    decided = decide_branch(150, steps, run="b", loaded=None)
    assert (decided.branch, decided.earlier, decided.left) == (1, [], [100, 200, 300])


class History:
    """Saves, loads and restarts of one run, and what is expected of them: the slow, obvious way.

    Attributes:
        made: every save in the order of time, as step and value.
    """

    def __init__(self, base: Path, seed: int) -> None:
        self.base, self.choice = base, random.Random(seed)
        self.made: list[tuple[int, int]] = []
        self.number = 0
        self.policy = self.choice.choice(["keep", "keep", "error", "discard"])
        self.kind = "async" if seed % 10 == 0 else "tiers" if seed % 4 == 1 else "plain"
        self.keep_last = self.choice.choice([None, None, 1, 2, 3])

    def options(self, group: Group) -> dict[str, Any]:
        options: dict[str, Any] = {"keep_last": self.keep_last, "on_newer_steps": self.policy}
        if self.kind == "tiers":
            tier = MemoryTier(f"{self.base}/node-{{node}}", keep_last=2)
            options["tiers"] = Tiers([tier], root_every=self.choice.choice([1, 2]), node=group.rank)
        return options | {"async_save": self.kind == "async"}

    def run(self, act: Callable[[Group, dict[str, Any]], Any]) -> Any:
        """Run on two ranks, or one that saves asynchronously, and return their common result."""
        seed = self.choice.random()

        def on_rank(group: Group) -> Any:
            self.choice = random.Random(seed)
            return act(group, self.options(group))

        results = SimulatedWorld(1 if self.kind == "async" else 2).run(on_rank)
        assert all(result == results[0] for result in results)
        return results[0]

    def load(self, group: Group, checkpointer: Checkpointer, step: int | None) -> int:
        return int(checkpointer.load(state(group, 0.0), step)["value"])

    def check_restart(self) -> None:
        def act(group: Group, options: dict[str, Any]) -> tuple[int, int | None]:
            with Checkpointer(self.base / "root", group=group, **options) as checkpointer:
                latest = checkpointer.find_latest()
                return self.load(group, checkpointer, None), latest

        step, expected = self.made[-1]
        assert self.run(act) == (expected, step), self.made

    def session(self) -> None:
        """One run: it loads the newest step, another one or none, and saves a few."""
        kind = self.choice.choice(["newest", "newest", "older", "none"]) if self.made else "none"
        known = Checkpointer(self.base / "root").steps()
        start = self.choice.choice(known) if kind == "older" and known else None
        newest = self.made[-1] if self.made else (0, 0)
        first = (start or newest[0]) + self.choice.randint(1, 60)
        if kind == "none":
            first = self.choice.randint(1, 200)
        steps = [first]
        for _ in range(self.choice.randint(0, 3)):
            goes_back = self.choice.random() < 0.15
            steps.append(max(1, steps[-1] + self.choice.randint(-40, 0) if goes_back else steps[-1] + 10))
        fails = self.choice.random() < 0.2 and self.kind == "plain"
        values = [self.number + n for n in range(1, len(steps) + 1)]
        self.number += len(steps)

        def act(group: Group, options: dict[str, Any]) -> list[Any]:
            done: list[Any] = []
            with Checkpointer(self.base / "root", group=group, **options) as checkpointer:
                if kind != "none":
                    done.append(self.load(group, checkpointer, start))
                for step, of_step in zip(steps, values, strict=True):
                    try:
                        made = state(group, float(of_step))
                        if fails and group.rank == 1 and step == steps[-1]:
                            made["w"] = "a state that does not fit the other rank's"
                        checkpointer.save(step, made)
                        done.append((step, of_step))
                    except CheckpointError as error:
                        done.append(type(error).__name__)
            return done

        done = self.run(act)
        if kind != "none":
            loaded = done.pop(0)
            assert start is not None or loaded == newest[1]
        position = None if kind == "none" else (newest if start is None else self._made(loaded))
        for step, result in zip(steps, done, strict=True):
            rejected = self._is_rejected(step, position)
            if self.policy == "error" and rejected:
                assert result == "DeclarationError", (step, position, self.made)
            elif not (fails and step == steps[-1] and result != (step, values[-1])):
                assert result[0] == step, (result, step, position, self.made)
                position = result
                self.made.append(result)

    def _made(self, loaded: int) -> tuple[int, int]:
        return next(save for save in self.made if save[1] == loaded)

    def _is_rejected(self, step: int, position: tuple[int, int] | None) -> bool:
        if not self.made:
            return False
        newest = self.made[-1]
        return step <= newest[0] if position is None else position != newest or step < newest[0]


@pytest.mark.parametrize("seed", range(few(24, of=200)))
def test_a_restart_takes_the_last_save_of_random_histories(tmp_path: Path, seed: int) -> None:
    history = History(tmp_path, seed)
    for _ in range(history.choice.randint(2, 5)):
        history.session()
        if history.made:
            history.check_restart()
