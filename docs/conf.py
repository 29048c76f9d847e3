"""Settings of the documentation: pages in Markdown, the reference out of the docstrings."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version as installed_version

from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

project = "Weft"
author = "The Weft authors"
copyright = "The Weft authors"
release = installed_version("torchweft")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3  # so that a page can link to a section of another

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "Weft"
html_static_path = ["_static"]
html_css_files = ["output.css"]


def setup(app: Sphinx) -> None:
    """Has documentation made without overloads."""
    ModuleAnalyzer.analyze = analyze_without_overloads


def analyze_without_overloads(
    analyzer: ModuleAnalyzer, analyze: Callable[[ModuleAnalyzer], None] = ModuleAnalyzer.analyze
) -> None:
    """Has each function shown once: the overloads of a call are for type checkers."""
    analyze(analyzer)
    analyzer.overloads = {}
