"""The part of a cluster that an agent runs on its host."""

import asyncio
import contextlib
import os
import shutil
import threading
from pathlib import Path

import pytest

from tfd_notebook.agent.agent import Agent
from tfd_notebook.agent.sessions import Session
from tfd_notebook.model.spec import TaskState
from tfd_notebook.net import runtime_dir
from tfd_notebook.net.probe import probe


@contextlib.asynccontextmanager
async def opened_cluster(name, allow=()):
    """Yield an agent, a session, and the directory of a cluster that is open in both."""
    directory, lock = runtime_dir.new_agent_dir("abcdefabcdef")
    agent = Agent("abcdefabcdef", directory, None)
    session = Session(0.0)
    opened = {"policy": {}, "environment": {}, "path": [], "directory": os.getcwd()}
    yield (
        agent,
        session,
        await agent.handle_open(
            session, name, preload=[], allow=list(allow), description={}, **opened
        ),
    )
    assert not agent.clusters
    runtime_dir.remove(agent.directory)
    lock.close()


def test_unkillable_task_leaves_no_directory(capfd, monkeypatch):
    async def work():
        async with opened_cluster("stuck") as (agent, session, opened_at):
            cluster = agent.clusters["stuck"]
            await cluster.handle_reserve_ports(
                [
                    {"role": "worker", "index": index, "host": "localhost"}
                    | {"port": 0, "settings": {}, "gpus": []}
                    for index in range(2)
                ],
            )
            stop = cluster.tasks["worker:0"].stop

            async def fail():
                await stop()
                raise ChildProcessError("the task cannot be killed")

            monkeypatch.setattr(cluster.tasks["worker:0"], "stop", fail)
            await agent.handle_close(session, "stuck")
        return Path(opened_at)

    assert not asyncio.run(work()).exists()
    assert "the task cannot be killed" in capfd.readouterr().err


@pytest.mark.slow
def test_slow_removal_of_a_directory_does_not_block_the_agent(capfd, monkeypatch):
    threads = []

    async def work():
        async with opened_cluster("kept") as (agent, session, opened_at):

            def remove_nothing(path, **options):
                threads.append(threading.current_thread())

            with monkeypatch.context() as patch:
                patch.setattr(shutil, "rmtree", remove_nothing)
                await agent.handle_close(session, "kept")
        return opened_at

    opened_at = asyncio.run(work())
    assert threads
    assert threading.main_thread() not in threads
    assert f"removing {opened_at} failed" in capfd.readouterr().err


def test_error_server_starts_after_a_failed_attempt(capfd):
    many = [f"10.{i // 128}.{i % 128 * 2}.0/24" for i in range(2000)]

    async def work():
        async with opened_cluster("lost", many) as (agent, session, _):
            packed = {"role": "ps", "index": 0, "host": "127.0.0.1"}
            cluster = agent.clusters["lost"]
            await cluster.handle_reserve_ports([packed | {"port": 0, "settings": {}, "gpus": []}])
            task = cluster.tasks["ps:0"]
            task.state = TaskState.FAILED
            results = []
            for allow in (cluster.allow, ()):
                cluster.allow = allow
                task.serve_error()
                results.append(await asyncio.to_thread(probe, task.address))
            await agent.handle_close(session, "lost")
        return results

    open_port, closed = asyncio.run(work())
    assert open_port.state == "refused"
    assert "FilterFailed" in capfd.readouterr().err
    assert closed.state == "foreign"
    assert "has failed" in closed.reason
