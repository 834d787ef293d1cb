"""Settings of Sphinx; stage.py copies the pages next to this file."""

import loadstone

project = "loadstone"
copyright = "the loadstone authors, Apache-2.0"
release = loadstone.__version__
html_theme = "furo"
html_title = f"loadstone {release}"
extensions = [
    "breathe",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["xml"]
suppress_warnings = ["duplicate_declaration.cpp"]  # every header declares the namespace
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
breathe_projects = {"loadstone": "xml"}
breathe_default_project = "loadstone"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
html_copy_source = False
html_show_sourcelink = False
