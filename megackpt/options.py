"""Every tunable of saving and loading, with its default.

Owns the option objects; nothing else in the library holds a tunable.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeAlias, get_args

from megackpt.arguments import (
    check_choice,
    check_count,
    check_flag,
    check_kind,
    check_seconds,
    check_text,
    check_texts,
)
from megackpt.errors import DeclarationError

Spread: TypeAlias = Literal["world", "group", "none"]
"""Over whom a save spreads a chunk that several ranks hold."""

PlainTensors: TypeAlias = Literal["auto", "common", "arrays"]
"""How a save stores tensors of common state."""

Exchange: TypeAlias = Literal[
    "direct", "all_to_all", "broadcast", "gather_rounds", "gather_object", "two_stage"
]
"""How a load gets bytes to the ranks that need them."""

OnCorrupt: TypeAlias = Literal["error", "fallback"]
"""What a load does about a damaged checkpoint."""

WhenBusy: TypeAlias = Literal["wait", "queue", "skip"]
"""What an asynchronous save does while an earlier one is under way."""

IoClass: TypeAlias = Literal["idle", "low"]
"""How a writer process stands back when others use the disk."""


class Policy(Enum):
    """What to do about something that a load finds."""

    ERROR = "error"
    WARN = "warn"
    IGNORE = "ignore"


def check_policy(name: str, value: object, *, optional: bool = False) -> None:
    """Check a policy; None does if it is optional. Local, pure.

    Raises:
        DeclarationError: it is none.
    """
    check_kind(name, value, Policy, give="Policy.ERROR, WARN or IGNORE", optional=optional)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRule:
    """What a load does about what it finds under certain keys.

    None leaves a matter to the next rule that fits, or to the default.

    Attributes:
        keys: a glob, as of a shell: `*` any text, `?` any character. Keys are those of the request.
        unexpected: the key is asked for and not in the checkpoint. Default: by `strict`.
        missing: the key is in the checkpoint and no rank asks for it. Default: by `strict`.
        cast: it is stored in another dtype. Default: error; otherwise values are converted.
        padded: the stored array is smaller along some axis. Default: error unless the tensor has
            `allow_shape_mismatch`; otherwise what is not stored becomes 0.
        cut: the stored array is larger along some axis. Default: as `padded`; otherwise what lies outside is
            left out.
        resharded: a chunk of this rank is not exactly a stored one. Default: ignore.
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
        timeout_s: how long a rank waits for the others at each meeting point, in seconds; and for a process
            that writes an asynchronous save and shows no progress.
        part_bytes: how much of a tensor that is not contiguous in host memory is copied at a time; from a
            CUDA device at most 4 MiB.
        assume_constant_structure: with a plan cache, take the plan of the last save without comparing
            declarations and common state between ranks. What this rank holds is still compared with the plan.
        spread: who writes a chunk of a tensor that several ranks hold. `world`: any of them, so that all
            write about as many bytes; `group`: any of those in the `spread_group` of its main replica;
            `none`: its main replica. Without `validate_access_integrity` ranks do not know what others hold,
            and main replicas write whatever stands here.
        plain_tensors: how tensors of common state are stored, such as those of the `state_dict()` of a module
            without sharding. `arrays`: as global arrays under their paths, written by all ranks; only the
            native format has it. `common`: by rank 0, in one file with the rest of it. `auto`: as arrays
            where the format has it. See docs/plain-modules.md.
        rank0_values: globs of paths of common state, joined with dots, that may differ between ranks: rank
            0's values are stored, those of others are not compared. For buffers that each rank updates by
            itself: `("model.*.running_*",)` of a BatchNorm.
        parity: of at most how many data files one parity file is written, from which any one of them that is
            lost or damaged is computed; None for no parity. Only the native format has it. See
            docs/integrity.md for what it costs.
        compare_replicas: what to do if ranks that declare the same chunk of a tensor, or the same object,
            hold different bits in it. IGNORE does not compare; otherwise every rank digests all it holds.
        sample_replicas: what to do if ranks that declare the same chunk of a tensor hold different bits in
            samples of it, 3 KiB of each chunk. ERROR finds a parameter that is cut and was not declared so.
            Sampled is where a save plans anew, and takes no plan of an earlier one; IGNORE does not sample.
            Where `compare_replicas` compares all bits, nothing is sampled.
        array_digests: store a digest of each array that does not depend on how it is sharded, by which
            `megackpt diff` proves arrays of two checkpoints equal without reading them. Only the native
            format has it, and it needs the extra `digests`. See docs/integrity.md for what it costs.
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
    """How a Checkpointer saves while training goes on.

    Attributes:
        staging_bytes: memory of each rank for what is saved and not yet written, in bytes, made before the
            first save. A larger state goes through it in waves, for which `save` waits. None: as much as a
            rank writes, made when that is known: by `Checkpointer.warm_up`, or else by the first save, which
            then takes longer.
        when_busy: what `save` does while an earlier one is under way. `wait`: it waits until that is
            committed; `queue`: it begins to copy as staging memory becomes free, and is written after the
            earlier one; `skip`: it does nothing, and returns False.
        stage_in_background: return from `save` before the state is copied; then `wait_staged` must be called
            before it changes.
        nice: niceness of the writer process, added to that of the training; 0 to leave it.
        ionice: class of its I/O: `idle`: only while nobody else uses the disk; `low`: after others; None to
            leave it. Not every I/O scheduler of Linux heeds it.
        start_timeout_s: how long a writer process may take to start, in seconds.
        coordinator_host: name or address under which other hosts reach that of rank 0; None to find it.
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
        timeout_s: how long a rank waits for the others at each meeting point, in seconds.
        verify: check the digest of every block that is read.
        threads: reads under way at once, at most; each may hold a buffer of 8 MiB. Where all files are in
            memory, no more than there are processors for each rank of this machine.
        rules: what to do about keys and arrays that differ; of those whose glob fits, the first that says
            something.
        rename: stored keys by other names, `{"old.*": "new.*"}`: what is stored as `old.x` answers a request
            for `new.x`. Each `*` stands for any text, in order; the first pattern that fits counts.
        exclude: globs of requested keys that are not loaded: those entities keep the data they have.
        allow_unsafe_pickle: in formats that hold pickles (never the native one), load any class they name.
            Unpickling runs code that the file chooses: set it only for a checkpoint you trust.
        load_on_device: load straight into the given tensors. False: those that are not in host memory stay as
            they are, and the loaded state dict holds tensors in host memory in their place, e.g. for a model
            that was built on the meta device. DTensors are always loaded in place.
        exchange: who reads what several ranks of the `exchange_group` need. `direct`: each of them.
            Otherwise one of them, about as many bytes as every other, and it sends them on: with `all_to_all`
            to each rank exactly the elements that it needs; with `broadcast` and `gather_rounds` everything
            to all; with `gather_object` everything to all at once, which needs memory for all of it.
            `two_stage`: the first rank of the group reads everything and broadcasts it. All give the same
            bits.
        exchange_bytes: bound of all buffers of one rank for reading, sending and receiving together, in
            bytes; not kept by `gather_object`, nor where a single block that a format can read is larger.
            `two_stage` keeps within twice the largest chunk as well.
        cpu_transfer: whether what is exchanged for tensors on a device goes through host memory. False, for
            `broadcast` and `two_stage`: it is broadcast between devices by the exchange group's own backend.
        on_corrupt: what to do where bytes are not those that were saved, or a file is gone or too short.
            `error`: raise. `fallback`: take what is damaged from parity files (`SaveOptions.parity`), or from
            copies, if the digests of the save say that it is right there; the log and the load report say
            what was taken from where. A `Checkpointer` that loads its newest step then goes back to older
            ones.
        copies: for `fallback`, where the same save may be found: directories, URLs or open stores, asked in
            this order. For a `Checkpointer`, roots of which each may have the same steps.
    """

    timeout_s: float = 600.0
    verify: bool = True
    threads: int = 4
    rules: tuple[KeyRule, ...] = ()
    rename: Mapping[str, str] = field(default_factory=dict)
    exclude: tuple[str, ...] = ()
    allow_unsafe_pickle: bool = False
    load_on_device: bool = True
    exchange: Exchange = "direct"
    exchange_bytes: int = 64 * 1024 * 1024
    cpu_transfer: bool = True
    on_corrupt: OnCorrupt = "error"
    copies: tuple[Any, ...] = ()  # str, os.PathLike or Store, which options do not know

    def __post_init__(self) -> None:
        for name in ("verify", "allow_unsafe_pickle", "load_on_device", "cpu_transfer"):
            check_flag(name, getattr(self, name))
        self._check_fallback()
        self._check_keys()
        check_seconds("timeout_s", self.timeout_s)
        check_count("threads", self.threads)
        check_choice("exchange", self.exchange, get_args(Exchange))
        check_count("exchange_bytes", self.exchange_bytes)
        if not self.cpu_transfer and self.exchange not in ("broadcast", "two_stage"):
            raise DeclarationError(
                f"cpu_transfer=False has no meaning with exchange={self.exchange!r}: only 'broadcast' and "
                f"'two_stage' move data between devices. Leave it out."
            )

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
        is_places = isinstance(self.copies, tuple) and all(
            copy is not None and not isinstance(copy, (bytes, bool, int, float)) and copy != ""
            for copy in self.copies
        )
        if not is_places:
            raise DeclarationError(f"copies={self.copies!r}: give a tuple of places, none of them empty.")
        if self.copies and self.on_corrupt != "fallback":
            raise DeclarationError("copies are given, and are never read: set on_corrupt='fallback' as well.")
        if self.on_corrupt == "fallback" and not self.verify:
            raise DeclarationError(
                "on_corrupt='fallback' needs verify=True: damage that is not looked for is not found."
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyOptions:
    """How to look for damage in a checkpoint.

    Attributes:
        deep: read every byte, compare it with its digest, and decode objects and common state.
        threads: reads under way at once; each holds a buffer of 4 MiB.
        allow_unsafe_pickle: as for `LoadOptions`.
        skip_unknown_classes: take an object or common state of a class that this process does not know, or
            may not load, for whole if its bytes are, even where they cannot be read as `convert` reads such
            values; else that counts as damage.
    """

    deep: bool = False
    threads: int = 4
    allow_unsafe_pickle: bool = False
    skip_unknown_classes: bool = False

    def __post_init__(self) -> None:
        check_count("threads", self.threads)
        for name in ("deep", "allow_unsafe_pickle", "skip_unknown_classes"):
            check_flag(name, getattr(self, name))
