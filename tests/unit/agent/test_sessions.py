"""Sessions of an agent and their clients: large, interrupted, lost and repeated messages."""

import asyncio
import contextlib
import os
import signal
import socket
import threading

import pytest

from tfd_notebook import errors
from tfd_notebook.agent.sessions import AgentListener, Session
from tfd_notebook.launchers.client import session as client_session
from tfd_notebook.launchers.client.agent_client import AgentClient
from tfd_notebook.net import agent_protocol, unix_socket

MEGABYTE = 1_000_000


class Loop:
    """An event loop in a thread."""

    def __enter__(self):
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        return self

    def __exit__(self, *_):
        async def end():
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self.call(end())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def call(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def start(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.loop)


@pytest.fixture
def loop():
    with Loop() as loop:
        yield loop


async def echo(session, body):
    session.send({"reply_to": body["id"], "ok": True, "value": body["method"]})


def request(number, **arguments):
    body = {"id": number, "method": f"request {number}", "arguments": arguments}
    return agent_protocol.encode(body, number)


def served(loop, lines, limit, replies):
    """Return the replies of a session to `lines`, by request."""

    async def start():
        reader = asyncio.StreamReader(limit=limit)
        read, write = os.pipe()
        transport, flow = await loop.loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(write, "wb", buffering=0)
        )
        writer = asyncio.StreamWriter(transport, flow, None, loop.loop)
        serving = loop.loop.create_task(Session(0.0).serve(reader, writer, echo))
        reader.feed_data(b"".join(lines))
        return read, reader, writer, serving

    async def end():
        reader.feed_eof()
        await serving
        writer.close()

    read, reader, writer, serving = loop.call(start())
    with os.fdopen(read, "rb") as file:
        hello, *bodies = [agent_protocol.decode(file.readline()).body for _ in range(replies + 1)]
        loop.call(end())
        assert not file.read()
    assert hello["event"] == "hello"
    return {body["reply_to"]: body for body in bodies}


@pytest.mark.parametrize("size", [5000, 500, 100_000])
def test_oversized_request_is_refused_and_the_next_works(loop, size):
    lines = [request(1), request(2, blob="x" * size), b"stray output\n" * 200, request(3)]
    replies = served(loop, lines, limit=400, replies=3)
    assert replies[1]["value"] == "request 1"
    assert not replies[2]["ok"]
    assert "MB" in replies[2]["error"]["what"]
    assert replies[3]["value"] == "request 3"


def test_truncated_request_does_not_swallow_the_next(loop):
    lines = [request(1), request(2, blob="x" * 5000)[:3000] + b"\n" + request(3)]
    assert served(loop, lines, limit=2**20, replies=2).keys() == {1, 3}


def test_oversized_request_is_refused_before_sending(monkeypatch):
    monkeypatch.setattr(agent_protocol, "LARGEST", 2 * MEGABYTE)
    sent = []
    client = AgentClient("agent", "host", sent.append)
    with pytest.raises(errors.UsageError, match="at most 2 MB"):
        client.submit("install", blob="x" * 2 * MEGABYTE)
    assert not sent
    client.submit("install", blob="x")
    assert len(sent) == 1


@pytest.fixture
def directory(tmp_path):
    with contextlib.suppress(OSError):
        tmp_path.chmod(0o700)
    return tmp_path


class Socket(socket.socket):
    """A socket with an event for the moment at which its buffer is full."""

    full = threading.Event()

    def send(self, *arguments):
        try:
            return super().send(*arguments)
        except BlockingIOError:
            self.full.set()
            raise


@contextlib.contextmanager
def linked(loop, directory, answer, grace=600.0):
    """Connect a client to an agent's socket; return it with the sessions at the other end."""
    sessions = {}
    listener = AgentListener(directory, answer, sessions)
    loop.call(listener.open())
    channels = []

    def connect():
        connected = unix_socket.connect(directory / "agent.sock", 60.0)
        channels.append(client_session.SocketChannel(Socket(fileno=connected.detach())))
        return channels[-1]

    connected = client_session.AgentSession("agent", "host", connect, grace)
    try:
        yield connected.client, channels
    finally:
        connected.close()
        loop.call(_close(listener))


async def _close(listener):
    listener.server.close()


@pytest.mark.parametrize("repeatable", [True, False])
def test_lost_reply_is_resent_over_the_next_connection(loop, directory, repeatable):
    """A request for a log is executed again, any other only once."""
    executed = []

    async def answer(session, body):
        executed.append(body["method"])
        if executed.count("kill") == 1 and body["method"] == "kill":
            channels[-1].close()
            await asyncio.sleep(0)
        session.send({"reply_to": body["id"], "ok": True, "value": len(executed)}, repeatable)

    with linked(loop, directory, answer) as (client, channels):
        assert client.request("free_disk_space", 60.0) == 1
        assert client.request("kill", 60.0) in ((2, 3) if repeatable else (2,))
        assert len(channels) > 1
        assert executed.count("kill") in ((1, 2) if repeatable else (1,))


def test_ctrl_c_during_a_send_leaves_the_channel_usable(loop, directory):
    async def answer(session, body):
        session.send({"reply_to": body["id"], "ok": True, "value": [body["method"]]})

    Socket.full.clear()
    interrupted = threading.Event()

    async def block():
        """Keep the agent from reading until the client is interrupted."""
        if Socket.full.wait(60):
            os.kill(os.getpid(), signal.SIGINT)
        interrupted.wait(60)

    with linked(loop, directory, answer) as (client, _):
        blocking = loop.start(block())
        with pytest.raises(KeyboardInterrupt):
            client.submit("large", blob="x" * 2 * MEGABYTE)
        interrupted.set()
        blocking.result(60)
        assert client.request("connect", 60.0) == ["connect"]
