"""The wheel: what is in it, and that it installs from a plain clone with pip alone."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {"cli", "compat", "coords", "data", "engine", "label", "language", "lower", "models", "nn", "ops", "runtime"}
ROOMS |= {"schedule"}
FILES = {"__init__.py", "__main__.py", "env.py", "errors.py", "testing.py", "py.typed"}
DATA = {"report.css", "report.html", "report.js"}
PIP = "-m", "pip", "--disable-pip-version-check", "--no-python-version-warning"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The files that git tracks, and no others, as `git clone` gives them."""
    folder = tmp_path_factory.mktemp("clone")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if names.returncode:
        pytest.skip("not a git checkout: what a clone holds is not known")
    for name in filter(None, names.stdout.split("\0")):
        if not name.startswith(("bench/", "docs/", "tests/")) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A new environment that finds this one's packages, pumice apart: pip installs nothing but pumice."""
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=False)
    found = folder / "bin" / "python"
    script = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = subprocess.run([found, "-c", script], capture_output=True, text=True, check=True).stdout.strip()
    Path(site, "packages.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return found


def run(*command, **more):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(clone, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, *PIP, "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation", "-w", out, clone)
    (found,) = out.glob("pumice-*.whl")
    return found


def test_the_wheel_holds_the_package_and_nothing_else(wheel, clone):
    names = {Path(name) for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {name.parts[0] for name in names} == {"pumice"}
    source = clone / "src" / "pumice"
    assert names == {
        Path("pumice") / path.relative_to(source)
        for path in source.rglob("*")
        if path.is_file() and (path.suffix == ".py" or path.name in DATA | FILES)
    }
    assert {name.parts[1] for name in names if len(name.parts) == 3} == ROOMS
    assert {name.parts[1] for name in names if len(name.parts) == 2} == FILES
    assert {name.name for name in names if name.suffix not in (".py", ".typed")} == DATA


def test_pip_installs_from_a_plain_clone(clone, python, tmp_path):
    command = [*PIP, "install", "-q", "--no-index", "--no-build-isolation", "--force-reinstall", "--no-deps"]
    run(python, *command, f"{clone}[cli]")
    # Every requirement is among this environment's packages: pip has nothing to add.
    run(python, *PIP, "install", "-q", "--no-index", "pumice", "pumice[cli]")
    script = (
        "import pumice, torch; x = pumice.testing.random_tensor(9, 4); print(pumice.nn.Conv3d(4, 4, 3)(x).feats.shape)"
    )
    assert "Size" in run(python, "-c", "import pumice.testing;" + script, cwd=tmp_path)
    assert "pumice" in run(python.parent / "pumice", "info", cwd=tmp_path)


def test_the_command_says_what_to_install_where_its_packages_are_missing(tmp_path):
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from pumice.cli import start; start()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1 and "pip install .[cli]" in done.stderr and "Traceback" not in done.stderr
