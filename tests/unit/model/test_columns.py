"""The columns of DataFrames, which other programs read."""

from __future__ import annotations

from tfd_notebook.model import resolution, snapshot


def test_columns_of_frames_are_stable() -> None:
    columns = {
        snapshot.TASK_COLUMNS: "task role index host address pid state reason cpu_percent rss_mb "
        "pss_mb gpu open_to restarts",
        snapshot.STREAM_COLUMNS: "name kind state elements bytes elements_per_s bytes_per_s "
        "wait_fraction limit epoch job error",
        snapshot.GPU_COLUMNS: "host index name task use_percent used_mb memory_mb",
        snapshot.NODE_COLUMNS: "node role index executor host address pid state gpu rows results "
        "rows_per_s queue_depth queue_capacity batch_age_s error",
        resolution.COLUMNS: "job task address state identity accelerators latency_ms reason",
    }
    for names, expected in columns.items():
        assert " ".join(names) == expected
