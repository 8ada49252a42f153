"""Fuzzes the readers, guided by coverage: `python tests/system/attacks/fuzz_reader.py -max_total_time=300`.

Needs atheris, which is no dependency: pip install atheris. Each input chooses a format and changes to its
files, see `mutation`. Whatever is no error of ours ends the run and leaves the input in the directory, as
crash-*, which given as an argument is tried again.
"""

from __future__ import annotations

import logging
import sys
import warnings

import atheris

with atheris.instrument_imports(include=["megackpt"]):
    from tests.system.attacks.mutation import checkpoint, decoded, mutated, outcome

from megackpt.codec import pack

BACKENDS = (("megackpt", 1), ("torch_dist", 1), ("zarr", 1), ("zarr", 3))
FILES = [checkpoint(backend) for backend in BACKENDS]
BLOB = pack({"a": [1, 2.5, "text"], "b": b"bytes", "c": (1, None, frozenset([3]))})


def try_one(data: bytes) -> None:
    """Change files as data says, and read them."""
    provider = atheris.FuzzedDataProvider(data)

    def choose(subdirectory: int) -> int:
        return provider.ConsumeIntInRange(0, subdirectory - 1)

    kind = choose(len(FILES) + 1)
    if kind == len(FILES):
        at = choose(len(BLOB))
        decoded(BLOB[:at] + provider.ConsumeBytes(8) + BLOB[at + choose(9) :])
        return
    files = FILES[kind]
    for _ in range(1 + choose(3)):
        try:
            files = mutated(files, choose)
        except Exception:  # noqa: BLE001 - of json, struct, safetensors
            break  # the change before has left no structure to change
    outcome(files, {})


def main() -> None:
    logging.disable()
    warnings.simplefilter("ignore")
    atheris.Setup(sys.argv, try_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
