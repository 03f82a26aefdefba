"""Findings about a process, its host, a description, and a cluster, without TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tfd_notebook as tfd
from tests import _nvml
from tests._doctor import DOCTOR, in_child
from tests._grpc import Server, status
from tfd_notebook import diagnosis, errors
from tfd_notebook.agent import memory
from tfd_notebook.cluster.registry import clusters
from tfd_notebook.diagnosis.data_service_checks import Service
from tfd_notebook.launchers import Fake
from tfd_notebook.launchers.base import OnEvent
from tfd_notebook.model import diagnostics
from tfd_notebook.model.events import HostDisconnected, HostReconnected
from tfd_notebook.model.snapshot import TaskRow
from tfd_notebook.model.spec import Role, TaskState
from tfd_notebook.net import config_files, ports, runtime_dir, tf_messages, unix_socket
from tfd_notebook.net.probe import Probe, WorkerTask

#: An address for documentation, without a host (RFC 5737).
UNREACHABLE = "192.0.2.1:2222"


@pytest.fixture(autouse=True)
def _own_place(
    plain_environment: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("TFD_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.delenv("TF_CONFIG", raising=False)
    yield
    for cluster in clusters().values():
        cluster.stop()


def codes(target: Any = None) -> set[str]:
    # Earlier tests may have set up TensorFlow in this process. A child process tests TFD804.
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


@pytest.mark.slow
def test_healthy_process_has_no_findings() -> None:
    assert in_child() == set()


def test_findings_are_a_list_a_table_text_and_html(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["<b>"]}}')
    findings = tfd.doctor()
    (finding,) = findings
    assert (finding.code, finding.severity, finding.where) == ("TFD803", "error", "TF_CONFIG")
    assert list(findings) == [findings[0]] == list(findings.errors)
    assert findings.records() == [finding.as_dict()]
    assert list(findings.to_frame().columns) == ["code", "severity", "where", "what", "why", "fix"]
    assert "✗ error" in repr(findings)
    assert "Next: " in repr(findings)
    shown = findings._repr_mimebundle_()
    assert "&lt;b&gt;" in shown["text/html"]
    assert "<b>" not in shown["text/html"]
    assert "checked: this process" in shown["text/plain"]
    assert str(finding).startswith("[TFD803] ")


def test_failing_check_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TFD_RUNTIME_DIR", str(tmp_path / "file"))
    (finding,) = tfd.doctor()
    assert (finding.code, finding.severity) == ("TFD800", "info")
    assert "WorkDirError" in finding.what


def test_invalid_targets_are_refused() -> None:
    with pytest.raises(errors.UnknownName, match="no cluster 'missing'"):
        tfd.doctor("missing")
    with pytest.raises(errors.UsageError, match="invalid target of type int"):
        tfd.doctor(3)
    with pytest.raises(errors.Malformed, match="invalid address"):
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
            (finding,) = tfd.doctor({"wroker": [odd.address]})
        assert finding.code == "TFD801"
        assert "did you mean 'worker'?" in finding.fix


def test_evaluator_of_a_coordinator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.ExitStack() as stack:
        jobs = ("chief", "ps", "worker", "evaluator")
        spec = {job: [stack.enter_context(Server(status(f"{job}:0"))).address] for job in jobs}
        assert codes(spec) == set()
        held = stack.enter_context(socket.socket())
        held.bind(("127.0.0.1", 0))
        for address in ("evaluator.invalid:1", "{}:{}".format(*held.getsockname())):
            spec["evaluator"] = [address]
            findings = {finding.code: finding for finding in tfd.doctor(spec)}
            assert "TFD809" not in findings
            assert "TF_CONFIG" in findings["TFD810"].fix
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": spec}))
        with pytest.raises(errors.TasksMissing, match="separate TF_CONFIG"):
            tfd.resolvers.TFConfigResolver().check()
        del spec["ps"]
        assert codes(spec) == {"TFD809"}


@pytest.mark.parametrize("text", ["{", "[]", '{"cluster": {"worker": ["a:99999"]}}'])
def test_invalid_tf_config_is_found(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    assert codes() == {"TFD803"}
    for good in ("", "{}", '{"cluster": {}}'):
        monkeypatch.setenv("TF_CONFIG", good)
        assert codes() == set()


def test_task_outside_its_cluster_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with Server(status("worker:0", "CPU")) as worker:
        cluster = {"worker": [worker.address]}
        for job, index, expected in (
            ("worker", 1, "worker:1"),
            ("chief", 0, "chief:0"),
            ("worker", 0, ""),
            ("evaluator", 0, ""),
        ):
            task = {"type": job, "index": index}
            monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))
            trouble = expected and f"this process is {expected}, which its cluster does not have"
            assert [f.what for f in tfd.doctor()] == [trouble] * bool(trouble)
            assert tfd.resolve().probe().trouble == trouble


def test_duplicate_addresses_are_found() -> None:
    with Server(status("worker:0", "CPU")) as server, Server(status("worker:1", "CPU")) as two:
        assert codes({"worker": [server.address, two.address]}) == set()
        assert codes({"worker": [server.address, server.address]}) == {"TFD805", "TFD807"}


def test_the_next_step_for_a_shared_address_names_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*held.getsockname())
        cluster = {"worker": [address, address]}
        config = {"cluster": cluster, "task": {"type": "worker", "index": 0}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        # TFD804: an earlier test of this process has used TensorFlow.
        findings = [finding for finding in tfd.doctor() if finding.code != "TFD804"]
        assert {finding.code for finding in findings} == {"TFD805", "TFD809"}
        assert {finding.fix for finding in findings} == {"give each task a separate port"}
        resolution = tfd.resolve()
        for call in (resolution.resolver.check, resolution.attach):
            with pytest.raises(errors.TfdError, match=r"worker:1 at .* has the same") as raised:
                call()
            assert raised.value.fix == "give each task a separate port"


def test_localhost_advertised_to_other_hosts() -> None:
    with Server(status("worker:0", "CPU")) as server:
        assert "TFD806" in codes({"worker": [server.address, UNREACHABLE]})
        assert codes({"worker": [server.address]}) == set()


def test_data_workers_with_localhost_and_a_remote_dispatcher() -> None:
    def codes_of(dispatcher: str, worker: str) -> set[str]:
        service = Service(
            dispatcher,
            Probe(dispatcher, "alive", "dispatcher", version=9),
            {worker: Probe(worker, "alive", "data_worker")},
        )
        return {finding.code for finding in diagnostics.run_checks("service", service)}

    diagnosis.load()
    assert codes_of("192.0.2.1:2222", "localhost:1") == {"TFD806"}
    assert codes_of("192.0.2.1:2222", "192.0.2.2:2222") == set()
    assert codes_of("localhost:1", "localhost:2") == set()


def test_restart_of_the_only_data_worker_is_found() -> None:
    def findings_of(state: TaskState, probe: str) -> list[str]:
        at = "localhost:2"
        row = TaskRow("data_worker:0", Role.DATA_WORKER, 0, address=at, state=state, reason="boom")
        service = Service(
            "localhost:1",
            Probe("localhost:1", "alive", "dispatcher", version=9),
            {at: Probe(at, probe, "data_worker", reason="refused")},  # type: ignore[arg-type]
            own=True,
            rows={at: row},
        )
        return [
            f"{finding.code} {finding.what}"
            for finding in diagnostics.run_checks("service", service)
        ]

    diagnosis.load()
    assert findings_of(TaskState.RESTARTING, "refused") == [
        "TFD811 none of its data workers responds: "
        "data_worker:0 at localhost:2 is restarting (boom)"
    ]
    assert findings_of(TaskState.READY, "alive") == []


@pytest.mark.parametrize(
    ("journal_bytes", "epochs", "expected"),
    [
        (None, 0, []),
        (10**9, 99, []),
        (10**9 + 10**8, 2, ["TFD817 the dispatcher's journal is 1.1 GB, and 2 epochs are open"]),
        (0, 100, ["TFD818 the data workers hold 100 open epochs"]),
    ],
)
def test_large_journal_and_many_epochs_are_found(
    journal_bytes: int | None, epochs: int, expected: list[str]
) -> None:
    def worker(number: int) -> Probe:
        tasks = tuple(WorkerTask(10 * epoch + number, epoch) for epoch in range(epochs))
        return Probe(f"localhost:{number}", "alive", "data_worker", tasks=tasks)

    service = Service(
        "localhost:1",
        Probe("localhost:1", "alive", "dispatcher", version=9),
        {f"localhost:{number}": worker(number) for number in (2, 3)},
        own=True,
        journal_bytes=journal_bytes,
    )
    diagnosis.load()
    findings = diagnostics.run_checks("service", service)
    assert [f"{finding.code} {finding.what}" for finding in findings] == expected


def test_data_worker_on_another_network_is_named() -> None:
    at = "192.0.2.2:2222"

    def finding_of(open_to: str) -> str:
        row = TaskRow("data_worker:0", Role.DATA_WORKER, 0, address=at, open_to=open_to)
        service = Service(
            "192.0.2.1:2222",
            Probe("192.0.2.1:2222", "alive", "dispatcher", version=9),
            {at: Probe(at, "unreachable", reason="timed out")},
            rows={at: row},
        )
        (finding,) = diagnostics.run_checks("service", service)
        return finding.what

    diagnosis.load()
    assert f"{at} is unreachable from here: timed out" in finding_of("")
    assert "or the network blocks" in finding_of("")
    assert "its packet filter allows this host, 10.0.0.0/8" in finding_of("this host, 10.0.0.0/8")


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


SERVICE = "/tensorflow.data.DispatcherService"


def dispatcher_of(*workers: str) -> Server:
    """Return a dispatcher with these data workers."""
    known = tf_messages.GetWorkersResponse()
    for worker in workers:
        known.workers.add(address=worker)
    return Server(
        {
            f"{SERVICE}/GetVersion": tf_messages.GetVersionResponse(version=9).SerializeToString(),
            f"{SERVICE}/GetWorkers": known.SerializeToString(),
        }
    )


@pytest.mark.slow
def test_unreachable_data_worker_is_named() -> None:
    diagnosis.load()
    with full_listener() as at, dispatcher_of(at) as dispatcher:
        (finding,) = diagnostics.run_checks("service", Service.inspect(dispatcher.address))
    assert finding.code == "TFD811"
    assert f"{at} is unreachable from here" in finding.what


def test_reachable_data_worker_is_probed_once_and_not_named() -> None:
    diagnosis.load()
    answer: dict[str, Any] = {"/tensorflow.data.WorkerService/GetWorkerTasks": b""}
    with Server(answer) as worker, dispatcher_of(worker.address) as dispatcher:
        assert not list(diagnostics.run_checks("service", Service.inspect(dispatcher.address)))
        assert len(worker.methods) == len(set(worker.methods))


def test_wrong_and_missing_answers_are_found() -> None:
    with Server(status("worker:1", "CPU")) as server:
        assert codes({"worker": [server.address]}) == {"TFD807"}
        assert codes({"worker": {1: server.address}}) == set()
        assert codes(server.address) == set()
        address = server.address
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


@pytest.mark.slow
def test_shared_port_is_found() -> None:
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
            matches = [
                x for x in tfd.doctor({"worker": [f"localhost:{port}"]}) if x.code == "TFD808"
            ]
            assert all(str(pid) in matches[0].what for pid in (first.pid, second.pid))
        finally:
            second.communicate("\n", timeout=60)
    finally:
        first.communicate("\n", timeout=60)


# The process and its host


def test_proxy_variables_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "no_grpc_proxy", "grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    assert codes() == {"TFD841"}
    monkeypatch.setenv("no_grpc_proxy", "localhost,127.0.0.1,::1")
    assert codes() == set()


@pytest.mark.slow
def test_hidden_gpus_are_found(tmp_path: Path) -> None:
    _nvml.write_module(tmp_path)
    _nvml.write_gpus(tmp_path / "gpus", (0, 0), (0, 0))
    there = {"PYTHONPATH": str(tmp_path), _nvml.VARIABLE: str(tmp_path / "gpus")}
    assert in_child(**there, CUDA_VISIBLE_DEVICES="") == {"TFD842"}
    assert in_child(**there, CUDA_VISIBLE_DEVICES="1") == set()
    assert in_child(**there) == set()
    with (tmp_path / "pynvml.py").open("a") as module:
        module.write("def nvmlDeviceGetCount():\n    raise NVMLError('driver not loaded')\n")
    assert in_child(**there) == {"TFD842"}


@pytest.mark.slow
def test_limit_of_address_space_is_found() -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_AS, ({0}, {0})); "
    assert in_child(limit.format(8 * 10**9) + DOCTOR) == {"TFD844"}
    assert in_child(limit.format(64 * 10**9) + DOCTOR) == set()


def test_limits_of_control_groups_are_found(tmp_path: Path) -> None:
    """The tightest limit of a Slurm job's cgroup (version 2) and its parents counts."""
    job = tmp_path / "slurm" / "job_7"
    job.mkdir(parents=True)
    (tmp_path / "mine").write_text("0::/slurm/job_7\n")

    def write(group: Path, limit: object, used: int) -> None:
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text("anon 500\ninactive_file 300\n")

    def group_memory() -> tuple[int, int] | None:
        return memory.of_group(tmp_path, tmp_path / "mine")

    assert group_memory() is None
    write(job, "max", 900)
    assert group_memory() is None
    write(job.parent, 1000, 900)
    assert group_memory() == (1000, 600)
    write(job, 700, 900)
    assert group_memory() == (700, 600)


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


@pytest.mark.slow
@pytest.mark.root
def test_nearly_full_control_group_is_found() -> None:
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


@pytest.mark.root  # a policy file must belong to root
def test_policy_limit_that_is_near_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_files, "SYSTEM", tmp_path)
    (tmp_path / config_files.POLICY).write_text("memory_gb = 1\n")
    (tmp_path / config_files.POLICY).chmod(0o644)
    launcher = Fake()
    cluster = tfd.Cluster(data_workers=1, launcher=launcher, name="near")
    launcher.task_hosts[0].measure("data_worker:0", rss_mb=500.0)
    assert "TFD844" not in codes(cluster)
    launcher.task_hosts[0].measure("data_worker:0", rss_mb=900.0)
    (finding,) = (f for f in tfd.doctor(cluster) if f.code == "TFD844")
    assert "line 1" in finding.what


def test_leftovers_of_dead_kernels_are_found() -> None:
    unix_socket.listen(runtime_dir.control_socket(999999999), 1).close()
    assert codes() == {"TFD845"}
    from tfd_notebook.launchers.client.orphans import sweep

    assert sweep()
    assert codes() == set()


@pytest.mark.slow
def test_kernel_that_will_be_culled_is_found() -> None:
    # The process that started it counts as its server.
    server = (
        "import subprocess, sys; print(subprocess.run([sys.executable, '-c', "
        f"'import ipykernel; {DOCTOR}'], capture_output=True, text=True, check=True).stdout)"
    )
    assert in_child(server, "--MappingKernelManager.cull_idle_timeout=60") == {"TFD861"}
    assert in_child(server, "--MappingKernelManager.cull_idle_timeout=0") == set()


@pytest.mark.slow
def test_ipykernel_that_queues_clicks_is_found() -> None:
    old = str(Path(sys.prefix) / "ipykernel6")
    assert in_child(f"import ipykernel; {DOCTOR}", PYTHONPATH=old) == {"TFD862"}
    assert in_child(f"import ipykernel; {DOCTOR}") == set()


# Clusters


class Local(Fake):
    """A fake launcher whose events a test can send."""

    on_event: OnEvent

    def connect(self, config: Any, on_event: OnEvent) -> Any:
        self.on_event = on_event
        return super().connect(config, on_event)


@pytest.fixture
def fake() -> Local:
    return Local()


@pytest.fixture
def cluster(fake: Fake) -> tfd.Cluster:
    return tfd.Cluster(data_workers=2, launcher=fake, name="images")


SHARED_GPU = """
import tfd_notebook as tfd
from tests._gpus import keep_gpus_visible
from tfd_notebook.launchers import Fake

keep_gpus_visible()

def start(name, gpus):
    launcher = Fake(gpus=(0, 1))
    tfd.Cluster(workers=1, ps=1, launcher=launcher, name=name, gpus=gpus)
    launcher.task_hosts[0].use_gpus("localhost", use_percent=(0, 0), used=(0, 0))

start("one", [0])
start("two", [1])
assert "TFD843" not in tfd.doctor().codes
start("three", [0])
(finding,) = (f for f in tfd.doctor() if f.code == "TFD843")
assert "GPU 0 of localhost" in finding.what
assert "one/worker:0, three/worker:0" in finding.what
print(finding.code)
"""


@pytest.mark.slow
def test_oversubscribed_gpu_is_found() -> None:
    # With TensorFlow imported by an earlier test, the process would become a coordinator.
    assert in_child(SHARED_GPU) == {"TFD843"}


def test_late_environment_variables_are_found(
    cluster: tfd.Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "TFD832" not in codes(cluster)
    monkeypatch.setenv("AWS_REGION", "nowhere")
    (finding,) = (f for f in tfd.doctor(cluster) if f.code == "TFD832")
    assert "AWS_REGION" in finding.what
    assert "nowhere" not in str(finding)
    monkeypatch.delenv("AWS_REGION")
    assert "TFD832" not in codes(cluster)


@pytest.fixture
def server_in_this_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Yield the port of a server that counts as TensorFlow's."""
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
        name = "tfd_notebook._compat.tf_coordinator.connection"
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(server_port=lambda: port))
        yield port


def test_port_of_this_process_without_a_filter_is_found(server_in_this_process: int) -> None:
    (finding,) = (f for f in tfd.doctor() if f.code == "TFD863")
    assert f"port {server_in_this_process} without a filter" in finding.what


@pytest.mark.parametrize("closing", [ports.restrict_port, ports.stop_listening])
def test_closed_port_of_this_process_is_no_finding(
    server_in_this_process: int, closing: Any
) -> None:
    options = {"host": "localhost"} if closing is ports.restrict_port else {}
    closing(server_in_this_process, **options)
    assert "TFD863" not in codes()


def test_tasks_open_to_other_hosts_are_found(cluster: tfd.Cluster, fake: Fake) -> None:
    assert "TFD852" not in codes(cluster)
    fake.task_hosts[0].set_state("data_worker:1", TaskState.READY, open_to="everyone")
    (finding,) = (f for f in tfd.doctor(cluster) if f.code == "TFD852")
    assert "data_worker:1 are open to everyone" in finding.what


def test_frequent_restarts_and_reconnects_are_found(cluster: tfd.Cluster, fake: Local) -> None:
    for _ in range(2):
        cluster.kill("data_worker:0")
    assert "TFD853" not in codes(cluster)
    cluster.kill("data_worker:0")
    (finding,) = (f for f in tfd.doctor(cluster) if f.code == "TFD853")
    assert "data_worker:0 was restarted 3 times" in finding.what
    for _ in range(3):
        fake.on_event(HostDisconnected("localhost", 600.0))
        fake.on_event(HostReconnected("localhost", 1.0))
    received = [finding.what for finding in tfd.doctor(cluster) if finding.code == "TFD853"]
    assert any("localhost was lost and restored 3 times" in what for what in received)


def test_failed_tasks_are_found(cluster: tfd.Cluster, fake: Fake) -> None:
    assert "TFD854" not in codes(cluster)
    fake.task_hosts[0].set_state("data_worker:0", TaskState.FAILED, "killed by signal 9", pid=None)
    (finding,) = (f for f in tfd.doctor(cluster) if f.code == "TFD854")
    assert "data_worker:0 is failed: killed by signal 9" in finding.what


@pytest.mark.slow
def test_silent_socket_does_not_block_the_doctor() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        assert codes({"worker": [f"127.0.0.1:{silent.getsockname()[1]}"]}) == {"TFD809"}
