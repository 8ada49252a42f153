"""Fails the build if a link of the built site leads to no page, no file or no heading of the site."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError


class PageParser(HTMLParser):
    """Collects the links of a page, and the ids that links can lead to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.ids: set[str] = {""}
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take an element's id and link."""
        values = {name: value for name, value in attrs if value}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        self.links |= {values[name] for name in ("href", "src") if name in values}


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
    if dead:
        raise PluginError("\n".join(dead))


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
