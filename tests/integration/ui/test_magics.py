"""The magics and the live widget in a real kernel, with real servers."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.integration._kernel import Notebook

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    with Notebook() as notebook:
        output = notebook.run(
            "%load_ext tfd_notebook\n%tfd_cluster start --data-workers 2 --name live", timeout=170
        )
        assert "it is in the variable 'cluster'" in output, output
        yield notebook


def test_status_shows_the_tasks(notebook: Notebook) -> None:
    output = notebook.run("%tfd_cluster status live")
    assert len(re.findall(r"data_worker:\d +● ready +localhost:\d+ +\d+", output)) == 2
    assert "open to" in output


def test_killed_worker_restarts_on_its_port(notebook: Notebook) -> None:
    before = notebook.run("print(cluster.snapshot().task('data_worker:1').address)")
    assert "was killed" in notebook.run("%tfd_cluster kill data_worker:1")
    output = notebook.run(
        "import time\n"
        "for _ in range(600):\n"
        "    row = cluster.snapshot().task('data_worker:1')\n"
        "    if row.restarts and row.state == 'ready': break\n"
        "    time.sleep(0.1)\n"
        "print(row.address)"
    )
    assert output.endswith(before)


def test_stream_runs_in_the_background(notebook: Notebook) -> None:
    output = notebook.run(
        "import tensorflow as tf\n"
        "numbers = tf.data.Dataset.range(10**9).batch(100).apply(cluster.distribute('off'))\n"
        "%tfd_stream start numbers\n"
    )
    assert "stream 'numbers' is running" in output, output
    assert notebook.run("print(cluster.streams['numbers'].wait(elements=500, timeout=60))") == (
        "True\n"
    )
    assert re.search(r"numbers +live +► running", notebook.run("%tfd_stream status"))
    assert "is paused" in notebook.run("%tfd_stream pause")
    assert "is running" in notebook.run("%tfd_stream resume")
    assert "is stopped" in notebook.run("%tfd_stream stop numbers")


def test_interrupt_ends_following_of_logs(notebook: Notebook) -> None:
    cell = notebook.client.execute("%tfd_cluster logs data_worker:0 --follow")
    notebook.finish(cell, until="WorkerServer running")
    notebook.manager.interrupt_kernel()
    assert "stopped following" in notebook.finish(cell)
    assert "ready" in notebook.run("print(cluster.state)")


def test_widget_commands_run_during_a_cell(notebook: Notebook) -> None:
    notebook.run("view = get_ipython().run_line_magic('tfd_cluster', 'status live --live')")
    widget = notebook.widget("cluster")
    assert widget.cluster["observed"]["data_worker"] == 2
    cell = notebook.begin("print('busy'); time.sleep(100)", until="busy")
    assert widget.request("scale", name="live", data_workers=3)["value"]["data_worker"] == 3
    widget.await_that(
        lambda: widget.cluster["tasks"].get("data_worker:2", {}).get("state") == "ready"
    )
    assert (
        "invalid data_workers=-1"
        in widget.request("scale", name="live", data_workers=-1)["error"]["what"]
    )
    assert widget.request("scale", name="live", data_workers=2)["value"]["data_worker"] == 2
    notebook.manager.interrupt_kernel()
    assert "KeyboardInterrupt" in notebook.finish(cell)


def test_unloading_stops_tasks_and_threads(notebook: Notebook) -> None:
    output = notebook.run(
        "%unload_ext tfd_notebook\n"
        "import psutil, threading\n"
        "print([c.cmdline() for c in psutil.Process().children()])\n"
        "threads = [t for t in threading.enumerate() if t.name.startswith('tfd')]\n"
        "for thread in threads: thread.join(60)\n"
        "print([t.name for t in threads if t.is_alive()])\n"
        "%tfd_cluster"
    )
    assert output.startswith("[]\n[]\n"), output
    assert "not found" in output
