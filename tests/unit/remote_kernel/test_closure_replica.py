"""Limits of the closures that another kernel sends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tfd_notebook import errors
from tfd_notebook.bus import closure_feed
from tfd_notebook.remote_kernel.bus_client import BusClient

ROWS = 10


class Sender:
    """A kernel that sends rows of closures without an end."""

    def __init__(self) -> None:
        self.client = BusClient(lambda message: None)
        self._seq = 0
        trees = {"train": {"coordinator": {}}}
        self.send(kind="state", state={"clusters": trees}, full=True)

    def send(self, buffers: list[bytes] | None = None, **fields: Any) -> None:
        self._seq += 1
        self.client.handle_message({"seq": self._seq, **fields}, buffers or [])

    def send_rows(self, ids: range, *, full: bool = False, cluster: str = "train") -> None:
        columns = [
            np.array(ids, "<f8") if n == "id" else np.zeros(len(ids), f"<{t}")
            for n, t in closure_feed.COLUMNS
        ]
        self.send(
            [column.tobytes() for column in columns],
            kind="values",
            full=full,
            cluster=cluster,
            columns=[list(column) for column in closure_feed.COLUMNS],
            functions=["step"],
            errors={str(key): "failed" for key in ids},
            lost=[],
            paused=False,
        )


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Sender:
    for name in ("MAX_ROWS", "MAX_CHANGED"):
        monkeypatch.setattr(closure_feed, name, ROWS)
    monkeypatch.setattr(closure_feed, "MAX_ERRORS", 3)
    return Sender()


def test_only_the_latest_rows_and_errors_are_kept(sender: Sender) -> None:
    sender.send_rows(range(8), full=True)
    for start in range(8, 400, 4):
        sender.send_rows(range(start, start + 4))
    columns = sender.client.replica("train").columns()
    assert columns.ids == list(range(390, 400))
    assert len(columns.worker) == len(columns.queued) == ROWS
    assert columns.errors == dict.fromkeys(range(397, 400), "failed")


@pytest.mark.parametrize("full", [True, False])
def test_message_with_too_many_rows_is_refused(sender: Sender, full: bool) -> None:
    sender.send_rows(range(1), full=True)
    with pytest.raises(errors.InvalidMessage, match="the columns of closures"):
        sender.send_rows(range(1, ROWS + 2), full=full)


def test_rows_of_other_clusters_are_not_kept(sender: Sender) -> None:
    """A kernel may send only the closures to which this client has subscribed."""
    sender.send_rows(range(3), full=True, cluster="other")
    assert sender.client.replica("other").columns().ids == []
