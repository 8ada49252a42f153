"""A job that saves one step after the other for ever, to be killed; and what must be true afterwards.

What the job does, on ranks of a pool or, as a script, under torchrun; what it notes of its processes;
and what is looked at after a kill. Who kills, and when, is up to the tests.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megackpt import AsyncOptions, Checkpointer, ShardedTensor
from megackpt.comm import SingleProcess
from tests.support.writers import is_alive, open_saver_of

RANKS = 2
TENSORS = 8
NUMEL = 1 << 20  # 8 tensors of 4 MiB on each of 2 ranks
LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class Notes:
    """Files in which a life of the job, from a start to a kill, says what must be known of it."""

    directory: Path
    life: int

    def put(self, name: str, text: str = "") -> None:
        """Let there be a file with this text, all at once."""
        new = self._file(f"{name}.new")
        new.write_text(text)
        new.replace(self._file(name))

    def wait(self, name: str) -> str:
        """Wait until there is such a file, and return its text."""
        deadline = time.monotonic() + LIMIT_S
        while not self._file(name).exists():
            assert time.monotonic() < deadline, f"{name} did not appear"
            time.sleep(0.002)
        return self._file(name).read_text()

    def processes(self) -> list[int]:
        return [json.loads(self._file(f"rank-{rank}").read_text())["rank"] for rank in range(RANKS)]

    def writers(self) -> list[int]:
        """Return the process ids of the writers of the ranks; none if saves are synchronous."""
        pids = [json.loads(self._file(f"rank-{rank}").read_text())["writer"] for rank in range(RANKS)]
        return [pid for pid in pids if pid]

    def duration(self) -> float:
        """Wait until the job has saved once, and return how long that took, in seconds."""
        return float(self.wait("saving"))

    def _file(self, name: str) -> Path:
        return self.directory / f"life-{self.life}.{name}"


def save_one_step_after_the_other(root: Path, notes: Notes, async_save: bool) -> None:
    """Go on from the newest step, for ever; the value of every element is the number of the step."""
    # Not behind others, as in training: here nothing else is done.
    options = AsyncOptions(nice=0) if async_save else False
    checkpointer = Checkpointer(root, keep_last=2, async_save=options)
    rank, size = dist.get_rank(), dist.get_world_size()
    saver = open_saver_of(checkpointer)
    writer = saver.writer_pid if saver is not None else None
    notes.put(f"rank-{rank}", json.dumps({"rank": os.getpid(), "writer": writer}))
    notes.wait("go")
    tensors = [torch.empty(NUMEL) for _ in range(TENSORS)]
    parts = [ShardedTensor.from_rank_offsets(f"t{i}", t, (0, rank, size)) for i, t in enumerate(tensors)]
    first = (checkpointer.find_latest() or 0) + 1
    step = first
    while True:
        for tensor in tensors:  # what was saved asynchronously is not what is there now
            tensor.fill_(step)
        state = {"model": dict(zip(map(str, range(TENSORS)), parts, strict=True)), "step": step}
        if rank == 0:
            notes.put("step", str(step))
        began = time.monotonic()
        checkpointer.save(step, state)
        if step == first + 1:  # of the first save, a writer process may have begun late
            checkpointer.wait()
            if rank == 0:
                notes.put("saving", str(time.monotonic() - began))
        dist.barrier()
        step += 1


def load_in_one_process(root: Path, step: int | None = None) -> tuple[int, torch.Tensor]:
    """Load a step, or the one that is chosen; return its number and `[tensors, elements]`."""
    checkpointer = Checkpointer(root, group=SingleProcess())
    tensors = {
        str(i): ShardedTensor.from_rank_offsets(f"t{i}", torch.zeros(RANKS * NUMEL)) for i in range(TENSORS)
    }
    loaded = checkpointer.load({"model": tensors}, step)
    return loaded["step"], torch.stack(list(loaded["model"].values()))


@dataclass(slots=True)
class Tally:
    """What kills have left.

    Attributes:
        newest: the newest committed step.
        kills: how many there were.
        interrupted: how many came before the commit of a save that had begun.
        incomplete: how many left an incomplete step that is newer than the committed ones. In the other
            cases, the writers that found themselves alone had removed the files before they ended.
    """

    newest: int = 0
    kills: int = 0
    interrupted: int = 0
    incomplete: int = 0

    def look(self, root: Path, notes: Notes) -> None:
        """Check that all that is committed loads, bit for bit, and that no incomplete step is chosen."""
        steps = Checkpointer(root, group=SingleProcess()).scan()
        newest = steps.committed[-1]
        assert newest > self.newest
        for asked in (*steps.committed[:-1], None):
            step, values = load_in_one_process(root, asked)
            assert step == (newest if asked is None else asked)
            assert torch.equal(values, torch.full_like(values, step))
        # Incomplete is the step that was being saved, or an old one that was being removed.
        assert all(
            incomplete == newest + 1 or incomplete < steps.committed[0] for incomplete in steps.incomplete
        )
        self.newest = newest
        self.kills += 1
        self.interrupted += int(notes.wait("step")) > newest
        self.incomplete += any(incomplete > newest for incomplete in steps.incomplete)

    def __str__(self) -> str:
        return (
            f"{self.kills} kills, {self.interrupted} before the commit of a save that had begun, of which "
            f"{self.incomplete} left an incomplete step; newest committed step {self.newest}"
        )


def await_end(pids: list[int], limit_s: float) -> float:
    """Return how long it took until none of the processes was left, in seconds."""
    began = time.monotonic()
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() - began < limit_s, f"processes {left} are still there"
        time.sleep(0.005)
    return time.monotonic() - began


def named_shared_memory(pid: int) -> list[str]:
    """Return what a process holds of /dev/shm that would stay there after it."""
    owned = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    for descriptor in list(Path(f"/proc/{pid}/fd").iterdir()):
        try:
            owned.append(os.readlink(descriptor))
        except FileNotFoundError:  # closed meanwhile
            continue
    return [name for name in owned if name.startswith("/dev/shm/") and not name.endswith("(deleted)")]


def main() -> None:
    """Be one rank of the job under torchrun: `interrupted_job.py ROOT NOTES`."""
    torch.set_num_threads(1)
    notes = Notes(Path(sys.argv[2]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
    # Not torchrun's own store, in which gloo finds the addresses of the life before.
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(str(notes.directory / f"life-{notes.life}.store"), size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    save_one_step_after_the_other(Path(sys.argv[1]), notes, True)


if __name__ == "__main__":
    main()
