"""`megackpt convert`: write a checkpoint in another format, also as a Hugging Face folder or from one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import click
from rich.filesize import decimal

from megackpt.cli.entry import (
    EPILOG,
    CommandWithSections,
    print_result,
    unsafe_pickle_option,
)
from megackpt.cli.locations import check_directory, check_target, checkpoint_location
from megackpt.cli.output import ProgressBars, counted
from megackpt.errors import CheckpointError, NotACheckpointError
from megackpt.storage import expanded_path, is_url, opened_store

if TYPE_CHECKING:
    from megackpt.comm import Group
    from megackpt.whole.copy import CopyReport
    from megackpt.whole.export_huggingface import HuggingFaceExport

_TIMEOUT_S = 600.0
_SPELLINGS = {"map_name": "--map", "merge_adapters": "--merge-adapter"}


_SECTIONS = {
    "The source": ("source_format", "allow_unsafe_pickle"),
    "The new checkpoint": ("name", "overwrite", "array_digests", "verify"),
    "Names and dtypes": (
        "map_name",
        "config",
        "dtype",
        "weights",
        "keys",
        "prefix",
        "norm_added",
        "text_only",
        "tied_output",
    ),
    "A Hugging Face folder as DST": ("merge_adapters", "adapters_from", "max_file_size"),
}


FORMAT_ALIASES = {"hf": "huggingface"}
DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""Short names, which mean the names of torch."""


@click.command(name="convert", cls=CommandWithSections, sections=_SECTIONS, epilog=EPILOG)
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--to",
    "name",
    metavar="FORMAT[:VERSION]",
    help="The new format: megackpt, torch_dist, zarr, huggingface (or hf), or that of a package; by default "
    "its newest version. Required, except with --map, or if SRC is of another tool: the default is megackpt.",
)
@click.option(
    "--from",
    "source_format",
    type=click.Choice(["huggingface", "hf", "deepspeed", "megatron", "nvrx", "torch"]),
    help="Check what SRC is, which is detected. huggingface: as --map auto. deepspeed: what ZeRO-1, 2 or 3 "
    "saved; weights, masters, moments and steps become whole arrays. megatron: weights that Megatron-LM "
    "saved with --ckpt-format torch. nvrx: the files of all ranks of a local checkpoint, of nvidia-"
    "resiliency-ext and Megatron-Core. torch: a file of torch.save with full state dicts, or a folder "
    "with a file for each rank, also with shards of FSDP version 1 and 2.",
)
@click.option(
    "--map",
    "map_name",
    metavar="NAME",
    help="Between names of megackpt and of Hugging Face: the family, such as llama, or auto for that of the "
    "config's model_type. Without a naming option a Hugging Face folder keeps its names, unless it is DST.",
)
@click.option(
    "--config",
    metavar="PATH",
    help="With huggingface: a config.json, or a folder that has one; with --to also its tokenizer is copied.",
)
@click.option("--dtype", metavar="NAME", help="With huggingface: round to this dtype, such as bf16.")
@click.option(
    "--weights",
    type=click.Choice(["model", "masters"]),
    help="With --to huggingface, or of deepspeed: the weights of the model, or the float32 masters of its "
    "optimizer.",
)
@click.option(
    "--keys",
    type=click.Choice(["megackpt", "torch"]),
    help="Of deepspeed: names of the arrays, as megackpt's optimizers (the default) or torch's have them.",
)
@click.option(
    "--merge-adapter",
    "merge_adapters",
    multiple=True,
    metavar="NAME",
    help="With --to huggingface: merge this adapter into the weights; give it again for further ones.",
)
@click.option(
    "--adapters-from",
    metavar="DIR",
    help="With --merge-adapter: the checkpoint that has the adapters, if it is not SRC.",
)
@click.option(
    "--max-file-size", metavar="SIZE", help="With --to huggingface: longest file, such as 5GB (the default)."
)
@click.option(
    "--prefix",
    metavar="TEXT",
    help="With huggingface, or of deepspeed and torch: what the checkpoint's keys begin with.",
)
@click.option(
    "--norm-added",
    type=click.IntRange(0, 1),
    metavar="0|1",
    help="With --to huggingface: 1 if SRC is of Megatron-Core and was trained with "
    "layernorm_zero_centered_gamma, and the norms of the folder are not zero-centred.",
)
@click.option(
    "--text-only",
    is_flag=True,
    default=None,
    help="With --from huggingface: the text model of a multimodal one; all other tensors are left out.",
)
@click.option(
    "--tied-output",
    type=click.Choice(["equal", "untie", "drop"]),
    help="With --from huggingface: an output layer that is stored although the config ties it to the "
    "embedding must be equal to it (the default), is imported, or is left out.",
)
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint of the same format at DST.")
@click.option("--array-digests", is_flag=True, help="Store a digest of each array (format megackpt only).")
@click.option(
    "--verify/--no-verify", default=True, help="Read the new checkpoint again to compare it (the default)."
)
@unsafe_pickle_option
def command(
    source: str,
    target: str,
    name: str | None,
    *,
    source_format: str | None,
    overwrite: bool,
    array_digests: bool,
    verify: bool,
    allow_unsafe_pickle: bool,
    **options: Any,  # of folders of other tools
) -> None:
    """Write a copy of the checkpoint in the directory SRC, in another format, to the directory DST.

    The format of SRC is detected; Hugging Face folders, and folders and files of other tools, are read, too.
    Chunks are streamed through small buffers and are not resharded; no GPU and no model is needed.
    DST becomes a checkpoint in one step, and is then compared with SRC byte by byte. If anything fails, DST
    is not a checkpoint. To use several processes:

    torchrun --nproc-per-node 4 -m megackpt.cli convert SRC DST --to FORMAT

    With --to huggingface, DST becomes a folder that transformers loads. If that is interrupted, the same
    command goes on after the files that are finished.
    """
    is_export = name is not None and _format(name) == "huggingface"
    options["dtype"] = DTYPE_ALIASES.get(options["dtype"], options["dtype"])
    source_format = FORMAT_ALIASES.get(str(source_format), source_format)
    folder = _FolderOptions.of(options)
    if not is_export:
        detected = _foreign_format(source, is_mapped=bool(folder.options))
        if detected is not None and source_format not in (None, detected):
            raise click.UsageError(f"{source} is of {detected}, not of {source_format}. Leave --from out.")
        source_format = source_format or detected
    if name is None and source_format is None:
        _check_source(source)
        raise click.UsageError("Missing option '--to'. Name the new format.")
    name = "megackpt" if name is None else name
    common: dict[str, Any] = {"verify": verify, "overwrite": overwrite, "timeout_s": _TIMEOUT_S}
    read: dict[str, Any] = {"allow_unsafe_pickle": allow_unsafe_pickle}
    written: dict[str, Any] = {"array_digests": array_digests}
    folder.check(is_export=is_export, source=source_format, array_digests=array_digests)
    with ProgressBars() as bars, _torchrun_group() as group:
        common |= {"group": group, "progress": bars}
        check_target(target)
        if is_export:
            counts, text = _export(source, target, **folder.of_export(), **common, **read)
        elif source_format == "huggingface":
            counts, text = _import(source, target, _format(name), **folder.of_import(), **common, **written)
        elif source_format is not None:
            arguments = {"settings": folder.options, **common, **written}
            counts, text = _import_files(source_format, source, target, _format(name), **arguments)
        else:
            counts, text = _convert(source, target, _format(name), **common, **read, **written)
    print_result({"source": source, "target": target, **counts}, text)


_Result: TypeAlias = tuple[dict[str, Any], str]  # the counts of a report, and the report as text


def _export(source: str, target: str, **arguments: Any) -> _Result:
    from megackpt.whole.export_huggingface import export_huggingface

    report = export_huggingface(checkpoint_location(source), target, **arguments)
    return asdict(report), _export_text(target, report)


def _import(source: str, target: str, to: str | tuple[str, int], **arguments: Any) -> _Result:
    from megackpt.whole.import_huggingface import import_huggingface

    _check_folder(source)
    report = import_huggingface(source, target, to, **arguments)
    return asdict(report), _copy_text(target, report)


def _import_files(
    source_format: str, source: str, target: str, to: str | tuple[str, int], **arguments: Any
) -> _Result:
    from megackpt.whole.convert import import_files

    report = import_files(source_format, source, target, to, **arguments)
    return asdict(report), _copy_text(target, report)


def _convert(source: str, target: str, to: str | tuple[str, int], **arguments: Any) -> _Result:
    from megackpt.formats.registry import save_strategy
    from megackpt.whole.convert import convert

    # An unknown format is reported before the source is looked at.
    strategy = save_strategy(to)
    report = convert(checkpoint_location(source), target, strategy, **arguments)
    return asdict(report), _copy_text(target, report)


def _foreign_format(source: str, *, is_mapped: bool) -> str | None:
    """Return the format of a source that another tool wrote; None for a checkpoint, or nothing.

    A Hugging Face folder is a checkpoint, unless is_mapped: its tensors get the names of megackpt.
    """
    from megackpt.engine.checkpoint.manifest import read_manifest
    from megackpt.formats.registry import is_foreign

    try:
        with opened_store(source) as store:
            backend = str(read_manifest(store).get("sharded_backend"))
    except CheckpointError:
        return None  # for the conversion to report
    return backend if is_foreign(backend) or (is_mapped and backend == "huggingface") else None


def _check_source(source: str) -> None:
    """Check that the source can be opened: if not, the error says what it is, and another option is no help.

    Raises:
        NotACheckpointError, FormatError, StorageError: it cannot be opened.
    """
    from megackpt.engine.checkpoint.manifest import read_manifest

    with opened_store(checkpoint_location(source)) as store:
        read_manifest(store)


def _check_folder(path: str) -> None:
    """Check that a folder has weights that can be read. URLs are accepted.

    Raises:
        NotACheckpointError: it has none, or is no folder.
    """
    check_directory(path)
    if not is_url(path) and not any(Path(expanded_path(path)).glob("*.safetensors")):
        raise NotACheckpointError(
            f"{path} has no *.safetensors files. Give a Hugging Face folder that has them; "
            f"model.save_pretrained of transformers writes them.",
            path=path,
        )


def _copy_text(target: str, report: CopyReport) -> str:
    objects = "" if report.origin or report.map else f" and {counted(report.objects, 'object')}"
    origin = f", from {report.origin}" if report.origin else ""
    by_map = f", by the map {report.map}" if report.map else ""
    lines = "".join(f"\n  left out: {what}" for what in report.left_out)
    other_tensors = ""
    if report.map and len(report.left_out) > 10:  # thousands of names would say no more
        other_tensors, lines = f" ({len(report.left_out)} tensors left out)", ""
    chunks = f"{decimal(report.nbytes)} in {counted(report.chunks, 'chunk')}"
    # Formats other than ours store the tensors of plain state dicts in common state.
    content = f"{counted(report.arrays, 'array')}{objects}, {chunks}, and common state"
    return (
        f"{target}: {content}{other_tensors}{origin}, as {report.backend} version {report.version}"
        f"{by_map}; {_checked(report)}.{lines}"
    )


def _export_text(target: str, report: HuggingFaceExport) -> str:
    kept = f" ({report.kept_files} kept from an interrupted export)" if report.kept_files else ""
    merged = f", with {', '.join(report.merged_adapters)} merged" if report.merged_adapters else ""
    return (
        f"{target}: {report.tensors} tensors, {decimal(report.nbytes)} in {report.files} files{kept}, as "
        f"{report.dtype}, by the map {report.map}{merged}; {_checked(report)}."
    )


def _checked(report: CopyReport | HuggingFaceExport) -> str:
    return "read again and equal" if report.is_verified else "not verified"


_NAMES = frozenset({"map_name", "config", "dtype", "prefix"})
_EXPORT_OPTIONS = _NAMES | {"weights", "max_file_size", "norm_added", "merge_adapters", "adapters_from"}
_IMPORT_OPTIONS = {
    "huggingface": _NAMES | {"text_only", "tied_output"},
    "deepspeed": frozenset({"keys", "prefix", "weights"}),
    "torch": frozenset({"prefix"}),
}


@dataclass(frozen=True, slots=True)
class _FolderOptions:
    """The options of folders of other tools that were given, by their names."""

    options: dict[str, Any]

    @classmethod
    def of(cls, options: dict[str, Any]) -> _FolderOptions:
        return cls({name: value for name, value in options.items() if value not in (None, ())})

    def check(self, *, is_export: bool, source: str | None, array_digests: bool) -> None:
        """Check that the given options can be used with the formats, and with each other.

        Raises:
            click.UsageError: they do not.
        """
        if is_export and source is not None:
            raise click.UsageError(f"Give --from {source} or --to huggingface, not both.")
        if is_export and array_digests:
            raise click.UsageError("--array-digests cannot be used with --to huggingface. Leave it out.")
        allowed = _EXPORT_OPTIONS if is_export else _IMPORT_OPTIONS.get(source or "", frozenset())
        for name in self.options.keys() - allowed:
            option = _SPELLINGS.get(name, f"--{name.replace('_', '-')}")
            raise click.UsageError(
                f"{option} cannot be used with these formats; `megackpt convert --help` lists them."
            )

    def of_import(self) -> dict[str, Any]:
        """Return arguments of `import_huggingface`."""
        names = self.options.keys() & {"config", "dtype", "prefix", "text_only", "tied_output"}
        return {"map": self.options.get("map_name", "auto"), **{name: self.options[name] for name in names}}

    def of_export(self) -> dict[str, Any]:
        """Return arguments of `export_huggingface`."""
        arguments = self.of_import()
        names = self.options.keys() & {"weights", "norm_added", "merge_adapters"}
        arguments |= {name: self.options[name] for name in names}
        if "adapters_from" in self.options:
            arguments["adapters_from"] = checkpoint_location(self.options["adapters_from"])
        if "max_file_size" in self.options:
            arguments["max_file_bytes"] = _size(self.options["max_file_size"])
        return arguments


def _size(text: str) -> int:
    """Return a number of bytes from a text such as `5GB`, `500MB` or `1GiB`."""
    match = re.fullmatch(r"(\d+) ?([KMGT]?)(i?)B?", text, re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise click.BadParameter(
            f"{text!r} is not a size; give one such as 5GB.", param_hint="--max-file-size"
        )
    power = " KMGT".index(match[2].upper() or " ")
    return int(match[1]) * int((1024 if match[3] else 1000) ** power)


def _format(name: str) -> str | tuple[str, int]:
    backend, colon, version = name.partition(":")
    backend = FORMAT_ALIASES.get(backend, backend)
    if not colon:
        return backend
    if not version.isdecimal():
        raise click.BadParameter(
            f"{version!r} is not a version; give a number, as in zarr:3.", param_hint="--to"
        )
    return backend, int(version)


@contextmanager
def _torchrun_group() -> Iterator[Group | None]:
    """Connect the ranks that torchrun has started, for a block of code; None if this process is alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield None
        return
    import torch.distributed as dist

    from megackpt.comm import world_group

    dist.init_process_group("gloo")
    try:
        group = world_group(timeout_s=_TIMEOUT_S)
        yield group
        group.all_gather(b"")  # no rank closes connections that another still needs
    finally:
        dist.destroy_process_group()
