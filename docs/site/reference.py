"""Makes the pages of the API reference while mkdocs builds the site: one for each task.

A public name is on the page of the module that defines it; `PAGES` says which modules a page has. Public are
the names that `megackpt` and `megackpt.training.parallel` export, those that names.md lists by module, the
`__all__` of other packages, and modules without `__all__` as a whole. A build fails if a module has no page
or two, if a name has no entry or two, and if a page is too large to read.
mkdocstrings reads docstrings and signatures from the source; nothing is imported.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
LARGEST_PAGE = 400_000
"""Characters of a page's HTML, with the source of each function."""


@dataclass(frozen=True)
class TaskPage:
    """A page of the reference: its title, a sentence, and the modules whose public names it has."""

    title: str
    about: str
    modules: tuple[str, ...]


DIVIDED = ("megackpt", "megackpt.training.parallel")
"""Packages whose names are on the pages of the modules that define them."""

PARALLEL = "megackpt.training.parallel"
PAGES = {
    "save-and-load": TaskPage(
        "Save and load",
        "Functions that save and load a state dict, with their options and reports.",
        (
            "megackpt.run.collective",
            "megackpt.run.check",
            "megackpt.run.local",
            "megackpt.run",
            "megackpt.options",
            "megackpt.plans.validation",
        ),
    ),
    "checkpointer": TaskPage(
        "Checkpointer", "Numbered steps under one root.", ("megackpt.run.checkpointer",)
    ),
    "errors": TaskPage("Errors", "All error classes.", ("megackpt.errors",)),
    "entities": TaskPage(
        "Entities and values",
        "Leaves of a state dict that declare their sharding, and values that need a codec.",
        ("megackpt.entities", "megackpt.codec.registration", "megackpt.codec"),
    ),
    "modules": TaskPage(
        "Modules of your own",
        "A module declares its parameters; marks, collectives and modules of other libraries.",
        (
            f"{PARALLEL}.mixin",
            f"{PARALLEL}.tp_sharding",
            f"{PARALLEL}.attributes",
            f"{PARALLEL}.collectives",
            f"{PARALLEL}.foreign_modules",
        ),
    ),
    "ranks": TaskPage(
        "Ranks and pipelines",
        "Layouts of ranks, their groups, stages, schedules and random streams.",
        (
            f"{PARALLEL}.layout",
            f"{PARALLEL}.groups",
            f"{PARALLEL}.stages",
            f"{PARALLEL}.pipeline",
            f"{PARALLEL}.schedule",
            f"{PARALLEL}.rng",
        ),
    ),
    "layers": TaskPage(
        "Layers",
        "Linear layers, embeddings, norms and stacks that declare their sharding.",
        (
            f"{PARALLEL}.linear",
            f"{PARALLEL}.embedding",
            f"{PARALLEL}.norm",
            f"{PARALLEL}.stack",
            f"{PARALLEL}.mtp",
        ),
    ),
    "attention": TaskPage(
        "Attention and recurrences",
        "Attention over context parallelism, Mamba, and the gated delta net.",
        (
            f"{PARALLEL}.attention",
            f"{PARALLEL}.context",
            f"{PARALLEL}.mamba",
            f"{PARALLEL}.delta_net",
            f"{PARALLEL}.causal_conv",
        ),
    ),
    "experts": TaskPage(
        "Experts",
        "Mixtures of experts and their routers.",
        (f"{PARALLEL}.moe", f"{PARALLEL}.experts", f"{PARALLEL}.router", f"{PARALLEL}.routing"),
    ),
    "adapters": TaskPage(
        "Adapters",
        "LoRA and DoRA.",
        (f"{PARALLEL}.adapters", f"{PARALLEL}.lora"),
    ),
    "geometry": TaskPage("Boxes and ranges", "Arithmetic of arrays' parts.", ("megackpt.plans.geometry",)),
    "optimizers": TaskPage("Optimizers", "They declare their state.", ("megackpt.training.optim",)),
    "training-state": TaskPage(
        "Training state",
        "Random streams, data position, schedule, your objects.",
        ("megackpt.training.state",),
    ),
    "whole-checkpoints": TaskPage(
        "Inspect, verify, repair",
        "Functions on whole checkpoints, for one process, and what they return.",
        (
            "megackpt.whole.inspect",
            "megackpt.whole.verify",
            "megackpt.whole.diff",
            "megackpt.whole.repair",
            "megackpt.whole",
        ),
    ),
    "storage": TaskPage("Storage", "Directories, object stores, your stores.", ("megackpt.storage",)),
    "convert": TaskPage(
        "Convert, import, export",
        "Copies of a checkpoint in other formats.",
        ("megackpt.whole.convert", "megackpt.whole.export_huggingface", "megackpt.whole.import_huggingface"),
    ),
    "maps": TaskPage("Maps", "Maps between families of names.", ("megackpt.maps",)),
    "megatron": TaskPage(
        "Megatron-Core, Megatron-LM",
        "Megatron-Core's `dist_checkpointing`, by `install()` or by a strategy; Megatron-Bridge.",
        (
            "megackpt.contrib.megatron",
            "megackpt.contrib.megatron.config",
            "megackpt.contrib.megatron_lm",
            "megackpt.contrib.megatron_strategy",
            "megackpt.contrib.megatron_bridge",
        ),
    ),
    "dcp": TaskPage(
        "PyTorch: DCP, torchtitan, XLA",
        "Planners, readers, writers and managers.",
        ("megackpt.contrib.dcp", "megackpt.contrib.torchtitan", "megackpt.contrib.xla"),
    ),
    "huggingface": TaskPage(
        "Trainer, accelerate, peft",
        "Hugging Face's libraries.",
        ("megackpt.contrib.transformers", "megackpt.contrib.accelerate", "megackpt.contrib.peft"),
    ),
    "frameworks": TaskPage(
        "Lightning, Ray, CPU offload",
        "Trainers of others, and optimizers whose state is on the CPU.",
        ("megackpt.contrib.lightning", "megackpt.contrib.ray", "megackpt.contrib.offload"),
    ),
    "kernels": TaskPage(
        "Transformer Engine, Apex",
        "NVIDIA's layers and optimizers.",
        ("megackpt.contrib.transformer_engine", "megackpt.contrib.apex"),
    ),
    "testing": TaskPage(
        "Worlds and suites",
        "Simulated and real ranks, and the tests that a format or a store has to pass.",
        (
            "megackpt.testing.world",
            "megackpt.testing.ranks",
            "megackpt.testing.format_suite",
            "megackpt.testing.store_suite",
        ),
    ),
}
"""The pages by their addresses below reference/, as mkdocs.yml lists them."""

PLACES = {"megackpt.maps.family": "megackpt.maps.family.family"}
"""Functions that have the name of their module, which mkdocstrings would take for the module."""


@cache
def public_names() -> dict[str, str]:
    """Return the public names and, for each, the module that decides on its page."""
    names = {}
    for package in DIVIDED:
        names |= {f"{package}.{name}": module for name, module in exports_of(package).items()}
        for module, listed in names_in_modules(package).items():
            names |= {f"{module}.{name}": module for name in listed}
    for module in {module for page in PAGES.values() for module in page.modules} - set(names.values()):
        names |= {f"{module}.{name}": module for name in all_of(module)} or {module: module}
    return names


def exports_of(package: str) -> dict[str, str]:
    """Return the names of a package's `__all__`, and the modules that it imports them from."""
    body = syntax_of(package).body
    if package == "megackpt":  # it imports names when they are used; type checkers see these imports
        body = next(node for node in body if isinstance(node, ast.If)).body
        names = None
    else:
        names = all_of(package)
    imports = [node for node in body if isinstance(node, ast.ImportFrom) and node.module]
    found = {alias.name: str(node.module) for node in imports for alias in node.names}
    return found if names is None else {name: found[name] for name in names}


def all_of(module: str) -> list[str]:
    """Return the `__all__` of a module from its source; an empty list if it has none."""
    for node in syntax_of(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    return []


def syntax_of(module: str) -> ast.Module:
    """Return the syntax tree of a module or package."""
    path = ROOT / module.replace(".", "/")
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def names_in_modules(part: str) -> dict[str, list[str]]:
    """Return the names that names.md lists under a part, by the module that they are imported from."""
    _, _, section = (ROOT / "docs" / "names.md").read_text().partition(f"\n## {part}\n")
    rows = re.findall(r"^\| `([\w.]+)` \| .*? \| (.*) \|$", section.partition("\n## ")[0], re.MULTILINE)
    return {module: re.findall(r"`(\w+)`", names) for module, names in rows}


def entries_of(page: TaskPage) -> dict[str, list[str]]:
    """Return the public names of a page, by the module that a user imports them from."""
    entries = defaultdict(list)
    for module in page.modules:
        for name, decides in public_names().items():
            if decides == module:
                entries[name if name == module else name.rpartition(".")[0]].append(name)
    return entries


def markdown_of(page: TaskPage) -> str:
    """Return the Markdown of a page, with a directive of mkdocstrings for each name."""
    lines = [f"# {page.title}\n", f"{page.about}\n"]
    for module, names in entries_of(page).items():
        lines.append(f"## From `{module}`\n")
        lines += [_entry(name, is_module=name == module) for name in names]
    return "\n".join(lines)


def _entry(name: str, *, is_module: bool) -> str:
    options = "heading_level: 3"
    if is_module:  # its heading is there already
        options = "heading_level: 2, show_root_heading: false, show_root_toc_entry: false"
    elif name == "megackpt.contrib.megatron.dist_checkpointing":  # names of Megatron-Core, which it documents
        options += ", members: false"
    return f"::: {PLACES.get(name, name)}\n    options: {{{options}}}\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, as mkdocs asks for after it has listed the files of docs/."""
    pages_of = Counter(module for page in PAGES.values() for module in page.modules)
    decide = set(public_names().values())
    if decide != set(pages_of) or max(pages_of.values()) > 1:
        faults = (decide ^ set(pages_of)) | {module for module, count in pages_of.items() if count > 1}
        raise PluginError(f"docs/site/reference.py: no public name, no page or two for {sorted(faults)}")
    for address, page in PAGES.items():
        files.append(File.generated(config, f"reference/{address}.md", content=markdown_of(page)))
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fail if a public name has no entry on its page or two, or if the page is too large."""
    address = page.file.src_uri.removeprefix("reference/").removesuffix(".md")
    if page.file.src_uri != f"reference/{address}.md":
        return html
    if len(html) > LARGEST_PAGE:
        raise PluginError(
            f"{page.file.src_uri} has {len(html)} characters: divide it in docs/site/reference.py"
        )
    headings = Counter(re.findall(r'<h\d id="([\w.]+)" class="doc doc-heading"', html))
    expected = {
        PLACES.get(name, name)
        for module, names in entries_of(PAGES[address]).items()
        for name in names
        if name != module
    }
    faults = [name for name in sorted(expected | set(headings)) if headings[name] != 1]
    if faults:
        raise PluginError(f"{page.file.src_uri} has no entry or two for {', '.join(faults)}")
    return html
