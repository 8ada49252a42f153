"""Lightning's CheckpointIO in one process: whole states, also in a thread of Lightning's; wrong input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader

from megackpt.errors import UnsupportedError
from megackpt.integrations.lightning import MegackptIO

# Lightning 2.6 uses a name that torch 2.13 is about to remove.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore::UserWarning")


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return (self.net(batch) - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(root: Path, io: Any, *, epochs: int, resume: Path | None = None) -> Regression:
    """Train two steps an epoch, and save at the end as `last.ckpt` under root."""
    torch.manual_seed(0)
    module = Regression()
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        plugins=[io],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.ones(2, 4)), ckpt_path=resume)
    trainer.save_checkpoint(root / "last.ckpt")
    trainer.strategy.teardown()  # waits for the thread
    return module


@pytest.mark.parametrize("wrap", [lambda io: io, AsyncCheckpointIO], ids=["plain", "thread"])
def test_a_run_goes_on_from_what_was_saved(wrap: Any, tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", wrap(MegackptIO()), epochs=4)
    fit(tmp_path / "half", wrap(MegackptIO()), epochs=2)
    resumed = fit(tmp_path / "rest", wrap(MegackptIO()), epochs=4, resume=tmp_path / "half" / "last.ckpt")
    for parameter, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(parameter, expected)
    assert not any(b"pickle" in path.read_bytes() for path in (tmp_path / "half").rglob("*.json"))


def test_a_checkpoint_is_removed_and_storage_options_are_an_error(tmp_path: Path) -> None:
    io = MegackptIO()
    io.save_checkpoint({"state_dict": {"w": torch.ones(2)}, "epoch": 1}, tmp_path / "a")
    assert torch.equal(io.load_checkpoint(tmp_path / "a")["state_dict"]["w"], torch.ones(2))
    io.remove_checkpoint(tmp_path / "a")
    io.remove_checkpoint(tmp_path / "a")
    assert not (tmp_path / "a").exists()
    with pytest.raises(UnsupportedError, match="storage_options are not known"):
        io.save_checkpoint({}, tmp_path / "b", storage_options={"a": 1})
