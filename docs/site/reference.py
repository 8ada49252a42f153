"""Makes the pages of the API reference while mkdocs builds the site: one for each public part of megackpt.

The names are those of each part's `__all__`, and those that names.md lists under the part, by the modules
that they are imported from. A build in which one of them has no entry fails.
mkdocstrings reads docstrings and signatures from the source; nothing is imported.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]

PARTS = {
    "megackpt": "Save, load, checkpointer, options, reports, errors, maintenance.",
    "megackpt.training.parallel": "Layers that declare their sharding.",
    "megackpt.training.optim": "Optimizers that declare their state.",
    "megackpt.training.state": "Random streams, data position, schedule, objects of your own.",
    "megackpt.maps": "Maps between families of names.",
    "megackpt.plans.geometry": "Boxes, splits and flat ranges of arrays.",
    "megackpt.storage": "Where the bytes are: directories, object stores, stores of your own.",
    "megackpt.contrib.apex": "Optimizers of NVIDIA Apex.",
    "megackpt.contrib.dcp": "Writers, readers and planners for torch.distributed.checkpoint.",
    "megackpt.contrib.transformer_engine": "Modules of Transformer Engine.",
    "megackpt.contrib.megatron": "The module paths of Megatron-Core's dist_checkpointing.",
}
MODULES = {
    "megackpt.contrib.megatron_lm": "Megatron-LM's local checkpoints in tiers.",
    "megackpt.contrib.megatron_strategy": "A save strategy for Megatron-Core without `install()`.",
    "megackpt.contrib.megatron_bridge": "A checkpoint manager for Megatron-Bridge.",
    "megackpt.contrib.accelerate": "State of Hugging Face accelerate.",
    "megackpt.contrib.lightning": "Strategies and a CheckpointIO for Lightning.",
    "megackpt.contrib.offload": "Optimizers whose state is on the CPU.",
    "megackpt.contrib.peft": "Adapter folders of Hugging Face's peft.",
    "megackpt.contrib.ray": "Ray Train without uploads.",
    "megackpt.contrib.torchtitan": "A checkpoint manager for torchtitan.",
    "megackpt.contrib.transformers": "A mixin for Hugging Face's Trainer.",
    "megackpt.contrib.xla": "Planners for torch_xla.",
    "megackpt.testing.world": "A simulated world: many ranks in one process.",
    "megackpt.testing.ranks": "Real worker ranks for tests.",
    "megackpt.testing.format_suite": "The tests that a format has to pass.",
    "megackpt.testing.store_suite": "The tests that a store has to pass.",
}
"""Modules without `__all__`: what they define in public is documented as a whole."""


def public_names(part: str) -> list[str]:
    """Return the names of a package's `__all__`, from its source."""
    tree = ast.parse((ROOT / part.replace(".", "/") / "__init__.py").read_text())
    if part == "megackpt":  # its list is made of a table; type checkers see the same names imported
        return sorted(_names_for_type_checkers(tree))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return sorted(ast.literal_eval(node.value))
    raise ValueError(f"{part} has no __all__")


def _names_for_type_checkers(tree: ast.Module) -> list[str]:
    block = next(node for node in tree.body if isinstance(node, ast.If))
    return [alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]


def names_in_modules(part: str) -> dict[str, list[str]]:
    """Return the names that names.md lists under a part, by the module that they are imported from."""
    _, _, section = (ROOT / "docs" / "names.md").read_text().partition(f"\n## {part}\n")
    rows = re.findall(r"^\| `([\w.]+)` \| .*? \| (.*) \|$", section.partition("\n## ")[0], re.MULTILINE)
    return {module: re.findall(r"`(\w+)`", names) for module, names in rows}


def page_of(part: str, about: str) -> str:
    """Return the Markdown of a part's page, with a directive of mkdocstrings for each name."""
    if part in MODULES:
        return f"# {part}\n\n{about}\n\n::: {part}\n"
    lines = [f"# {part}\n", f"{about}\n", *(_entry(f"{part}.{name}") for name in public_names(part))]
    for module, names in names_in_modules(part).items():
        entries = [_entry(f"{module}.{name}", heading_level=3) for name in names]
        lines += [f"## Of `{module}`\n", *entries]
    return "\n".join(lines)


def _entry(name: str, *, heading_level: int = 2) -> str:
    return f"::: {name}\n    options:\n      heading_level: {heading_level}\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, as mkdocs asks for after it has listed the files of docs/."""
    for part, about in {**PARTS, **MODULES}.items():
        files.append(File.generated(config, f"reference/{part}.md", content=page_of(part, about)))
    return files


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fail if a public name has no entry on the page of its part."""
    part = page.file.src_uri.removeprefix("reference/").removesuffix(".md")
    if part in PARTS:
        names = [f"{part}.{name}" for name in public_names(part)]
        names += [f"{module}.{name}" for module, of in names_in_modules(part).items() for name in of]
        missing = [name for name in names if f'id="{name}"' not in html]
        if missing:
            raise PluginError(f"{page.file.src_uri} has no entry for {', '.join(missing)}")
    return html
