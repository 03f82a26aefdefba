"""Engines whose packages are missing or too old on this host."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

import pytest

from tfd_notebook import errors, launchers
from tfd_notebook.launchers.base import Launcher
from tfd_notebook.model.spec import ClusterConfig, Role
from tfd_notebook.net import optional_packages

ENGINES = [
    (launchers.Dask(), "distributed"),
    (launchers.IPyParallel(), "ipyparallel"),
    (launchers.Kubernetes("tfd:1"), "kubernetes"),
    (launchers.Ray(), "ray"),
    (launchers.Slurm(), "cryptography"),
]
engines = pytest.mark.parametrize(
    ("launcher", "package"), ENGINES, ids=[launcher.name for launcher, _ in ENGINES]
)


def start_error(launcher: Launcher) -> errors.Unsupported:
    """Return the error of the start of a cluster."""
    config = ClusterConfig("none", launcher=launcher.name, counts={Role.WORKER: 1})
    with pytest.raises(errors.Unsupported) as caught:
        launcher.connect(config, lambda event: None)
    return caught.value


def install(package: str, version: str, site: Path) -> None:
    """Create the metadata of an installed package."""
    directory = site / f"{package}-{version}.dist-info"
    directory.mkdir()
    text = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    (directory / "METADATA").write_text(text)


@engines
def test_engine_that_is_not_installed_is_named_with_its_extra(
    launcher: Launcher, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    error = start_error(launcher)
    assert f'launcher "{launcher.name}" needs the package {package}' in error.what
    assert error.fix == f'pip install "tfd-notebook[{launcher.name}]"'


@engines
def test_engine_of_an_old_version_is_named(
    launcher: Launcher, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(package, "0.1rc1", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    error = start_error(launcher)
    (minimum,) = [
        requirement.partition(">=")[2].partition(";")[0].strip()
        for requirement in metadata.requires("tfd-notebook") or []
        if requirement.startswith(f"{package}>=") and f"'{launcher.name}'" in requirement
    ]
    assert f"needs {package} {minimum} or later, but 0.1rc1 is installed" in error.what
    assert f"tfd-notebook[{launcher.name}]" in str(error.fix)


@pytest.mark.parametrize("version", ["42", "42.0", "42.0.0rc1", "43.0.dev1", "100"])
def test_minimum_version_is_accepted(
    version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install("cryptography", version, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    assert optional_packages.load("json", "a test", "slurm").dumps(1) == "1"
