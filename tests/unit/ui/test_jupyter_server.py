"""The server extension: authentication, refused requests, and answers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests._jupyter import serving
from tfd_notebook import errors
from tfd_notebook.agent import interpreter
from tfd_notebook.launchers.client import detached
from tfd_notebook.ui import jupyter_server

#: Most tests start a Jupyter server.
pytestmark = pytest.mark.slow

TOKEN = "a-token-of-the-test"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Return the address of the extension in a server without anything else."""
    home = tmp_path_factory.mktemp("server")
    with serving(
        *("jupyter_server", home, TOKEN, f"--ServerApp.root_dir={home}"),
        "--ServerApp.base_url=/base/",
        "--ServerApp.jpserver_extensions="
        '{"tfd_notebook.ui.jupyter_server": True, "jupyterlab": False}',
    ) as port:
        yield f"http://127.0.0.1:{port}/base/tfd-notebook/clusters"


def request(address: str, body: Any = None, token: str = TOKEN) -> tuple[int, Any]:
    """Post `body`, and return status and content of the answer."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(address, data)
    if token:
        request.add_header("Authorization", f"token {token}")
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_list_is_empty_without_detached_clusters(address: str) -> None:
    assert request(address) == (200, {"clusters": []})


def test_unauthenticated_requests_are_refused(address: str) -> None:
    assert request(address, token="")[0] == 403
    assert request(address, token="another")[0] == 403
    assert request(f"{address}/c", {"action": "stop"}, token="")[0] == 403


@pytest.mark.parametrize(
    ("name", "body", "status", "what"),
    [
        ("c", b"no JSON", 400, "expected JSON"),
        ("c", b"[" * 100_000, 400, "expected JSON"),
        ("c", [], 400, "expected an action"),
        ("c", {"action": "start"}, 400, "expected an action"),
        ("c", {"action": ["stop"]}, 400, "expected an action"),
        ("c", {"action": "renew", "hours": "8"}, 400, "expected a number"),
        ("c", {"action": "renew", "hours": True}, 400, "expected a number"),
        ("c", {"action": "renew", "hours": 0}, 400, "expected more than 0"),
        ("c", b'{"action": "renew", "hours": NaN}', 400, "expected more than 0"),
        ("c", {"action": "renew", "hours": 10**400}, 400, "expected more than 0"),
        ("c", {"action": "stop", "agent": "1"}, 400, "expected a number"),
        ("--help", {"action": "stop"}, 404, "invalid name of a cluster"),
        ("c%0A", {"action": "stop"}, 404, "invalid name of a cluster"),
        ("c", {"action": "stop"}, 404, "without a kernel"),
    ],
)
def test_invalid_requests_are_refused(
    address: str, name: str, body: Any, status: int, what: str
) -> None:
    code, reply = request(f"{address}/{name}", body)
    assert code == status
    assert what in reply["what"]
    assert reply["code"].startswith("TFD1")
    assert {"what", "fix", "code"} <= set(reply)


def test_cross_site_requests_are_refused(address: str) -> None:
    # Like a browser: with the user's cookie, and without the XSRF token.
    base = address.removesuffix("tfd-notebook/clusters")
    login = urllib.request.Request(f"{base}api/me")
    login.add_header("Authorization", f"token {TOKEN}")
    request = urllib.request.Request(f"{address}/c", b'{"action": "stop"}')
    with urllib.request.urlopen(login, timeout=60) as reply:
        cookies = [cookie.partition(";")[0] for cookie in reply.headers.get_all("Set-Cookie") or []]
    assert cookies
    request.add_header("Cookie", "; ".join(cookies))
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    with refused.value as error:
        assert error.code == 403
        assert "XSRF" in json.load(error)["message"] or "Forbidden" in error.reason


def test_command_answers_or_reports_an_error() -> None:
    assert json.loads(asyncio.run(jupyter_server.tfd("list", "--json", limit=60))) == []
    with pytest.raises(errors.StateError, match="no running cluster") as error:
        asyncio.run(jupyter_server.tfd("stop", limit=60))
    assert error.value.fix


def test_command_is_ended_after_its_timeout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    code = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    monkeypatch.setattr(interpreter, "command", lambda *_: [sys.executable, "-c", code])
    with pytest.raises(errors.TimeLimit, match="within 2 s"):
        asyncio.run(jupyter_server.tfd("list", limit=2))
    assert not Path(f"/proc/{note.read_text()}").exists()


def test_only_unattached_clusters_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"state": "ready", "launcher": "local", "planned": 2, "observed": 2, "reading": 0}
    known = [
        dict(cluster, name="held", pid=1, lease=2.0),
        dict(cluster, name="left", pid=None, lease=3.0, agent=11),
        dict(cluster, name="left", pid=None, lease=4.0, agent=12),
    ]
    calls = []

    async def tfd(*arguments: str, limit: float) -> str:
        calls.append(arguments)
        return json.dumps(known)

    monkeypatch.setattr(jupyter_server, "tfd", tfd)
    monkeypatch.setattr(detached, "detached", lambda: [object()])
    listed = asyncio.run(jupyter_server.unattached_clusters())
    assert [(each["name"], each["lease"]) for each in listed] == [("left", 3.0), ("left", 4.0)]
    assert "pid" not in listed[0]
    with pytest.raises(errors.UnknownName, match="without a kernel"):
        asyncio.run(jupyter_server.act("held", b'{"action": "stop"}'))
    with pytest.raises(errors.UnknownName, match="without a kernel"):
        asyncio.run(jupyter_server.act("left", b'{"action": "stop", "agent": 13}'))
    asyncio.run(jupyter_server.act("left", b'{"action": "renew", "hours": 1.5, "agent": 12}'))
    asyncio.run(jupyter_server.act("left", b'{"action": "stop"}'))
    assert [each for each in calls if each[0] != "list"] == [
        ("renew", "left", "--pid=12", "--hours=1.5"),
        ("stop", "left"),
    ]


@pytest.fixture
def lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file to which each process that lists clusters adds a line."""
    file = tmp_path / "lists"
    file.touch()
    code = f"open({str(file)!r}, 'a').write('list\\n'); print('[]')"
    monkeypatch.setattr(interpreter, "command", lambda *_: [sys.executable, "-c", code])
    monkeypatch.setattr(detached, "detached", lambda: [object()])
    return file


def test_concurrent_requests_share_one_list(lists: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def request() -> None:
        given_up = asyncio.ensure_future(jupyter_server.unattached_clusters())
        asking = [asyncio.ensure_future(jupyter_server.unattached_clusters()) for _ in range(5)]
        await asyncio.wait([given_up, *asking], timeout=0)
        given_up.cancel()
        assert await asyncio.gather(*asking) == [[]] * 5
        assert await jupyter_server.unattached_clusters() == []
        assert lists.read_text() == "list\n"
        real = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: real() + 3600)
        assert await jupyter_server.unattached_clusters() == []
        assert lists.read_text() == "list\nlist\n"

    asyncio.run(request())


def test_failed_list_is_not_shared_with_later_requests(
    lists: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = interpreter.command

    async def request() -> None:
        monkeypatch.setattr(interpreter, "command", lambda *_: ["false"])
        with pytest.raises(errors.TfdError):
            await jupyter_server.unattached_clusters()
        monkeypatch.setattr(interpreter, "command", works)
        assert await jupyter_server.unattached_clusters() == []

    asyncio.run(request())


def test_server_extension_imports_no_cluster_code() -> None:
    code = (
        "import asyncio, sys; from tfd_notebook.ui import jupyter_server; "
        "asyncio.run(jupyter_server.unattached_clusters());"
        "print({'tensorflow', 'grpc', 'pandas', 'tfd_notebook.cluster'} & set(sys.modules))"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert completed.stdout.strip() == "set()"


def test_wheel_enables_the_extension() -> None:
    data = json.loads((Path(__file__).parents[3] / "labextension" / "server.json").read_text())
    assert data["ServerApp"]["jpserver_extensions"] == {jupyter_server.__name__: True}
    assert jupyter_server._jupyter_server_extension_points() == [
        {"module": jupyter_server.__name__}
    ]
