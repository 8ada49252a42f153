"""Fails the build if a link of the site leads nowhere, or if a page needs a file of another host.

Readers without a network see the whole site. A link to another host is for readers to click.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

_ADDRESS = re.compile(r"""(?<=["'`(])(?:https?:)?//[\w.-]+\.[a-z]{2,}[^"'`)\s]*""")
_IMPORT = re.compile(r"""(?:url\(|@import)\s*["']?(?:https?:)?//[^"')\s]*""")

WHAT_SCRIPTS_WOULD_LOAD = {
    "https://unpkg.com/mermaid": 'class="mermaid"',
    "https://unpkg.com/resize-observer-polyfill": None,  # browsers before 2020
    "https://api.github.com/": 'data-md-component="source"',
    "https://api.gitlab.com/": 'data-md-component="source"',
}
"""Addresses in Material's scripts, and what a page has that makes the scripts load them."""


class PageParser(HTMLParser):
    """Collects the links of a page, the files that it loads, and the ids that links can lead to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.loaded: set[str] = set()
        self.ids: set[str] = {""}
        self.text = page.read_text()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take an element's id and link."""
        values = {name: value for name, value in attrs if value}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        links = {values[name] for name in ("href", "src") if name in values}
        self.links |= links
        if tag != "a" and values.get("rel") != "canonical":
            self.loaded |= links | ({values["srcset"]} if "srcset" in values else set())


def on_post_build(config: MkDocsConfig) -> None:
    """Check all links within the site; those of the page 404 are absolute, and are not."""
    site = Path(config.site_dir).resolve()
    pages = {path: PageParser(path) for path in site.rglob("*.html") if path.name != "404.html"}
    dead = [
        f"{path.relative_to(site)} links to {link}"
        for path, page in pages.items()
        for link in sorted(page.links)
        if not leads_somewhere(link, path, pages)
    ]
    faults = dead + loaded_from_other_hosts(site, pages)
    if faults:
        raise PluginError("\n".join(faults))


def loaded_from_other_hosts(site: Path, pages: dict[Path, PageParser]) -> list[str]:
    """Return what pages, styles and scripts of the site load from other hosts."""
    faults = [
        f"{path.relative_to(site)} loads {address}"
        for path, page in pages.items()
        for address in sorted(page.loaded)
        if urlsplit(address).netloc
    ]
    faults += [
        f"{path.relative_to(site)} loads {address}"
        for path in [*site.rglob("*.css"), *pages]
        for address in _IMPORT.findall(path.read_text())
    ]
    names = set(re.findall(r"[\w.-]+\.js", "".join(page.text for page in pages.values())))
    for path in (path for path in site.rglob("*.js") if path.name in names):
        for address in _ADDRESS.findall(path.read_text()):
            known = [start for start in WHAT_SCRIPTS_WOULD_LOAD if address.startswith(start)]
            if not known:
                faults.append(f"{path.relative_to(site)} has {address}: is it loaded?")
                continue
            cause = WHAT_SCRIPTS_WOULD_LOAD[known[0]]
            faults += [
                f"{page.relative_to(site)} makes {path.name} load {address}"
                for page, parsed in pages.items()
                if cause is not None and cause in parsed.text
            ]
    return faults


def leads_somewhere(link: str, page: Path, pages: dict[Path, PageParser]) -> bool:
    """Whether a link of a page leads to a file of the site and to an id in it; other sites are not asked."""
    url = urlsplit(link)
    if url.scheme or url.netloc:
        return True
    target = (page.parent / unquote(url.path)).resolve() if url.path else page
    if target.is_dir():
        target /= "index.html"
    # Material adds ids that begin with two underscores by its scripts.
    is_id = target not in pages or url.fragment.startswith("__") or unquote(url.fragment) in pages[target].ids
    return target.exists() and is_id
