"""The site: `make docs` writes it to build/site, without a network; warnings are errors."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE.parent), str(HERE / "_ext")]

import pumice  # noqa: E402

project, author, copyright = "Pumice", "The Pumice authors", "the Pumice authors"
version = release = pumice.__version__
extensions = [
    "docstrings",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["gallery/README.rst"]
smartquotes = False  # "same" is a value

html_theme = "furo"
html_title = f"Pumice {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_inherit_docstrings = False  # torch.nn.Module has its own
maximum_signature_line_length = 80
python_use_unqualified_type_names = True

sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "pictures",
    "filename_pattern": "/",
    "copyfile_regex": r".*\.rst",
    "download_all_examples": False,
    "show_memory": False,
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "write_computation_times": False,
    "plot_gallery": True,
}
