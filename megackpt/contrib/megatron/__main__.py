"""Run a Megatron program that cannot be edited over megackpt.

    torchrun --nproc-per-node 8 -m megackpt.contrib.megatron pretrain_gpt.py ARGUMENTS...

calls `install()` and then runs the script as its own process would, with the arguments behind its name.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys

from megackpt.contrib.megatron.installing import install


def main() -> None:
    """Install megackpt, then run the script with the arguments behind it."""
    parser = argparse.ArgumentParser(
        prog="python -m megackpt.contrib.megatron",
        description="Run a Megatron program with megackpt in the place of megatron.core.dist_checkpointing.",
    )
    parser.add_argument("--silent-cast", action="store_true", help="see install()")
    parser.add_argument("--replicas", choices=("warn", "error", "off"), default="warn", help="see install()")
    parser.add_argument("--gather-optimizer", action="store_true", help="see install()")
    parser.add_argument("script", help="the program, such as pretrain_gpt.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments, as they are")
    options = parser.parse_args()
    if not os.path.isfile(options.script):
        parser.error(f"{options.script} is no file. Give the path of the program to run.")
    install(
        silent_cast=options.silent_cast,
        replicas=options.replicas,
        gather_optimizer=options.gather_optimizer,
    )
    sys.argv = [options.script, *options.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(options.script))  # as `python SCRIPT` has it
    runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
