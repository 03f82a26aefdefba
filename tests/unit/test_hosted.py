"""The part of a cluster that is on one host, in its agent."""

import asyncio
import os
from pathlib import Path

from tfd_notebook.launch import runtime
from tfd_notebook.launch.agent import Agent
from tfd_notebook.launch.sessions import Session


def test_a_task_that_cannot_be_ended_leaves_no_directory(capfd):
    async def work():
        agent = Agent("abcdefabcdef", runtime.new_agent_dir("abcdefabcdef"), None)
        session = Session("host", agent.id, 0.0)
        opened = {"policy": {}, "environment": {}, "path": [], "directory": os.getcwd()}
        directory = await agent.do_open(session, "stuck", preload=[], allow=[], about={}, **opened)
        await agent.do_hold(
            "stuck",
            [
                {"role": "worker", "index": index, "host": "localhost"}
                | {"port": 0, "settings": {}, "gpus": []}
                for index in range(2)
            ],
        )
        cluster = agent.clusters["stuck"]
        os.close(cluster.tasks["worker:0"]._holder.fileno())  # closing it again is an error
        await agent.do_close(session, "stuck")
        assert not agent.clusters
        runtime.remove(agent.directory)
        return Path(directory)

    assert not asyncio.run(work()).exists()
    assert "Bad file descriptor" in capfd.readouterr().err
