"""How Sphinx builds the documentation: ``make docs``. Nothing is fetched, and every warning is an error."""

from __future__ import annotations

from itertools import groupby

import click
from sphinx.application import Sphinx

from ringattn import __version__

project = "ringtune"
author = "the ringtune contributors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
myst_heading_anchors = 3  # links to a section of a page work here as they do on GitHub

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
smartquotes = False  # two hyphens begin an option
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"ringtune {version}"
html_copy_source = False
html_show_copyright = False


def examples_as_code(app: Sphinx, context: click.Context, lines: list[str]) -> None:
    """Show the examples in a command's help, which sphinx-click makes a line block of, as code."""
    text: list[str] = []
    for is_example, group in groupby(lines, lambda line: line.startswith("|")):
        if is_example:
            text += ["::", "", *("    " + line.removeprefix("|").strip() for line in group)]
        else:
            text += group
    lines[:] = text


def setup(app: Sphinx) -> None:
    app.connect("sphinx-click-process-description", examples_as_code)
