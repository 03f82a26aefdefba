"""Frames are transferred unchanged, and other data is rejected."""

import pytest

from tfd_notebook import errors
from tfd_notebook.launchers.client.agent_client import AgentClient
from tfd_notebook.model.events import ClusterEnded, LeaseChanged, TasksLost, from_json
from tfd_notebook.net import agent_protocol


def frame(body):
    return agent_protocol.encode(body, 7)


def test_frame_survives_a_round_trip():
    body = {"text": "a\nb ü \u2028", "n": [1, None, 2.5]}
    line = frame(body)
    assert line.count(b"\n") == 1
    assert agent_protocol.decode(line) == (7, body)


@pytest.mark.parametrize(
    "line",
    [b"", b"Welcome to host!\n", b"TFD1 1 2\n", b"TFD2 1 2 {}\n", b"TFD1 x 2 {}\n"],
)
def test_other_lines_are_not_frames(line):
    assert agent_protocol.decode(line) is None


def test_truncated_frame_is_not_a_frame():
    assert agent_protocol.decode(frame({"a": "b" * 100})[:-20] + b"\n") is None


def test_errors_survive_the_transfer():
    error = errors.PortInUse("port 1 is taken", task="dispatcher:0", fix="use another")
    back = agent_protocol.unpack_error(agent_protocol.pack_error(error))
    assert type(back) is errors.PortInUse
    assert (back.what, back.task, back.fix) == (error.what, error.task, error.fix)
    foreign = agent_protocol.unpack_error(agent_protocol.pack_error(OSError("disk full")))
    assert type(foreign) is errors.TfdError
    assert "disk full" in foreign.what


def answering(body):
    """Return a client whose agent answers every request with `body`."""

    def send(line):
        number = agent_protocol.decode(line).body["id"]
        client.handle_line(frame({"reply_to": number, **body}))

    client = AgentClient("agent", "host", send)
    return client


def test_request_returns_the_value():
    assert answering({"ok": True, "value": 5}).request("kill", 1) == 5


def test_request_raises_the_agents_error():
    error = agent_protocol.pack_error(errors.UnknownName("no such task"))
    with pytest.raises(errors.UnknownName, match="no such task"):
        answering({"ok": False, "error": error}).request("x", 1)


def test_request_has_a_timeout():
    client = AgentClient("agent", "host", lambda line: None)
    with pytest.raises(errors.TimeLimit, match="did not reply"):
        client.request("x", 0.01)


def test_abandoned_request_is_not_sent_again():
    client = AgentClient("agent", "host", lambda line: None, reconnects=True)
    with pytest.raises(errors.TimeLimit):
        client.request("given up", 0.01)
    waiting = client.submit("kill")
    sent = []
    client.resume(lambda line: sent.append(agent_protocol.decode(line.lstrip(b"\n")).body))
    assert [body["method"] for body in sent] == ["kill"]
    client.handle_line(frame({"reply_to": sent[0]["id"], "ok": True, "value": 5}))
    assert waiting.result(0) == 5


def test_lost_agent_fails_requests_and_notifies_clusters():
    client = AgentClient("agent", "host", lambda line: None)
    received = []
    client.listen("c", received.append)
    waiting = client.submit("x")
    client.lost("it ended")
    with pytest.raises(errors.AgentLost, match="it ended"):
        waiting.result(0)
    with pytest.raises(errors.AgentLost, match="it ended"):
        client.request("x", 1)
    assert received == [TasksLost("it ended")]


def test_events_reach_their_cluster_only():
    client = AgentClient("agent", "host", lambda line: None)
    mine, others = [], []
    client.listen("mine", mine.append)
    client.listen("other", others.append)
    client.handle_line(frame({"event": "ended", "cluster": "mine", "reason": "over"}))
    client.handle_line(b"stray output\n")
    assert (len(mine), len(others)) == (1, 0)


def test_incompatible_version_error_has_both_versions():
    client = AgentClient("agent", "host", lambda line: None)
    client.handle_line(frame({"event": "hello", "version": 99, "pid": 1}))
    with pytest.raises(errors.AgentLost, match=r"99.*1"):
        client.request("x", 1)


def test_agent_without_the_session_sends_the_full_state():
    requests, events = [], []
    client = AgentClient(
        "agent", "host", lambda line: requests.append(agent_protocol.decode(line).body)
    )
    client.listen("c", events.append)
    hello = {"event": "hello", "version": agent_protocol.VERSION, "pid": 1}
    client.handle_line(frame({**hello, "full": True}))
    assert requests == []
    client.handle_line(frame({**hello, "full": False}))
    assert [(item["method"], item["arguments"]) for item in requests] == [
        ("adopt", {"cluster": "c"})
    ]
    event = {
        "event": "task",
        "cluster": "c",
        "task": "worker:0",
        "state": "ready",
        "reason": "",
        "address": "localhost:1",
        "pid": 1,
        "restarts": 0,
        "open_to": "",
        "log": [],
    }
    value = {
        "description": {},
        "directory": "/d",
        "lease": 9,
        "tasks": [event],
        "time_limit_left": None,
    }
    client.handle_line(frame({"reply_to": requests[0]["id"], "ok": True, "value": value}))
    assert events == [from_json(event), LeaseChanged(9)]
    client.handle_line(frame({**hello, "full": False}))
    unknown = agent_protocol.pack_error(errors.StateError("no such cluster"))
    client.handle_line(frame({"reply_to": requests[1]["id"], "ok": False, "error": unknown}))
    assert isinstance(events[2], ClusterEnded)
