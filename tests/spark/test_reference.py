"""Names, arguments and attributes of TFCluster as documented by TensorFlowOnSpark."""

from __future__ import annotations

import inspect
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tfd_notebook import errors
from tfd_notebook.spark import TFCluster, TFNode, TFParallel, dfutil
from tfd_notebook.spark.executor.context import TFNodeContext
from tfd_notebook.spark.TFCluster import InputMode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

#: Timeout in seconds of steps that take a few seconds on an idle machine.
LONG = 200.0
QUEUES = ["input", "output", "error"]
NEEDED = object()
LOCAL = "file:" + "//"


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (
            TFCluster.run,
            {
                **{"sc": NEEDED, "map_fun": NEEDED, "tf_args": NEEDED, "num_executors": NEEDED},
                **{"num_ps": 0, "tensorboard": False, "input_mode": 0, "log_dir": None},
                **{"driver_ps_nodes": False, "master_node": None, "reservation_timeout": 600},
                **{"queues": QUEUES, "eval_node": False, "release_port": True},
            },
        ),
        (
            TFCluster.TFCluster.train,
            {"dataRDD": NEEDED, "num_epochs": 0, "feed_timeout": 600, "qname": "input"},
        ),
        (
            TFCluster.TFCluster.inference,
            {"dataRDD": NEEDED, "feed_timeout": 600, "qname": "input"},
        ),
        (TFCluster.TFCluster.shutdown, {"ssc": None, "grace_secs": 0, "timeout": 259200}),
        (TFNodeContext.release_port, {}),
        (TFCluster.TFCluster.tensorboard_url, {}),
        (
            TFNode.DataFeed,
            {
                **{"mgr": NEEDED, "train_mode": True, "qname_in": "input", "qname_out": "output"},
                "input_mapping": None,
            },
        ),
        (
            TFNodeContext.get_data_feed,
            {
                **{"train_mode": True, "qname_in": "input", "qname_out": "output"},
                "input_mapping": None,
            },
        ),
        (TFNode.DataFeed.next_batch, {"batch_size": NEEDED}),
        (TFNode.DataFeed.batch_results, {"results": NEEDED}),
        (TFNode.hdfs_path, {"ctx": NEEDED, "path": NEEDED}),
        (
            TFParallel.run,
            {
                **{"sc": NEEDED, "map_fn": NEEDED, "tf_args": NEEDED, "num_executors": NEEDED},
                "use_barrier": True,
            },
        ),
        (dfutil.saveAsTFRecords, {"df": NEEDED, "output_dir": NEEDED}),
        (dfutil.loadTFRecords, {"sc": NEEDED, "input_dir": NEEDED, "binary_features": []}),
    ],
)
def test_arguments_keep_their_positions_and_defaults(
    function: Callable[..., Any], arguments: dict[str, Any]
) -> None:
    """Arguments work by position and by name. Added arguments follow the original ones."""
    parameters = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional][: len(arguments)] == list(arguments)
    for parameter in positional[: len(arguments)]:
        default = arguments[parameter.name]
        if default is NEEDED:
            assert parameter.default is parameter.empty
        else:
            actual = list(parameter.default) if isinstance(default, list) else parameter.default
            assert actual == default
    assert all(p.default is not p.empty for p in parameters[len(arguments) :])


def test_input_modes_are_numbers() -> None:
    assert (InputMode.TENSORFLOW, InputMode.SPARK) == (0, 1)
    assert TFCluster.InputMode is InputMode


@pytest.mark.parametrize(
    ("root", "path", "full"),
    [
        (LOCAL + "/", "data/a", LOCAL + "/current/dir/data/a"),
        (LOCAL + "/", "/data/a", LOCAL + "/data/a"),
        ("hdfs://name:8020", "data/a", "hdfs://name:8020/user/{me}/data/a"),
        ("hdfs://name:8020/", "/data/a", "hdfs://name:8020/data/a"),
        ("viewfs://cluster", "a", "viewfs://cluster/user/{me}/a"),
        ("hdfs://", "/foo/bar", "hdfs:///foo/bar"),
        ("viewfs://", "/foo/bar", "viewfs:///foo/bar"),
        (LOCAL, "/foo/bar", LOCAL + "/foo/bar"),
        ("hdfs://", "foo/bar", "hdfs:///user/{me}/foo/bar"),
        ("viewfs://", "foo/bar", "viewfs:///user/{me}/foo/bar"),
        ("hdfs:///", "/foo/bar", "hdfs:///foo/bar"),
        ("hdfs:///", "foo/bar", "hdfs:///user/{me}/foo/bar"),
        ("viewfs:///", "/foo/bar", "viewfs:///foo/bar"),
        ("viewfs:///", "foo/bar", "viewfs:///user/{me}/foo/bar"),
        (LOCAL, "foo/bar", LOCAL + "/current/dir/foo/bar"),
        ("s3a://bucket", "foo/bar", "s3a://bucket/foo/bar"),
        ("hdfs://", "viewfs://foo/bar", "viewfs://foo/bar"),
        ("hdfs://name:8020", "s3a://bucket/a", "s3a://bucket/a"),
        ("hdfs://name:8020", LOCAL + "/data/a", LOCAL + "/data/a"),
        (LOCAL + "/", "hdfs://other/a", "hdfs://other/a"),
        (LOCAL + "/", "gs://bucket/a", "gs://bucket/a"),
    ],
)
def test_paths_have_scheme_and_directory(root: str, path: str, full: str) -> None:
    import getpass

    ctx = TFNodeContext(default_fs=root, working_dir="/current/dir")
    assert ctx.absolute_path(path) == full.format(me=getpass.getuser())
    assert TFNode.hdfs_path(ctx, path) == ctx.absolute_path(path)


@pytest.mark.parametrize(
    "name",
    [
        *("cluster_id", "cluster_info", "cluster_meta", "defaultFS", "input_mode", "nodeRDD"),
        *("num_executors", "queues", "sc", "server", "working_dir"),
    ],
)
def test_attributes_are_none_before_run(name: str) -> None:
    assert getattr(TFCluster.TFCluster, name) is None


def listens(port: int) -> bool:
    """Return True if a plain socket of this host can listen at a port."""
    import socket

    with socket.socket() as own:
        try:
            own.bind(("", port))
            own.listen()
        except OSError:
            return False
        return True


def test_queues_mapping_port_and_attributes(sc: Any, tmp_path: Path, clusters: list[Any]) -> None:
    def function(args: Any, ctx: Any) -> None:
        import threading

        port = int(ctx.cluster_spec["worker"][ctx.task_index].rpartition(":")[2])
        report = {
            "port": [port, ctx.tmp_socket.getsockname()[1]],
            "shared": os.environ.get("TF_GRPC_REUSE_PORT"),
            "held": not listens(port),
            "path": ctx.absolute_path("data"),
            "working_dir": ctx.working_dir,
        }
        ctx.release_port()
        report["released"] = ctx.tmp_socket is None and listens(port)
        ctx.release_port()  # a second time does nothing

        def answer() -> None:
            feed = TFNode.DataFeed(ctx.mgr, False, "questions", "answers")
            while not feed.should_stop():
                feed.batch_results([row + 1 for row in feed.next_batch(4)])

        answering = threading.Thread(target=answer)
        answering.start()
        feed = ctx.get_data_feed(True, "input", input_mapping={"b": "second", "a": "first"})
        report["rows"] = []
        while not feed.should_stop():
            batch = feed.next_batch(3)
            report["rows"] += zip(batch["first"], batch["second"], strict=True)
        answering.join()
        (tmp_path / str(ctx.task_index)).write_text(json.dumps(report))

    queues = [*QUEUES, "questions", "answers"]
    cluster = TFCluster.run(
        sc, function, None, 2, 0, input_mode=1, queues=queues, release_port=False
    )
    clusters.append(cluster)
    cluster.train(sc.parallelize([(n, -n) for n in range(20)], 4), 1, qname="input")
    results = cluster.inference(sc.parallelize(range(10), 4), qname="questions")
    assert results.collect() == list(range(1, 11))
    with pytest.raises(errors.UnknownName, match="'missing'"):
        cluster.train(sc.parallelize([1], 1), 1, qname="missing")

    assert cluster.sc is sc
    assert cluster.input_mode is InputMode.SPARK
    assert cluster.queues == queues
    assert cluster.num_executors == 2
    assert cluster.nodeRDD.collect() == [0, 1]
    assert cluster.working_dir == os.getcwd()
    assert cluster.server.done is False
    assert cluster.cluster_meta == {
        "id": cluster.cluster_id,
        "cluster_template": {"worker": [0, 1]},
        "num_executors": 2,
        "default_fs": cluster.defaultFS,
        "working_dir": cluster.working_dir,
        "server_addr": cluster.server.address,
        "release_port": False,
    }
    info = cluster.cluster_info
    assert [(node["executor_id"], node["task_index"]) for node in info] == [(0, 0), (1, 1)]
    assert [stat.S_ISSOCK(os.stat(node["addr"]).st_mode) for node in info] == [True, True]
    assert [(node["authkey"], node["tb_pid"], node["tb_port"]) for node in info] == [
        (b"", 0, 0)
    ] * 2
    spec = [f"{node['host']}:{node['port']}" for node in info]
    assert [address.rpartition(":")[2] for address in cluster.cluster_spec["worker"]] == [
        address.rpartition(":")[2] for address in spec
    ]
    cluster.shutdown(timeout=LONG)
    assert cluster.server.done is True

    nodes = [json.loads((tmp_path / str(index)).read_text()) for index in range(2)]
    assert sorted(row for node in nodes for row in node["rows"]) == [[n, -n] for n in range(20)]
    for node, node_info in zip(nodes, info, strict=True):
        assert node["port"] == [node_info["port"]] * 2
        assert node["held"]
        assert node["released"]
        assert node["shared"] is None
        assert node["path"] == f"{LOCAL}{node['working_dir']}/data"


def test_named_roles_and_parameter_servers_on_the_driver(
    sc: Any, tmp_path: Path, clusters: list[Any]
) -> None:
    def function(args: Any, ctx: Any) -> None:
        import threading

        config = json.loads(os.environ["TF_CONFIG"])
        address = config["cluster"][ctx.job_name][ctx.task_index]
        report = {
            "config": config,
            "port": [ctx.port, int(address.rpartition(":")[2])],
            "free": ctx.tmp_socket is None and listens(ctx.port),
            "shared": os.environ.get("TF_GRPC_REUSE_PORT"),
        }
        (tmp_path / ".new").mkdir(exist_ok=True)
        file = tmp_path / ".new" / ctx.job_name
        file.write_text(json.dumps(report))
        file.rename(tmp_path / ctx.job_name)
        if ctx.job_name != "master":
            threading.Event().wait()
        expected = ("ps", "evaluator")
        while not all((tmp_path / name).exists() for name in expected):
            threading.Event().wait(0.05)

    cluster = TFCluster.run(
        sc, function, None, 3, 1, driver_ps_nodes=True, master_node="master", eval_node=True
    )
    clusters.append(cluster)
    assert cluster.num_executors == 3
    assert list(cluster.cluster_spec) == ["ps", "master", "evaluator"]
    executors = {node["job_name"]: node["executor"] for node in cluster.cluster_info}
    assert executors["ps"] == "driver"
    assert "driver" not in (executors["master"], executors["evaluator"])
    cluster.shutdown(timeout=LONG)
    for name in ("ps", "master", "evaluator"):
        report = json.loads((tmp_path / name).read_text())
        assert report["free"]
        assert report["shared"] is None
        assert report["port"][0] == report["port"][1]
        config = report["config"]
        assert config["task"] == {"type": name, "index": 0}
        assert config["cluster"]["master"] == cluster.cluster_spec["master"]
    states = {row.node: row.state for row in cluster.snapshot().spark.nodes}
    assert states == {"ps:0": "stopped", "master:0": "finished", "evaluator:0": "stopped"}
