"""What is read from a page of pumice.cli.page."""

import json
import re
from html.parser import HTMLParser

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


class Elements(HTMLParser):
    """Tags with their attributes, every one that needs an end closed."""

    VOID = frozenset({"meta", "link", "br", "input"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.open = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def data_of(text):
    """The input of the page's script."""
    return json.loads(
        re.search(r'<script type="application/json" id="report-data">(.*?)</script>', text, re.S).group(1)
    )


def loads_nothing(text):
    """Fail if the page, without plotly, asks for anything that is not in it."""
    for tag, attrs in Elements(text).tags:
        assert not attrs.get("src"), (tag, attrs)
        assert tag != "link" or attrs["href"].startswith("data:")
        assert tag not in ("a", "iframe", "object", "embed", "base")
    # The policy forbids what plotly itself might ask for: only inline code, no connection at all.
    assert "default-src 'none'" in text
    own = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?://|@import|\bfetch\(|XMLHttpRequest|url\(", own)
