"""Views are pure functions of a snapshot, and escape all external text."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from comm.base_comm import BaseComm

from tests._waiting import until
from tfd_notebook import views
from tfd_notebook.bus import PROTOCOL
from tfd_notebook.cluster.cluster import Cluster
from tfd_notebook.data.service.journal import Iteration, Job, JournalState, JournalTask
from tfd_notebook.errors import UsageError
from tfd_notebook.model.events import Notice
from tfd_notebook.model.snapshot import GpuRow, Snapshot, StreamRow, TaskRow
from tfd_notebook.model.spec import Role, TaskState
from tfd_notebook.ui import widgets
from tfd_notebook.views import formatting as figures

ESCAPE = "\x1b[2J<script>alert('&')</script>"


def worker(index: int, state: TaskState = TaskState.READY, **fields: object) -> TaskRow:
    return TaskRow(
        f"data_worker:{index}",
        Role.DATA_WORKER,
        index,
        address=f"localhost:{40000 + index}",
        pid=1000 + index,
        state=state,
        open_to="this host",
        **fields,  # type: ignore[arg-type]
    )


def snapshot(*tasks: TaskRow, planned: int | None = None, **fields: object) -> Snapshot:
    ready = sum(row.state is TaskState.READY for row in tasks)
    planned = len(tasks) if planned is None else planned
    given: dict[str, object] = {
        "planned": {Role.DATA_WORKER: planned},
        "requested": {Role.DATA_WORKER: len(tasks)},
        "observed": {Role.DATA_WORKER: ready},
        **fields,
    }
    return Snapshot(3, 1000.0, "images", "local", "degraded", tuple(tasks), **given)  # type: ignore[arg-type]


BUSY = snapshot(
    worker(0, cpu_percent=97.2, pss_mb=31.5, bytes_sent=1_234_567_890, bytes_per_s=63e6),
    worker(1, TaskState.RESTARTING, reason="killed by signal 9 (SIGKILL)", restarts=2),
    streams=(
        StreamRow("train", "dataset", "running", 12_345, 63_000_000, 1200.0, 63e6, 0.12, (0, 1, 2)),
    ),
    events=(Notice("warning", "was killed", task="data_worker:1", fix="more memory"),),
    journal_bytes=12_000,
    expires=1000.0 + 3480,
)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(launcher="fake", data_workers=2, name="viewed") as cluster:
        yield cluster


class Balance(HTMLParser):
    """Parser that collects the text and checks that every element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open.append(tag)
        self.names.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        self.names.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


@pytest.mark.parametrize("shown", [views.text(BUSY), Balance(views.html(BUSY)).text])
def test_both_views_are_complete(shown: str) -> None:
    for words in (
        "images",
        "degraded",
        "launcher local",
        "open to this host",
        "journal 12.0 kB",
        "stops in 58 min",
        "● ready",
        "↻ restarting",
        "killed by signal 9 (SIGKILL)",
        "localhost:40001",
        "1001",
        "97 %",
        "31.5 MB",
        "1.2 GB",
        "63.0 MB/s",
        "► running",
        "12,345",
        "1,200",
        "12 %",
        "▲ warning: data_worker:1: was killed",
        "more memory",
    ):
        assert words in shown.replace("\n: ", ": ")


def test_views_show_planned_requested_and_ready_counts() -> None:
    shown = views.text(
        snapshot(worker(0), worker(1, TaskState.STARTING, reason="importing"), planned=4)
    )
    assert re.search(r"data_worker +4 +2 +1\b", shown)
    assert "2 not requested yet; data_worker:1 starting (importing)" in shown


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_text_stays_within_its_width_with_the_reason(width: int) -> None:
    shown = views.text(BUSY, width)
    assert max(map(figures.columns_of, shown.splitlines())) <= width
    assert "killed by signal 9 (SIGKILL)" in " ".join(shown.replace("└", "").split())
    assert "restarting" in shown


def test_long_names_are_truncated_in_text_only() -> None:
    name = "名前" * 60
    shown = snapshot(worker(0), streams=(StreamRow(name, "stream", "running"),))
    lines = views.text(shown, 80).splitlines()
    assert max(map(figures.columns_of, lines)) <= 80
    assert any("…" in line for line in lines)
    assert f'title="{name}"' in views.html(shown)


def test_external_text_is_escaped_in_both_views() -> None:
    shown = Snapshot(
        1,
        0.0,
        ESCAPE,
        ESCAPE,
        "ready",
        (worker(0, TaskState.FAILED, reason=ESCAPE, gpu=ESCAPE),),
        (StreamRow(ESCAPE, "stream", "failed", error=ESCAPE),),
        events=(Notice("error", ESCAPE, task=ESCAPE, fix=ESCAPE),),
    )
    assert "script" not in Balance(views.html(shown)).names
    assert "\x1b" not in views.text(shown)


@pytest.mark.parametrize("count", [0, 1, 1000])
def test_views_support_any_number_of_tasks(count: int) -> None:
    shown = snapshot(*(worker(i) for i in range(count)))
    page = Balance(views.html(shown))
    assert page.names.count("tr") <= 55
    assert ("and 950 more (950 ready)" in views.text(shown)) == (count == 1000)
    assert ("and 950 more (950 ready)" in page.text) == (count == 1000)


def test_tasks_with_problems_come_first() -> None:
    tasks = [worker(i) for i in range(998)]
    shown = snapshot(*tasks, worker(998, TaskState.HUNG), worker(999, TaskState.FAILED))
    lines = views.text(shown).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("task"))
    assert lines[first + 1].startswith("data_worker:999")
    assert lines[first + 2].startswith("data_worker:998")


def test_html_uses_the_colors_of_the_theme() -> None:
    page = views.html(BUSY)
    assert "background" not in page.replace("{background:none}", "")
    for rule in re.findall(r"[^-]color:([^;}]+)", page):
        assert rule.startswith(("var(--jp-", "color-mix(in srgb,var(--jp-")) or rule == "inherit"


def test_figures_are_formatted() -> None:
    assert figures.sparkline((0, 1, 2, 4)) == "▁▃▅█"
    assert figures.sparkline((0, 0)) == "▁▁"
    assert figures.sparkline(tuple(range(100)), 5)[-1] == "█"
    assert [figures.size(n) for n in (0, 999, 999.6, 12_000, 5e6, 2.5e12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "12.0 kB",
        "5.0 MB",
        "2.5 TB",
    ]
    assert [figures.count(n) for n in (0, 0.5, 1200, 2e6)] == ["0", "0.5", "1,200", "2.0 M"]
    assert [figures.duration(n) for n in (-1, 40, 3480, 36_000)] == [
        "0 s",
        "40 s",
        "58 min",
        "10.0 h",
    ]


def test_cluster_is_displayed_as_text_and_html(cluster: Cluster) -> None:
    bundle = views.View(cluster.snapshot())._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    assert "data_worker:1" in bundle["text/plain"]


class Comm(BaseComm):
    """A widget's connection to a page, which records the received messages."""

    def publish_msg(self, msg_type: str, data: Any = None, *rest: Any, **more: Any) -> None:
        self.published: list[dict[str, Any]] = [*getattr(self, "published", []), data or {}]

    def deliver(self, kind: str, **content: Any) -> None:
        data = {"method": "custom", "content": {"kind": kind, "client": "page", **content}}
        self.handle_msg({"content": {"data": data}, "buffers": []})

    def received(self, kind: str) -> list[Any]:
        received = [data["content"] for data in self.published if data.get("method") == "custom"]
        return [message for message in received if message["kind"] == kind]


@pytest.fixture
def front_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widgets, "has_front_end", lambda: True)
    monkeypatch.setattr("comm.create_comm", Comm)


def test_widget_shows_and_scales_its_cluster(cluster: Cluster, front_end: None) -> None:
    view = widgets.live(cluster)
    assert widgets.live(cluster) is view
    assert (view.widget.view, view.widget.cluster) == ("cluster", "viewed")
    shown, marks = view._repr_mimebundle_()
    assert {"text/plain", "text/html", "application/vnd.jupyter.widget-view+json"} <= set(shown)
    assert marks == {"tfd_notebook": {}}

    page = view.widget.comm
    page.deliver("hello", protocol=PROTOCOL, version="test", acks=False)
    (whole,) = until(lambda: page.received("state")[:1])
    assert "data_worker:1" in whole["state"]["clusters"]["viewed"]["tasks"]
    page.deliver("command", request_id="1", command="scale", name="viewed", data_workers=3)
    until(lambda: any("data_worker:2" in str(message) for message in page.received("state")))
    (reply,) = until(lambda: page.received("reply"))
    assert reply["value"]["data_worker"] == 3
    page.deliver("command", request_id="2", command="scale", name="viewed", data_workers=100_001)
    until(lambda: "expected 0 to" in str(page.received("reply")))
    page.deliver("command", request_id="3", command="stop", name="viewed")
    until(lambda: any("'state': 'stopped'" in str(message) for message in page.received("state")))
    view.close()
    until(lambda: page.received("bye"))
    until(lambda: not [t for t in threading.enumerate() if t.name.startswith("tfd-bus")])
    again = widgets.live(cluster)
    assert again is not view
    again.close()


def test_each_view_has_a_widget(cluster: Cluster, front_end: None) -> None:
    views_of = [widgets.live(cluster, name) for name in widgets.VIEWS]
    assert [view.widget.view for view in views_of] == list(widgets.VIEWS)
    for view in views_of:
        view.close()
    with pytest.raises(UsageError, match="invalid view 'graph'"):
        widgets.live(cluster, "graph")


def test_static_fallback_replaces_missing_widgets(cluster: Cluster) -> None:
    view = widgets.live(cluster)
    assert view.widget is None
    bundle, _ = view._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    view.close()


def gpus(count: int, *, hosts: int = 1, name: str = "ada@host") -> tuple[GpuRow, ...]:
    """Return GPUs of which each worker sees two. The last two of each host are not assigned."""
    each = count // hosts
    return tuple(
        GpuRow(
            f"{name}{host}",
            index,
            "Imaginary",
            f"worker:{index // 2}" if index < each - 2 else "",
            100.0 * index / each,
            1e4 * (index % 9),
            80_000.0,
        )
        for host in range(hosts)
        for index in range(each)
    )


def test_gpus_are_shown_by_host_with_their_tasks() -> None:
    shown = snapshot(worker(0), gpus=(*gpus(4), GpuRow("ada@two", 0)))
    text = views.text(shown)
    line = next(line for line in text.splitlines() if "ada@host0" in line)
    assert line.split() == [
        *("ada@host0", "0-3", "▁▃▅▆", "38", "%", "▁▂▃▄", "60.0", "of", "320", "GB"),
        *("worker:0", "0-1,", "not", "assigned", "2-3"),
    ]
    assert next(line for line in text.splitlines() if "ada@two" in line).split() == [
        *("ada@two", "0", "·", "·", "not", "assigned", "0")
    ]
    page = views.html(shown)
    for words in (
        "GPU 1 of ada@host0 (Imaginary), seen by worker:0: 25 % busy, 10.0 of 80 GB used",
        "GPU 2 of ada@host0 (Imaginary), seen by no task: 50 % busy, 20.0 of 80 GB used",
        "GPU 0 of ada@two, seen by no task: utilization unknown",
    ):
        assert f'role="img" aria-label="{words}"' in page
    assert "5 on 2 hosts, 3 not assigned, 38 % busy, 60.0 of 320 GB used" in Balance(page).text


def test_color_of_a_gpu_depends_on_its_load() -> None:
    loads = [(5.0, 1e3), (35.0, 1e3), (99.0, 76e3)]
    rows = tuple(GpuRow("one", i, "", "", *load, 80e3) for i, load in enumerate(loads))
    bars = re.findall(r'<i class="([^"]*)"', views.html(snapshot(gpus=rows)))
    assert bars[::2] == ["tfd-idle", "tfd-use", "tfd-busy"]
    assert bars[1::2] == ["tfd-memory", "tfd-memory", "tfd-memory tfd-full"]


@pytest.mark.parametrize(("count", "hosts"), [(1, 1), (8, 2), (64, 8), (64, 1), (1000, 125)])
@pytest.mark.parametrize("width", [60, 110])
def test_strip_supports_any_number_of_gpus(count: int, hosts: int, width: int) -> None:
    shown = snapshot(gpus=gpus(count, hosts=hosts, name="user@" + "long-" * 12))
    text = views.text(shown, width)
    assert max(map(figures.columns_of, text.splitlines())) <= width
    # One line per 16 GPUs of a host, and a second line for the tasks if they do not fit.
    assert sum(line.startswith("user@") for line in text.splitlines()) == min(
        hosts * -(-count // hosts // 16), 32
    )
    page = Balance(views.html(shown))
    assert f"{count} on {hosts} hosts" in page.text or hosts == 1
    assert views.html(shown).count('role="img"') == min(count, 256)
    assert ("744 more GPUs" in text) is (count == 1000)


def test_strip_is_absent_without_gpus() -> None:
    assert "GPU" not in views.text(BUSY)
    assert '<div class="tfd-gpus' not in views.html(BUSY)
    assert repr(views.gpus_table(())) == "no GPUs available to tasks"


def test_names_of_gpus_and_hosts_are_escaped() -> None:
    shown = snapshot(gpus=(GpuRow(ESCAPE, 0, ESCAPE, ESCAPE),))
    page = views.html(shown)
    assert "script" not in Balance(page).names
    assert "\x1b" not in views.text(shown)


def test_html_has_the_time_of_the_snapshot() -> None:
    at = time.mktime((2026, 3, 4, 1, 15, 39, 0, 0, -1))
    shown = replace(snapshot(), time=at)
    assert "Snapshot of 01:15:39, not updated" in views.html(shown)
    assert "not updated" not in views.text(shown)


def test_next_step_of_an_error_is_a_sentence() -> None:
    error = str(UsageError("the job ended", fix="iterate again"))
    assert figures.short_error(error) == "[TFD100] the job ended. Next: iterate again"


def test_names_of_graph_functions_are_not_part_of_an_error() -> None:
    error = "{{function_node __inference_<lambda>_111}} not a number : Tensor had NaN values"
    assert figures.short_error(error) == "not a number : Tensor had NaN values"


def test_jobs_have_a_note_of_each_pass_that_does_not_deliver_each_element_once() -> None:
    jobs = tuple(Job(n, f"job-{n}", "7", mode) for n, mode in enumerate(("dynamic", "off")))
    tasks = (JournalTask(1, 1), JournalTask(2, 1), JournalTask(3, 2), JournalTask(4, 2))
    iterations = (Iteration(1, 0, 1, interrupted=("data_worker:1",)), Iteration(2, 1, 1))
    table = views.jobs_table(JournalState(jobs, iterations, tasks), {}, {})
    notes = [row["note"] for row in table.records()]
    assert notes == [
        "data_worker:1 stopped or restarted: elements may be missing",
        "each of 2 data workers delivers all elements",
    ]
    assert all(note in str(table) for note in notes)


def test_jobs_end_with_the_open_passes_and_the_size_of_the_journal() -> None:
    jobs = (Job(1, "train", "7", "dynamic"),)
    iterations = (
        Iteration(1, 1, 1, clients=1),
        Iteration(2, 1, 2, expires=0.0),
        Iteration(3, 1, 3, finished=True),
    )
    table = views.jobs_table(JournalState(jobs, iterations, (), 5_400_000, 12), {}, {})
    assert [row["state"] for row in table.records()] == ["running", "discarded", "finished"]
    assert str(table).endswith("1 open pass, journal 5.4 MB, 12 older finished passes")
    assert str(views.jobs_table(JournalState(), {}, {})).endswith("0 open passes, journal 0 B")
