"""Which checkpoints are written, by whom, who reads them at which layout, and what cannot pass. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.system.interop.environments import HERE
from tests.system.interop.environments import OLD as OLD_ENVIRONMENT

Layout = tuple[int, int, int]  # tp, pp, ranks
Backend = tuple[str, int]  # name, version

MEGACKPT, DCP, NEW, OLD, TENSORSTORE, ZARR2, ZARR3 = (
    "megackpt",
    "DCP",
    "megatron-core 0.16.1",
    "megatron-core 0.12.3",
    "tensorstore",
    "zarr 2",
    "zarr 3",
)

SOURCES: tuple[Layout, ...] = ((2, 2, 4), (2, 1, 4))
TARGETS: tuple[Layout, ...] = ((2, 2, 4), (4, 1, 4), (1, 1, 4), (1, 4, 4))


@dataclass(frozen=True)
class Program:
    """A peer's process."""

    peer: str  # who it speaks for
    script: str  # a file in this directory
    flags: tuple[str, ...] = ()  # of its command line
    env: str = "here"  # the environment it runs in
    modules: tuple[str, ...] = ()  # what it imports there


ARRAYS = Program(MEGACKPT, "array_peer.py", ("--as=megackpt",))
OURS_NEW = Program(MEGACKPT, "megatron_peer.py", ("--megackpt",), modules=("megatron",))
OURS_OLD = Program(MEGACKPT, "megatron_peer.py", ("--megackpt",), OLD_ENVIRONMENT)
STOCK_DCP = Program(DCP, "array_peer.py", ("--as=dcp",))
STOCK_NEW = Program(NEW, "megatron_peer.py", modules=("megatron", "psutil"))
STOCK_OLD = Program(OLD, "megatron_peer.py", env=OLD_ENVIRONMENT)
STOCK_TENSORSTORE = Program(
    TENSORSTORE, "array_peer.py", ("--as=tensorstore",), modules=("tensorstore", "ml_dtypes")
)
STOCK_ZARR2 = Program(ZARR2, "array_peer.py", ("--as=zarr",), OLD_ENVIRONMENT)
STOCK_ZARR3 = Program(ZARR3, "array_peer.py", ("--as=zarr",), modules=("zarr", "ml_dtypes"))


@dataclass(frozen=True)
class Written:
    """One checkpoint."""

    program: Program  # who writes it
    kind: str  # `model`, `adam` or `distopt`
    layout: Layout  # tp, pp, ranks of the writer
    form: str = ""  # the format of a distributed optimizer
    backend: Backend = ("torch_dist", 1)  # and its version
    naming: str = "megatron"  # whose names its arrays have

    @property
    def name(self) -> str:
        program, backend = self.program, "".join(map(str, self.backend))
        parts = [program.env, program.script[:5], *program.flags, backend, self.kind, self.form, self.naming]
        return "-".join([*parts, "x".join(map(str, self.layout))]).replace("--", "").replace("=", "")


@dataclass(frozen=True)
class Read:
    """One reading of a checkpoint."""

    written: Written  # what is read
    program: Program  # by whom
    layout: Layout  # at which layout
    rejected: str = ""  # why the peer cannot; "" if it must
    text: str = ""  # part of the error that shows it


# Formats of Megatron-Core's distributed optimizer, and along which axes each can be resharded by its nature.
FORMS = {
    "megatron-core 0.16.1": ("dp_zero_gather_scatter", "dp_reshardable", "fully_reshardable"),
    "megatron-core 0.12.3": (
        "dp_zero_gather_scatter",
        "fully_sharded_model_space",
        "fully_sharded_bucket_space",
    ),
}
ONLY_DP = ("dp_zero_gather_scatter", "dp_reshardable")
FIXED = ("fully_sharded_bucket_space",)
FLAT, DTENSORS = "flat ranges", "sharded DTensors"

TORCH_DIST: Backend = ("torch_dist", 1)
ZARR_1: Backend = ("zarr", 1)
ZARR_3: Backend = ("zarr", 3)
KNOWN_BUG = (
    "its own bug: an assertion fails where a rank has two flat ranges of one chunk, in torch_dist only",
    "AssertionError",
)


def checkpoints(backend: Backend, *, few: bool) -> list[Written]:
    writes = [w for kind in ("model", "adam", "distopt") for w in _of_kind(backend, kind)]
    if few:
        return [w for w in writes if w.program.env == HERE and w.layout == SOURCES[0]]
    return writes


def _of_kind(backend: Backend, kind: str) -> Iterator[Written]:
    if backend != ZARR_3:
        yield from _of_megatron(backend, kind)
    form = FLAT if kind == "distopt" else ""
    if backend != ZARR_1:
        yield Written(ARRAYS, kind, SOURCES[0], form, backend)
    if backend == TORCH_DIST:
        yield Written(ARRAYS, kind, SOURCES[0], form, backend, naming="dcp")
        for layout in SOURCES[:1]:
            yield Written(
                STOCK_DCP, kind, layout, DTENSORS if kind == "distopt" else "", backend, naming="dcp"
            )
    elif backend == ZARR_1:
        for program in (STOCK_TENSORSTORE, STOCK_ZARR2):
            yield Written(program, kind, SOURCES[0], form, backend)


def _of_megatron(backend: Backend, kind: str) -> Iterator[Written]:
    for program in (OURS_NEW, OURS_OLD, STOCK_NEW, STOCK_OLD):
        if program is STOCK_NEW and backend != TORCH_DIST:
            continue  # 0.16 has no zarr
        if program in (OURS_NEW, OURS_OLD) and backend == ZARR_1:
            continue  # which megackpt only reads
        for form in FORMS[models_of(program)] if kind == "distopt" else ("",):
            for layout in SOURCES:
                ours = program in (OURS_OLD, OURS_NEW)
                if layout != SOURCES[form in ONLY_DP] and (ours or kind != "distopt"):
                    continue  # one layout says as much
                yield Written(program, kind, layout, form, backend)


def models_of(program: Program) -> str:
    """Return whose models and optimizers a program runs; "" for one that knows arrays only."""
    if program.script != "megatron_peer.py":
        return ""
    return OLD if program.env == OLD_ENVIRONMENT else NEW


def reads(written: Written, *, few: bool) -> Iterator[Read]:
    for program in _readers(written):
        if few and program.env != HERE:
            continue
        for layout in _targets(written, program, few=few):
            reason, text = unsupported_reason(written, program)
            yield Read(written, program, layout, reason, text)
            if reason:
                break


def _readers(written: Written) -> Iterator[Program]:
    """Yield the programs that are run, besides those that would find nothing they know."""
    anyhow = written.form not in (*ONLY_DP, *FIXED)
    if anyhow:
        yield ARRAYS
    by_megatron = bool(models_of(written.program))
    for program in (OURS_NEW, OURS_OLD, STOCK_NEW, STOCK_OLD):
        if program is STOCK_NEW and written.backend != TORCH_DIST:
            continue
        knows = not written.form or written.form in FORMS[models_of(program)]
        if (by_megatron and knows) or (program in (STOCK_NEW, STOCK_OLD) and written.program is STOCK_DCP):
            yield program
    if written.form == "fully_sharded_model_space" and written.backend == TORCH_DIST:
        yield STOCK_NEW
    if not anyhow:
        return
    if written.backend == TORCH_DIST:
        yield STOCK_DCP
    else:
        yield from (STOCK_TENSORSTORE, STOCK_ZARR3)
        if written.backend == ZARR_1:
            yield STOCK_ZARR2


def _targets(written: Written, program: Program, *, few: bool) -> tuple[Layout, ...]:
    if written.form in FIXED:
        return (written.layout,)
    if written.form in ONLY_DP:
        tp, pp, ranks = written.layout
        return (written.layout,) if few or ranks == tp * pp else (written.layout, (tp, pp, tp * pp))
    if few:
        return TARGETS[2:3]
    if written.kind == "distopt" and program is ARRAYS:
        return TARGETS
    return TARGETS[1:3] if program.peer == MEGACKPT else TARGETS[1:2]


def unsupported_reason(written: Written, reader: Program) -> tuple[str, str]:
    """Return why a peer cannot read a checkpoint, and what its error says; "" and "" if it can."""
    if written.program is STOCK_DCP and models_of(reader):
        return (
            "DCP writes no metadata.json, by which Megatron-Core knows a checkpoint",
            "not a distributed checkpoint",
        )
    if written.form == "fully_sharded_model_space" and reader is STOCK_NEW:
        return "0.16 rejects every flattened_range", "flattened_range is not supported"
    if written.form == "fully_sharded_model_space" and reader is STOCK_DCP and written.program is STOCK_OLD:
        return (
            "0.12 stores flat slices under a global shape that DCP takes for the tensor's own",
            "Size mismatch",
        )
    from_ours_old = written.program is OURS_OLD and written.backend == TORCH_DIST
    if from_ours_old and reader is STOCK_OLD and written.form in (*FIXED, "fully_sharded_model_space"):
        return "0.12 reads flat ranges in torch_dist only as it stores them itself", "mcore_data"
    has_bfloat16 = written.kind != "adam" and written.naming == "megatron"
    if written.program is STOCK_ZARR2 and has_bfloat16 and reader.peer in (MEGACKPT, TENSORSTORE):
        text = "'<V2'" if reader.peer == MEGACKPT else "numpy.void"
        return "zarr 2 alone stores bfloat16 as '<V2', bits of no dtype (the other dtypes pass)", text
    if reader is STOCK_ZARR3 and has_bfloat16 and written.backend == ZARR_1:
        return "zarr 3 does not know bfloat16 (the other dtypes pass)", "No Zarr data type found"
    return "", ""


def unwritten(written: Written) -> tuple[str, str]:
    """Return why a peer cannot write a checkpoint, and what its error says; "" and "" if it can."""
    if written.program is STOCK_OLD and written.form in FIXED and written.backend == TORCH_DIST:
        return KNOWN_BUG
    return "", ""


def asked_form(read: Read) -> str:
    """Return the format that a reader's optimizer asks for: that of the checkpoint, if it has one."""
    if read.written.form == DTENSORS and models_of(read.program):
        return FORMS[models_of(read.program)][0]
    return read.written.form
