"""Draws the diagrams of concepts.md as docs/images/*.svg: `python docs/site/pictures.py`.

On the site the diagrams are part of the page, so that their text has the page's colour and can be searched.
Elsewhere they are images, with the colours of the reader's system.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # who draws the diagrams needs no mkdocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

IMAGES = Path(__file__).parents[1] / "images"
WIDTH = 520
LINE = 18
_STYLE = "<style>svg { color: #222 } @media (prefers-color-scheme: dark) { svg { color: #ddd } }</style>"
_IMAGE = re.compile(r'<img alt="([^"]*)" src="[^"]*images/(\w+)\.svg" ?/?>')


@dataclass(frozen=True)
class Step:
    """A step of a save or a load: a lane, or the two between which something goes, and a text."""

    lanes: str
    text: str
    condition: str = ""


LANES = {"R": ("all ranks", 36, "#4a86c5"), "C": ("rank 0", 114, "#c77a2b"), "S": ("store", 170, "#3f9a66")}
SAVE = [
    Step("R", "flatten the state dict, describe entities as rows"),
    Step("RC", "all-reduce: digests of settings and common state, plans that are cached"),
    Step("R", "take the cached plan", "a plan fits all ranks"),
    Step("RC", "gather the declarations", "the structure is new"),
    Step("C", "prove coverage, plan: one writer for each chunk"),
    Step("CR", "scatter: each rank its rows"),
    Step("RS", "write one data file per rank, digests on the way, flush", "in both cases"),
    Step("RC", "gather the digests"),
    Step("CS", "write common state and index, flush"),
    Step("CS", "replace metadata.json: the commit"),
    Step("RC", "all-reduce: committed, or the error"),
]
LOAD = [
    Step("SR", "read metadata.json, common state and the head of the index"),
    Step("R", "flatten the request, compare it with what is stored"),
    Step("SR", "read the rows of the index that this rank needs"),
    Step("R", "plan: intersect requested boxes with stored ones, prove that nothing is missing"),
    Step("RC", "gather missing keys and errors: the same error on every rank"),
    Step("SR", "read whole digest blocks", "in a few threads, at most 4 MiB each"),
    Step("R", "check digests, copy into the tensors"),
    Step("R", "decode objects, merge factories, rebuild the state dict", "then"),
    Step("RC", "all-gather: done"),
]
LAYERS = [
    (
        "your model and optimizer",
        "megackpt.training.parallel, megackpt.training.optim, your layers",
        0,
        WIDTH,
    ),
    ("run", "save(state, path), load(state, path), Checkpointer", 0, WIDTH),
    ("engine", "runs a save or a load step by step", 0, WIDTH),
    ("entities, plans", "pure functions, proofs", 0, 206),
    ("formats, codec", "what the files look like", 216, 180),
    ("comm", "deadlines", 406, 114),
    ("storage", "where the files are", 216, 180),
]
ARROWS = [
    (260, 0, "sharded_state_dict()"),
    (260, 1, ""),
    (103, 2, ""),
    (306, 2, ""),
    (463, 2, ""),
    (306, 3, ""),
]
"""Arrows down from the middle of a box, by its row."""


def sequence(steps: list[Step], title: str) -> str:
    """Return a diagram with a lane for each who takes part, with the text of each step on their right."""
    shapes, y = [], 2 * LINE
    for step in steps:
        if step.condition:
            y += LINE // 3
            shapes.append(_text(204, y, f"{step.condition}:", 'font-style="italic" opacity="0.75"'))
            y += LINE + 2
        lines = wrap(step.text, 43)
        middle = y + (len(lines) - 1) * LINE // 2 - 5
        places = [LANES[lane][1] for lane in step.lanes]
        colour = LANES[step.lanes[0]][2]
        if len(places) == 1:
            shapes.append(f'<circle cx="{places[0]}" cy="{middle}" r="6" fill="{colour}"/>')
        else:
            shapes.append(_arrow(places[0], middle, places[1], middle, colour))
        shapes += [_text(204, y + number * LINE, line) for number, line in enumerate(lines)]
        y += len(lines) * LINE + 8
    lanes = []
    for name, x, colour in LANES.values():
        lanes.append(_text(x, 13, name, f'font-weight="bold" text-anchor="middle" style="fill:{colour}"'))
        lanes.append(f'<path d="M{x} 20V{y - LINE}" stroke="{colour}" opacity="0.5" stroke-width="1.5"/>')
    return _picture(lanes + shapes, y - LINE // 2, title)


def layers(title: str) -> str:
    """Return the diagram of layers, each box above those that it uses most."""
    height, gap = 48, 30
    rows = [0, 1, 2, 3, 3, 3, 4]
    shapes = []
    for (name, about, x, width), row in zip(LAYERS, rows, strict=True):
        y = row * (height + gap) + 1
        shapes.append(
            f'<rect x="{x + 1}" y="{y}" width="{width - 2}" height="{height}" rx="6" fill="#4a86c5" '
            f'fill-opacity="0.15" stroke="#4a86c5"/>'
        )
        shapes.append(_text(x + width // 2, y + 20, name, 'font-weight="bold" text-anchor="middle"'))
        shapes.append(_text(x + width // 2, y + 38, about, 'text-anchor="middle"'))
    for x, row, label in ARROWS:
        y = row * (height + gap) + height + 3
        shapes.append(_arrow(x, y, x, y + gap - 4, "currentColor"))
        shapes.append(_text(x + 10, y + 17, label))
    return _picture(shapes, 5 * height + 4 * gap + 2, title)


def _text(x: int, y: int, text: str, attributes: str = "") -> str:
    return f'<text x="{x}" y="{y}" {attributes}>{escape(text)}</text>' if text else ""


def _arrow(x: int, y: int, to_x: int, to_y: int, colour: str) -> str:
    """Return an arrow along one axis."""
    step_x, step_y = (to_x > x) - (to_x < x), (to_y > y) - (to_y < y)
    left = f"{to_x - 8 * step_x - 4 * step_y} {to_y - 8 * step_y - 4 * step_x}"
    right = f"{to_x - 8 * step_x + 4 * step_y} {to_y - 8 * step_y + 4 * step_x}"
    return (
        f'<path d="M{x} {y}L{to_x - 6 * step_x} {to_y - 6 * step_y}" stroke="{colour}" stroke-width="2"/>'
        f'<path d="M{to_x} {to_y}L{left}L{right}Z" fill="{colour}"/>'
    )


def _picture(shapes: list[str], height: int, title: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" class="picture" role="img" font-family="sans-serif" font-size="14" fill="none">'
    )
    texts = "<style>.picture text { fill: currentColor }</style>"
    return "\n".join(
        [head, f"<title>{escape(title)}</title>", _STYLE, texts, *filter(None, shapes), "</svg>\n"]
    )


def drawn() -> dict[str, str]:
    """Return all diagrams by their names."""
    return {
        "layers.svg": layers("The layers of megackpt; arrows lead to what a layer uses most"),
        "life_of_a_save.svg": sequence(SAVE, "The steps of a save, by who takes part"),
        "life_of_a_load.svg": sequence(LOAD, "The steps of a load, by who takes part"),
    }


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put diagrams into the page, without the colours that they have as images."""
    return _IMAGE.sub(lambda image: (IMAGES / f"{image[2]}.svg").read_text().replace(_STYLE, ""), html)


if __name__ == "__main__":
    for name, svg in drawn().items():
        (IMAGES / name).write_text(svg)
