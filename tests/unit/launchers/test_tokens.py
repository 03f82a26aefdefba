"""Tokens of Jupyter servers and other secrets: their recipients, and places without them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import tfd_notebook as tfd
from tfd_notebook import errors
from tfd_notebook.cluster import attach
from tfd_notebook.cluster.config import ClusterOptions
from tfd_notebook.launchers import profiles
from tfd_notebook.launchers.client import detached, orphans
from tfd_notebook.launchers.client.jupyter_server import TOKEN, JupyterServer
from tfd_notebook.model import spec

pytest.importorskip("requests")
pytest.importorskip("websocket")

ONE, TWO = "https://one:8888", "https://two:8888"


@pytest.fixture(autouse=True)
def config_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("TFD_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv(TOKEN, raising=False)
    return tmp_path / "config" / "tfd_notebook"


class Server(ThreadingHTTPServer):
    """HTTP handler that records the Authorization headers and sends a fixed answer."""

    def __init__(self, status: int = 200, location: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status, self.location = status, location
        self.authorizations: list[str | None] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server: Any = self.server
        server.authorizations.append(self.headers.get("Authorization"))
        self.send_response(server.status)
        if server.location:
            self.send_header("Location", server.location)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"[]")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    running: list[tuple[Server, threading.Thread]] = []

    def start(*arguments: Any) -> Server:
        server = Server(*arguments)
        running.append((server, threading.Thread(target=server.serve_forever)))
        running[-1][1].start()
        return server

    yield start
    for server, thread in running:
        server.shutdown()
        thread.join()
        server.server_close()


# Recipients of tokens


def test_netrc_does_not_replace_the_token(
    serve: Callable[..., Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login ada password other\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    server = serve()
    JupyterServer(server.url, "right").request("GET", "/api/kernels")
    JupyterServer(server.url, "").request("GET", "/api/kernels")
    assert server.authorizations == ["token right", None]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirect_does_not_forward_the_token(serve: Callable[..., Server], status: int) -> None:
    target = serve()
    server = serve(status, target.url.replace("http", "ws"))
    with pytest.raises(errors.LaunchError, match="rejected the token"):
        JupyterServer(server.url, "right").connect("kernel")
    server.location = target.url
    with pytest.raises(errors.LaunchError, match="rejected the token"):
        JupyterServer(server.url, "right").request("GET", "/api/kernels")
    assert server.authorizations == ["token right"] * 2
    assert target.authorizations == []


def test_answer_without_a_websocket_is_refused(serve: Callable[..., Server]) -> None:
    with pytest.raises(errors.LaunchError, match="not a Jupyter server: it returned status 200"):
        JupyterServer(serve().url, "right").connect("kernel")


@pytest.mark.parametrize(
    ("servers", "token", "expected"),
    [
        (ONE, None, ("variable", "")),
        (f"{ONE}/lab?token=own", None, ("own", "")),
        ([ONE, TWO], None, ("variable", "variable")),
        ([f"{ONE}/?token=own", TWO], None, ("own", "")),
        ([ONE, TWO], {f"{ONE}/lab": "own"}, ("own", "")),
        ([ONE, TWO], {ONE: "own", TWO: None}, ("own", "variable")),
        ([ONE, TWO], "both", ("both", "both")),
        (ONE, "", ("", "")),
    ],
)
def test_token_variable_is_sent_to_its_server_only(
    servers: Any, token: Any, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "variable")
    jupyter = tfd.launchers.Jupyter(servers, token=token)
    assert (jupyter.token_of(ONE), jupyter.token_of(TWO)) == expected
    # An attach has only the options. A different token does not replace a missing one.
    again = tfd.launchers.Jupyter(**jupyter.options)
    assert again.options == jupyter.options
    if not isinstance(servers, str):
        for address, source in zip((ONE, TWO), expected, strict=True):
            assert again.token_of(address) == ("variable" if source == "variable" else "")


def test_token_is_read_from_the_profile_of_its_server(
    config_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN, "variable")
    config_home.mkdir(parents=True)
    broken = 'launcher = "jupyter"\nservers = 3\n'
    (config_home / "broken.toml").write_text(broken)
    text = (
        f'launcher = "jupyter"\nservers = ["{ONE}/lab?token=a", "{TWO}"]\n[token]\n"{TWO}" = "b"\n'
    )
    (config_home / "lab.toml").write_text(text)
    jupyter = tfd.launchers.Jupyter(**tfd.launchers.Jupyter([ONE, TWO, "https://three"]).options)
    assert [jupyter.token_of(item) for item in (ONE, TWO)] == ["a", "b"]
    assert tfd.launchers.Jupyter("https://one:8889").token_of("https://one:8889") == "variable"


# Places without secrets


@pytest.fixture
def config() -> spec.ClusterConfig:
    launcher = tfd.launchers.Jupyter([f"{ONE}/lab?token=s3cret", TWO], token={TWO: "s3cret"})
    options = {"launcher": launcher, "data_workers": 1, "env": {"HF_TOKEN": "s3cret"}}
    return ClusterOptions(name="secret", **options).configure()[0]


def test_tokens_are_not_part_of_a_specification(config: spec.ClusterConfig) -> None:
    assert "s3cret" not in json.dumps(config.options)
    assert "s3cret" not in repr(config)
    assert config.options["servers"] == [ONE, TWO]


def test_agents_receive_variable_names_only(config: spec.ClusterConfig) -> None:
    described = spec.pack(spec.without_values(config))
    assert "s3cret" not in json.dumps(described)
    assert spec.is_same(spec.unpack(described), config)
    assert not spec.is_same(spec.unpack(described), spec.without_values(config).__class__("other"))


def test_detached_cluster_description_has_no_secret() -> None:
    env = {"HF_TOKEN": "s3cret"}
    fake = tfd.launchers.Fake()
    with tfd.Cluster(launcher=fake, data_workers=1, name="secret", env=env) as cluster:
        cluster.detach(1)
        described = fake.task_hosts[0].description
        assert described["config"]["env"] == {"HF_TOKEN": ""}
        assert "s3cret" not in json.dumps(described)
        cluster.stop()


def test_file_of_a_detached_cluster_has_no_token(
    config: spec.ClusterConfig, tmp_path: Path
) -> None:
    detached.DetachedClusterRecord("secret", "jupyter", dict(config.options), ["a1"]).set_lease(
        time.time() + 100
    )
    (file,) = (tmp_path / "run").iterdir()
    assert "s3cret" not in file.read_text()


def test_options_are_not_in_the_repr(config_home: Path) -> None:
    config_home.mkdir(parents=True)
    file = config_home / "lab.toml"
    file.write_text(f'launcher = "jupyter"\nservers = "{ONE}"\ntoken = "s3cret"\n')
    profile = profiles.read(file)
    assert profile.options["token"] == "s3cret"
    assert "s3cret" not in repr(profile)
    detached.DetachedClusterRecord("lab", "jupyter", profile.options, ["a1"]).set_lease(100)
    (listed,) = detached.remote_detached_clusters()
    assert listed.options["token"] == "s3cret"
    assert "s3cret" not in repr(listed)


def test_attach_without_the_token_has_a_fix(serve: Callable[..., Server]) -> None:
    servers = [serve(403), serve(403)]
    launcher = tfd.launchers.Jupyter([f"{server.url}/?token=s3cret" for server in servers])
    detached.DetachedClusterRecord("secret", "jupyter", launcher.options, ["a1", "b2"]).set_lease(
        time.time() + 100
    )
    with pytest.raises(errors.LaunchError, match=r"(?s)requires a token.*a profile with"):
        attach.attach("secret")
    assert {authorization for server in servers for authorization in server.authorizations} == {
        None
    }


def test_sweep_removes_the_file_of_an_expired_lease(tmp_path: Path) -> None:
    record = detached.DetachedClusterRecord("secret", "jupyter", {}, ["a1"])
    record.set_lease(-1)
    assert not orphans.sweep(dry_run=True)
    assert list((tmp_path / "run").iterdir())
    orphans.sweep()
    assert not list((tmp_path / "run").iterdir())
