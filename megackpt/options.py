"""The options of saving, loading and verifying, with their defaults."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeAlias, get_args

from megackpt.errors import DeclarationError
from megackpt.ground.arguments import (
    check_choice,
    check_count,
    check_flag,
    check_kind,
    check_seconds,
    check_text,
    check_texts,
)

Spread: TypeAlias = Literal["world", "group", "none"]
"""Which ranks may write a chunk that several ranks declare."""

PlainTensors: TypeAlias = Literal["auto", "common", "arrays"]
"""How a save stores tensors of common state."""

Exchange: TypeAlias = Literal[
    "auto", "direct", "all_to_all", "broadcast", "gather_rounds", "gather_object", "two_stage"
]
"""How the bytes of a load get to the ranks that need them."""

OTHER_NAMES_OF_ALL_TO_ALL: tuple[Exchange, ...] = ("broadcast", "gather_rounds", "gather_object")
"""Algorithms of Megatron-Core, whose names are accepted."""

OnCorrupt: TypeAlias = Literal["error", "fallback"]
"""What a load does if stored bytes are damaged."""

WhenBusy: TypeAlias = Literal["wait", "queue", "skip"]
"""What an asynchronous save does while an earlier one is not finished."""

IoClass: TypeAlias = Literal["idle", "low"]
"""I/O scheduling class of a writer process."""


class Policy(Enum):
    """What to do about a difference that a save or a load finds."""

    ERROR = "error"
    WARN = "warn"
    IGNORE = "ignore"


def check_policy(name: str, value: object, *, optional: bool = False) -> None:
    """Check that an argument is a policy, or None if it is optional. Local, pure.

    Raises:
        DeclarationError: it is something else.
    """
    check_kind(name, value, Policy, give="Policy.ERROR, WARN or IGNORE", optional=optional)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRule:
    """What a load does about differences of certain keys.

    A field that is None leaves the difference to the next rule whose glob matches, or to the default.

    Attributes:
        keys: a glob as in a shell: `*` matches any text, `?` any character. It is compared with the
            requested keys.
        unexpected: the key is requested and not in the checkpoint. Default: by `strict`.
        missing: the key is in the checkpoint and no rank requests it. Default: by `strict`.
        cast: the array is stored with another dtype. Default: error; otherwise values are converted.
        padded: the stored array is smaller along some axis. Default: error unless the tensor has
            `allow_shape_mismatch`, which makes it a warning; otherwise elements that are not stored become 0,
            or stay as they are if they are rows of new tokens (`ShardedTensor.unpadded_shape`).
        cut: the stored array is larger along some axis. Default: as `padded`, but an error if the elements
            outside are known to be no padding; otherwise they are left out.
        resharded: a chunk of this rank is not exactly a stored chunk. Default: ignore.
    """

    keys: str
    unexpected: Policy | None = None
    missing: Policy | None = None
    cast: Policy | None = None
    padded: Policy | None = None
    cut: Policy | None = None
    resharded: Policy | None = None

    def __post_init__(self) -> None:
        check_text("KeyRule.keys", self.keys, otherwise=", a glob as 'decoder.*'")
        for name in ("unexpected", "missing", "cast", "padded", "cut", "resharded"):
            check_policy(f"KeyRule.{name}", getattr(self, name), optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """How to save.

    Attributes:
        timeout_s: how long a rank waits for the others in each collective, in seconds. In an asynchronous
            save also how long it waits for a writer process that makes no progress.
        part_bytes: how many bytes are copied at once if a tensor is not contiguous in host memory, or is on
            a device; at most 4 MiB.
        assume_constant_structure: with a plan cache, use the plan of the last save without comparing
            declarations and common state between ranks. Each rank still compares its own declarations with
            the plan.
        spread: which rank writes a chunk that several ranks declare. `world`: any of them, so that all ranks
            write about the same number of bytes; `group`: any of those in the `spread_group` of its main
            replica; `none`: its main replica. Without `validate_access_integrity`, ranks do not know the
            declarations of other ranks, and main replicas write in every case.
        plain_tensors: how tensors of common state are stored, for example the `state_dict()` of a module
            without sharding. `arrays`: as global arrays under their paths, written by all ranks; only the
            native format can do this. `common`: by rank 0, in one file with the rest of common state.
            `auto`: as arrays if the format can. See docs/torch.md.
        rank0_values: globs of paths of common state, joined with dots, or paths as errors show them, that
            may differ between ranks, also inside of namespaces. The values of rank 0 are stored; those of
            other ranks are not compared. Use it for buffers that each rank updates
            separately, such as `("model.*.running_*",)` of a BatchNorm.
        parity: the maximum number of data files that share one parity file. If one of them is lost or
            damaged, it is computed from the others. None writes no parity. Only the native format can do
            this. See docs/operating.md for the cost.
        compare_replicas: what to do if ranks that declare the same chunk of a tensor, or the same object,
            have different bits. IGNORE does not compare; otherwise every rank computes digests of everything
            that it declares.
        sample_replicas: what to do if ranks that declare the same object have different values, or ranks
            that declare the same chunk of a tensor have different bits in samples of it. Every save compares
            them: all of each object, and of each chunk 4.5 KiB at positions that move from save to save.
            ERROR also finds a parameter that is sharded but not declared as sharded; IGNORE compares nothing.
            If `compare_replicas` compares all bits, nothing is sampled.
        array_digests: store a digest of each array that does not depend on its sharding. With it, `megackpt
            diff` compares arrays of two checkpoints without reading them. Only the native format can do
            this, and it needs the extra `digests`. See docs/operating.md for the cost.
    """

    timeout_s: float = 600.0
    part_bytes: int = 4 * 1024 * 1024
    assume_constant_structure: bool = False
    spread: Spread = "world"
    plain_tensors: PlainTensors = "auto"
    rank0_values: tuple[str, ...] = ()
    parity: int | None = None
    compare_replicas: Policy = Policy.IGNORE
    sample_replicas: Policy = Policy.ERROR
    array_digests: bool = False

    def __post_init__(self) -> None:
        check_choice("spread", self.spread, get_args(Spread))
        if self.parity is not None:
            check_count("parity", self.parity, otherwise=": how many data files share a parity file; or None")
        check_choice("plain_tensors", self.plain_tensors, get_args(PlainTensors))
        check_texts("rank0_values", self.rank0_values, example="('model.*.running_*',)")
        for name in ("compare_replicas", "sample_replicas"):
            check_policy(name, getattr(self, name))
        check_seconds("timeout_s", self.timeout_s)
        check_count("part_bytes", self.part_bytes)
        for name in ("assume_constant_structure", "array_digests"):
            check_flag(name, getattr(self, name))


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncOptions:
    """How a Checkpointer saves while training continues.

    Attributes:
        staging_bytes: host memory of each rank for states that are saved and not yet written, in bytes,
            allocated before the first save. A larger state goes through it in several parts, and `save`
            waits for them. None: the number of bytes that a rank writes. This memory is allocated by
            `Checkpointer.warm_up`, or by the first save, which then takes longer.
        when_busy: what `save` does while an earlier save is not finished. `wait`: it waits until that save is
            committed; `queue`: it copies the state as staging memory becomes free, and the state is written
            after the earlier one; `skip`: it does nothing and returns False.
        stage_in_background: return from `save` before the state is copied. The caller must then call
            `wait_staged` before it changes the state.
        nice: niceness of the writer process, added to that of the training process; 0 leaves it unchanged.
        ionice: I/O class of the writer process: `idle`: only while no other process uses the disk; `low`:
            after other processes; None leaves it unchanged. Not every I/O scheduler of Linux uses it.
        start_timeout_s: how long a writer process may take to start, in seconds.
        coordinator_host: name or address of the host of rank 0 for other hosts; None finds it.
    """

    staging_bytes: int | None = None
    when_busy: WhenBusy = "wait"
    stage_in_background: bool = False
    nice: int = 10
    ionice: IoClass | None = None
    start_timeout_s: float = 120.0
    coordinator_host: str | None = None

    def __post_init__(self) -> None:
        check_choice("when_busy", self.when_busy, get_args(WhenBusy))
        check_seconds("start_timeout_s", self.start_timeout_s)
        if self.staging_bytes is not None:
            check_count("staging_bytes", self.staging_bytes, otherwise=", or None for what a save needs")
        if self.ionice is not None:
            check_choice("ionice", self.ionice, get_args(IoClass))
        if type(self.nice) is not int or self.nice not in range(20):
            raise DeclarationError(f"nice is {self.nice!r}; give a number from 0 to 19.")
        check_flag("stage_in_background", self.stage_in_background)
        if self.coordinator_host is not None:
            check_text("coordinator_host", self.coordinator_host, otherwise=", a name or address; or None")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load.

    Attributes:
        timeout_s: how long a rank waits for the others in each collective, in seconds.
        verify: check the digest of every block that is read.
        threads: the maximum number of reads at the same time; each may use two buffers of 4 MiB. If all
            files are in memory, at most the number of processors for each rank of this machine.
        rules: what to do about keys and arrays that differ. The first rule that matches and has a policy
            decides.
        rename: stored keys under other names, `{"old.*": "new.*"}`: the stored key `old.x` answers a request
            for `new.x`. Each `*` matches any text, in order; the first pattern that matches counts.
        exclude: globs of requested keys that are not loaded: those entities keep their data.
        complete: before anything is read, prove that the ranks together request the whole checkpoint: each
            stored key (unless a rule ignores `missing`), and each element of each array from exactly one main
            replica, as in a save; and that common state in the request is equal on all ranks. So it is an
            error if no rank, or two ranks, request a layer or an expert. Needs one gather of the requests.
        allow_unsafe_pickle: in formats with pickles (never the native one), load any class that they name.
            Unpickling runs code that the file chooses: set it only for a checkpoint you trust.
        load_on_device: load straight into the given tensors. False: tensors that are not in host memory stay
            unchanged, and the loaded state dict has tensors in host memory instead, for example for a
            model that was built on the meta device. DTensors are always loaded in place.
        exchange: who reads bytes that several ranks of the `exchange_group` need. `direct`: each of them.
            `auto`: as `direct`; but if a load with `maps` would make a rank read more than 1.05 times the
            bytes that it needs, as `all_to_all`. `all_to_all`: one rank reads them and sends the others
            exactly the elements that they need, and all ranks read about the same number of bytes.
            `two_stage`: the first rank of the group reads everything and broadcasts it. The loaded bits are
            the same. `broadcast`, `gather_rounds` and `gather_object`, names of Megatron-Core, mean
            `all_to_all`.
        exchange_bytes: limit of all buffers of one rank for reading, sending and receiving, in bytes. A load
            uses more if a single block of the format is larger. `two_stage` also stays within twice the
            largest chunk.
        cpu_transfer: whether exchanged data for tensors on a device goes through host memory. False, only for
            `two_stage`: the backend of the exchange group broadcasts between devices. With `broadcast`, False
            has no effect, and a warning says so.
        on_corrupt: what to do if stored bytes are damaged, or a file is lost or too short.
            `error`: raise an error. `fallback`: read damaged bytes from parity files
            (`SaveOptions.parity`) or from copies, if they have the digests of the save there; the
            log and the load report list these bytes. A `Checkpointer` that loads its newest step then falls
            back to older steps.
        copies: for `fallback`, locations that may have the same save: directories, URLs or open stores, tried
            in this order. For a `Checkpointer`, roots that may have the same steps.
    """

    timeout_s: float = 600.0
    verify: bool = True
    threads: int = 4
    rules: tuple[KeyRule, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    complete: bool = False
    allow_unsafe_pickle: bool = False
    load_on_device: bool = True
    exchange: Exchange = "auto"
    exchange_bytes: int = 64 * 1024 * 1024
    cpu_transfer: bool = True
    on_corrupt: OnCorrupt = "error"
    copies: tuple[Any, ...] = ()  # str, os.PathLike or Store, which options do not know

    def __post_init__(self) -> None:
        for name in ("verify", "complete", "allow_unsafe_pickle", "load_on_device", "cpu_transfer"):
            check_flag(name, getattr(self, name))
        self._check_fallback()
        self._check_keys()
        check_seconds("timeout_s", self.timeout_s)
        check_count("threads", self.threads)
        check_choice("exchange", self.exchange, get_args(Exchange))
        check_count("exchange_bytes", self.exchange_bytes)
        if not self.cpu_transfer and self.exchange not in ("broadcast", "two_stage"):
            raise DeclarationError(
                f"cpu_transfer=False has no meaning with exchange={self.exchange!r}: only 'two_stage' moves "
                f"data between devices. Leave it out."
            )
        if self.exchange in OTHER_NAMES_OF_ALL_TO_ALL:
            if not self.cpu_transfer:
                warnings.warn(
                    f"cpu_transfer=False has no effect with exchange={self.exchange!r}: that means "
                    f"'all_to_all', whose data goes through host memory. Leave it out, or give "
                    f"exchange='two_stage', which broadcasts between devices.",
                    stacklevel=3,  # this method, the constructor, and the line that makes the options
                )
            object.__setattr__(self, "exchange", "all_to_all")
            object.__setattr__(self, "cpu_transfer", True)

    def _check_keys(self) -> None:
        is_rules = isinstance(self.rules, tuple) and all(isinstance(rule, KeyRule) for rule in self.rules)
        if not is_rules:
            raise DeclarationError(
                f"rules is {self.rules!r}; give a tuple of rules, as (KeyRule(keys='*', cast=Policy.WARN),)."
            )
        check_texts("exclude", self.exclude, example="('optimizer.*',)")
        is_names = isinstance(self.rename, Mapping) and all(
            isinstance(text, str) and text for pair in self.rename.items() for text in pair
        )
        if not is_names:
            raise DeclarationError(
                f"rename is {self.rename!r}; give stored keys by other names, as {{'old.*': 'new.*'}}."
            )

    def _check_fallback(self) -> None:
        check_choice("on_corrupt", self.on_corrupt, get_args(OnCorrupt))
        is_locations = isinstance(self.copies, tuple) and all(
            copy is not None and not isinstance(copy, (bytes, bool, int, float)) and copy != ""
            for copy in self.copies
        )
        if not is_locations:
            raise DeclarationError(f"copies={self.copies!r}: give a tuple of locations, none of them empty.")
        if self.copies and self.on_corrupt != "fallback":
            raise DeclarationError("copies are given but never read: set on_corrupt='fallback' as well.")
        if self.on_corrupt == "fallback" and not self.verify:
            raise DeclarationError(
                "on_corrupt='fallback' needs verify=True: without digests no damage is found."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """How to verify a checkpoint.

    Attributes:
        deep: read every byte, compare it with its digest, and decode objects and common state.
        threads: the number of reads at the same time; each uses a buffer of 4 MiB.
        allow_unsafe_pickle: as in `LoadOptions`.
        skip_unknown_classes: if an object or common state has a class that this process does not know, or
            may not load, count it as undamaged if its bytes are, even if `convert` could not read the value.
            Otherwise it counts as damage.
    """

    deep: bool = False
    threads: int = 4
    allow_unsafe_pickle: bool = False
    skip_unknown_classes: bool = False

    def __post_init__(self) -> None:
        check_count("threads", self.threads)
        for name in ("deep", "allow_unsafe_pickle", "skip_unknown_classes"):
            check_flag(name, getattr(self, name))
