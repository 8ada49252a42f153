"""Patterns of the file names of each built-in format.

They are here and not in the modules of the formats. So a commit finds the stale files of any format without
importing it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

_ATTEMPT = "([0-9a-f]{16})"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileNames:
    """Regular expressions for the names of a format's files; each has to match a whole name.

    Attributes:
        attempt: matches names that contain the attempt that wrote the file. Exactly one group of a match is
            set: the attempt.
        marker: matches names of markers. If a store has one, a save of this format may also have left files
            whose names contain no attempt; `SaveStrategy.fixed_names` lists these. None if there are never
            any.
        foreign: `LoadStrategy.detect` is called only for a directory that has a file with a name like this.
            None if it has to be called for every directory without metadata.json.
    """

    attempt: str
    marker: str | None = None
    foreign: str | None = None

    def attempt_of(self, name: str) -> str | None:
        """Return the attempt in a file name; None for a name that carries none, or is of no such file."""
        match = compiled(self.attempt).fullmatch(name)
        return next((group for group in match.groups() if group), None) if match else None

    def is_marker(self, name: str) -> bool:
        """Return whether a file shows that there may be files whose names carry no attempt."""
        return self.marker is not None and compiled(self.marker).fullmatch(name) is not None

    def is_foreign(self, name: str) -> bool:
        """Return whether `LoadStrategy.detect` may recognise a directory with a file of this name."""
        return self.foreign is None or compiled(self.foreign).fullmatch(name) is not None


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern for names."""
    return re.compile(pattern, re.DOTALL)  # a key, and so a name, may contain a newline


NOTHING = "(?!)"
"""Matches no name."""

NATIVE = FileNames(
    attempt=rf"(?:data/|parity/|index-|common-|parity-){_ATTEMPT}(?:-\d{{5,}})?\.(?:safetensors|json)",
    foreign=NOTHING,
)

TORCH_DIST_TEMPORARY = r"\.(?:\.metadata|common\.pt)\.[0-9a-f]+\.tmp"
"""Temporary files that a process leaves which dies while it replaces `.metadata` or `common.pt`."""

TORCH_DIST = FileNames(
    attempt=(
        rf"__\d+_\d+_{_ATTEMPT}\.distcp"
        rf"|megackpt-{_ATTEMPT}(?:-[0-9a-f]{{32}}\.json|(?:-\d{{5,}})?\.safetensors)"
        rf"|common-{_ATTEMPT}\.pt"
        rf"|metadata-{_ATTEMPT}\.pickle"
        rf"|values-{_ATTEMPT}-(?:state|objects)\.distcp"
    ),
    marker=rf"megackpt-[0-9a-f]{{16}}-[0-9a-f]{{32}}\.json|{TORCH_DIST_TEMPORARY}",
    foreign=r"\.metadata",
)

ZARR_V1 = FileNames(
    # Earlier versions of megackpt wrote an attempt to a directory of its own, and moved the files to names
    # without an attempt, as Megatron-Core has them. The second one is a temporary file of the list of these.
    attempt=rf"\.megackpt-{_ATTEMPT}/.*|\.\.megackpt-{_ATTEMPT}\.json\.[0-9a-f]+\.tmp",
    foreign=r".*/\.zarray",
)

ZARR_V3 = FileNames(
    attempt=rf"(?:zarr|objects)-{_ATTEMPT}/.*|common-{_ATTEMPT}\.safetensors|files-{_ATTEMPT}\.json",
    foreign=r".*/zarr\.json",
)


def is_of_a_save(name: str) -> bool:
    """Return whether a file name carries the attempt of a save in a built-in format, finished or not."""
    return any(of.attempt_of(name) is not None for of in (NATIVE, TORCH_DIST, ZARR_V1, ZARR_V3))


DEEPSPEED = FileNames(attempt=NOTHING, foreign=r"(?:[^/]+/)?[^/]*mp_rank_\d+_model_states\.pt")
"""Files of a step, in its folder or in the folder of all steps."""

LEGACY_MEGATRON = FileNames(
    attempt=NOTHING,
    foreign=r"(?:(?:iter_\d{7,}|release)/)?mp_rank_\d{2,}(?:_\d{3,}){0,2}/model_optim_rng\.pt",
)
"""Files of an iteration, in its folder or in the folder of all iterations."""

NVRX = FileNames(attempt=NOTHING, foreign=r"(?:.*/)?iter_\d{7,9}_\d{1,6}_local\.pt")

TRAINER_ARGUMENTS = "training_args.bin"
"""A pickled object of Hugging Face's Trainer, which is no state."""

# common.pt is the common state of torch_dist and zarr. Without metadata.json, that save has not finished.
TORCH_SAVE = FileNames(
    attempt=NOTHING, foreign=r"(?!(?:common\.pt|training_args\.bin)\Z)[^/]+\.(?:pt|pth|bin|ckpt|tar)"
)

HUGGINGFACE_MODELS = ("model.safetensors", "model.safetensors.index.json")
"""The only file with tensors, or the index of several, in the order that transformers looks for them."""

HUGGINGFACE = FileNames(
    attempt=NOTHING,
    # An index, or a safetensors file in the folder itself that no save of another format has written.
    foreign=(
        r"[^/]+\.safetensors\.index(?:\.[^/.]+)?\.json"
        rf"|(?!(?:index|common|megackpt)-{_ATTEMPT}(?:-\d{{5,}})?\.safetensors\Z)[^/]+\.safetensors"
    ),
)
