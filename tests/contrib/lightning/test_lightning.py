"""Lightning in one process: a CheckpointIO, also in a thread; asynchronous saves; wrong input."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch.utils.data import DataLoader

from megackpt import load
from megackpt.contrib.lightning import MegackptDDPStrategy, MegackptIO
from megackpt.errors import CheckpointError, NotACheckpointError, UnsupportedError
from megackpt.run import check_is_distributed_checkpoint

# Lightning 2.6 uses a name that torch 2.13 is about to remove.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore::UserWarning")


QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False}
QUIET |= {"enable_progress_bar": False, "enable_model_summary": False}


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
    trainer = Trainer(max_epochs=epochs, plugins=[io], enable_checkpointing=False, **QUIET)
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


def fit_with_a_strategy(root: Path, epochs: int, *, keep: int = -1, resume: Path | None = None) -> Regression:
    torch.manual_seed(0)
    module = Regression()
    callbacks = [ModelCheckpoint(root, "{epoch}", save_top_k=keep, monitor="epoch", mode="max")]
    strategy = MegackptDDPStrategy(async_save=True)
    trainer = Trainer(devices=1, max_epochs=epochs, strategy=strategy, callbacks=callbacks, **QUIET)
    trainer.fit(module, DataLoader(torch.ones(2, 4)), ckpt_path=resume)
    return module


def test_asynchronous_saves_are_committed_at_the_end_and_resume(tmp_path: Path) -> None:
    whole = fit_with_a_strategy(tmp_path / "whole", 4)
    for epoch in range(4):
        assert check_is_distributed_checkpoint(tmp_path / "whole" / f"epoch={epoch}.ckpt")
    resumed = fit_with_a_strategy(tmp_path / "rest", 4, resume=tmp_path / "whole" / "epoch=1.ckpt")
    alone = Regression()
    last = tmp_path / "whole" / "epoch=3.ckpt"
    alone.load_state_dict(load({"model": alone.state_dict()}, last)["model"])
    for module in (resumed, alone):
        for parameter, expected in zip(module.parameters(), whole.parameters(), strict=True):
            assert torch.equal(parameter, expected)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Return a checkpoint of Lightning itself, after one epoch."""
    trainer = Trainer(max_epochs=1, enable_checkpointing=False, **QUIET)
    trainer.fit(Regression(), DataLoader(torch.ones(2, 4)))
    trainer.save_checkpoint(tmp_path / "own.ckpt")
    return tmp_path / "own.ckpt"


def test_a_checkpoint_of_lightning_itself_is_an_error_and_stays(
    own: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "sharded").mkdir()
    torch.save({}, tmp_path / "sharded" / "meta.pt")  # as of FSDP
    again = Trainer(max_epochs=2, strategy=MegackptDDPStrategy(), enable_checkpointing=False, **QUIET)
    with pytest.raises(NotACheckpointError, match=r"own\.ckpt is no checkpoint of megackpt.*MegackptIO"):
        again.fit(Regression(), DataLoader(torch.ones(2, 4)), ckpt_path=own)
    for name in ("own.ckpt", "sharded"):
        MegackptIO().remove_checkpoint(tmp_path / name)
        assert f"{name} stays: megackpt has not written it" in caplog.text
        assert (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("saved", "resumed_with", "text"),
    [
        ({}, {"plugins": [MegackptIO()]}, "was not saved by MegackptIO.* MegackptDDPStrategy"),
        ({"weights_only": True}, {"strategy": "ours"}, "no state of this optimizer; only models were saved"),
        ({"plugins": [MegackptIO()]}, {"strategy": "ours"}, "If MegackptIO saved it, resume it with that"),
        ({"above": True}, {"strategy": "ours"}, r"Name one of them, such as .*a\.ckpt"),
    ],
    ids=["by a strategy", "without an optimizer", "by MegackptIO", "a folder of checkpoints"],
)
def test_a_checkpoint_that_another_plugin_has_saved_names_that_plugin(
    saved: dict[str, Any], resumed_with: dict[str, Any], text: str, tmp_path: Path
) -> None:
    data = DataLoader(torch.ones(2, 4))
    how = {"plugins": saved["plugins"]} if "plugins" in saved else {"strategy": MegackptDDPStrategy()}
    trainer = Trainer(devices=1, max_epochs=1, enable_checkpointing=False, **how, **QUIET)
    trainer.fit(Regression(), data)
    trainer.save_checkpoint(tmp_path / "a.ckpt", weights_only=saved.get("weights_only", False))
    how = resumed_with if "plugins" in resumed_with else {"strategy": MegackptDDPStrategy()}
    again = Trainer(devices=1, max_epochs=2, enable_checkpointing=False, **how, **QUIET)
    with pytest.raises(CheckpointError, match=text):
        again.fit(Regression(), data, ckpt_path=tmp_path if "above" in saved else tmp_path / "a.ckpt")


def test_a_run_goes_on_from_a_file_of_lightning_as_lightning_does(own: Path) -> None:
    ended = []
    for plugins in ([], [MegackptIO()]):
        module = Regression()
        trainer = Trainer(max_epochs=3, plugins=plugins, enable_checkpointing=False, **QUIET)
        trainer.fit(module, DataLoader(torch.ones(2, 4)), ckpt_path=own)
        assert trainer.global_step == 6
        ended.append(list(module.parameters()))
    assert all(map(torch.equal, *ended))


def test_a_checkpoint_is_not_removed_before_the_one_that_supersedes_it_is_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed: list[bool] = []
    remove = shutil.rmtree

    def removed(path: Path, **kwargs: Any) -> None:
        others = [other for other in tmp_path.iterdir() if other != Path(path)]
        committed.append(any(map(check_is_distributed_checkpoint, others)))
        remove(path, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", removed)
    fit_with_a_strategy(tmp_path, 3, keep=1)
    assert committed == [True, True]
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=2.ckpt"]


def test_an_asynchronous_save_that_fails_raises_its_error_at_the_end_of_the_run(tmp_path: Path) -> None:
    trainer = fit_with_a_strategy(tmp_path / "run", 1).trainer
    (tmp_path / "file").touch()
    trainer.save_checkpoint(tmp_path / "file" / "last.ckpt")
    with pytest.raises(CheckpointError, match=r"file/last\.ckpt"):
        trainer.strategy.teardown()
