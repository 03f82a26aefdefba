"""Messages of one session, without the hub's thread."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tfd_notebook.bus import session
from tfd_notebook.bus.session import Session, is_message
from tfd_notebook.model.snapshot import Snapshot

FIRST = Snapshot(1, 10.0, "c", "local", "ready", ())
SECOND = replace(FIRST, state="degraded")


class Panel:
    """A session with its sent messages, and one client."""

    def __init__(self, acks: bool = True) -> None:
        self.sent: list[dict[str, Any]] = []
        self.session = Session(lambda message, buffers: self.sent.append(message))
        self.handle("hello", acks=acks)

    def handle(self, kind: str, client: str = "tab", **content: Any) -> None:
        self.session.handle_message({"kind": kind, "client": client, **content})

    def push(self, snapshot: Snapshot) -> list[dict[str, Any]]:
        """Return the messages that a push sends."""
        count = len(self.sent)
        self.session.push({}, {snapshot.name: snapshot})
        return self.sent[count:]


@pytest.fixture
def panel() -> Panel:
    panel = Panel()
    panel.push(FIRST)
    return panel


@pytest.mark.parametrize(("kind", "client"), [("resync", "tab"), ("hello", "new")])
def test_client_can_request_the_full_state(panel: Panel, kind: str, client: str) -> None:
    (patch,) = panel.push(SECOND)
    assert (patch["full"], patch["state"]) == (False, {"clusters": {"c": {"state": "degraded"}}})
    assert panel.push(SECOND) == []
    panel.handle(kind, client)
    (full,) = panel.push(SECOND)
    assert full["full"]
    assert full["state"]["clusters"]["c"]["state"] == "degraded"
    assert full["seq"] == patch["seq"] + 1


def test_flush_is_answered_after_the_changes(panel: Panel) -> None:
    panel.handle("flush", request_id=7)
    state, reply = panel.push(SECOND)
    assert (state["kind"], reply["kind"]) == ("state", "reply")
    assert (reply["client"], reply["request_id"], reply["value"]) == ("tab", 7, None)
    assert panel.push(SECOND) == []


@pytest.mark.parametrize("acks", [True, False])
def test_client_that_acknowledges_nothing_receives_nothing(acks: bool) -> None:
    panel = Panel(acks)
    for number in range(session.MAX_UNACKNOWLEDGED):
        assert panel.session.watched
        panel.push(replace(FIRST, state=str(number)))
    assert panel.session.watched is not acks
    panel.handle("ack", seq="1")  # invalid
    assert panel.session.watched is not acks
    panel.handle("ack", seq=1)
    assert panel.session.watched


def test_unknown_client_is_asked_to_connect(panel: Panel) -> None:
    panel.handle("ack", "other", seq=1)
    assert panel.sent[-1]["unknown"] == "other"


def test_client_controls_the_clusters_that_it_shows(panel: Panel) -> None:
    panel.handle("subscribe", clusters=["c", 3])
    assert panel.session.controlled_clusters == {"c"}
    panel.handle("subscribe", clusters=None)
    assert panel.session.controlled_clusters == set()
    panel.handle("subscribe", clusters=["c"])
    panel.handle("bye")
    assert panel.session.controlled_clusters == set()


@pytest.mark.parametrize(
    "message",
    [None, [], {}, {"kind": "ack"}, {"kind": 1, "client": "a"}, {"kind": "a", "client": "a" * 101}],
)
def test_malformed_message_is_refused(message: Any) -> None:
    assert not is_message(message)
    assert is_message({"kind": "ack", "client": "a"})
