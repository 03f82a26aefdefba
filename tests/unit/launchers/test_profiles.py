"""Profiles of launchers, and the administrator's policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tfd_notebook as tfd
from tfd_notebook import errors
from tfd_notebook.agent import admin_policy
from tfd_notebook.cluster import attach
from tfd_notebook.launchers import base, profiles
from tfd_notebook.net import config_files
from tfd_notebook.ui.argparsing import CommandLine, launchers_table, make_cluster


@pytest.fixture(autouse=True)
def _own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "home"))
    for module in (profiles, config_files):
        monkeypatch.setattr(module, "SYSTEM", tmp_path / "etc")
    for directory in (tmp_path / "home/tfd_notebook", tmp_path / "etc"):
        directory.mkdir(parents=True)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o644)
    return path


def test_profile_is_a_launcher_by_name(tmp_path: Path) -> None:
    write(tmp_path / "etc/box.toml", 'launcher = "local"\nallow = ["10.0.0.0/8"]')
    launcher = base.launcher("box")
    assert (launcher.name, launcher.allow) == ("local", ("10.0.0.0/8",))
    # The user's profile takes precedence.
    write(tmp_path / "home/tfd_notebook/box.toml", 'launcher = "fake"\ngpus = [0, 1]')
    with tfd.Cluster(data_workers=1, launcher="box", name="boxed") as cluster:
        assert cluster.snapshot().launcher == "fake"
    assert "box" in launchers_table().text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("launcher = ", "cannot be read"),
        ("hosts = ['a']", "has no launcher"),
        ('launcher = "fake"\nspeed = 3', "unexpected keyword argument 'speed'"),
    ],
)
def test_invalid_profile_is_named(tmp_path: Path, text: str, message: str) -> None:
    write(tmp_path / "home/tfd_notebook/bad.toml", text)
    with pytest.raises(errors.UsageError, match=message) as caught:
        base.launcher("bad")
    assert "bad.toml" in str(caught.value)
    # A user who does not use it is not affected.
    assert "bad" in launchers_table().text()


def test_options_of_the_command_line_keep_those_of_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        tmp_path / "home/tfd_notebook/box.toml",
        'launcher = "slurm"\nnodes = 2\npartition = "debug"\nallow = ["10.0.0.0/8"]',
    )
    started: list[Any] = []
    monkeypatch.setattr(attach, "start", lambda options, hours: started.append(options))
    for surface in ("tfd", "%tfd_cluster"):
        parser = CommandLine(surface).parser("start")
        make_cluster(parser.read(["--launcher", "box", "--host", "h1", "--allow", "10.1.0.0/16"]))
        launcher = started.pop().launcher
        assert launcher.options["nodes"] == 2
        assert launcher.options["partition"] == "debug"
        assert launcher.options["host"] == "h1"
        assert launcher.allow == ("10.1.0.0/16",)


def test_missing_profile_error_names_the_searched_paths(tmp_path: Path) -> None:
    with pytest.raises(errors.UnknownName, match="profiles are files in"):
        base.launcher("nowhere")
    write(tmp_path / "etc/far.toml", 'launcher = "teleport"')
    with pytest.raises(errors.UnknownName, match="names 'teleport'"):
        base.launcher("far")


POLICY = """# what may be started here
tasks = 3
gpus = 1
lease_hours = 2
launchers = ["fake"]
allow = ["10.1.0.0/16"]
"""


@pytest.mark.root
class TestPolicy:
    @pytest.fixture(autouse=True)
    def _policy(self, tmp_path: Path) -> None:
        write(tmp_path / "etc/policy.toml", POLICY)

    def refused(self, message: str, line: str, **options: object) -> None:
        with pytest.raises(errors.Refused, match=message) as caught:
            tfd.Cluster(name="refused", **{"launcher": "fake", **options})
        assert f"policy.toml, {line}" in str(caught.value)
        assert "refused" not in tfd.clusters()

    def test_exceeded_policy_is_refused_with_file_and_line(self) -> None:
        self.refused("4 tasks are too many", "line 2: tasks = 3", data_workers=3)
        self.refused("2 GPUs are too many", "line 3: gpus = 1", workers=2, gpus=[0, 1])
        self.refused("launcher 'local' is not", "line 5: launchers", launcher="local")
        self.refused(
            "opened to 10.0.0.0/8", "line 6", launcher=tfd.launchers.Fake(allow="10.0.0.0/8")
        )

    def test_automatic_gpus_and_scaling_count_for_the_policy(self) -> None:
        self.refused("2 GPUs", "line 3", workers=2, launcher=tfd.launchers.Fake(gpus=(0, 1)))
        with tfd.Cluster(data_workers=1, launcher="fake", name="small") as cluster:
            with pytest.raises(errors.Refused, match="4 tasks"):
                cluster.scale(data_workers=3)
            with pytest.raises(errors.Refused, match=r"9 tasks.*line 2: tasks = 3"):
                cluster.adapt(1, 8)
            with pytest.raises(errors.Refused, match="3 hours is too long"):
                cluster.detach(3)
            assert len(cluster.tasks) == 2

    def test_allowed_cluster_starts(self) -> None:
        allowed = tfd.launchers.Fake(allow="10.1.2.0/24")
        with tfd.Cluster(data_workers=2, launcher=allowed, name="fits") as cluster:
            assert cluster.detach(2)

    def test_policy_writable_by_others_is_ignored(self, tmp_path: Path) -> None:
        (tmp_path / "etc/policy.toml").chmod(0o666)
        with pytest.warns(UserWarning, match="must belong to root"):
            assert admin_policy.limits() == admin_policy.Limits()

    @pytest.mark.parametrize("text", ["tasks = -1", "colour = 3", 'allow = ["x"]', "tasks ="])
    def test_invalid_policy_prevents_every_start(self, tmp_path: Path, text: str) -> None:
        write(tmp_path / "etc/policy.toml", text)
        with pytest.raises(errors.UsageError, match=r"policy\.toml"):
            tfd.Cluster(launcher="fake", name="refused")
        assert "refused" not in tfd.clusters()
