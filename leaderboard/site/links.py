"""Paths of the pages of a site, relative to its root, which stay the same when records are added.

Names come from records, thus from strangers: a path holds none of their characters but letters, digits, hyphens and
underscores.
"""

import hashlib
import re

FRONT, METHODS, PITFALLS = "index.html", "methods/index.html", "pitfalls/index.html"

LONGEST = 60
"""Characters of a slug, so that no path is too long for a file system."""

DIGITS = 16
"""Hexadecimal digits of the digest in a slug: 64 bits, so that nobody can search for a name of an equal slug."""

_RESERVED = re.compile(r"con|prn|aux|nul|com\d|lpt\d")
"""Names that Windows keeps for devices, so that no folder can have them."""


def slug(name: str) -> str:
    """Returns a name as one part of a path; a name that has to be changed for it gets the start of its digest.

    Args:
        name: of a suite, a defense or an attack.
    """
    plain = re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-")[:LONGEST]
    # A name that ends like a digest gets one too, so that nobody can take the page of another name.
    if plain == name and not re.search(rf"-[0-9a-f]{{{DIGITS}}}$", name) and not _RESERVED.fullmatch(name):
        return plain
    # Names may hold what UTF-8 cannot encode.
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()
    return f"{plain or 'name'}-{digest[:DIGITS]}"


def suite_page(name: str) -> str:
    """Returns the path of the page of a suite."""
    return f"suites/{slug(name)}/index.html"


def defense_page(name: str) -> str:
    """Returns the path of the page of a defense."""
    return f"defenses/{slug(name)}/index.html"


def attack_page(name: str) -> str:
    """Returns the path of the page of an attack."""
    return f"attacks/{slug(name)}/index.html"


def row_page(identifier: str) -> str:
    """Returns the path of the page of a row, by its id (`board.identity.row_id`)."""
    return f"rows/{identifier}/index.html"


def submission_page(handle: str, digest: str) -> str:
    """Returns the path of the page of a submission."""
    return f"submissions/{slug(handle)}/{slug(digest)}/index.html"


def root_of(path: str) -> str:
    """Returns the prefix of links from a page to the root of the site: "" for the front page, "../../" for a row."""
    return "../" * path.count("/")
