"""Train a small GPT on real text with 4 processes, changing the parallel layout every 10 steps.

    python examples/elastic_resume.py

Every phase is a run of pretrain_gpt.py under torchrun that ends after its steps. The next phase resumes from
the checkpoint at another layout. The losses are compared with those of a run that was never interrupted,
printed as a table and drawn as a picture. It takes about two minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

EXAMPLES = Path(__file__).parent
PROCESSES = 4
STEPS_PER_PHASE = 10
ALLOWED_DIFFERENCE = 1e-4
"""Relative. Layouts sum in different orders, so float32 losses differ in their last digits, by 2e-7 here; a
lost moment or a shifted sample differs a thousand times as much. At three times the learning rate training is
chaotic: after 60 steps even two uninterrupted runs at different layouts are 4e-4 apart."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A parallel layout of 4 processes."""

    tp: int
    pp: int

    @property
    def dp(self) -> int:
        """The number of data-parallel ranks."""
        return PROCESSES // (self.tp * self.pp)

    def __str__(self) -> str:
        axes = {"TP": self.tp, "PP": self.pp, "DP": self.dp}
        return " x ".join(f"{axis}{size}" for axis, size in axes.items() if size > 1)


PHASES = (Layout(2, 2), Layout(1, 1), Layout(4, 1), Layout(1, 2), Layout(2, 1), Layout(1, 4))


def main() -> int:
    """Run both trainings and compare their losses; return 0 if they agree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("out/elastic_resume"), help="where the results go")
    out: Path = parser.parse_args().out
    if find_spec("matplotlib") is None:
        parser.error("the picture needs matplotlib; install it with: pip install -e '.[examples]'")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    steps = STEPS_PER_PHASE * len(PHASES)
    console = Console()
    began = time.monotonic()

    console.print(f"[bold]Uninterrupted[/]: {steps} steps at {PHASES[0]}")
    run(PHASES[0], out / "uninterrupted", steps=steps, until=steps)
    for number, layout in enumerate(PHASES):
        first, last = number * STEPS_PER_PHASE + 1, (number + 1) * STEPS_PER_PHASE
        console.print(f"[bold]Elastic[/]: steps {first} to {last} at {layout}")
        run(layout, out / "elastic", steps=steps, until=last)

    whole, switched = losses(out / "uninterrupted"), losses(out / "elastic")
    differences = {step: abs(switched[step] - whole[step]) / whole[step] for step in range(1, steps + 1)}
    console.print(comparison(whole, switched, differences))
    draw(whole, switched, out / "losses.png")
    worst = max(differences.values())
    verdict = "agree" if worst <= ALLOWED_DIFFERENCE else "DIFFER"
    console.print(
        f"The losses {verdict}: at most {worst:.1e} relative apart (allowed: {ALLOWED_DIFFERENCE:.0e}) over "
        f"{steps} steps with {len(PHASES) - 1} changes of layout. {time.monotonic() - began:.0f} s. "
        f"Picture: {out / 'losses.png'}",
        soft_wrap=True,
    )
    return 0 if worst <= ALLOWED_DIFFERENCE else 1


def run(layout: Layout, directory: Path, *, steps: int, until: int) -> None:
    """Run pretrain_gpt.py in 4 processes, from the newest checkpoint in the directory to step `until`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    command += [str(EXAMPLES / "pretrain_gpt.py"), f"--tp={layout.tp}", f"--pp={layout.pp}"]
    command += [f"--ckpt={directory}", f"--steps={steps}", f"--exit-after={until}", f"--save-every={steps}"]
    command += ["--micro-batches=2", "--global-batch-size=8", "--keep-last=2"]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def losses(directory: Path) -> dict[int, float]:
    """Return the loss of every step from a run's metrics, by step."""
    lines = (json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def comparison(whole: dict[int, float], switched: dict[int, float], differences: dict[int, float]) -> Table:
    """Return a table with a row for each phase; all arguments are by step."""
    table = Table(title="Loss at the last step of each phase")
    for column in ("steps", "layout", "uninterrupted", "elastic", "largest relative difference"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for number, layout in enumerate(PHASES):
        first, last = number * STEPS_PER_PHASE + 1, (number + 1) * STEPS_PER_PHASE
        largest = max(differences[step] for step in range(first, last + 1))
        ends = (f"{run_losses[last]:.6f}" for run_losses in (whole, switched))
        table.add_row(f"{first}-{last}", str(layout), *ends, f"{largest:.1e}")
    return table


def draw(whole: dict[int, float], switched: dict[int, float], path: Path) -> None:
    """Draw both loss curves with the changes of layout marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    label = f"uninterrupted, {PHASES[0]}"
    axes.plot(list(whole), list(whole.values()), color="0.7", linewidth=5, label=label)
    axes.plot(list(switched), list(switched.values()), color="tab:blue", label="layout changes")
    top = 1.08 * max(whole.values())  # leaves room for the names of the layouts above the curves
    axes.set_ylim(top=top)
    for number, layout in enumerate(PHASES):
        begin = number * STEPS_PER_PHASE + 0.5
        if number:
            axes.axvline(begin, color="tab:red", linewidth=0.8, linestyle="--")
        axes.text(begin + 0.3, 0.99 * top, str(layout), fontsize=9, color="tab:red", va="top")
    title = f"A GPT on real text: resumed at another layout every {STEPS_PER_PHASE} steps"
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.legend(loc="center right")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
