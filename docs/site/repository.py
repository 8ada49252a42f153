"""Shows files that pages link to as pages of the site: notebooks, examples, the list of changes.

In the repository such a link leads out of docs/ to the file itself; on the site to `repository/FILE`.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
FOLDER = "repository/"
"""The folder of these pages on the site."""
_LINK = re.compile(r"\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file that a page of docs/ or a notebook links to."""
    for path in linked_paths():
        files.append(File.generated(config, site_path(path), content=markdown_of(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links to files outside of docs/ lead to their pages on the site."""
    uri = page.file.src_uri
    if uri.startswith("reference/"):
        return markdown
    folder = posixpath.dirname(repository_path(uri))

    def relinked(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        if not (ROOT / target).exists() or (target.startswith("docs/") and not uri.startswith(FOLDER)):
            return link[0]
        return f"]({posixpath.relpath(site_path(target), posixpath.dirname(uri) or '.')}{link[2] or ''})"

    return _LINK.sub(relinked, markdown)


def linked_paths() -> list[str]:
    """Return files and folders outside of docs/ that pages and notebooks link to, and the folders' files."""
    sources = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples" / "notebooks").glob("*.ipynb")]
    paths = set()
    for source in sources:
        for link, _ in _LINK.findall(source.read_text()):
            path = Path(os.path.normpath(source.parent / link))
            if path.exists() and path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "docs"):
                paths |= {path, *(path.glob("*.py") if path.is_dir() else ())}
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def site_path(path: str) -> str:
    """Return the name of the page of a file, below docs/ for the build."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{FOLDER}{path}.md"


def repository_path(uri: str) -> str:
    """Return the file in the repository that a page of the site shows."""
    return uri.removeprefix(FOLDER).removesuffix(".md") if uri.startswith(FOLDER) else f"docs/{uri}"


def markdown_of(path: str) -> str:
    """Return the text of the page of a file or folder."""
    file = ROOT / path
    if file.is_dir():
        return "\n".join(
            [f"# {path}\n", *(f"* [{p.name}]({file.name}/{p.name})" for p in sorted(file.glob("*.py")))]
        )
    text = file.read_text()
    if file.suffix == ".ipynb":
        return notebook_markdown(json.loads(text), path)
    return text if file.suffix == ".md" else f"# {path}\n\n````{file.suffix[1:]}\n{text}````\n"


def notebook_markdown(notebook: dict[str, Any], path: str) -> str:
    """Return a notebook as text: cells of code as blocks, each before the output that it has in the file."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        output = "".join(output_text(output) for output in cell["outputs"])
        if output:
            parts.append(f"```text\n{_COLOURS.sub('', output).rstrip()}\n```")
    parts.insert(1, f"To run it, open `{path}` of the repository in Jupyter.")
    return "\n\n".join(parts)


def output_text(output: dict[str, Any]) -> str:
    """Return what an output of a cell shows as text."""
    return "".join(output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"])
