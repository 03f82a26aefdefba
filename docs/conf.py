"""Configuration of Sphinx; run it by ``make docs``."""

from importlib.metadata import version as _version

project = "tfd_notebook"
author = "the tfd_notebook contributors"
copyright = author
release = version = _version("tfd-notebook")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"tfd_notebook {release}"

# The notebooks are shown as they were saved: their outputs are checked by the tests.
nb_execution_mode = "off"
myst_heading_anchors = 3

autodoc_typehints = "none"
autodoc_member_order = "bysource"
napoleon_google_docstring = False
