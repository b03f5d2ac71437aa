"""pumice info: it collects on any machine, says why not, and goes through JSON."""

import io
import json
import subprocess

import pytest
import torch
from rich.console import Console

from pumice.cli import info as module
from pumice.cli.info import Package, collect, render
from pumice.env import Settings
from pumice.errors import OptionError


def printed(info, width=100):
    out = io.StringIO()
    Console(file=out, width=width).print(render(info))
    return out.getvalue()


def by_name(checks):
    return {check.name: check for check in checks}


@pytest.fixture(scope="module")
def info():
    return collect()


def test_it_collects_and_goes_through_json(info):
    again = json.loads(json.dumps(info.as_dict()))
    assert again["versions"]["torch"] == torch.__version__
    assert set(again) == {"versions", "devices", "capabilities", "packages", "folders"}


def test_what_cannot_be_used_says_what_to_do(info):
    checks = (*info.devices, *info.capabilities, *info.packages, *info.folders)
    assert all(check.found for check in checks)
    assert all(check.advice for check in checks if not check.usable)


@pytest.mark.parametrize("width", [60, 100])
def test_it_renders(info, width):
    text = printed(info, width)
    for expected in ("Versions", "Devices", "cpu", "oneDNN", "Triton launcher", "PUMICE_DATA", torch.__version__):
        assert expected in text


def test_no_compiler(monkeypatch):
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    checks = by_name(collect().capabilities)
    assert not checks["C compiler"].usable and not checks["Triton launcher"].usable
    assert "apt install gcc" in checks["C compiler"].advice


def test_no_python_headers(monkeypatch, tmp_path):
    if module._compiler() is None:
        pytest.skip("needs a C compiler")
    monkeypatch.setattr(module.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    launcher = by_name(collect().capabilities)["Triton launcher"]
    # Headers in the system's own folder are found all the same.
    assert launcher.usable or "Python.h" in launcher.found


def test_a_compiler_that_fails_is_reported(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "probe.c:1: error: no")
    monkeypatch.setattr(module, "_run", lambda command: failed)
    launcher = module._launcher("gcc")
    assert not launcher.usable and launcher.advice
    monkeypatch.setattr(module, "_run", lambda command: None)
    assert not module._launcher("gcc").usable
    assert module._compiler_version("/somewhere/gcc") == "gcc, version unknown"


def test_a_package_that_is_missing_names_its_extra():
    check = module._package(Package("no_such_package_here", "nothing", "pip install pumice[io]"))
    assert not check.usable
    assert check.advice == "pip install pumice[io]"


def test_brackets_of_an_extra_are_printed(info):
    missing = module.Check("laspy", False, "not installed", "pip install pumice[io]")
    shown = module.Info({}, (), (), (missing,), ())
    assert "pip install pumice[io]" in printed(shown)


def test_a_package_that_does_not_import_says_why(monkeypatch, tmp_path):
    (tmp_path / "broken_package_here.py").write_text("raise OSError('no library')")
    monkeypatch.syspath_prepend(tmp_path)
    check = module._package(Package("broken_package_here", "nothing", "pip install it"))
    assert not check.usable and "OSError: no library" in check.found


def test_folders(monkeypatch, tmp_path):
    (tmp_path / "scan.bin").write_bytes(b"1234")
    monkeypatch.setattr(module, "settings", lambda: Settings(data=tmp_path, cache=tmp_path / "new"))
    data, cache = module._data_folder(), module._cache_folder()
    assert data.usable and "1 entries" in data.found
    assert cache.usable and "created on first use" in cache.found
    monkeypatch.setattr(module, "settings", lambda: Settings(data=None, cache=tmp_path))
    assert not module._data_folder().usable
    assert "1 files" in module._cache_folder().found


def test_bad_settings_are_reported_not_raised(monkeypatch):
    def refuse():
        raise OptionError("PUMICE_DATA should name an existing folder, found 'x'")

    monkeypatch.setattr(module, "settings", refuse)
    for check in (module._data_folder(), module._cache_folder()):
        assert not check.usable and "existing folder" in check.found


def test_a_gpu_build_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (check,) = module._gpus()
    assert not check.usable and "CUDA 13.0" in check.found and "nvidia-smi" in check.advice
