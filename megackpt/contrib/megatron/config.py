"""The settings of distributed checkpointing under Megatron-LM's names.

`CheckpointConfig` translates them into a strategy and into options of `save` and `load`. Nothing else in the
library uses it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import get_args

from megackpt.errors import DeclarationError
from megackpt.formats.registry import check_known, save_strategy
from megackpt.formats.strategy import SaveStrategy
from megackpt.ground.arguments import (
    check_choice,
    check_count,
    check_flag,
    check_kind,
    check_seconds,
    check_text,
)
from megackpt.options import OTHER_NAMES_OF_ALL_TO_ALL, AsyncOptions, LoadOptions, SaveOptions, WhenBusy
from megackpt.plans.validation import StrictHandling

SAVE_SIGNALS = ("SIGUSR1", "SIGUSR2")
_FLAGS = (
    "dist_ckpt_load_on_device",
    "dist_ckpt_parallel_save",
    "dist_ckpt_parallel_save_within_dp",
    "dist_ckpt_parallel_load",
    "dist_ckpt_assume_constant_structure",
    "dist_ckpt_parallel_dist_opt",
    "async_save",
    "verify_after_save",
)
EXCHANGE_ALGOS = ("all_to_all", *OTHER_NAMES_OF_ALL_TO_ALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig:
    """How a training run saves and loads its checkpoints. docs/megatron-compat.md says what to choose.

    Each method returns the same options or strategy on all ranks that have the same values. All are local.

    Attributes:
        dist_ckpt_format: format of new checkpoints: `megackpt`, `torch_dist`, `zarr`, or a format that
            another package adds. A version may follow, as in `zarr:3`; default is the newest. Loads detect
            the format.
        dist_ckpt_load_on_device: load straight into tensors on their device. False: load into new tensors in
            host memory, which the loaded state dict then has.
        dist_ckpt_parallel_save: spread replicated chunks over the ranks that declare them; False: main
            replicas write.
        dist_ckpt_parallel_save_within_dp: spread them only over the ranks of the data-parallel group.
        dist_ckpt_parallel_load: one rank of a data-parallel group reads each byte and sends it to the others.
            False: every rank reads the bytes that it needs.
        dist_ckpt_exchange_algo: how ranks send these bytes: `all_to_all`. Megatron-Core's `broadcast`,
            `gather_rounds` and `gather_object` mean the same.
        dist_ckpt_torch_dist_multiproc: files and writer threads of a rank in format `torch_dist`.
        dist_ckpt_assume_constant_structure: reuse the plan of the last save without comparing digests.
        dist_ckpt_parallel_dist_opt: the distributed optimizer's state is saved as it is sharded; False: it is
            gathered on the first of the ranks that share it. Both load into any layout.
        dist_ckpt_load_strictness: a `StrictHandling` or its value; None (`null` in a configuration file) is
            the default mode.
        async_save: return from a save as soon as the state is copied to host memory.
        async_when_busy: what an asynchronous save does while an earlier save is not finished: `wait`, `queue`
            or `skip`.
        async_staging_bytes: host memory of a rank for copies of the state; None for the size of its share.
        keep_last: how many checkpoints are kept; None keeps all.
        keep_every: also keep the checkpoints of steps that are multiples of this number; None keeps no
            others.
        save_interval: steps between checkpoints; None saves only the last step.
        save_interval_seconds: maximum of seconds between checkpoints; None for no limit.
        exit_signal: name of a signal at which a run saves and ends, such as `SIGTERM`; None for no signal.
        save_signal: `SIGUSR1` or `SIGUSR2`, at which a run saves and continues; None for no signal.
        on_save_error: `raise` ends the run if the store raises an error in a save; `warn` continues it.
        verify_after_save: verify each checkpoint before older ones are removed.
        timeout_s: how long a rank waits for the others, in seconds.

    Source: Megatron-LM, `megatron/training/arguments.py`, for the names (`exit_signal`: its
    `--exit-signal-handler`).
    """

    dist_ckpt_format: str = "megackpt"
    dist_ckpt_load_on_device: bool = True
    dist_ckpt_parallel_save: bool = True
    dist_ckpt_parallel_save_within_dp: bool = False
    dist_ckpt_parallel_load: bool = False
    dist_ckpt_exchange_algo: str = "all_to_all"
    dist_ckpt_torch_dist_multiproc: int = 2
    dist_ckpt_assume_constant_structure: bool = False
    dist_ckpt_parallel_dist_opt: bool = True
    dist_ckpt_load_strictness: StrictHandling | str | None = StrictHandling.ASSUME_OK_UNEXPECTED
    async_save: bool = False
    async_when_busy: WhenBusy = "wait"
    async_staging_bytes: int | None = None
    keep_last: int | None = None
    keep_every: int | None = None
    save_interval: int | None = None
    save_interval_seconds: float | None = None
    exit_signal: str | None = None
    save_signal: str | None = None
    on_save_error: str = "raise"
    verify_after_save: bool = False
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        check_text("dist_ckpt_format", self.dist_ckpt_format, otherwise=", as 'megackpt' or 'zarr:3'")
        object.__setattr__(self, "dist_ckpt_load_strictness", _mode(self.dist_ckpt_load_strictness))
        if self.dist_ckpt_parallel_save_within_dp and not self.dist_ckpt_parallel_save:
            raise DeclarationError(
                "dist_ckpt_parallel_save_within_dp=True has no effect with dist_ckpt_parallel_save=False, "
                "which does not spread chunks. Set dist_ckpt_parallel_save, too."
            )
        check_count("dist_ckpt_torch_dist_multiproc", self.dist_ckpt_torch_dist_multiproc)
        check_choice("async_when_busy", self.async_when_busy, get_args(WhenBusy))
        for name in ("keep_last", "keep_every", "save_interval", "async_staging_bytes"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), otherwise=", or None")
        check_choice("dist_ckpt_exchange_algo", self.dist_ckpt_exchange_algo, EXCHANGE_ALGOS)
        if self.save_interval_seconds is not None:
            check_seconds("save_interval_seconds", self.save_interval_seconds, otherwise=", or None")
        check_choice("on_save_error", self.on_save_error, ("raise", "warn"))
        self._check_signals()
        check_known(self._format, to_save=True)
        # Values that the options reject are rejected here as well.
        self.save_options()
        self.load_options()
        self.async_options()

    def _check_signals(self) -> None:
        if self.exit_signal is not None and (
            self.exit_signal not in signal.Signals.__members__ or self.exit_signal in SAVE_SIGNALS
        ):
            raise DeclarationError(
                f"exit_signal={self.exit_signal!r} is not a signal that can end a run. Give a name such as "
                f"SIGTERM. {' and '.join(SAVE_SIGNALS)} can be used for save_signal, to save and go on."
            )
        if self.save_signal is not None and self.save_signal not in SAVE_SIGNALS:
            raise DeclarationError(
                f"save_signal={self.save_signal!r}: give {' or '.join(SAVE_SIGNALS)}, or exit_signal to end "
                f"the run as well."
            )

    @property
    def signals(self) -> tuple[int, ...]:
        """Numbers of the signals at which the run saves: what `SaveSchedule(signals=)` takes."""
        return tuple(signal.Signals[name] for name in (self.exit_signal, self.save_signal) if name)

    @property
    def _format(self) -> str | tuple[str, int]:
        backend, colon, version = self.dist_ckpt_format.partition(":")
        return (backend, int(version)) if colon and version.isdecimal() else self.dist_ckpt_format

    def save_strategy(self) -> SaveStrategy:
        """Return the strategy of the format.

        Raises:
            MissingExtraError: it needs a package that is not installed.
        """
        if self.dist_ckpt_format.partition(":")[0] == "torch_dist":
            from megackpt.formats.torch_dist import TorchDistSaveStrategy  # imports much of torch

            return TorchDistSaveStrategy(thread_count=self.dist_ckpt_torch_dist_multiproc)
        return save_strategy(self._format)

    def save_options(self) -> SaveOptions:
        """Return the options of a save. For `spread="group"`, also pass the data-parallel group to `save`."""
        spread = "group" if self.dist_ckpt_parallel_save_within_dp else "world"
        return SaveOptions(
            timeout_s=self.timeout_s,
            spread=spread if self.dist_ckpt_parallel_save else "none",  # type: ignore[arg-type]
            assume_constant_structure=self.dist_ckpt_assume_constant_structure,
        )

    def async_options(self) -> AsyncOptions:
        """Return the options of asynchronous saves."""
        return AsyncOptions(when_busy=self.async_when_busy, staging_bytes=self.async_staging_bytes)

    def load_options(self) -> LoadOptions:
        """Return the options of a load. For a parallel load, also pass the `exchange_group` to `load`."""
        return LoadOptions(
            timeout_s=self.timeout_s,
            exchange=self.dist_ckpt_exchange_algo if self.dist_ckpt_parallel_load else "direct",  # type: ignore[arg-type]
            load_on_device=self.dist_ckpt_load_on_device,
        )


def _mode(strictness: StrictHandling | str | None) -> StrictHandling:
    """Return the mode of a strictness; None is the default mode."""
    if strictness is None:
        return StrictHandling.ASSUME_OK_UNEXPECTED
    check_kind("dist_ckpt_load_strictness", strictness, (StrictHandling, str), give="a StrictHandling")
    return StrictHandling.of(strictness)
