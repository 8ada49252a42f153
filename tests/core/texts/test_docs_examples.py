"""What documents and docstrings say is true: blocks run or are listed, outputs are real, links exist."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import runpy
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import click
import pytest
import torch.distributed as dist

import megackpt
from megackpt import Checkpointer, errors, options
from megackpt.cli.entry import COMMANDS, FLAGS_OF_ALL
from megackpt.codec import pickled
from megackpt.codec.encoder import KINDS
from megackpt.codec.tree import MAX_DEPTH
from megackpt.contrib.megatron.config import CheckpointConfig
from megackpt.engine.background.saver import _MAX_QUEUED
from megackpt.engine.checkpoint.steps import _MAX_STEP
from megackpt.errors import CheckpointError
from megackpt.formats.zarr.chunks import MAX_CHUNKS
from megackpt.plans.metadata import DTYPES
from megackpt.plans.metadata.chunk_table import MAX_NUMEL
from tests.support.docs import (
    CLASSES,
    DOCUMENTS,
    FENCE,
    ON_RANKS,
    PAGES,
    ROOT,
    Block,
    blocks_of,
    examples_of,
    names_by_module,
    run,
)

PUBLIC_PARTS = {
    "", "contrib", "maps", "plans", "read_checkpoint", "storage", "testing", "training",
    *(module.split(".")[1] for module in names_by_module()),
}  # fmt: skip
"""Parts of megackpt that users import from; most names are in the package itself."""

WITH_A_GROUP = {ROOT / "README.md", ROOT / "docs" / "index.md"}
"""One of their examples is FSDP2, which needs a process group."""

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PATH = re.compile(r"`((?:megackpt|models|examples|tests|docs)/[\w./-]+)`")
_DTYPE = re.compile(r"\| `(\w+)` \| (\d+) \| `(\w+)`")
_TAG = re.compile(r"`(\$\w+)`")
_ATTEMPT = re.compile(r"\b[0-9a-f]{16}\b")


def is_error_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, CheckpointError)


def as_shown(text: str, directory: Path) -> str:
    """Replace what differs from run to run: the directory, and the id of an attempt."""
    return _ATTEMPT.sub("0123456789abcdef", text.replace(str(directory), "/data"))


@pytest.fixture
def group_of_one() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "path", [p for p in DOCUMENTS if p != ON_RANKS], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_examples_of_a_document_run_and_print_what_it_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    directory = tmp_path / "cwd"
    directory.mkdir()
    monkeypatch.chdir(directory)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    if path in WITH_A_GROUP:
        request.getfixturevalue("group_of_one")
    for example in examples_of(path.read_text()):
        if re.search("^import zarr$", example.code, re.MULTILINE):
            pytest.importorskip("zarr", reason="zarr 3.1 needs Python 3.11; the blocks before have run")
        printed = run(example, path, namespace)
        if example.output is not None:
            assert as_shown(printed, directory) == example.output, f"{path}, line {example.line + 1}"
    for name, value in namespace.items():
        if name.startswith("test_"):
            (tmp_path / name).mkdir()
            value(tmp_path / name)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_paths_lead_to_files(path: Path) -> None:
    text = path.read_text()
    targets = [link.partition("#")[0] for link in _LINK.findall(FENCE.sub("", text)) if "://" not in link]
    dead = [target for target in targets if target and not (path.parent / target).exists()]
    assert not dead, f"{path} links to {dead}"
    gone = [name for name in _PATH.findall(text) if not (ROOT / name).exists()]
    assert not gone, f"{path} names {gone}"


def test_the_readme_has_the_two_commands_of_a_newcomer_as_they_are_run() -> None:
    commands = [b.code for b in blocks_of((ROOT / "README.md").read_text()) if b.kind == "bash"]
    assert commands == [
        "pip install -e '.[examples]' -c tests/constraints.txt && python examples/elastic_resume.py\n",
        "pip install -e '.[test]' -c tests/constraints.txt && pytest -n 2 --dist loadfile\n",
    ]


def imported_parts(code: str) -> set[str]:
    """Return the parts of megackpt that a block of code imports from; "" for the package itself."""
    nodes = list(ast.walk(ast.parse(code)))
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {f"{name}.".split(".")[1] for name in modules if name.split(".")[0] == "megackpt"}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_examples_import_public_parts_only(path: Path) -> None:
    text = path.read_text()
    parts = {part for example in examples_of(text) for part in imported_parts(example.code)}
    allowed = PUBLIC_PARTS | ({"formats"} if path.name == "contributing.md" else set())
    assert parts - allowed == set()
    assert not re.search(r"\bmegackpt\.(engine\b|whole\.\w)", text)


def test_the_format_lists_every_dtype_and_every_tag_of_the_codec() -> None:
    text = (ROOT / "docs" / "format.md").read_text()
    dtypes = {name: (int(size), code) for name, size, code in _DTYPE.findall(text)}
    assert dtypes == {name: (info.itemsize, info.safetensors) for name, info in DTYPES.items()}
    tags = {tag for row in re.findall(r"^\| (`\$.*?) \|", text, re.MULTILINE) for tag in _TAG.findall(row)}
    assert tags == {"$registered", *(kind.tag for kind in (*KINDS, *pickled.KINDS))}


def test_the_tutorial_ends_in_a_test_and_every_error_class_has_a_section() -> None:
    tutorial = examples_of((ROOT / "docs" / "sharding-your-layer.md").read_text())
    assert tutorial[-1].code.count("\ndef test_") + tutorial[-1].code.startswith("def test_") == 1
    sections = set(re.findall(r"^## (\w+)$", (ROOT / "docs" / "errors.md").read_text(), re.MULTILINE))
    classes = {name for name, value in vars(errors).items() if is_error_class(value)}
    assert classes - {"CheckpointError", "CheckpointingException"} == sections


HOME = Path(megackpt.__path__[0]).parent


def has_examples(name: str) -> bool:
    return ">>> " in (HOME / f"{name.replace('.', '/')}.py").read_text()


FOUND = pkgutil.walk_packages(megackpt.__path__, "megackpt.")
MODULES = [module.name for module in FOUND if not module.ispkg and has_examples(module.name)]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_print_what_they_show(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert doctest.testmod(importlib.import_module(name)).failed == 0


SHELL = {"bash", "sh", "console"}
TRAINING = "tests/contrib/test_hosts.py"
ENGINE = "tests/contrib/transformer_engine/test_transformer_engine"

RUN_ELSEWHERE = {
    ("docs/coming-from.md", "deepspeed.initialize"): ["tests/contrib/deepspeed/deepspeed_program.py"],
    ("docs/coming-from.md", "import_deepspeed"): ["tests/contrib/deepspeed/test_deepspeed_folders.py"],
    ("docs/integrations.md", "contrib.accelerate"): ["tests/contrib/accelerate/test_stock_folders.py"],
    ("docs/integrations.md", "class MyTrainer"): [TRAINING, "examples/hosts/trainer.py"],
    ("docs/integrations.md", "MegackptDDPStrategy"): [
        "tests/contrib/lightning/test_lightning.py",
        "examples/hosts/lightning_fit.py",
        "tests/contrib/lightning/lightning_fsdp.py",
    ],
    ("docs/integrations.md", "contrib.ray"): [TRAINING, "examples/hosts/ray_train.py"],
    ("docs/integrations.md", "contrib.torchtitan"): [TRAINING, "examples/hosts/torchtitan_train.py"],
    ("docs/integrations.md", "dist_checkpointing.save(state"): [TRAINING, "examples/hosts/megatron_core.py"],
    ("docs/integrations.md", "custom_manager_class"): ["tests/contrib/megatron/test_megatron_bridge.py"],
    ("docs/torch.md", "def resume_training"): ["tests/contrib/torch/test_dtensor_meshes.py"],
    ("docs/torch.md", "fully_shard(model"): ["tests/contrib/torch/test_dtensor_meshes.py"],
    ("docs/torch.md", "FSDP.set_state_dict_type"): ["tests/contrib/torch/test_fsdp1.py"],
    ("docs/integrations.md", "MoEConfig"): ["tests/contrib/megatron/test_megatron_into_models.py"],
    ("docs/integrations.md", "resume_from_megatron"): ["tests/contrib/megatron/test_megatron_optimizer.py"],
    ("docs/models.md", "create_on"): ["tests/system/training/test_modules_on_own_ranks.py"],
    ("docs/huggingface.md", "family_of(config)"): ["tests/contrib/megatron/megatron_world.py"],
    ("docs/megatron-compat.md", "TieredCheckpointManager"): [
        "tests/contrib/nvrx/test_tiered_manager.py",
        "tests/contrib/megatron/test_installing.py",
    ],
    ("docs/optimizers.md", "fused_adam"): [f"{ENGINE}_fused_adam.py"],
    ("docs/transformer-engine.md", "save(state,"): [f"{ENGINE}.py"],
    ("docs/transformer-engine.md", "import initialise_fp8_state"): [f"{ENGINE}_fp8.py"],
    ("docs/transformer-engine.md", "read_extra_state"): [f"{ENGINE}_extra_state.py", f"{ENGINE}_fp8.py"],
    ("docs/transformer-engine.md", 'quantised="codes"'): [f"{ENGINE}_quantised.py"],
    ("docs/transformer-engine.md", "set_components"): [
        "tests/contrib/transformer_engine/te_models.py",
        f"{ENGINE}_megatron.py",
    ],
    ("docs/transformer-engine.md", "mark_parameters"): [f"{ENGINE}_optimizer.py"],
}
"""Python that needs ranks, another package or objects that the page does not make.

Keys are a page and text that only this block of it has. Values are files that tests run,
which use every name that the block takes from megackpt.
"""

NOT_RUN = {
    ("docs/coming-from.md", "nl.MegatronStrategy"): "NeMo needs a GPU",
}
"""Blocks that nothing runs, with the reason."""

NO_CODE = {
    ("docs/concepts.md", "three rectangles"): "a drawing; the block after it prints the same numbers",
    ("docs/format.md", "metadata.json"): "a tree of files, with names of one save",
    ("docs/tools.md", "llama3-405b"): "output with times of one machine",
    (
        "docs/operating.md",
        "* * 0",
    ): "lines of a crontab, which tests/core/face/test_documented_commands.py runs",
    (
        "docs/index.md",
        "step 9",
    ): "tests/system/examples/test_quickstart.py compares it with what the example prints",
    (
        "docs/contributing.md",
        "megackpt.stores",
    ): "tests/core/storage/test_stores.py registers a store in this way",
    (
        "docs/huggingface.md",
        "megackpt.maps",
    ): "tests/core/views/test_mapped_loads.py registers a map in this way",
}
"""Blocks without code, or with code of another language."""


def is_covered(page: str, blocks: list[Block], position: int) -> bool:
    """Whether a block is run, or compared with an output, by the test that its kind belongs to."""
    block = blocks[position]
    if block.kind in {"python", *SHELL}:
        return True
    return block.kind == "text" and position > 0 and blocks[position - 1].kind == "python" and not block.lead


def test_every_block_is_run_or_listed_once() -> None:
    listed = [*RUN_ELSEWHERE, *NOT_RUN, *NO_CODE]
    assert len(listed) == len(set(listed))
    unlisted, seen = [], []
    for path in DOCUMENTS:
        page, blocks = str(path.relative_to(ROOT)), blocks_of(path.read_text())
        for position, block in enumerate(blocks):
            if is_covered(page, blocks, position):
                continue
            names = [entry for entry in listed if entry[0] == page and entry[1] in block.code]
            seen += names
            if not names:
                unlisted.append(f"{page}:{block.line}: {block.first_line}")
    assert unlisted == []
    assert sorted(set(listed) - set(seen)) == []  # no entry without its block


_INDENTED = re.compile(r"(?:^    .*\n)+", re.MULTILINE)


def is_program(text: str) -> bool:
    """Whether a text is Python that calls something."""
    try:
        nodes = list(ast.walk(ast.parse(textwrap.dedent(text))))
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Call) for node in nodes)


def test_code_stands_in_fences() -> None:
    """Indented code would escape the test above."""
    pages = {path: FENCE.sub("", path.read_text()) for path in DOCUMENTS}
    indented = [f"{path}: {m[0]}" for path, text in pages.items() for m in _INDENTED.finditer(text)]
    assert [text for text in indented if is_program(text.partition(": ")[2])] == []


def names_of_megackpt(code: str) -> set[str]:
    """Return the names that a block imports from megackpt, and the attributes of its modules that it uses."""
    nodes = list(ast.walk(ast.parse(code)))
    imports = [n for n in nodes if isinstance(n, ast.ImportFrom)]
    names = {a.name for n in imports if (n.module or "").partition(".")[0] == "megackpt" for a in n.names}
    modules = {"te_checkpoints", "fused_adam", "megatron"}
    owners = [n for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    return names | {n.attr for n in owners if ast.unparse(n.value) in modules}


@pytest.mark.parametrize(("page", "text"), RUN_ELSEWHERE)
def test_what_runs_elsewhere_is_used_there(page: str, text: str) -> None:
    sources = "".join((ROOT / path).read_text() for path in RUN_ELSEWHERE[page, text])
    (block,) = (b for b in blocks_of((ROOT / page).read_text()) if b.kind == "py" and text in b.code)
    assert [name for name in names_of_megackpt(block.code) if name not in sources] == []


QUOTING = ["operating"]
OF_OTHERS = {
    "No space left on device (ENOSPC)",  # of the operating system
    "not enough values to unpack",  # of Python
}
_CODE = re.compile(r"`([^`\n]+)`")
_VARIABLE = re.compile(r"\.\.\.|\[[^\]]*\]|'[^']*'|\b\d[\d,]*\b|\bsaved\b|\ba rank\b|rank\(s\)")
"""Parts of a quotation that the code fills in; it says "requested" for "saved" of a load."""


def source_of_package() -> str:
    """Return the source of megackpt, with strings that go on in the next line joined."""
    texts = (path.read_text() for path in Path(megackpt.__file__).parent.rglob("*.py"))
    return "\n".join(re.sub(r'"\n\s+f?"', "", text) for text in texts)


def quotations(page: str) -> list[str]:
    """Return the texts in backticks that are sentences, or parts of one, and neither code nor commands."""
    text = FENCE.sub("", (ROOT / "docs" / f"{page}.md").read_text())
    codes = [code for code in _CODE.findall(text) if len(code.split()) >= 3]
    return [code for code in codes if not re.match(r"(megackpt|python|pip|pytest) |.*[=(]", code)]


@pytest.fixture(scope="module")
def sources() -> str:
    return source_of_package()


@pytest.mark.parametrize("page", QUOTING)
def test_quoted_errors_are_those_of_the_code(page: str, sources: str) -> None:
    for quotation in quotations(page):
        parts = [part.strip() for part in _VARIABLE.split(quotation)]
        missing = [part for part in parts if len(part) > 3 and part not in sources]
        assert not missing or quotation in OF_OTHERS, f"no error of megackpt has {missing}"


def test_the_pages_quote_errors() -> None:
    assert sum(len(quotations(page)) for page in QUOTING) >= 8


def test_the_largest_numbers_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "status.md").read_text().partition("## Limits")[2].partition("## Versions")[0]
    rows = dict(re.findall(r"^\| (.+?) \| ([\d^,]+) \|$", text, re.MULTILINE))
    numbers = [eval(number.replace("^", "**").replace(",", "")) for number in rows.values()]
    assert numbers == [MAX_NUMEL, MAX_DEPTH, _MAX_STEP, _MAX_QUEUED, MAX_CHUNKS]


DOCS = Path(__file__).parents[3] / "docs"


def undocumented(names: list[str], *pages: Path) -> list[str]:
    words = {word for page in pages for word in re.findall(r"[\w-]+", page.read_text())}
    return [name for name in names if name not in words]


@pytest.mark.parametrize("name", PAGES)
def test_pages_made_from_the_code_are_what_the_code_makes(name: str) -> None:
    assert (DOCS / name).read_text() == PAGES[name](), "run: python -m tests.support.docs"


def test_no_class_of_options_is_missing_there() -> None:
    kinds = {kind for kind in vars(options).values() if isinstance(kind, type) and is_dataclass(kind)}
    assert kinds - CLASSES.keys() == set()


def test_every_argument_of_a_checkpointer_is_on_its_page() -> None:
    names = list(inspect.signature(Checkpointer).parameters)
    assert undocumented(names, DOCS / "checkpointer.md") == []


@pytest.mark.parametrize("name", ["CheckpointConfig", *COMMANDS])
def test_every_flag_and_every_knob_is_named_in_the_documents(name: str) -> None:
    names = [field.name for field in fields(CheckpointConfig)]
    if name in COMMANDS:
        command: click.Command = importlib.import_module(f"megackpt.cli.{name}").command
        names = [param.opts[0] for param in command.params if isinstance(param, click.Option)]
        names += FLAGS_OF_ALL
    assert undocumented(names, *DOCS.glob("*.md")) == []


def test_every_image_is_shown_and_has_a_command_and_diagrams_are_drawn_by_today_s() -> None:
    diagrams = runpy.run_path(str(DOCS / "site" / "pictures.py"))["drawn"]()
    for name, svg in diagrams.items():
        assert (DOCS / "images" / name).read_text() == svg, "run: python docs/site/pictures.py"
    listed = (DOCS / "contributing.md").read_text()
    shown = "".join(path.read_text() for path in DOCUMENTS)
    for image in (DOCS / "images").iterdir():
        assert f"`{image.name}`" in listed
        assert f"images/{image.name})" in shown
