"""The site is built from docs: without warnings, with the pictures of its gallery."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pumice
from pumice import compat, coords, data, engine, errors, models, nn, ops

ROOT = Path(__file__).parents[1]
SHOWN = {
    "index.html": "Coming from another library",
    "tutorial.html": "voxelize",
    "api/nn.html": 'id="pumice.nn.Conv3d"',
    "api/pumice.html": 'id="pumice.voxelize"',
    "how/index.html": "flow.svg",
    "status.html": "geometric mean",
    "pictures/index.html": "sphx_glr_plot_street_thumb.png",
}


def test_the_site_is_built_without_warnings(tmp_path):
    pytest.importorskip("sphinx", reason="the site needs the extra `docs`")
    options = ["-W", "--keep-going", "--quiet", "-d", tmp_path / "trees"]
    ran = subprocess.run([sys.executable, "-m", "sphinx", *options, "docs", tmp_path / "site"], cwd=ROOT, text=True,
                         capture_output=True)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    for page, text in SHOWN.items():
        assert text in (tmp_path / "site" / page).read_text(encoding="utf-8"), page
    pages = [path for path in (tmp_path / "site").rglob("*.html") if "_static" not in path.parts]
    for module in (pumice, nn, ops, coords, engine, models, data, compat, errors):
        page = (tmp_path / "site" / "api" / f"{module.__name__.rpartition('.')[2]}.html").read_text(encoding="utf-8")
        lacking = [name for name in module.__all__ if not re.search(rf"\b{name}\b", page)]
        assert not lacking, f"the reference of {module.__name__} lacks {lacking}"
    asks = [path.name for path in pages if 'src="http' in path.read_text(encoding="utf-8")]
    assert not asks, f"pages that load from a network: {asks}"
