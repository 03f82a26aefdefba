"""What the doctor finds in a process, its host, a description and a cluster without TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tfd_notebook as tfd
from tests import _nvml
from tests._doctor import DOCTOR, in_child
from tests.unit._grpc import Server, status
from tfd_notebook import diagnosis, errors
from tfd_notebook.agent import memory
from tfd_notebook.cluster.registry import clusters
from tfd_notebook.diagnosis import data_service_checks
from tfd_notebook.diagnosis.data_service_checks import Service
from tfd_notebook.launchers import Fake
from tfd_notebook.model import diagnostics
from tfd_notebook.model.events import HostDisconnected, HostReconnected
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import Role, TaskState
from tfd_notebook.net import config_files, probe, tf_messages
from tfd_notebook.net.probe import Probe

#: An address of which nobody is the owner (RFC 5737).
ELSEWHERE = "192.0.2.1:2222"


@pytest.fixture(autouse=True)
def _own_place(nowhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("TFD_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("TF_CONFIG", raising=False)
    yield
    for cluster in clusters().values():
        cluster.stop()


def codes(target: Any = None) -> set[str]:
    # Tests before this one may have set TensorFlow up in this process: TFD804 is for a child.
    return set(tfd.doctor(target).codes) - {"TFD804"}


# The doctor itself


def test_every_code_has_its_entry_with_its_severity_and_title() -> None:
    from tfd_notebook.diagnosis import code_reference

    diagnosis.load()
    known = code_reference.codes()
    for code, kind in diagnostics.kinds().items():
        assert known[code].startswith(f"{code} {kind.title} ({kind.severity})\n")
    errors_of = {getattr(errors, name).code for name in errors.__all__}
    assert known.keys() == diagnostics.kinds().keys() | errors_of


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert in_child() == set()


def test_findings_are_a_list_a_table_text_and_html(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["<b>"]}}')
    found = tfd.doctor()
    (one,) = found
    assert (one.code, one.severity, one.where) == ("TFD803", "error", "TF_CONFIG")
    assert list(found) == [found[0]] == list(found.errors)
    assert found.records() == [one.as_dict()]
    assert list(found.to_frame().columns) == ["code", "severity", "where", "what", "why", "fix"]
    assert "✗ error" in repr(found)
    assert "Next: " in repr(found)
    shown = found._repr_mimebundle_()
    assert "&lt;b&gt;" in shown["text/html"]
    assert "<b>" not in shown["text/html"]
    assert "checked: this process" in shown["text/plain"]
    assert str(one).startswith("[TFD803] ")


def test_a_check_that_fails_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TFD_RUNTIME_DIR", str(tmp_path / "file"))
    (found,) = tfd.doctor()
    assert (found.code, found.severity) == ("TFD800", "info")
    assert "WorkDirError" in found.what


def test_what_is_no_target_is_an_error() -> None:
    with pytest.raises(errors.UnknownName, match="no cluster 'nobody'"):
        tfd.doctor("nobody")
    with pytest.raises(errors.UsageError, match="invalid target of type int"):
        tfd.doctor(3)
    with pytest.raises(errors.Malformed, match="no address"):
        tfd.doctor({"worker": ["a"]})


# Descriptions


def test_odd_job_names_and_a_missing_chief(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(status("worker:0", "CPU")) as worker, Server(status("ps:0", "CPU")) as ps:

        def config(**jobs: Any) -> set[str]:
            monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs}))
            return codes()

        with Server(status("chief:0", "CPU")) as chief:
            whole = {
                job: [server.address]
                for job, server in {"worker": worker, "ps": ps, "chief": chief}.items()
            }
            assert config(**whole) == set()
        assert config(worker=[worker.address], ps=[ps.address]) == {"TFD802"}
        assert config(worker=[worker.address]) == set()
        with Server(status("wroker:0", "CPU")) as odd:
            (found,) = tfd.doctor({"wroker": [odd.address]})
        assert found.code == "TFD801"
        assert "did you mean 'worker'?" in found.fix


@pytest.mark.parametrize("text", ["{", "[]", '{"cluster": {"worker": ["a:99999"]}}'])
def test_a_config_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    assert codes() == {"TFD803"}
    for good in ("", "{}", '{"cluster": {}}'):
        monkeypatch.setenv("TF_CONFIG", good)
        assert codes() == set()


def test_duplicate_addresses() -> None:
    with Server(status("worker:0", "CPU")) as one, Server(status("worker:1", "CPU")) as two:
        assert codes({"worker": [one.address, two.address]}) == set()
        assert codes({"worker": [one.address, one.address]}) == {"TFD805", "TFD807"}


def test_localhost_advertised_to_other_hosts() -> None:
    with Server(status("worker:0", "CPU")) as one:
        assert "TFD806" in codes({"worker": [one.address, ELSEWHERE]})
        assert codes({"worker": [one.address]}) == set()


def test_workers_that_tell_a_dispatcher_elsewhere_localhost() -> None:
    def found(dispatcher: str, worker: str) -> set[str]:
        seen = Service(
            dispatcher,
            Probe(dispatcher, "alive", "dispatcher", version=9),
            {worker: Probe(worker, "alive", "data_worker")},
        )
        return {one.code for one in diagnostics.look("service", seen)}

    diagnosis.load()
    assert found("192.0.2.1:2222", "localhost:1") == {"TFD806"}
    assert found("192.0.2.1:2222", "192.0.2.2:2222") == set()
    assert found("localhost:1", "localhost:2") == set()


def test_the_only_data_worker_restarts() -> None:
    def found(state: TaskState, probe: str) -> list[str]:
        at = "localhost:2"
        row = TaskRow("data_worker:0", Role.DATA_WORKER, 0, address=at, state=state, reason="boom")
        seen = Service(
            "localhost:1",
            Probe("localhost:1", "alive", "dispatcher", version=9),
            {at: Probe(at, probe, "data_worker", reason="refused")},  # type: ignore[arg-type]
            own=True,
            rows={at: row},
        )
        return [f"{one.code} {one.what}" for one in diagnostics.look("service", seen)]

    diagnosis.load()
    assert found(TaskState.RESTARTING, "refused") == [
        "TFD811 none of its data workers responds: "
        "data_worker:0 at localhost:2 is restarting (boom)"
    ]
    assert found(TaskState.READY, "alive") == []


def test_a_data_worker_on_another_network_is_named() -> None:
    at = "192.0.2.2:2222"

    def found(open_to: str) -> str:
        row = TaskRow("data_worker:0", Role.DATA_WORKER, 0, address=at, open_to=open_to)
        seen = Service(
            "192.0.2.1:2222",
            Probe("192.0.2.1:2222", "alive", "dispatcher", version=9),
            {at: Probe(at, "unreachable", reason="timed out")},
            rows={at: row},
        )
        (one,) = diagnostics.look("service", seen)
        return one.what

    diagnosis.load()
    assert f"{at} is unreachable from here: timed out" in found("")
    assert "or the network blocks" in found("")
    assert "its packet filter allows this host, 10.0.0.0/8" in found("this host, 10.0.0.0/8")


@contextlib.contextmanager
def full_listener() -> Iterator[str]:
    """Yield an address at which connections are neither accepted nor refused."""
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = held.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Return the timeouts that probes pass to calls and connections, by address."""
    found: dict[str, list[float]] = {}
    addresses: dict[int, str] = {}
    channel, call, connects = probe._channel, probe._call, probe._connects

    def record_channel(address: str, via_proxy: bool = False) -> Any:
        made = channel(address, via_proxy)
        addresses[id(made)] = address
        return made

    def record_call(used: Any, method: str, timeout: float, *request: bytes) -> bytes:
        found.setdefault(addresses[id(used)], []).append(timeout)
        return call(used, method, timeout, *request)

    def record_connect(address: str, timeout: float) -> bool:
        found.setdefault(address, []).append(timeout)
        return connects(address, timeout)

    monkeypatch.setattr(probe, "_channel", record_channel)
    monkeypatch.setattr(probe, "_call", record_call)
    monkeypatch.setattr(probe, "_connects", record_connect)
    return found


def dispatcher_of(*workers: str) -> Server:
    """Return a dispatcher that knows these data workers."""
    known = tf_messages.GetWorkersResponse()
    for worker in workers:
        known.workers.add(address=worker)
    return Server(
        {
            probe._METHODS["dispatcher"]: tf_messages.GetVersionResponse(
                version=9
            ).SerializeToString(),
            probe._WORKERS: known.SerializeToString(),
        }
    )


def test_an_unreachable_data_worker_takes_one_probe(waits: dict[str, list[float]]) -> None:
    diagnosis.load()
    with full_listener() as at, dispatcher_of(at) as dispatcher:
        (one,) = diagnostics.look("service", Service.inspect(dispatcher.address))
    assert one.code == "TFD811"
    assert f"{at} is unreachable from here" in one.what
    assert len(waits[at]) == 2, "a call, and a connection to tell hung from unreachable"
    assert sum(waits[at]) <= data_service_checks._PROBE_SECONDS


def test_a_data_worker_that_is_reachable_again_is_not_named(waits: dict[str, list[float]]) -> None:
    diagnosis.load()
    answer = {probe._METHODS["data_worker"]: b""}
    with Server(answer) as worker, dispatcher_of(worker.address) as dispatcher:
        assert not list(diagnostics.look("service", Service.inspect(dispatcher.address)))
        assert all(
            timeout <= data_service_checks._PROBE_SECONDS for timeout in waits[worker.address]
        )


def test_another_task_answers_and_nobody_answers() -> None:
    with Server(status("worker:1", "CPU")) as one:
        assert codes({"worker": [one.address]}) == {"TFD807"}
        assert codes({"worker": {1: one.address}}) == set()
        assert codes(one.address) == set()
        address = one.address
    assert codes({"worker": {1: address}}) == {"TFD809"}
    assert codes(address) == {"TFD809"}


_LISTEN = """
import socket, sys
sock = socket.socket()
sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
sock.bind(("127.0.0.1", int(sys.argv[1])))
sock.listen()
print(sock.getsockname()[1], flush=True)
input()
"""


def test_a_port_that_two_servers_share() -> None:
    def listen(port: str) -> Any:
        pipe = subprocess.PIPE
        started = subprocess.Popen(
            [sys.executable, "-c", _LISTEN, port], stdin=pipe, stdout=pipe, text=True
        )
        assert started.stdout
        return started, started.stdout.readline().strip()

    first, port = listen("0")
    try:
        assert "TFD808" not in codes({"worker": [f"localhost:{port}"]})
        second, _ = listen(port)
        try:
            found = [x for x in tfd.doctor({"worker": [f"localhost:{port}"]}) if x.code == "TFD808"]
            assert all(str(pid) in found[0].what for pid in (first.pid, second.pid))
        finally:
            second.communicate("\n", timeout=10)
    finally:
        first.communicate("\n", timeout=10)


# The process and its host


def test_proxy_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert codes() == {"TFD841"}
    monkeypatch.setenv("no_grpc_proxy", "localhost,127.0.0.1,::1")
    assert codes() == set()


def test_hidden_gpus(tmp_path: Path) -> None:
    _nvml.write_module(tmp_path)
    _nvml.write_gpus(tmp_path / "gpus", (0, 0), (0, 0))
    there = {"PYTHONPATH": str(tmp_path), _nvml.VARIABLE: str(tmp_path / "gpus")}
    assert in_child(**there, CUDA_VISIBLE_DEVICES="") == {"TFD842"}
    assert in_child(**there, CUDA_VISIBLE_DEVICES="1") == set()
    assert in_child(**there) == set()


def test_a_limit_of_address_space() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, ({0}, {0})); "
    assert in_child(limit.format(8 * 10**9) + DOCTOR) == {"TFD844"}
    assert in_child(limit.format(64 * 10**9) + DOCTOR) == set()


def test_limits_of_control_groups(tmp_path: Path) -> None:
    """As version 2 writes them: the tightest of a job and of what is around it."""
    job = tmp_path / "slurm" / "job_7"
    job.mkdir(parents=True)
    (tmp_path / "mine").write_text("0::/slurm/job_7\n")

    def write(group: Path, limit: object, used: int) -> None:
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text("anon 500\ninactive_file 300\n")

    def found() -> tuple[int, int] | None:
        return memory.of_group(tmp_path, tmp_path / "mine")

    assert found() is None
    write(job, "max", 900)
    assert found() is None
    write(job.parent, 1000, 900)
    assert found() == (1000, 600)
    write(job, 700, 900)
    assert found() == (700, 600)


_FILL = """
import os, sys
with open(os.path.join(sys.argv[1], "cgroup.procs"), "w") as file:
    file.write(str(os.getpid()))
import tfd_notebook.diagnosis
from tfd_notebook.agent import memory
held = []
while memory.of_group()[1] < float(sys.argv[2]) * memory.of_group()[0]:
    held.append(b"x" * (8 << 20))
"""


@pytest.mark.root
def test_a_control_group_that_is_nearly_full() -> None:
    root = Path("/sys/fs/cgroup/memory")
    version_1 = root.is_dir()
    group = (root if version_1 else root.parent) / f"tfd-test-{os.getpid()}"
    group.mkdir()
    try:
        limit = group / ("memory.limit_in_bytes" if version_1 else "memory.max")
        limit.write_text(str(500 << 20))
        assert in_child(_FILL + DOCTOR, str(group), "0.9") == {"TFD844"}
        assert in_child(_FILL + DOCTOR, str(group), "0.5") == set()
    finally:
        group.rmdir()


def test_a_policy_that_will_soon_end_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_files, "SYSTEM", tmp_path)
    (tmp_path / config_files.POLICY).write_text("memory_gb = 1\n")
    (tmp_path / config_files.POLICY).chmod(0o644)
    launcher = Fake()
    cluster = tfd.Cluster(data_workers=1, launcher=launcher, name="near")
    launcher.nodes[0].measure("data_worker:0", rss_mb=500.0)
    assert "TFD844" not in codes(cluster)
    launcher.nodes[0].measure("data_worker:0", rss_mb=900.0)
    (found,) = (one for one in tfd.doctor(cluster) if one.code == "TFD844")
    assert "line 1" in found.what


def test_leftovers_of_dead_kernels() -> None:
    held = (
        "import os; from tfd_notebook.cluster import control_socket; "
        "control_socket.ensure_started(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", held], check=True, timeout=60)
    assert codes() == {"TFD845"}
    from tfd_notebook.launchers.client.orphans import sweep

    assert sweep()
    assert codes() == set()


def test_a_kernel_that_will_be_culled() -> None:
    # Its server is whoever started it.
    server = (
        "import subprocess, sys; print(subprocess.run([sys.executable, '-c', "
        f"'import ipykernel; {DOCTOR}'], capture_output=True, text=True, check=True).stdout)"
    )
    assert in_child(server, "--MappingKernelManager.cull_idle_timeout=60") == {"TFD861"}
    assert in_child(server, "--MappingKernelManager.cull_idle_timeout=0") == set()


def test_an_ipykernel_that_queues_clicks() -> None:
    old = str(Path(sys.prefix) / "ipykernel6")
    assert in_child(f"import ipykernel; {DOCTOR}", PYTHONPATH=old) == {"TFD862"}
    assert in_child(f"import ipykernel; {DOCTOR}") == set()


# Clusters


@pytest.fixture
def fake() -> Fake:
    return Fake()


@pytest.fixture
def cluster(fake: Fake) -> tfd.Cluster:
    return tfd.Cluster(data_workers=2, launcher=fake, name="images")


SHARED_GPU = """
import tfd_notebook as tfd
from tfd_notebook.launchers import Fake

def start(name, gpus):
    launcher = Fake(gpus=(0, 1))
    tfd.Cluster(workers=1, ps=1, launcher=launcher, name=name, gpus=gpus)
    launcher.nodes[0].use_gpus("localhost", use_percent=(0, 0), used=(0, 0))

start("one", [0])
start("two", [1])
assert "TFD843" not in tfd.doctor().codes
start("three", [0])
(found,) = (one for one in tfd.doctor() if one.code == "TFD843")
assert "GPU 0 of localhost" in found.what
assert "one/worker:0, three/worker:0" in found.what
print(found.code)
"""


def test_a_gpu_that_two_tasks_share() -> None:
    # Where TensorFlow was imported by a test before, the process would become a coordinator.
    assert in_child(SHARED_GPU) == {"TFD843"}


def test_environment_that_came_too_late(
    cluster: tfd.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "TFD832" not in codes(cluster)
    monkeypatch.setenv("AWS_REGION", "nowhere")
    (found,) = (one for one in tfd.doctor(cluster) if one.code == "TFD832")
    assert "AWS_REGION" in found.what
    assert "nowhere" not in str(found)
    monkeypatch.delenv("AWS_REGION")
    assert "TFD832" not in codes(cluster)


def test_tasks_open_to_others(cluster: tfd.Cluster, fake: Fake) -> None:
    assert "TFD852" not in codes(cluster)
    fake.nodes[0].tell("data_worker:1", TaskState.READY, open_to="everyone")
    (found,) = (one for one in tfd.doctor(cluster) if one.code == "TFD852")
    assert "data_worker:1 are open to everyone" in found.what


def test_too_many_restarts_and_reconnects(cluster: tfd.Cluster, fake: Fake) -> None:
    for _ in range(2):
        cluster.kill("data_worker:0")
    assert "TFD853" not in codes(cluster)
    cluster.kill("data_worker:0")
    (found,) = (one for one in tfd.doctor(cluster) if one.code == "TFD853")
    assert "data_worker:0 was restarted 3 times" in found.what
    for _ in range(3):
        fake.nodes[0]._on_event(HostDisconnected("localhost", 600.0))
        fake.nodes[0]._on_event(HostReconnected("localhost", 1.0))
    said = [one.what for one in tfd.doctor(cluster) if one.code == "TFD853"]
    assert any("localhost was lost and restored 3 times" in what for what in said)


def test_tasks_that_do_not_work(cluster: tfd.Cluster, fake: Fake) -> None:
    assert "TFD854" not in codes(cluster)
    fake.nodes[0].tell("data_worker:0", TaskState.FAILED, "killed by signal 9", pid=None)
    (found,) = (one for one in tfd.doctor(cluster) if one.code == "TFD854")
    assert "data_worker:0 is failed: killed by signal 9" in found.what


def test_a_socket_that_says_nothing_hangs_nobody() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert codes({"worker": [f"127.0.0.1:{silent.getsockname()[1]}"]}) == {"TFD809"}
