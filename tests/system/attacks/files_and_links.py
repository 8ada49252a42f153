"""Attacks by what lies in the place of a file: links, pipes, sockets, directories, other files."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from tests.system.attacks.crafting import (
    NATIVE,
    STEP,
    TORCH_DIST,
    ZARR_1,
    ZARR_3,
    Location,
    attack,
    attacks_with,
)

NATIVE_FILES = {
    "manifest": "metadata.json",
    "index": "index-*",
    "common": "common-*.json",
    "common_tensors": "common-*.safetensors",
    "data": "data/*-00001.safetensors",
}
TORCH_FILES = {"metadata": ".metadata", "common": "common-*.pt", "note": "megackpt-*.json", "data": "__1_0_*"}
ZARR_FILES = {"document": "half/.zarray", "chunk": "half/0", "object": "object/*.pt", "common": "common.pt"}
ZARR_3_FILES = {
    "manifest": "metadata.json",
    "document": "zarr-*/half/zarr.json",
    "chunk": "zarr-*/half/c/0",
    "object": "objects-*/object/*.bin",
    "common": "common-*",
    "list": "files-*",
}


def _link_to(file: Path, target: Path) -> None:
    file.unlink()
    file.symlink_to(target)


def link_outside(location: Location, pattern: str) -> None:
    """The same bytes, which lie outside."""
    file = location.only_file(pattern)
    moved = location.outside / "moved"
    shutil.move(file, moved)
    file.symlink_to(moved)


def link_to_secret(location: Location, pattern: str) -> None:
    _link_to(location.only_file(pattern), location.outside / "secret")


def link_to_itself(location: Location, pattern: str) -> None:
    file = location.only_file(pattern)
    _link_to(file, file)


def link_to_zeros(location: Location, pattern: str) -> None:
    _link_to(location.only_file(pattern), Path("/dev/zero"))


def pipe(location: Location, pattern: str) -> None:
    file = location.only_file(pattern)
    file.unlink()
    os.mkfifo(file)


def socket_file(location: Location, pattern: str) -> None:
    file = location.only_file(pattern)
    file.unlink()
    here = os.getcwd()
    os.chdir(file.parent)  # the name of a socket may not be long
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(file.name[:90])
    os.chdir(here)
    if len(file.name) > 90:
        os.rename(file.parent / file.name[:90], file)


def directory(location: Location, pattern: str) -> None:
    file = location.only_file(pattern)
    file.unlink()
    file.mkdir()
    (file / "inner").write_bytes(b"x")


def empty(location: Location, pattern: str) -> None:
    location.only_file(pattern).write_bytes(b"")


def half_gone(location: Location, pattern: str) -> None:
    file = location.only_file(pattern)
    os.truncate(file, file.stat().st_size // 2)


KINDS: dict[Callable[[Location, str], None], str] = {
    link_outside: "{} is a link to a file outside, of the right bytes",
    link_to_secret: "{} is a link to a secret outside",
    link_to_itself: "{} is a link to itself",
    link_to_zeros: "{} is a link to /dev/zero",
    pipe: "{} is a pipe that nobody writes to",
    socket_file: "{} is a socket",
    directory: "{} is a directory",
    empty: "{} is empty",
    half_gone: "{} ends in its middle",
}
SOME = (link_outside, pipe, directory)

for build, claim in KINDS.items():
    attacks_with(NATIVE, claim, NATIVE_FILES, build)
for build in SOME:
    for base, files in ((TORCH_DIST, TORCH_FILES), (ZARR_1, ZARR_FILES), (ZARR_3, ZARR_3_FILES)):
        named = {f"{base.replace(':', '_')}_{name}": pattern for name, pattern in files.items()}
        # Without its note, it is read as other libraries do, by `.metadata`.
        attacks_with(base, KINDS[build], named, build, harmless=(f"{TORCH_DIST.replace(':', '_')}_note",))


def _device(location: Location, pattern: str) -> None:
    file = location.only_file(pattern)
    file.unlink()
    try:
        os.mknod(file, 0o666 | 0o020000, os.makedev(1, 5))  # /dev/zero
    except OSError:  # only root may
        os.mkfifo(file)


attacks_with(NATIVE, "{} is a device", NATIVE_FILES, _device)


def directory_is_a_link(location: Location, pattern: str) -> None:
    (moved,) = location.directory.glob(pattern)
    shutil.move(moved, location.outside / moved.name)
    moved.symlink_to(location.outside / moved.name)


for base, which, pattern in (
    (NATIVE, "data", "data"),
    (ZARR_1, "an_array", "half"),
    (ZARR_3, "chunks", "zarr-*/half/c"),
):
    attacks_with(base, "the directory of {} is a link to one outside", {which: pattern}, directory_is_a_link)


@attack(NATIVE, "the directory of data holds a link to itself", is_harmless=True)
def directory_in_itself(location: Location) -> None:
    (location.directory / "data" / "again").symlink_to(location.directory)


@attack(NATIVE, "data files have changed places")
def swapped_data(location: Location) -> None:
    first, second = sorted(location.directory.glob("data/*"))
    owned = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(owned)


def endless(location: Location, pattern: str) -> None:
    os.truncate(location.only_file(pattern), 1 << 40)


attacks_with(NATIVE, "{} goes on for a terabyte", NATIVE_FILES, endless, harmless=("data",))
attacks_with(
    TORCH_DIST,
    "torch_dist: {} goes on for a terabyte",
    {"metadata_": ".metadata", "note_": "megackpt-*.json"},
    endless,
)
attacks_with(
    ZARR_1,
    "zarr: {} goes on for a terabyte",
    {"document": "half/.zarray", "chunk": "half/0", "common_pt": "common.pt", "object": "object/*.pt"},
    endless,
)
attacks_with(
    ZARR_3,
    "zarr 3: {} goes on for a terabyte",
    {
        "document_3": "zarr-*/half/zarr.json",
        "chunk_3": "zarr-*/half/c/0",
        "object_3": "objects-*/object/*.bin",
    },
    endless,
)


def next_to_the_step(location: Location, make: Callable[[Path], object]) -> None:
    make(location.directory.parent)


def _step_with_a_pipe(root: Path) -> None:
    (root / "iter_0000009").mkdir()
    os.mkfifo(root / "iter_0000009" / "metadata.json")


SIBLINGS: dict[str, Callable[[Path], object]] = {
    "a_later_step_that_is_a_pipe": lambda root: os.mkfifo(root / "iter_0000009"),
    "a_later_step_that_is_a_loop": lambda root: (root / "iter_0000009").symlink_to("iter_0000009"),
    "a_later_step_with_a_pipe_as_metadata": _step_with_a_pipe,
    "a_later_step_of_many_digits": lambda root: (root / ("iter_" + "9" * 200)).mkdir(),
    "a_tracker_of_a_step_outside": lambda root: (root / "latest_checkpointed_iteration.txt").write_text(
        f"../../outside/{STEP}\n"
    ),
}
attacks_with(NATIVE, "next to the step is {}", SIBLINGS, next_to_the_step, harmless=SIBLINGS)
