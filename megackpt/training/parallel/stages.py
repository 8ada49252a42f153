"""Which layers are on which pipeline stage, as plain data.

A stage table is the single source of that decision: layers, checkpoints and planners read it and compute no
offset of their own. It is proved when it is made. Torch is not needed here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby, pairwise
from typing import Any

from megackpt.errors import DeclarationError, truncated_list
from megackpt.training.parallel.stage_string import parse_stages

_WRITTEN_OUT = 4  # a longer row of equal letters is written as t*5


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTable:
    """The global layers on each (pipeline stage, virtual stage) of a model. All methods are pure.

    A pipeline stage has `vpp` model chunks, one for each virtual stage. The forward pass visits virtual stage
    0 of all pipeline stages, then virtual stage 1 of all of them, and so on: the chunk of (stage, virtual
    stage) is at position `virtual_stage * pp + stage`. The embedding is in the first chunk, the loss (with
    final norm and output layer) in the last one.

    >>> table = StageTable.even(8, pp=2, vpp=2)
    >>> table.layers_of(0, 0), table.layers_of(0, 1)
    ((0, 1), (4, 5))
    >>> str(table)
    'Ett|(tt|)*2ttL'

    Attributes:
        num_layers: transformer layers of the whole model.
        pp: number of pipeline stages.
        layers: global layer indices of each chunk, by position; empty for a chunk with other work.
        mtp_layers: number of multi-token-prediction layers, all of them in one chunk.
        mtp_position: position of that chunk; None if there are none.

    Raises:
        DeclarationError: a layer is on no stage, on two, or does not exist; layers are out of order; the
            number of chunks is no multiple of pp; several chunks on a single stage; or the MTP layers are not
            after all other layers, on the last virtual stage.

    Source: Megatron-Core `pipeline_parallel_layer_layout.PipelineParallelLayerLayout`.
    """

    num_layers: int
    pp: int
    layers: tuple[tuple[int, ...], ...]
    mtp_layers: int = 0
    mtp_position: int | None = None

    def __post_init__(self) -> None:
        self._check_chunks()
        self._check_layers()
        self._check_mtp()

    @classmethod
    def even(
        cls,
        num_layers: int,
        *,
        pp: int = 1,
        vpp: int = 1,
        account_for_embedding: bool = False,
        account_for_loss: bool = False,
    ) -> StageTable:
        """Return a table whose chunks differ by one layer at most; the first ones have more.

        >>> str(StageTable.even(6, pp=4, account_for_embedding=True, account_for_loss=True))
        'Et|(tt|)*2tL'

        Args:
            num_layers: transformer layers of the whole model.
            pp: number of pipeline stages.
            vpp: number of model chunks on each stage.
            account_for_embedding: count the embedding as a layer of the first chunk.
            account_for_loss: count the loss as a layer of the last chunk.

        Raises:
            DeclarationError: fewer layers than chunks.

        Source: Megatron-Core `transformer_layer.get_transformer_layer_offset`, which rejects what cannot be
        divided without a rest.
        """
        chunks = pp * vpp
        units = num_layers + account_for_embedding + account_for_loss
        if pp < 1 or vpp < 1 or not chunks <= units:
            raise DeclarationError(
                f"{num_layers} layers cannot be split over {_sizes(pp, vpp)}: a stage would have none. Use "
                f"at most {num_layers} stages, or give the layers of each stage (StageTable.from_counts)."
            )
        share, more = divmod(units, chunks)
        counts = [share + (position < more) for position in range(chunks)]
        counts[0] -= account_for_embedding
        counts[-1] -= account_for_loss
        return cls.from_counts(counts, pp=pp)

    @classmethod
    def from_counts(cls, counts: Sequence[int], *, pp: int) -> StageTable:
        """Return a table with a given number of layers in each chunk, by position.

        Args:
            counts: layers of each chunk, for each virtual stage those of all stages; 0 for other work.
            pp: number of pipeline stages.

        Raises:
            DeclarationError: a negative number, or as in the constructor.
        """
        if min(counts, default=0) < 0:
            raise DeclarationError(f"layers per stage are {tuple(counts)}. Give at least 0 for each stage.")
        starts = [sum(counts[:position]) for position in range(len(counts))]
        layers = tuple(tuple(range(a, a + n)) for a, n in zip(starts, counts, strict=True))
        return cls(num_layers=sum(counts), pp=pp, layers=layers)

    @classmethod
    def from_string(cls, text: str, *, pp: int) -> StageTable:
        """Return the table of a layout string, as Megatron's `--pipeline-model-parallel-layout` takes it.

        `E` is the embedding, `t` a transformer layer, `m` an MTP layer, `L` the loss; `|` ends a stage.
        `t*3` and `(tt|)*29` repeat. Commas are ignored. The number of stages in the string is pp x vpp.

        >>> StageTable.from_string("Et*3|(tt|)*2,tL", pp=2).layers
        ((0, 1, 2), (3, 4), (5, 6), (7,))

        Args:
            text: the layout string.
            pp: number of pipeline stages.

        Raises:
            DeclarationError: an unknown letter, an unbalanced parenthesis, a `*` without a number, E or L not
                exactly once at the ends, or as in the constructor.
        """
        stages = parse_stages(text)
        counts = [stage.count("t") for stage in stages]
        mtp = [(position, stage.count("m")) for position, stage in enumerate(stages) if "m" in stage]
        if len(mtp) > 1:
            raise DeclarationError(
                f"{text!r} has MTP layers (m) on stages {[position for position, _ in mtp]}. Put all of them "
                f"on one."
            )
        plain = cls.from_counts(counts, pp=pp)
        return replace(plain, mtp_position=mtp[0][0], mtp_layers=mtp[0][1]) if mtp else plain

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StageTable:
        """Return the table that `to_json` described.

        Raises:
            DeclarationError: value does not describe a table.
        """
        try:
            text, pp = str(value["layout"]), int(value["pp"])
        except (KeyError, TypeError, ValueError) as error:
            raise DeclarationError(
                f"{value!r} does not describe a stage table. Give a dict with 'layout', a layout string, and "
                f"'pp', the number of pipeline stages, as StageTable.to_json() returns it."
            ) from error
        return cls.from_string(text, pp=pp)

    def to_json(self) -> dict[str, Any]:
        """Return the table as plain values, to be stored as common state of a checkpoint."""
        return {"layout": str(self), "pp": self.pp}

    @property
    def vpp(self) -> int:
        """Number of model chunks on each pipeline stage."""
        return len(self.layers) // self.pp

    def position(self, stage: int, virtual_stage: int = 0) -> int:
        """Return the position of a chunk in the forward pass.

        Raises:
            DeclarationError: the table has no such chunk.
        """
        if not (0 <= stage < self.pp and 0 <= virtual_stage < self.vpp):
            raise DeclarationError(
                f"there is no stage {stage} with virtual stage {virtual_stage} in {str(self)!r}, a table of "
                f"{_sizes(self.pp, self.vpp)}. Give the table of the layout that runs."
            )
        return virtual_stage * self.pp + stage

    def layers_of(self, stage: int, virtual_stage: int = 0) -> tuple[int, ...]:
        """Return the global layers of a chunk, ascending."""
        return self.layers[self.position(stage, virtual_stage)]

    def mtp_layers_of(self, stage: int, virtual_stage: int = 0) -> tuple[int, ...]:
        """Return the MTP layers of a chunk: all of them or none."""
        is_there = self.position(stage, virtual_stage) == self.mtp_position
        return tuple(range(self.mtp_layers)) if is_there else ()

    def has_embedding(self, stage: int, virtual_stage: int = 0) -> bool:
        """Whether the chunk begins with the embedding."""
        return self.position(stage, virtual_stage) == 0

    def has_loss(self, stage: int, virtual_stage: int = 0) -> bool:
        """Whether the chunk ends with final norm, output layer and loss."""
        return self.position(stage, virtual_stage) == len(self.layers) - 1

    def stage_of(self, layer: int) -> tuple[int, int]:
        """Return (stage, virtual stage) of a global layer.

        Raises:
            DeclarationError: the model has no such layer.
        """
        for position, layers in enumerate(self.layers):
            if layer in layers:
                return position % self.pp, position // self.pp
        raise DeclarationError(
            f"there is no layer {layer} in a model of {self.num_layers}. Give a layer of "
            f"0..{self.num_layers - 1}."
        )

    def check_num_layers(self, num_layers: int) -> None:
        """Check that the table is one for a model of so many layers.

        Raises:
            DeclarationError: it is not.
        """
        if num_layers != self.num_layers:
            raise DeclarationError(
                f"the stage table {str(self)!r} has {self.num_layers} layers, but the model has "
                f"{num_layers}. Give a table of {num_layers} layers, or change the model."
            )

    def check_layout(self, *, pp: int, vpp: int = 1) -> None:
        """Check that the table is one for these sizes.

        Raises:
            DeclarationError: it is not.
        """
        if (self.pp, self.vpp) != (pp, vpp):
            raise DeclarationError(
                f"the stage table {str(self)!r} is one for {_sizes(self.pp, self.vpp)}, but the layout has "
                f"{_sizes(pp, vpp)}. Give a table with {pp * vpp} stages (it has {len(self.layers)}), or "
                f"change pp or vpp."
            )

    def __str__(self) -> str:
        """Return the table as a layout string, which `from_string` reads."""
        stages = [self._stage_string(position) for position in range(len(self.layers))]
        text = ""
        for stage, equal in groupby(stages[:-1]):
            count = len(list(equal))
            text += f"{stage}|" if count == 1 else f"({stage}|)*{count}"
        return text + stages[-1]

    def _stage_string(self, position: int) -> str:
        mtp = self.mtp_layers if position == self.mtp_position else 0
        parts = [_repeated("t", len(self.layers[position])), _repeated("m", mtp)]
        if position == 0:
            parts.insert(0, "E")
        if position == len(self.layers) - 1:
            parts.append("L")
        return "".join(parts)

    def _check_chunks(self) -> None:
        stages = len(self.layers)
        if self.pp < 1 or stages < 1 or stages % self.pp:
            raise DeclarationError(
                f"a table of {stages} stages does not fit pp={self.pp}. Give a multiple of pp, one for each "
                f"pipeline stage of each virtual stage."
            )
        if self.pp == 1 and stages > 1:
            raise DeclarationError(
                f"a table of {stages} stages with pp=1 would be a virtual pipeline on one stage. Give one "
                f"stage, or set pp."
            )

    def _check_layers(self) -> None:
        """Prove that each layer is in exactly one chunk, and that the forward pass visits them in order."""
        positions: dict[int, list[int]] = {layer: [] for layer in range(self.num_layers)}
        for position, layers in enumerate(self.layers):
            for layer in layers:
                positions.setdefault(layer, []).append(position)
        faults = [
            self._layer_fault(layer, at)
            for layer, at in sorted(positions.items())
            if len(at) != 1 or not 0 <= layer < self.num_layers
        ]
        order = list(chain.from_iterable(self.layers))
        if not faults and order != sorted(order):
            high, low = next((a, b) for a, b in pairwise(order) if a > b)
            names = [f"layer {layer} ({self._name(positions[layer][0])})" for layer in (high, low)]
            faults = [f"{names[0]} comes before {names[1]}"]
        if faults:
            raise DeclarationError(
                f"the stage table of {self.num_layers} layers over {_sizes(self.pp, self.vpp)} is wrong:\n"
                f"{truncated_list(faults)}\n"
                f"Give each layer of 0..{self.num_layers - 1} to exactly one stage, in the order of the "
                f"forward pass."
            )

    def _layer_fault(self, layer: int, positions: Sequence[int]) -> str:
        names = " and ".join(map(self._name, positions))
        if not 0 <= layer < self.num_layers:
            return f"layer {layer} is on {names}, but the model has no such layer"
        return f"layer {layer} is on {names}" if names else f"layer {layer} is on no stage"

    def _check_mtp(self) -> None:
        at = self.mtp_position
        if at is None and self.mtp_layers == 0:
            return
        if at is None or self.mtp_layers < 1 or not len(self.layers) - self.pp <= at < len(self.layers):
            raise DeclarationError(
                f"{self.mtp_layers} MTP layers at position {at} are not on the last virtual stage of "
                f"{_sizes(self.pp, self.vpp)}. Put them there, after all other layers."
            )
        later = [layer for layers in self.layers[at + 1 :] for layer in layers]
        if later:
            raise DeclarationError(
                f"layer {later[0]} comes after the MTP layers, which are on {self._name(at)}. Put the MTP "
                f"layers after all other layers."
            )

    def _name(self, position: int) -> str:
        stage, virtual_stage = position % self.pp, position // self.pp
        return f"stage {stage}" + (f", virtual stage {virtual_stage}" if self.vpp > 1 else "")


def _sizes(pp: int, vpp: int) -> str:
    return f"pp={pp}" + (f", vpp={vpp}" if vpp != 1 else "") + " stages"


def _repeated(letter: str, count: int) -> str:
    return letter * count if count <= _WRITTEN_OUT else f"{letter}*{count}"
