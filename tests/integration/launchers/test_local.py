"""The local launcher with real processes: who dies, who comes back, what is left."""

import contextlib
import fcntl
import gc
import logging
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time

import numpy as np
import psutil
import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook.cluster import data_service
from tfd_notebook.launchers import local
from tfd_notebook.launchers.client import orphans
from tfd_notebook.model.events import Notice
from tfd_notebook.model.spec import ClusterConfig, Role, TaskSpec, TaskState
from tfd_notebook.net import runtime_dir

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster():
    with tfd.Cluster(
        data_workers=2, name="local", policy=tfd.Policy(restarts=2, hang_seconds=1.5)
    ) as cluster:
        yield cluster


def row(cluster, task):
    return cluster.snapshot().task(task)


def test_tasks_are_ready_closed_and_in_a_session_of_their_own(cluster):
    for task in cluster.tasks:
        seen = row(cluster, task.name)
        assert seen.state is TaskState.READY
        assert seen.open_to == "loopback"
        assert os.getsid(seen.pid) != os.getsid(0)
        assert psutil.Process(seen.pid).name().startswith("tfd ")
    assert set(cluster.dispatcher.workers) >= {t.address for t in cluster.tasks[1:]}


def test_a_killed_worker_comes_back_on_its_port(cluster, caplog):
    before = row(cluster, "data_worker:1")
    with caplog.at_level(logging.WARNING, "tfd_notebook"):
        assert cluster.kill("data_worker:1") == before.pid
        until(lambda: row(cluster, "data_worker:1").restarts > before.restarts)
        until(lambda: row(cluster, "data_worker:1").state is TaskState.READY)
    after = row(cluster, "data_worker:1")
    assert after.address == before.address
    assert after.pid != before.pid
    assert "killed by signal 9 (SIGKILL)" in caplog.text


def test_a_killed_dispatcher_comes_back_on_its_port(cluster):
    before = row(cluster, "dispatcher:0")
    cluster.kill("dispatcher:0")
    until(lambda: row(cluster, "dispatcher:0").restarts > before.restarts)
    until(lambda: row(cluster, "dispatcher:0").state is TaskState.READY)
    assert row(cluster, "dispatcher:0").address == before.address


def test_a_stopped_worker_is_seen_as_hung_and_recovers(cluster):
    pid = row(cluster, "data_worker:0").pid
    os.kill(pid, signal.SIGSTOP)
    try:
        hung = until(lambda: (r := row(cluster, "data_worker:0")).state is TaskState.HUNG and r)
        assert "no reply for" in hung.reason
        assert cluster.state == "degraded"
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: row(cluster, "data_worker:0").state is TaskState.READY)
    assert row(cluster, "data_worker:0").pid == pid


def test_what_dies_again_and_again_is_given_up_with_the_reason(cluster):
    for _ in range(10):
        seen = row(cluster, "data_worker:1")
        if seen.state is TaskState.FAILED:
            break
        if seen.state is TaskState.READY:
            cluster.kill("data_worker:1")
        until(lambda before=seen: row(cluster, "data_worker:1").pid != before.pid)
    seen = until(lambda: (r := row(cluster, "data_worker:1")).state is TaskState.FAILED and r)
    assert re.search(r"killed by signal 9 \(SIGKILL\), \d times in a row", seen.reason)
    cluster.restart("data_worker:1")
    assert row(cluster, "data_worker:1").state is TaskState.READY


def test_a_restart_is_requested_before_the_process_of_an_earlier_one_exists(cluster):
    dispatcher, before = row(cluster, "dispatcher:0"), row(cluster, "data_worker:0")
    os.kill(dispatcher.pid, signal.SIGSTOP)  # a data worker starts only once it answers
    try:
        cluster.kill("data_worker:0")
        until(lambda: row(cluster, "data_worker:0").restarts > before.restarts)
        failed = []

        def restart():
            try:
                cluster.restart("data_worker:0")
            except errors.TfdError as error:
                failed.append(error)

        requester = threading.Thread(target=restart)
        requester.start()
        until(lambda: row(cluster, "data_worker:0").reason == "requested")
    finally:
        os.kill(dispatcher.pid, signal.SIGCONT)
    requester.join()
    assert not failed
    after = row(cluster, "data_worker:0")
    assert after.state is TaskState.READY
    assert after.pid != before.pid


def test_measurements_arrive(cluster):
    seen = until(lambda: (r := row(cluster, "data_worker:0")).rss_mb and r)
    assert seen.rss_mb > 50
    assert seen.cpu_percent is not None
    assert seen.bytes_sent > 0
    until(lambda: row(cluster, "data_worker:0").pss_mb)
    until(lambda: cluster.snapshot().journal_bytes)


def doubled(cluster, data):
    """Read a dataset whose Python function refers to `data`."""

    def double(x):
        return x * (2 if len(data) else 0)

    dataset = tf.data.Dataset.range(4).map(lambda x: tf.numpy_function(double, [x], tf.int64))
    read = dataset.apply(cluster.distribute("dynamic"))
    return sorted(int(element) for element in read)


def test_a_function_with_200_mb_is_refused_and_the_cluster_works_on(cluster):
    with pytest.raises(errors.NotSerializable, match=r"200 MB.*at most 200 MB"):
        doubled(cluster, np.ones(200_000_000, np.uint8))
    assert doubled(cluster, np.ones(1000)) == [0, 2, 4, 6]


def megabytes(pid):
    return psutil.Process(pid).memory_info().rss / 1e6


def test_a_cell_that_is_run_again_and_again_does_not_fill_agent_and_workers():
    with tfd.Cluster(data_workers=1, name="cells") as cluster:
        size, times = 5_000_000, 40
        kept = tf.data.Dataset.range(4).map(lambda x: tf.numpy_function(abs, [x], tf.int64))
        kept = kept.apply(cluster.distribute("dynamic"))
        pids = (local.agent_pids()[0], row(cluster, "data_worker:0").pid)
        for _ in range(3):
            assert doubled(cluster, np.ones(size, np.uint8)) == [0, 2, 4, 6]
        before = [megabytes(pid) for pid in pids]
        for _ in range(times):
            assert doubled(cluster, np.ones(size, np.uint8)) == [0, 2, 4, 6]
        grown = [megabytes(pid) - had for pid, had in zip(pids, before, strict=True)]
        assert max(grown) < size * times / 1e6 / 2, grown
        # A new worker has the functions of datasets that still exist.
        assert sorted(int(x) for x in kept) == [0, 1, 2, 3]
        cluster.restart("data_worker:0")
        assert sorted(int(x) for x in kept) == [0, 1, 2, 3]
        assert megabytes(row(cluster, "data_worker:0").pid) < before[1] + size * times / 1e6 / 2


def test_functions_of_a_registered_dataset_stay():
    with tfd.Cluster(data_workers=1, name="registered") as cluster:

        def registered():
            """Register a dataset and refer to its functions no more."""
            dataset = tf.data.Dataset.range(4).map(lambda x: tf.numpy_function(abs, [x], tf.int64))
            return cluster.register(dataset), dataset.element_spec

        dataset_id, spec = registered()
        gc.collect()
        assert doubled(cluster, np.ones(1000)) == [0, 2, 4, 6]
        cluster.restart("data_worker:0")
        read = cluster.from_dataset_id("dynamic", dataset_id, spec)
        assert sorted(int(x) for x in read) == [0, 1, 2, 3]


def pipe_bytes(pid):
    """Return how many bytes wait in the pipe that is the standard input of a process."""
    fd = os.open(f"/proc/{pid}/fd/0", os.O_RDONLY | os.O_NONBLOCK)
    try:
        return struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0]
    finally:
        os.close(fd)


def test_ctrl_c_while_a_function_is_sent_leaves_the_cluster_usable(cluster):
    agent = local.agent_pids()[0]

    def interrupt():
        until(lambda: pipe_bytes(agent) > 60_000)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    os.kill(agent, signal.SIGSTOP)
    try:
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            doubled(cluster, np.ones(10_000_000, np.uint8))
    finally:
        interrupter.join()
        os.kill(agent, signal.SIGCONT)
    assert doubled(cluster, np.ones(1000)) == [0, 2, 4, 6]


def notices(cluster):
    return " ".join(str(notice) for notice in cluster.snapshot().notices)


@contextlib.contextmanager
def no_descriptors(pid):
    """Keep a process from opening files and sockets."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def test_an_agent_without_descriptors_keeps_its_tasks():
    with tfd.Cluster(data_workers=1, name="narrow", policy=tfd.Policy(restarts=1)) as cluster:
        before = {task.name: task.pid for task in cluster.tasks}
        agent = local.agent_pids()[0]
        with no_descriptors(agent):
            until(lambda: "inspecting it failed: OSError" in notices(cluster), 30.0)
            assert {task.name: task.pid for task in cluster.tasks} == before
            # Its successor cannot be started, which is a failure with a reason.
            cluster.kill("dispatcher:0")
            until(lambda: row(cluster, "dispatcher:0").state is TaskState.FAILED, 30.0)
            assert "Too many open files" in row(cluster, "dispatcher:0").reason
            assert row(cluster, "data_worker:0").pid == before["data_worker:0"]
        cluster.restart("dispatcher:0")
        assert local.agent_pids()[0] == agent
        assert doubled(cluster, np.ones(1000)) == [0, 2, 4, 6]


def test_a_listener_that_raises_ends_neither_the_agent_nor_other_clusters(cluster, caplog):
    heard = []

    def raising(event):
        heard.append(event)
        raise KeyError("provoked")

    before = {task.name: task.pid for task in cluster.tasks}
    (task_host,) = local.Local().connect(ClusterConfig(name="raising"), raising)
    try:
        task_host.reserve_ports([TaskSpec(Role.DISPATCHER, 0)])
        task_host.stop(["dispatcher:0"])
        until(lambda: any(isinstance(event, Notice) for event in heard))
    finally:
        task_host.close()
    assert "KeyError" in caplog.text
    assert {task.name: task.pid for task in cluster.tasks} == before
    assert cluster.kill("data_worker:0") == before["data_worker:0"]


def test_a_crash_after_a_restart_in_the_back_off_is_reported():
    with tfd.Cluster(data_workers=1, name="again", policy=tfd.Policy(restarts=5)) as cluster:

        def crash():
            """Kill the worker and return when the agent has noticed."""
            before = row(cluster, "data_worker:0").restarts
            cluster.kill("data_worker:0")
            until(lambda: row(cluster, "data_worker:0").restarts > before)

        for _ in range(4):  # the fourth pause is one of 5 s
            until(lambda: row(cluster, "data_worker:0").state is TaskState.READY)
            crash()
        assert row(cluster, "data_worker:0").state is TaskState.RESTARTING
        cluster.restart("data_worker:0")
        assert row(cluster, "data_worker:0").state is TaskState.READY
        told = len(cluster.snapshot().notices)
        crash()
        seen = until(lambda: cluster.snapshot().notices[told:])
        assert "killed by signal 9" in str(seen[0])


def test_a_stopped_fork_server_does_not_stop_the_agent():
    large = {f"LARGE_{number}": "x" * 100_000 for number in range(10)}
    with tfd.Cluster(data_workers=1, name="large", env=large) as cluster:
        agent, *servers = local.agent_pids()
        assert servers
        for pid in servers:
            os.kill(pid, signal.SIGSTOP)
        scaling = threading.Thread(target=cluster.scale, kwargs={"data_workers": 2})
        try:
            scaling.start()
            until(lambda: "data_worker:1" in [task.name for task in cluster.tasks])
            until(lambda: row(cluster, "data_worker:1").state is TaskState.STARTING)
            pid = row(cluster, "data_worker:0").pid
            assert cluster.kill("data_worker:0") == pid
        finally:
            for pid in servers:
                os.kill(pid, signal.SIGCONT)
            scaling.join()
        until(lambda: [task.state for task in cluster.tasks] == [TaskState.READY] * 3)
        assert local.agent_pids()[0] == agent


def test_scale_up_and_down_leaves_no_process(cluster):
    cluster.scale(data_workers=4)
    pids = [row(cluster, f"data_worker:{i}").pid for i in (2, 3)]
    assert all(psutil.pid_exists(pid) for pid in pids)
    cluster.scale(data_workers=2)
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert len(data_service.of(cluster).data_workers()) == 2


def test_a_port_is_held_against_strangers_also_while_its_task_is_down(cluster):
    port = int(row(cluster, "data_worker:0").address.rsplit(":", 1)[1])
    cluster.kill("data_worker:0")
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))
    until(lambda: row(cluster, "data_worker:0").state is TaskState.READY)


def test_a_port_in_use_names_its_owner(cluster):
    for owner in ("stranger", "cluster"):
        with socket.socket() as stranger:
            if owner == "stranger":
                stranger.bind(("127.0.0.1", 0))
                stranger.listen()
                port = stranger.getsockname()[1]
            else:
                port = int(row(cluster, "dispatcher:0").address.rsplit(":", 1)[1])
            with pytest.raises(errors.PortInUse, match=str(port)):
                tfd.Cluster(name="second", service=tfd.Service(port=port))
    assert list(tfd.clusters()) == ["local"]


def test_environment_directory_and_path_are_those_of_the_start(tmp_path, monkeypatch):
    module = tmp_path / "tfd_probe_module.py"
    module.write_text(
        "import os, sys\n"
        "print('PROBE', os.environ['TFD_X'], os.environ['TFD_Y'], os.getcwd(), flush=True)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("TFD_X", "kernel")
    with tfd.Cluster(
        data_workers=1, name="environment", env={"TFD_Y": "extra"}, preload="tfd_probe_module"
    ) as cluster:
        said = f"PROBE kernel extra {tmp_path}"
        assert said in cluster.logs("data_worker:0")
        assert f"--- data_worker:0\n{said}" in cluster.logs()
        lines = cluster.logs("data_worker:0", lines=1, follow=True)
        assert next(lines) == said
        lines.close()


def test_a_variable_read_at_import_brings_a_new_fork_server(cluster):
    before = set(local.agent_pids())
    with tfd.Cluster(data_workers=1, name="imported", env={"TF_TFD_TEST": "1"}) as other:
        assert "TF_TFD_TEST" in next(n.what for n in other.snapshot().notices)
        assert set(local.agent_pids()) != before
    assert row(cluster, "data_worker:0").state is TaskState.READY


def test_a_stale_module_is_told(tmp_path, monkeypatch, caplog):
    import tensorflow as tf

    module = tmp_path / "tfd_stale_module.py"
    module.write_text("def add(a):\n    return a + 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import tfd_stale_module

    def read(cluster):
        dataset = tf.data.Dataset.range(3).map(
            lambda a: tf.numpy_function(tfd_stale_module.add, [a], tf.int64)
        )
        return sorted(dataset.apply(cluster.distribute("dynamic")).as_numpy_iterator())

    with tfd.Cluster(data_workers=1, name="stale") as cluster:
        assert read(cluster) == [1, 2, 3]
        assert read(cluster) == [1, 2, 3]
        assert "old version" not in caplog.text
        module.write_text("def add(a):\n    return a + 10\n")
        later = time.time() + 10
        os.utime(module, (later, later))
        read(cluster)
        assert "old version of tfd_stale_module" in caplog.text
        cluster.restart("data_worker:0")
        assert read(cluster) == [10, 11, 12]


def test_a_proxy_does_not_come_between(monkeypatch):
    """With http_proxy set TensorFlow alone would wait for ever for a worker on this host."""
    import tensorflow as tf

    monkeypatch.setenv("no_grpc_proxy", "example.org")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with tfd.Cluster(data_workers=1, name="proxied") as cluster:
        dataset = tf.data.Dataset.range(5).apply(cluster.distribute("dynamic"))
        assert sorted(dataset.as_numpy_iterator()) == list(range(5))
        assert os.environ["no_grpc_proxy"] == "example.org,localhost,127.0.0.1,::1"  # noqa: SIM112
        assert "http_proxy is set" in cluster.snapshot().notices[0].what


@pytest.mark.parametrize(
    ("preload", "reason"),
    [("tfd_no_such_module", "ModuleNotFoundError"), ("/nowhere/op.so", "NotFoundError")],
)
def test_a_bad_preload_fails_at_once_and_leaves_nothing(cluster, preload, reason):
    with pytest.raises(errors.LaunchError, match=reason):
        tfd.Cluster(data_workers=1, name="bad", preload=preload)
    assert list(tfd.clusters()) == ["local"]


@pytest.mark.parametrize("work_dir", ["/proc/tfd", "/dev/full/x"])
def test_an_unusable_work_dir_is_named(cluster, work_dir):
    with pytest.raises(errors.WorkDirError, match=work_dir):
        tfd.Cluster(name="bad", service=tfd.Service(work_dir=work_dir))


def test_no_tensorflow_is_one_sentence(tmp_path):
    """A Python that cannot import TensorFlow gets told what to install."""
    (tmp_path / "tensorflow.py").write_text("raise ImportError('no TensorFlow here')")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import tfd_notebook as tfd\n"
        "try: tfd.Cluster(data_workers=1)\n"
        "except tfd.errors.TensorFlowMissing as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert "no TensorFlow here" in done.stdout
    assert 'pip install "tfd-notebook[tensorflow]"' in done.stdout


OWNER = """
import sys, time
import tfd_notebook as tfd
cluster = tfd.Cluster(data_workers=1, name="owned")
from tfd_notebook.launchers import local
print(*[t.pid for t in cluster.tasks], *local.agent_pids(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_its_owner(number):
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 4
        assert all(psutil.pid_exists(pid) for pid in pids)
    finally:
        owner.send_signal(number)
        owner.wait(20)
        owner.stdout.close()
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    # The agent's own directory goes with it.
    until(lambda: not any(s.get("owner_pid") == owner.pid for _, s in runtime_dir.agent_states()))


@pytest.mark.parametrize("told", [True, False])
def test_the_end_of_a_process_is_waited_for_and_its_status_left(told, monkeypatch):
    if not told:  # a system that cannot be asked to tell

        def refused(pid):
            raise OSError

        monkeypatch.setattr(os, "pidfd_open", refused, raising=False)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with runtime_dir.watched(process.pid) as ended:
        assert not ended(0.1)
        process.kill()
        assert ended(20)
    assert process.wait() == -signal.SIGKILL


def test_sweep_ends_only_what_a_dead_owner_left():
    """An agent that was killed together with its owner leaves a directory and, here, a process."""
    owner = subprocess.Popen(["sleep", "60"])
    ended = runtime_dir.process_identity(owner.pid)
    owner.kill()
    owner.wait()
    directory, lock = runtime_dir.new_agent_dir("0123456789ab")
    lock.close()
    state = {"agent": "0123456789ab", "pid": owner.pid, "process": ended, "owner": ended}
    runtime_dir.write_state(directory, state)
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    left = subprocess.Popen(sleeper, env={**os.environ, runtime_dir.AGENT_VARIABLE: "0123456789ab"})
    stranger = subprocess.Popen(sleeper)
    try:
        until(lambda: psutil.Process(left.pid).environ().get(runtime_dir.AGENT_VARIABLE))
        seen = orphans.sweep(dry_run=True)
        assert {leftover.pid for leftover in seen} == {left.pid, None}
        assert left.poll() is None
        orphans.sweep()
        assert left.wait(5) == -signal.SIGKILL
        assert stranger.poll() is None
        assert not directory.exists()
        assert orphans.sweep() == ()
    finally:
        for process in (left, stranger):
            process.kill()
            process.wait()


FORKING = """
import os, sys
import tfd_notebook as tfd

def end_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

cluster = tfd.Cluster(data_workers=1, name="forked")
pids = [task.pid for task in cluster.tasks]
child = os.fork()
if child == 0:
    assert not tfd.clusters()
    try:
        cluster.logs("data_worker:0")
    except tfd.errors.StateError as error:
        assert str(os.getppid()) in str(error), error
        sys.exit(7)
assert end_of(child) == 7
assert cluster.logs("data_worker:0") is not None
with tfd.Cluster(data_workers=1, name="block") as block:
    child = os.fork()
    if child == 0:
        sys.exit(8)
    assert end_of(child) == 8
    assert block.logs("data_worker:0") is not None
child = os.fork()
if child == 0:
    cluster.stop()
    with tfd.Cluster(data_workers=1, name="own") as own:
        assert own.state == "ready"
    sys.exit(9)
assert end_of(child) == 9
assert [task.pid for task in cluster.tasks] == pids
assert cluster.kill("data_worker:0") == pids[1]
print("the parent's clusters work", flush=True)
"""


def test_a_forked_child_that_ends_leaves_the_clusters_of_its_parent():
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", FORKING],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.stdout == "the parent's clusters work\n", done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_a_lost_agent_is_said_and_the_next_cluster_gets_a_new_one():
    code = (
        "import os, signal, time\n"
        "import tfd_notebook as tfd\n"
        "from tfd_notebook.launchers import local\n"
        "first = tfd.Cluster(data_workers=1, name='first')\n"
        "os.kill(local.agent_pids()[0], signal.SIGKILL)\n"
        "assert first.wait_ended(5)\n"
        "print(first.state, first.snapshot().notices[-1])\n"
        "with tfd.Cluster(data_workers=1, name='second') as second: print(second.state)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=True
    )
    assert "agent ended" in done.stdout
    assert "ready" in done.stdout


def test_where_forking_is_impossible_tasks_are_spawned():
    code = (
        "import os\n"
        "import tfd_notebook as tfd\n"
        "with tfd.Cluster(data_workers=1, name='spawned') as cluster:\n"
        "    cluster.kill('data_worker:0')\n"
        "    cluster.restart('data_worker:0')\n"
        "    print(cluster.state, [task.name for task in cluster.tasks])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TFD_START_METHOD": "spawn"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "ready ['dispatcher:0', 'data_worker:0']\n"


def test_packages_that_start_threads_when_imported_are_left_to_the_tasks(tmp_path):
    # Keras imports pandas where there is one, and pandas pyarrow, which starts threads.
    (tmp_path / "pandas.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    code = (
        "import tfd_notebook as tfd\n"
        "with tfd.Cluster(data_workers=1, name='threads') as cluster: print(cluster.state)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "ready\n", done.stderr


def test_ctrl_c_during_the_start_ends_it_and_leaves_nothing():
    code = (
        "import os, signal, threading\n"
        "import tfd_notebook as tfd\n"
        "threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "try: tfd.Cluster(data_workers=1, preload='slow_to_import')\n"
        "except KeyboardInterrupt: print('interrupted', dict(tfd.clusters()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "interrupted {}\n"


@pytest.mark.root
def test_a_full_work_dir_is_named(tmp_path):
    full = tmp_path / "full"
    full.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(full)]
    subprocess.run(mount, check=True)
    try:
        (full / "filler").write_bytes(b"x" * 4096)
        with pytest.raises(errors.WorkDirError, match=f"{full}.*No space left"):
            tfd.Cluster(name="full", service=tfd.Service(work_dir=str(full)))
    finally:
        subprocess.run(["umount", str(full)], check=True)


@pytest.mark.root
def test_a_work_dir_that_fills_up_is_named(tmp_path):
    """TensorFlow's dispatcher would deliver nothing at all, and call that the end."""
    import tensorflow as tf

    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)], check=True)
    try:
        settings = tfd.Service(work_dir=str(disk))
        with tfd.Cluster(data_workers=1, name="filling", service=settings) as cluster:
            numbers = tf.data.Dataset.range(10)
            assert len(list(numbers.apply(cluster.distribute("off")))) == 10
            filler = disk / "filler"
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while file.write(b"x" * 65536):
                    pass
            with pytest.raises(errors.WorkDirError, match=f"{disk}.* has only 0.0 MB free"):
                numbers.apply(cluster.distribute("off"))
            filler.unlink()
            assert len(list(numbers.apply(cluster.distribute("off")))) == 10
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_start_that_is_broken_off_does_no_harm_to_the_next() -> None:
    """A cluster is stopped while a task that was killed is being forked anew."""
    for pause in (0.0, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05):
        with tfd.Cluster(data_workers=2, name="broken-off") as cluster:
            cluster.kill("data_worker:0")
            cluster.kill("data_worker:1")
            time.sleep(pause)
    with tfd.Cluster(data_workers=2, name="broken-off") as cluster:
        assert all(task.restarts == 0 for task in cluster.snapshot().tasks)
        assert all(psutil.pid_exists(task.pid) for task in cluster.tasks)
