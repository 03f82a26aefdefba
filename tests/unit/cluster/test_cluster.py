"""`Cluster` with a fake launcher: names, counts, states and refused arguments."""

import inspect
import logging
import re
import threading
import time

import pytest
import tensorflow as tf

import tfd_notebook as tfd
from tests._waiting import until
from tfd_notebook import errors
from tfd_notebook.bus.snapshot_feed import SnapshotFeed
from tfd_notebook.cluster import data_service
from tfd_notebook.cluster.adaptation_loop import kept
from tfd_notebook.data.bottleneck.usage import Delivery
from tfd_notebook.launchers import Fake
from tfd_notebook.model.events import TasksLost
from tfd_notebook.model.snapshot import TASK_COLUMNS
from tfd_notebook.model.spec import Role, TaskState

pytestmark = pytest.mark.usefixtures("no_coordinator")


@pytest.fixture
def fake():
    launcher = Fake()
    yield launcher
    for cluster in tfd.clusters().values():
        cluster.stop()


@pytest.fixture
def cluster(fake):
    return tfd.Cluster(data_workers=2, launcher=fake)


def test_starts_dispatcher_and_workers(cluster):
    assert cluster.state == "ready"
    assert [task.name for task in cluster.tasks] == [
        "dispatcher:0",
        "data_worker:0",
        "data_worker:1",
    ]
    frame = cluster.to_frame()
    assert tuple(frame.columns) == TASK_COLUMNS
    assert list(frame.state) == ["ready"] * 3
    assert cluster.dispatcher.target.startswith("grpc://localhost:")


def test_repeated_call_returns_the_same_cluster(cluster, fake):
    assert tfd.Cluster(data_workers=2, launcher=fake) is cluster
    cluster.scale(data_workers=3)
    assert tfd.Cluster(data_workers=2, launcher=fake) is cluster
    assert len(fake.task_hosts) == 1


class Broken(Fake):
    """A launcher whose agent ends at its start, and whose connection then raises the cause."""

    def connect(self, config, on_event):
        monitors = {thread for thread in threading.enumerate() if "monitor" in thread.name}
        on_event(TasksLost(reason="the agent has ended"))
        until(lambda: not all(thread.is_alive() for thread in monitors))
        raise errors.LaunchError("starting failed: the disk is full")


def test_cause_of_a_failed_start_is_raised_after_the_loss_of_its_agent():
    with pytest.raises(errors.LaunchError, match="the disk is full"):
        tfd.Cluster(data_workers=1, launcher=Broken(), name="broken")
    assert "broken" not in tfd.clusters()


def test_rebinding_a_variable_does_not_stop_the_cluster(fake):
    tfd.Cluster(data_workers=1, launcher=fake, name="kept")
    assert tfd.clusters()["kept"].state == "ready"


def test_similar_name_of_a_cluster_is_suggested(fake):
    tfd.Cluster(data_workers=1, launcher=fake, name="train")
    for look_up in (tfd.clusters().__getitem__, tfd.attach):
        with pytest.raises(errors.UnknownName, match=r"'trian'\n.*did you mean 'train'"):
            look_up("trian")
    assert "trian" not in tfd.clusters()
    assert tfd.clusters().get("trian") is None


def test_similar_choice_of_an_option_is_suggested(fake):
    with pytest.raises(errors.UsageError, match="did you mean 'reuse'"):
        tfd.Cluster(data_workers=1, launcher=fake, if_exists="resue")
    with pytest.raises(errors.UsageError, match="did you mean 'restart'"):
        tfd.Policy(on_hang="restrat")


def test_duplicate_name_is_refused_or_replaced(cluster, fake):
    with pytest.raises(errors.NameTaken, match="another specification"):
        tfd.Cluster(data_workers=5, launcher=fake)
    with pytest.raises(errors.NameTaken):
        tfd.Cluster(data_workers=2, launcher=fake, if_exists="error")
    with pytest.raises(errors.UsageError, match="if_exists"):
        tfd.Cluster(data_workers=2, launcher=fake, if_exists="overwrite")
    assert cluster.state == "ready"
    new = tfd.Cluster(data_workers=5, launcher=fake, if_exists="replace")
    assert (cluster.state, new.state) == ("stopped", "ready")


@pytest.mark.parametrize("count", [-1, 1025, 1.5, "2", True])
def test_invalid_counts_are_refused(fake, count):
    with pytest.raises(errors.UsageError, match="data_workers"):
        tfd.Cluster(data_workers=count, launcher=fake)
    assert not fake.task_hosts
    assert not tfd.clusters()


def test_unknown_launchers_and_arguments_are_refused(fake):
    with pytest.raises(errors.UnknownName, match="did you mean 'local'"):
        tfd.Cluster(launcher="lokal")
    with pytest.raises(errors.UsageError, match="expected a name or"):
        tfd.Cluster(launcher=3)
    with pytest.raises(TypeError, match="data_worker"):
        tfd.Cluster(data_worker=3, launcher=fake)


def test_scale_changes_the_number_of_data_workers(cluster, fake):
    cluster.scale(data_workers=4)
    assert [row.index for row in data_service.of(cluster).data_workers()] == [0, 1, 2, 3]
    cluster.scale(data_workers=1)
    snapshot = cluster.snapshot()
    assert [row.task for row in snapshot.tasks] == ["dispatcher:0", "data_worker:0"]
    assert snapshot.planned[Role.DATA_WORKER] == snapshot.observed[Role.DATA_WORKER] == 1
    with pytest.raises(errors.UsageError):
        cluster.scale(data_workers=-3)
    assert cluster.state == "ready"


def test_training_tasks_start_without_a_dispatcher(fake):
    cluster = tfd.Cluster(workers=2, ps=1, evaluator=True, launcher=fake)
    assert [task.name for task in cluster.tasks] == ["ps:0", "worker:0", "worker:1", "evaluator:0"]
    for call in (
        lambda: cluster.dispatcher,
        lambda: cluster.distribute("dynamic"),
        lambda: data_service.of(cluster).service_target,
        cluster.jobs,
    ):
        with pytest.raises(errors.StateError, match=r"no dispatcher[^$]*scale\(data_workers=2\)"):
            call()
    cluster.scale(data_workers=0)
    assert not any(task.role is Role.DISPATCHER for task in cluster.tasks)
    cluster.scale(data_workers=2)
    assert [task.name for task in cluster.tasks][:3] == [
        "dispatcher:0",
        "data_worker:0",
        "data_worker:1",
    ]
    assert cluster.dispatcher.target.startswith("grpc://")
    assert cluster.state == "ready"


def test_failed_start_stops_the_dispatcher(fake, monkeypatch):
    cluster = tfd.Cluster(workers=1, ps=1, launcher=fake)
    task_host = fake.task_hosts[0]
    start = task_host.start

    def refuse(tasks):
        if "data_worker:0" in tasks:
            raise errors.LaunchError("no room")
        start(tasks)

    monkeypatch.setattr(task_host, "start", refuse)
    with pytest.raises(errors.LaunchError, match="no room"):
        cluster.scale(data_workers=1, workers=2)
    assert [task.name for task in cluster.tasks] == ["ps:0", "worker:0"]
    assert cluster.state == "ready"
    with pytest.raises(errors.StateError, match="no dispatcher"):
        cluster.distribute("off")


def test_each_server_gets_its_cluster_spec(fake):
    cluster = tfd.Cluster(workers=2, ps=2, evaluator=True, launcher=fake)
    task_host = fake.task_hosts[0]
    address = {task.name: task.address for task in cluster.tasks}
    training = {
        "worker": [address["worker:0"], address["worker:1"]],
        "ps": [address["ps:0"], address["ps:1"]],
    }
    assert task_host.settings == {
        "worker:0": {"cluster": training, "job": "worker", "index": 0},
        "worker:1": {"cluster": training, "job": "worker", "index": 1},
        "ps:0": {"cluster": training, "job": "ps", "index": 0},
        "ps:1": {"cluster": training, "job": "ps", "index": 1},
        "evaluator:0": {
            "cluster": {"evaluator": [address["evaluator:0"]]},
            "job": "evaluator",
            "index": 0,
        },
    }
    cluster.scale(workers=3)
    addresses = [task.address for task in cluster.tasks if task.role is Role.WORKER]
    assert addresses[:2] == training["worker"]
    grown = {**training, "worker": addresses}
    assert task_host.settings["worker:2"] == {"cluster": grown, "job": "worker", "index": 2}
    cluster.scale(workers=1)
    task_host.set_state("worker:0", TaskState.FAILED, "it died", pid=None)
    cluster.scale(workers=1)  # restarts the failed worker
    assert cluster.snapshot().task("worker:0").state is TaskState.READY


def test_invalid_scaling_is_refused(fake):
    cluster = tfd.Cluster(workers=1, ps=1, launcher=fake)
    with pytest.raises(errors.UsageError, match="needs the number"):
        cluster.scale()
    with pytest.raises(errors.Unsupported, match="a new cluster with ps=2"):
        cluster.scale(workers=2, ps=2)
    for wrong in (-1, True, "2", 1.5):
        with pytest.raises(errors.UsageError, match="workers="):
            cluster.scale(workers=wrong)
    cluster.scale(ps=1)
    assert len(cluster.tasks) == 2


def test_launcher_refuses_unsupported_tasks(fake, monkeypatch):
    monkeypatch.setattr(Fake, "roles", frozenset((Role.DISPATCHER, Role.DATA_WORKER)))
    with pytest.raises(errors.Unsupported, match="'fake' cannot run a ps, only dispatcher, data_w"):
        tfd.Cluster(workers=1, ps=1, launcher=fake)
    assert not fake.task_hosts
    cluster = tfd.Cluster(launcher=fake)
    with pytest.raises(errors.Unsupported, match="cannot run a worker"):
        cluster.scale(workers=1)
    assert cluster.state == "ready"


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("ps:0", "restore a checkpoint"),
        ("worker:0", "is retried"),
        ("data_worker:0", None),
        ("dispatcher:0", None),
    ],
)
def test_notice_of_a_killed_task_states_the_consequence(fake, task, message):
    cluster = tfd.Cluster(workers=1, ps=1, data_workers=1, launcher=fake)
    cluster.kill(task)
    (notice,) = cluster.snapshot().notices
    assert "it is being restarted" in notice.what
    assert message is None or message in notice.what
    assert ("epoch" in notice.what) is False


def test_planned_and_ready_counts_differ_while_a_task_is_down(cluster, fake):
    fake.task_hosts[0].set_state(
        "data_worker:1", TaskState.FAILED, "killed by signal 9 (SIGKILL)", pid=None
    )
    snapshot = cluster.snapshot()
    assert snapshot.state == "degraded"
    assert (snapshot.planned[Role.DATA_WORKER], snapshot.observed[Role.DATA_WORKER]) == (2, 1)
    assert [row.task for row in data_service.of(cluster).data_workers()] == ["data_worker:0"]


def test_failure_is_reported_as_a_warning(cluster, fake, caplog):
    with caplog.at_level(logging.INFO, "tfd_notebook"):
        fake.task_hosts[0].set_state("data_worker:1", TaskState.FAILED, "exit status 3", pid=None)
        fake.task_hosts[0].set_state("data_worker:0", TaskState.HUNG, "no reply for 30 s")
    assert "data_worker:1" in caplog.text
    assert "cluster.restart('data_worker:1')" in caplog.text
    assert "data_worker:0: hung" in caplog.text
    assert [notice.severity for notice in cluster.snapshot().notices] == ["error", "warning"]


def test_tasks_can_be_restarted_and_killed(cluster):
    pid = cluster.snapshot().task("data_worker:0").pid
    assert cluster.kill("data_worker:0") == pid
    cluster.restart("data_worker:0")
    row = cluster.snapshot().task("data_worker:0")
    assert (row.state, row.restarts) == (TaskState.READY, 2)
    with pytest.raises(errors.UnknownName, match="data_worker:7"):
        cluster.restart("data_worker:7")
    with pytest.raises(errors.UnknownName, match="data_worker:7"):
        cluster.kill("data_worker:7")


def test_stop_is_final_and_idempotent(cluster):
    cluster.stop()
    cluster.stop()
    assert cluster.state == "stopped"
    assert cluster.ended
    for call in (
        cluster.start,
        lambda: cluster.scale(data_workers=1),
        lambda: cluster.restart("dispatcher:0"),
        lambda: cluster.kill("dispatcher:0"),
        lambda: cluster.distribute("dynamic"),
        lambda: cluster.stream(None),
    ):
        with pytest.raises(errors.StateError, match="stopped"):
            call()


def test_stream_refuses_invalid_semantics(cluster):
    for given, similar in {"strict": "", "sam": "did you mean 'same'"}.items():
        with pytest.raises(errors.UsageError, match=rf"invalid semantics='{given}'\n.*{similar}"):
            cluster.stream(tf.data.Dataset.range(3), semantics=given)
    with pytest.raises(errors.UsageError, match="Dataset"):
        cluster.stream(None, semantics="checked")
    assert not cluster.streams


def test_cluster_can_be_inspected_before_the_start(fake):
    cluster = tfd.Cluster(data_workers=1, launcher=fake, start=False)
    assert cluster.state == "new"
    with pytest.raises(errors.StateError, match="is new"):
        cluster.scale(data_workers=2)
    with cluster:
        assert cluster.state == "ready"
    assert cluster.state == "stopped"


def test_measurements_become_rates(cluster, fake):
    task_host = fake.task_hosts[0]
    task_host.measure("data_worker:0", cpu_percent=50.0, rss_mb=10.0, bytes_sent=1000)
    task_host.measure("data_worker:0", bytes_sent=3000)
    row = cluster.snapshot().task("data_worker:0")
    assert (row.cpu_percent, row.rss_mb, row.bytes_sent) == (50.0, 10.0, 3000)
    assert row.bytes_per_s > 0


def test_wall_clock_step_does_not_change_rates(cluster, fake, monkeypatch):
    task_host = fake.task_hosts[0]
    task_host.measure("data_worker:0", bytes_sent=1000)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 3600)
    task_host.measure("data_worker:0", bytes_sent=3000)
    assert cluster.snapshot().task("data_worker:0").bytes_per_s > 0


def test_logs_return_the_last_lines(cluster):
    assert cluster.logs("data_worker:0") == "data_worker:0 has no output"
    assert "--- dispatcher:0" in cluster.logs()
    with pytest.raises(errors.UsageError, match="needs a task"):
        cluster.logs(follow=True)
    with pytest.raises(errors.UnknownName):
        cluster.logs("ps:0")
    assert cluster.tasks[1].logs() == cluster.logs("data_worker:0")


@pytest.mark.slow
def test_cluster_stops_at_its_time_limit(fake):
    cluster = tfd.Cluster(launcher=fake, policy=tfd.Policy(time_limit=0.1))
    until(lambda: cluster.ended)
    assert any("time limit" in notice.what for notice in cluster.snapshot().notices)


def test_only_schedulers_have_a_job_script(fake):
    cluster = tfd.Cluster(launcher=fake, start=False)
    with pytest.raises(errors.Unsupported, match="does not submit jobs"):
        cluster.job_script()
    cluster.stop()


def test_windows_is_refused_with_an_error(monkeypatch):
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(errors.Unsupported, match="WSL2"):
        tfd.Cluster(launcher="fake")


@pytest.mark.slow
def test_range_of_data_workers_is_kept_and_ended(cluster, fake):
    cluster.adapt(3, 4)
    until(lambda: len(fake.task_hosts[0].tasks) == 4)  # with the dispatcher
    shown = cluster.snapshot()
    assert shown.adaptation.minimum == 3
    (tree,) = SnapshotFeed().full([shown])["clusters"].values()
    assert (tree["adaptation"]["minimum"], tree["adaptation"]["workers"]) == (3, 3)
    cluster.adapt(1, 2)
    until(lambda: len(fake.task_hosts[0].tasks) == 3)
    cluster.adapt(None)
    assert cluster.snapshot().adaptation is None
    cluster.adapt(1, 2)
    cluster.scale(data_workers=1)
    assert cluster.snapshot().adaptation is None
    cluster.adapt(None)  # a no-op


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1,), "needs a minimum and a maximum"),
        ((0, 4), "invalid minimum=0"),
        ((1, True), "invalid maximum=True"),
        ((None, 4), "invalid minimum=None"),
        ((4, 2), r"minimum 4 is larger.*Next: cluster.adapt\(2, 4\)"),
        ((1, 10**6), "invalid maximum=1000000"),
    ],
)
def test_invalid_range_is_refused(cluster, arguments, message):
    with pytest.raises(errors.UsageError, match=f"(?s){message}"):
        cluster.adapt(*arguments)
    assert cluster.snapshot().adaptation is None


def test_adapt_needs_a_running_cluster(cluster):
    cluster.stop()
    with pytest.raises(errors.StateError, match="is stopped"):
        cluster.adapt(1, 2)


@pytest.mark.slow
def test_failed_change_is_reported_and_not_repeated_at_once(cluster, fake, monkeypatch):
    calls = []

    def refuse(tasks, *, timeout=30.0):
        calls.append(tasks)
        raise errors.LaunchError("no host is free", fix="ask for more")

    monkeypatch.setattr(fake.task_hosts[0], "reserve_ports", refuse)
    cluster.adapt(3, 4)
    notice = until(lambda: next((n for n in cluster.snapshot().notices if n.fix), None))
    assert re.match(
        r"changing to 3 data workers failed: no host is free\. No data worker is added for \d+ s",
        notice.what,
    )
    assert len(calls) == 1
    assert cluster.snapshot().planned[Role.DATA_WORKER] == 2


@pytest.mark.parametrize(
    ("mode", "cardinality", "on_loss", "keeps"),
    [
        ("DYNAMIC", 100, "raise", "fewer"),
        ("DYNAMIC", -2, "raise", "fewer"),
        ("DYNAMIC", 100, "warn", ""),
        ("DYNAMIC", -1, "raise", ""),
        ("OFF", 100, "warn", "all"),
        ("OFF", -1, "raise", ""),
    ],
)
def test_changes_that_would_damage_an_epoch(mode, cardinality, on_loss, keeps):
    assert kept(Delivery(lambda: None, cardinality, mode, None), on_loss) == keeps
    for name in ("one_worker", "cached"):
        delivery = Delivery(lambda: None, cardinality, mode, None, **{name: True})
        assert kept(delivery, on_loss) == "all"


def test_errors_of_calls_have_public_names(cluster):
    with pytest.raises(TypeError, match=r"^Cluster\(\) takes keyword arguments only"):
        tfd.Cluster(2)
    with pytest.raises(TypeError, match=r"^Cluster\(\) .* 'dta_workers': did you mean 'data_worke"):
        tfd.Cluster(dta_workers=2)
    with pytest.raises(TypeError, match=r"^Cluster\(\) .* 'if_exist': did you mean 'if_exists'"):
        tfd.Cluster(if_exist="error")
    with pytest.raises(TypeError, match=r"pass it to tfd\.Policy\(restarts="):
        tfd.Cluster(restarts=2)
    for name, method in inspect.getmembers(tfd.Cluster, inspect.isfunction):
        if not name.startswith("_"):
            with pytest.raises(TypeError, match=rf"^(Cluster\.)?{name}\(\) got an unexpected"):
                method(cluster, unknown=2)


def test_subclasses_are_refused():
    with pytest.raises(errors.UsageError, match="class My cannot be derived from Cluster"):

        class My(tfd.Cluster):
            pass
