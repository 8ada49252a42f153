"""Train a small GPT on real text with 4 processes, changing the parallel layout every 10 steps.

    python examples/elastic_resume.py          # a dense model over changing TP, PP and DP
    python examples/elastic_resume.py --moe    # a mixture of experts, over changing EP, ETP, CP and VPP too

Every phase is a run of pretrain_gpt.py that ends after its steps. The next phase makes new process groups, a
new model and a new optimizer at another layout, and resumes from the checkpoint. The losses are compared with
those of a run that was never interrupted, printed as a table and drawn as a picture. It takes about a minute
on 2 cores, twice as long with experts.

The 4 processes stay, as starting them takes most of the time. With --new-processes each phase starts its own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

EXAMPLES = Path(__file__).parent
PROCESSES = 4
STEPS_PER_PHASE = 10
ALLOWED_DIFFERENCE = 1e-4
"""Relative. Layouts sum in different orders, so float32 losses differ in their last digits, by 2e-7 here; a
lost moment or a shifted sample differs a thousand times as much. At three times the learning rate training is
chaotic: after 60 steps even two uninterrupted runs at different layouts are 4e-4 apart."""


@dataclass(frozen=True, slots=True)
class Run:
    """What is trained, and at which layouts of 4 processes, one for each phase.

    Attributes:
        title: of the picture.
        flags: of pretrain_gpt.py, besides those of the layout.
        phases: the sizes of the axes in each phase; the remaining ranks are data-parallel.
    """

    title: str
    flags: tuple[str, ...]
    phases: tuple[dict[str, int], ...]


DENSE = Run(
    "A GPT on real text",
    (),
    ({"tp": 2, "pp": 2}, {}, {"tp": 4}, {"pp": 2}, {"tp": 2}, {"pp": 4}),
)
MOE = Run(
    "A mixture of experts on real text",
    ("--experts=8", "--top-k=2", "--shared-experts=1", "--expert-ffn-hidden-size=64", "--hidden-size=64"),
    (
        {"tp": 2, "pp": 2, "ep": 2, "etp": 1},
        {"ep": 4},
        {"cp": 2, "ep": 2},
        {"pp": 2, "vpp": 2, "ep": 2},
        {"tp": 4, "ep": 2, "etp": 2},
        {},
    ),
)


def layout_text(axes: dict[str, int]) -> str:
    """Return a layout in a few letters, with the data-parallel ranks that its axes leave."""
    dp = PROCESSES // math.prod(axes.get(axis, 1) for axis in ("tp", "pp", "cp"))
    sizes = {**axes, "dp": dp}
    return " ".join(f"{axis.upper()}{size}" for axis, size in sizes.items() if size > 1 or axis == "etp")


def main() -> int:
    """Run both trainings and compare their losses; return 0 if they agree."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--moe", action="store_true", help="train a mixture of experts, over all axes")
    parser.add_argument("--new-processes", action="store_true", help="start each phase in new processes")
    parser.add_argument(
        "--out",
        type=Path,
        help="where the results go; default: out/elastic_resume, with --moe out/elastic_moe",
    )
    arguments = parser.parse_args()
    trained = MOE if arguments.moe else DENSE
    out: Path = arguments.out or Path("out/elastic_moe" if arguments.moe else "out/elastic_resume")
    if find_spec("matplotlib") is None:
        parser.error("the picture needs matplotlib; install it with: pip install -e '.[examples]'")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    steps = STEPS_PER_PHASE * len(trained.phases)
    console = Console()
    began = time.monotonic()

    runs = [(0, "uninterrupted", steps)]
    runs += [(number, "elastic", (number + 1) * STEPS_PER_PHASE) for number in range(len(trained.phases))]
    flags = [flags_of(trained, phase, out / name, steps=steps, until=until) for phase, name, until in runs]
    console.print(
        f"{PROCESSES} processes train {steps} steps twice: at {layout_text(trained.phases[0])}, and at "
        f"another layout every {STEPS_PER_PHASE} steps. Their output: {out / 'log.txt'}",
        soft_wrap=True,
    )
    batches = [[run] for run in flags] if arguments.new_processes else [flags]
    with progress_bar(console) as bar:
        task = bar.add_task("starting", total=2 * steps)
        for batch in batches:
            process = start(batch, out)
            while process.poll() is None:
                time.sleep(0.2)
                done = [len(losses(out / name)) for name in ("uninterrupted", "elastic")]
                phase = max(0, done[1] - 1) // STEPS_PER_PHASE if done[1] else 0
                bar.update(task, completed=sum(done), description=layout_text(trained.phases[phase]))
            if process.returncode:
                console.print((out / "log.txt").read_text(), highlight=False, markup=False)
                return process.returncode

    whole, switched = losses(out / "uninterrupted"), losses(out / "elastic")
    differences = {step: abs(switched[step] - whole[step]) / whole[step] for step in range(1, steps + 1)}
    console.print(comparison(trained, whole, switched, differences))
    draw(trained, whole, switched, out / "losses.png")
    worst = max(differences.values())
    verdict = "agree" if worst <= ALLOWED_DIFFERENCE else "DIFFER"
    console.print(
        f"The losses {verdict}: at most {worst:.1e} relative apart (allowed: {ALLOWED_DIFFERENCE:.0e}) over "
        f"{steps} steps with {len(trained.phases) - 1} changes of layout. {time.monotonic() - began:.0f} s. "
        f"Picture: {out / 'losses.png'}",
        soft_wrap=True,
    )
    return 0 if worst <= ALLOWED_DIFFERENCE else 1


def flags_of(trained: Run, phase: int, directory: Path, *, steps: int, until: int) -> list[str]:
    """Return the flags of pretrain_gpt.py that train from the newest checkpoint to step `until`."""
    flags = [*trained.flags, *(f"--{axis}={size}" for axis, size in trained.phases[phase].items())]
    flags += [f"--ckpt={directory}", f"--steps={steps}", f"--exit-after={until}", f"--save-every={steps}"]
    return [*flags, "--micro-batches=2", "--global-batch-size=8", "--keep-last=2"]


def start(runs: Sequence[Sequence[str]], out: Path) -> subprocess.Popen[bytes]:
    """Start 4 processes that do runs of pretrain_gpt.py with these flags, one after the other."""
    (out / "runs.json").write_text(json.dumps(runs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={PROCESSES}"]
    command += [str(EXAMPLES / "training" / "phases.py"), str(out / "runs.json")]
    with (out / "log.txt").open("ab") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)


def progress_bar(console: Console) -> Progress:
    """Return a bar over the steps of all runs. A log file gets no bar."""
    columns = (TextColumn("{task.description:14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def losses(directory: Path) -> dict[int, float]:
    """Return the loss of every step from a run's metrics, by step; empty before the first step."""
    metrics = directory / "metrics.jsonl"
    whole_lines = metrics.read_text().rpartition("\n")[0].splitlines() if metrics.exists() else []
    lines = map(json.loads, whole_lines)
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def comparison(
    trained: Run, whole: dict[int, float], switched: dict[int, float], differences: dict[int, float]
) -> Table:
    """Return a table with a row for each phase; losses and differences are by step."""
    table = Table(title="Loss at the last step of each phase")
    for column in ("steps", "layout", "uninterrupted", "elastic", "largest relative difference"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for number, axes in enumerate(trained.phases):
        first, last = number * STEPS_PER_PHASE + 1, (number + 1) * STEPS_PER_PHASE
        largest = max(differences[step] for step in range(first, last + 1))
        ends = (f"{run_losses[last]:.6f}" for run_losses in (whole, switched))
        table.add_row(f"{first}-{last}", layout_text(axes), *ends, f"{largest:.1e}")
    return table


def draw(trained: Run, whole: dict[int, float], switched: dict[int, float], path: Path) -> None:
    """Draw both loss curves with the changes of layout marked."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4.5), layout="constrained")
    label = f"uninterrupted, {layout_text(trained.phases[0])}"
    axes.plot(list(whole), list(whole.values()), color="0.7", linewidth=5, label=label)
    axes.plot(list(switched), list(switched.values()), color="tab:blue", label="layout changes")
    top = 1.08 * max(whole.values())  # leaves room for the names of the layouts above the curves
    axes.set_ylim(top=top)
    for number, phase in enumerate(trained.phases):
        begin = number * STEPS_PER_PHASE + 0.5
        if number:
            axes.axvline(begin, color="tab:red", linewidth=0.8, linestyle="--")
        axes.text(begin + 0.3, 0.99 * top, layout_text(phase), fontsize=9, color="tab:red", va="top")
    title = f"{trained.title}: resumed at another layout every {STEPS_PER_PHASE} steps"
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.legend(loc="center right")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
