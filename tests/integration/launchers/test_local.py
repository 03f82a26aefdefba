"""The local launcher with real processes: crashes, restarts and leftovers."""

import contextlib
import fcntl
import gc
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


def test_tasks_are_ready_and_private_in_their_own_session(cluster):
    for task in cluster.tasks:
        status = row(cluster, task.name)
        assert status.state is TaskState.READY
        assert status.open_to == "loopback"
        assert os.getsid(status.pid) != os.getsid(0)
        assert psutil.Process(status.pid).name().startswith("tfd ")
    assert set(cluster.dispatcher.workers) >= {t.address for t in cluster.tasks[1:]}


def test_suspended_worker_is_hung_until_it_continues(cluster):
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


def test_repeatedly_killed_worker_fails_with_a_reason(cluster):
    for _ in range(10):
        status = row(cluster, "data_worker:1")
        if status.state is TaskState.FAILED:
            break
        if status.state is TaskState.READY:
            cluster.kill("data_worker:1")
        until(lambda before=status: row(cluster, "data_worker:1").pid != before.pid)
    status = until(lambda: (r := row(cluster, "data_worker:1")).state is TaskState.FAILED and r)
    assert re.search(r"killed by signal 9 \(SIGKILL\), \d times in a row", status.reason)
    cluster.restart("data_worker:1")
    assert row(cluster, "data_worker:1").state is TaskState.READY


def test_restart_can_be_requested_during_a_restart(cluster):
    dispatcher, before = row(cluster, "dispatcher:0"), row(cluster, "data_worker:0")
    os.kill(dispatcher.pid, signal.SIGSTOP)  # a data worker starts after the dispatcher answers
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


def test_data_workers_are_not_added_while_the_dispatcher_is_stopped(cluster):
    dispatcher = row(cluster, "dispatcher:0")
    count = cluster.snapshot().planned[Role.DATA_WORKER]
    os.kill(dispatcher.pid, signal.SIGSTOP)
    try:
        with pytest.raises(errors.StateError, match="dispatcher:0 does not answer") as caught:
            cluster.scale(data_workers=count + 1)
    finally:
        os.kill(dispatcher.pid, signal.SIGCONT)
    assert caught.value.fix == "cluster.restart('dispatcher:0')"
    assert cluster.snapshot().planned[Role.DATA_WORKER] == count


def test_measurements_are_shown(cluster):
    usage = until(lambda: (r := row(cluster, "data_worker:0")).rss_mb and r)
    assert usage.rss_mb > 50
    assert usage.cpu_percent is not None
    assert usage.bytes_sent > 0
    until(lambda: row(cluster, "data_worker:0").pss_mb)
    until(lambda: cluster.snapshot().journal_bytes)


def doubled(cluster, data):
    """Read a dataset whose Python function refers to `data`."""

    def double(x):
        return x * (2 if len(data) else 0)

    dataset = tf.data.Dataset.range(4).map(lambda x: tf.numpy_function(double, [x], tf.int64))
    read = dataset.apply(cluster.distribute("dynamic"))
    return sorted(int(element) for element in read)


def test_too_large_function_is_refused_without_damage(cluster):
    with pytest.raises(errors.NotSerializable, match=r"200 MB.*at most 200 MB"):
        doubled(cluster, np.ones(200_000_000, np.uint8))
    assert doubled(cluster, np.ones(1000)) == [0, 2, 4, 6]


def megabytes(pid):
    return psutil.Process(pid).memory_info().rss / 1e6


def test_repeated_cells_do_not_fill_agent_and_workers():
    with tfd.Cluster(data_workers=1, name="cells") as cluster:
        size, times = 10_000_000, 10
        # Limit in MB, less than the total size of the functions.
        limit = 0.8 * size * times / 1e6
        kept = tf.data.Dataset.range(4).map(lambda x: tf.numpy_function(abs, [x], tf.int64))
        kept = kept.apply(cluster.distribute("dynamic"))
        pids = (local.agent_pids()[0], row(cluster, "data_worker:0").pid)
        for _ in range(3):
            assert doubled(cluster, np.ones(size, np.uint8)) == [0, 2, 4, 6]
        before = [megabytes(pid) for pid in pids]
        for _ in range(times):
            assert doubled(cluster, np.ones(size, np.uint8)) == [0, 2, 4, 6]
        grown = [megabytes(pid) - had for pid, had in zip(pids, before, strict=True)]
        assert max(grown) < limit, grown
        # A new worker has the functions of datasets that still exist.
        assert sorted(int(x) for x in kept) == [0, 1, 2, 3]
        cluster.restart("data_worker:0")
        assert sorted(int(x) for x in kept) == [0, 1, 2, 3]
        assert megabytes(row(cluster, "data_worker:0").pid) < before[1] + limit


def test_functions_of_a_registered_dataset_are_kept():
    with tfd.Cluster(data_workers=1, name="registered") as cluster:

        def registered():
            """Register a dataset, and keep no reference to its functions."""
            dataset = tf.data.Dataset.range(4).map(lambda x: tf.numpy_function(abs, [x], tf.int64))
            return cluster.register(dataset), dataset.element_spec

        dataset_id, spec = registered()
        gc.collect()
        assert doubled(cluster, np.ones(1000)) == [0, 2, 4, 6]
        cluster.restart("data_worker:0")
        read = cluster.from_dataset_id("dynamic", dataset_id, spec)
        assert sorted(int(x) for x in read) == [0, 1, 2, 3]


def pipe_bytes(pid):
    """Return the number of unread bytes in the standard input of a process."""
    fd = os.open(f"/proc/{pid}/fd/0", os.O_RDONLY | os.O_NONBLOCK)
    try:
        return struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0]
    finally:
        os.close(fd)


def test_ctrl_c_during_a_transfer_keeps_the_cluster_usable(cluster):
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


def test_agent_without_file_descriptors_keeps_its_tasks():
    with tfd.Cluster(data_workers=1, name="narrow", policy=tfd.Policy(restarts=1)) as cluster:
        before = {task.name: task.pid for task in cluster.tasks}
        agent = local.agent_pids()[0]
        with no_descriptors(agent):
            until(lambda: "inspecting data_worker:0 failed: OSError" in notices(cluster))
            assert {task.name: task.pid for task in cluster.tasks} == before
            # A new process cannot start, so the task fails with a reason.
            cluster.kill("dispatcher:0")
            until(lambda: row(cluster, "dispatcher:0").state is TaskState.FAILED)
            assert "Too many open files" in row(cluster, "dispatcher:0").reason
            assert row(cluster, "data_worker:0").pid == before["data_worker:0"]
        cluster.restart("dispatcher:0")
        assert local.agent_pids()[0] == agent
        assert doubled(cluster, np.ones(1000)) == [0, 2, 4, 6]


def test_failing_listener_ends_only_its_own_session(cluster, caplog):
    received = []

    def raising(event):
        received.append(event)
        raise KeyError("provoked")

    before = {task.name: task.pid for task in cluster.tasks}
    (task_host,) = local.Local().connect(ClusterConfig(name="raising"), raising)
    try:
        task_host.reserve_ports([TaskSpec(Role.DISPATCHER, 0)])
        task_host.stop(["dispatcher:0"])
        until(lambda: any(isinstance(event, Notice) for event in received))
    finally:
        task_host.close()
    assert "KeyError" in caplog.text
    assert {task.name: task.pid for task in cluster.tasks} == before
    assert cluster.kill("data_worker:0") == before["data_worker:0"]


def test_networks_of_a_host_that_joins_can_connect_to_running_tasks():
    with tfd.Cluster(data_workers=1, name="opened") as cluster:
        before = {task.name: task.pid for task in cluster.tasks}
        cluster._task_manager.task_host.allow(["127.0.0.9/32", "192.0.2.7/32"])
        for task in cluster.tasks:
            assert row(cluster, task.name).open_to.endswith("192.0.2.7/32")
        assert {task.name: task.pid for task in cluster.tasks} == before
        assert doubled(cluster, np.ones(1000)) == [0, 2, 4, 6]
        cluster.restart("data_worker:0")
        assert row(cluster, "data_worker:0").open_to.endswith("192.0.2.7/32")


def test_crash_after_a_restart_during_backoff_is_reported():
    with tfd.Cluster(data_workers=1, name="again", policy=tfd.Policy(restarts=5)) as cluster:

        def crash():
            """Kill the worker, and wait until the agent has detected it."""
            before = row(cluster, "data_worker:0").restarts
            cluster.kill("data_worker:0")
            until(lambda: row(cluster, "data_worker:0").restarts > before)

        for _ in range(4):  # the fourth pause lasts 5 s
            until(lambda: row(cluster, "data_worker:0").state is TaskState.READY)
            crash()
        assert row(cluster, "data_worker:0").state is TaskState.RESTARTING
        cluster.restart("data_worker:0")
        assert row(cluster, "data_worker:0").state is TaskState.READY
        count = len(cluster.snapshot().notices)
        crash()
        new = until(lambda: cluster.snapshot().notices[count:])
        assert "killed by signal 9" in str(new[0])


def test_suspended_fork_server_does_not_block_the_agent():
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


def test_port_stays_reserved_while_its_task_is_down(cluster):
    port = int(row(cluster, "data_worker:0").address.rsplit(":", 1)[1])
    cluster.kill("data_worker:0")
    with socket.socket() as intruder, pytest.raises(OSError, match="in use"):
        intruder.bind(("127.0.0.1", port))
    until(lambda: row(cluster, "data_worker:0").state is TaskState.READY)


def test_port_of_another_program_is_named():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(errors.PortInUse, match=str(port)):
            tfd.Cluster(name="second", service=tfd.Service(port=port))
    assert "second" not in tfd.clusters()


def test_tasks_get_environment_and_directory_of_the_start(tmp_path, monkeypatch):
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
        line = f"PROBE kernel extra {tmp_path}"
        assert line in cluster.logs("data_worker:0")
        assert f"--- data_worker:0\n{line}" in cluster.logs()
        lines = cluster.logs("data_worker:0", lines=1, follow=True)
        assert next(lines) == line
        lines.close()


def test_variable_read_at_import_starts_a_new_fork_server(cluster):
    before = set(local.agent_pids())
    with tfd.Cluster(data_workers=1, name="imported", env={"TF_TFD_TEST": "1"}) as second:
        assert "TF_TFD_TEST" in next(n.what for n in second.snapshot().notices)
        assert set(local.agent_pids()) != before
    assert row(cluster, "data_worker:0").state is TaskState.READY


def test_stale_module_is_reported(tmp_path, monkeypatch, caplog):
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


def test_proxy_is_not_used_for_local_workers(monkeypatch):
    """With http_proxy, TensorFlow would wait without end for a worker on this host."""
    import tensorflow as tf

    monkeypatch.setenv("no_grpc_proxy", "example.org")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with tfd.Cluster(data_workers=1, name="proxied") as cluster:
        dataset = tf.data.Dataset.range(5).apply(cluster.distribute("dynamic"))
        assert sorted(dataset.as_numpy_iterator()) == list(range(5))
        assert os.environ["no_grpc_proxy"] == "example.org,localhost,127.0.0.1,::1"  # noqa: SIM112
        assert "http_proxy is set" in cluster.snapshot().notices[0].what


def test_missing_op_library_fails_and_leaves_nothing_behind():
    with pytest.raises(errors.LaunchError, match="NotFoundError"):
        tfd.Cluster(data_workers=1, name="bad", preload="/nowhere/op.so")
    assert "bad" not in tfd.clusters()


@pytest.mark.parametrize("work_dir", ["/proc/tfd", "/dev/full/x"])
def test_unusable_work_dir_is_named(cluster, work_dir):
    with pytest.raises(errors.WorkDirError, match=work_dir):
        tfd.Cluster(name="bad", service=tfd.Service(work_dir=work_dir))


def test_missing_tensorflow_error_has_the_command_to_install_it(tmp_path):
    """The error of a Python without TensorFlow has the command to install it."""
    (tmp_path / "tensorflow.py").write_text("raise ImportError('no TensorFlow here')")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import tfd_notebook as tfd\n"
        "try: tfd.Cluster(data_workers=1)\n"
        "except tfd.errors.TensorFlowMissing as error: print(error)\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert "no TensorFlow here" in completed.stdout
    assert 'pip install "tfd-notebook[tensorflow]"' in completed.stdout


OWNER = """
import sys, time
import tfd_notebook as tfd
cluster = tfd.Cluster(data_workers=1, name="owned")
from tfd_notebook.launchers import local
print(*[t.pid for t in cluster.tasks], *local.agent_pids(), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_tasks_and_agent_end_with_their_owner(number):
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(word) for word in owner.stdout.readline().split()]
        assert len(pids) == 4
        assert all(psutil.pid_exists(pid) for pid in pids)
    finally:
        owner.send_signal(number)
        owner.wait(60)
        owner.stdout.close()
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    # The agent also removes its directory.
    until(lambda: not any(s.get("owner_pid") == owner.pid for _, s in runtime_dir.agent_states()))


@pytest.mark.parametrize("supported", [True, False])
def test_watching_a_process_keeps_its_exit_status(supported, monkeypatch):
    if not supported:  # a system without pidfds

        def unsupported(pid):
            raise OSError

        monkeypatch.setattr(os, "pidfd_open", unsupported, raising=False)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with runtime_dir.watched(process.pid) as ended:
        assert not ended(0.1)
        process.kill()
        assert ended(20)
    assert process.wait() == -signal.SIGKILL


def test_sweep_ends_orphans_only():
    """An agent that was killed with its owner leaves a directory and a process behind."""
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
    unrelated = subprocess.Popen(sleeper)
    try:
        until(lambda: psutil.Process(left.pid).environ().get(runtime_dir.AGENT_VARIABLE))
        listed = orphans.sweep(dry_run=True)
        assert {leftover.pid for leftover in listed} == {left.pid, None}
        assert left.poll() is None
        orphans.sweep()
        assert left.wait(60) == -signal.SIGKILL
        assert unrelated.poll() is None
        assert not directory.exists()
        assert orphans.sweep() == ()
    finally:
        for process in (left, unrelated):
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


@pytest.mark.slow
def test_forked_child_keeps_the_clusters_of_its_parent():
    completed = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", FORKING],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert completed.stdout == "the parent's clusters work\n", completed.stdout + completed.stderr
    assert "Traceback" not in completed.stderr


def test_lost_agent_is_reported_and_replaced():
    code = (
        "import os, signal, time\n"
        "import tfd_notebook as tfd\n"
        "from tfd_notebook.launchers import local\n"
        "first = tfd.Cluster(data_workers=1, name='first')\n"
        "os.kill(local.agent_pids()[0], signal.SIGKILL)\n"
        "assert first.dispatcher.join(60)\n"
        "print(first.state, first.snapshot().notices[-1])\n"
        "with tfd.Cluster(data_workers=1, name='second') as second: print(second.state)\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=90, check=True
    )
    assert "agent ended" in completed.stdout
    assert "ready" in completed.stdout


@pytest.mark.slow
def test_tasks_can_be_spawned_instead_of_forked():
    code = (
        "import os\n"
        "import tfd_notebook as tfd\n"
        "with tfd.Cluster(data_workers=1, name='spawned') as cluster:\n"
        "    cluster.kill('data_worker:0')\n"
        "    cluster.restart('data_worker:0')\n"
        "    print(cluster.state, [task.name for task in cluster.tasks])\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TFD_START_METHOD": "spawn"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert completed.stdout == "ready ['dispatcher:0', 'data_worker:0']\n"


def test_fork_server_skips_packages_that_start_threads(tmp_path):
    # Keras imports pandas if it is installed. Pandas imports pyarrow, which starts threads.
    (tmp_path / "pandas.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    code = (
        "import tfd_notebook as tfd\n"
        "with tfd.Cluster(data_workers=1, name='threads') as cluster: print(cluster.state)\n"
    )
    completed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert completed.stdout == "ready\n", completed.stderr


@pytest.mark.root
def test_full_work_dir_is_named(tmp_path):
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
def test_work_dir_that_becomes_full_is_named(tmp_path):
    """TensorFlow's dispatcher would end the epoch without an element."""
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


def test_stop_during_a_restart_does_not_harm_the_next_cluster() -> None:
    """A cluster is stopped while the agent forks the successor of a killed task."""
    for pause in (0.0, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05):
        with tfd.Cluster(data_workers=2, name="broken-off") as cluster:
            cluster.kill("data_worker:0")
            cluster.kill("data_worker:1")
            time.sleep(pause)
    with tfd.Cluster(data_workers=2, name="broken-off") as cluster:
        assert all(task.restarts == 0 for task in cluster.snapshot().tasks)
        assert all(psutil.pid_exists(task.pid) for task in cluster.tasks)
