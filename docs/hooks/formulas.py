"""A hook of MkDocs: formulas become MathML when the site is built, so that pages need no script for them.

Arithmatex has marked the formulas `$…$` and `$$…$$` of a page.
"""

import html
import re

from latex2mathml.converter import convert

FORMULA = re.compile(r'(<(div|span) class="arithmatex">)(?:\\\[|\\\()(.*?)(?:\\\]|\\\))(</\2>)', re.DOTALL)
WRONG = re.compile(r"<mi>(\\\w+|&)</mi>")


def as_mathml(marker):
    """One formula. Raises ValueError for a command of TeX that latex2mathml does not know."""
    begin, tag, formula, end = marker.groups()
    made = convert(html.unescape(formula).strip(), display="block" if tag == "div" else "inline")
    if wrong := WRONG.search(made):
        raise ValueError(
            f"formula {formula.strip()!r}: got {wrong[1]!r}, expected TeX that latex2mathml knows."
        )
    return f"{begin}{made}{end}"


def on_page_content(content, **_):
    """The page as MkDocs calls it."""
    return FORMULA.sub(as_mathml, content)
