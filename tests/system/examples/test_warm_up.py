"""The example prepares its writer process before the first asynchronous save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megackpt import Checkpointer
from megackpt.parallel import ParallelLayout
from megackpt.testing.ranks import RankPool
from tests.system.examples.training_runs import arguments_for, deterministic, make_trainer, write_text


class _Observed(Checkpointer):
    """Notes how much memory there is for copies of the state when a save begins."""

    staging_nbytes: list[int]

    def save(self, *args: Any, **kwargs: Any) -> bool:
        saver = self._async_saving.saver if self._async_saving is not None else None
        assert saver is not None
        self.staging_nbytes.append(saver.staging_nbytes)
        return super().save(*args, **kwargs)


def _staging_nbytes(flags: list[str]) -> list[int]:
    sizes: list[int] = []
    with deterministic():
        trainer = make_trainer(arguments_for(ParallelLayout(), flags))
        assert trainer.checkpointer is not None
        trainer.checkpointer.__class__ = _Observed
        trainer.checkpointer.staging_nbytes = sizes
        trainer.run()
    return sizes


def test_the_first_save_finds_memory_for_its_copy(rank_pool: RankPool, tmp_path: Path) -> None:
    data = write_text(tmp_path / "text")
    flags = [f"--data={data}", f"--ckpt={tmp_path / 'run'}", "--steps=2", "--save-interval=1", "--async-save"]
    ((first, second),) = rank_pool.run(_staging_nbytes, 1, flags)
    assert first == second > 0
