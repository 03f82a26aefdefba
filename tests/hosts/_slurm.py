"""A real Slurm: its controller on ``north``, a Slurm node on each host, and munge."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests._waiting import until
from tests.hosts._hosts import Host, Hosts
from tests.hosts._services import Server

#: Names whose lexicographic order is n1, n10, n2.
NODES = {"north": "n1", "east": "n2", "west": "n10"}
#: Slurm starts heterogeneous jobs in its interval of backfilling only, by default 30 s.
_CONFIG = """\
SchedulerParameters=bf_interval=1
ClusterName=tests
SlurmctldHost=north({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
ReturnToService=2
MaxNodeCount=16
KillWait=1
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=60 State=UP PriorityTier=2
"""
_NODE = "NodeName={node} NodeHostname={name} NodeAddr={address} CPUs=8 State=UNKNOWN"
#: Without cgroups, because the simulated hosts share those of the machine.
_CGROUP = "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n"


class MungeAtHome:
    """The munge of this process, whose socket is in the directory of the tests."""

    def __init__(self, key: Path, directory: Path) -> None:
        munge = directory / "munge-home"
        munge.mkdir(mode=0o755)
        files = [f"--{kind}-file={munge}/{kind}" for kind in ("pid", "log", "seed")]
        self._command = [
            shutil.which("munged") or "/usr/sbin/munged",
            "--foreground",
            "--force",
            f"--key-file={key}",
            f"--socket={directory}/munge.socket",
            *files,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        self._process = subprocess.Popen(
            self._command, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)


class Slurm:
    """The Slurm cluster, as a context manager that waits until all of its hosts are idle.

    Attributes
    ----------
    env : dict of str to str
        Environment for the commands of Slurm.
    """

    def __init__(self, hosts: Hosts, directory: Path) -> None:
        self._hosts = hosts
        config, key = directory / "slurm.conf", directory / "munge.key"
        # Without the second option, jobs write to the working directory of the tests.
        self.env = {"SLURM_CONF": str(config), "SBATCH_OUTPUT": str(directory / "job-%j.log")}
        nodes = [
            _NODE.format(node=node, name=name, address=hosts[name].address)
            for name, node in NODES.items()
        ]
        config.write_text(
            _CONFIG.format(address=hosts.north.address, directory=directory, nodes="\n".join(nodes))
        )
        (directory / "cgroup.conf").write_text(_CGROUP)
        (directory / "state").mkdir()
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self._daemons: list[Server] = []
        for host in hosts:
            node = NODES[host.name]
            (directory / f"spool-{node}").mkdir()
            munge = host.directory / "munge"
            munge.mkdir(mode=0o755)
            flags = [f"--{kind}-file=/run/munge/{kind}" for kind in ("pid", "log", "seed")]
            self._daemon(
                host,
                ["munged", "--foreground", "--force", f"--key-file={key}", *flags],
                directory / f"munged-{node}.log",
            )
        self._munge_home = MungeAtHome(key, directory)
        # The commands of this process use the munge of home.
        text = config.read_text().replace(
            "AuthType=auth/munge", f"AuthType=auth/munge\nAuthInfo=socket={directory}/munge.socket"
        )
        home = directory / "home"
        home.mkdir()
        (home / "slurm.conf").write_text(text)
        self.home_env = {"SLURM_CONF": str(home / "slurm.conf")}
        for host in hosts:
            names = (host.directory / "etc" / "hosts").open("a")
            with names:
                for name, node in NODES.items():
                    names.write(f"{hosts[name].address} {node}\n")
        self._daemon(
            hosts.north, ["slurmctld", "-D", "-f", str(config)], directory / "slurmctld.log"
        )
        for host in hosts:
            node = NODES[host.name]
            self._daemon(
                host, ["slurmd", "-D", "-N", node, "-f", str(config)], directory / f"{node}.log"
            )

    def _daemon(self, host: Host, command: list[str], log: Path) -> None:
        path = shutil.which(command[0]) or f"/usr/sbin/{command[0]}"
        self._daemons.append(Server(host, [path, *command[1:]], log))

    def __enter__(self) -> Slurm:
        self._munge_home.launch()
        for daemon in self._daemons:
            daemon.launch()
        self._hosts.services.extend(self._daemons)
        try:
            until(self._idle, 60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            self._hosts.services.remove(daemon)
            daemon.stop()
        self._munge_home.stop()

    def _idle(self) -> bool:
        for daemon in self._daemons:
            daemon.wait_ready()
        states = self.run(
            "sinfo", "--partition=all", "--noheader", "--Node", "--format=%T"
        ).stdout.split()
        return states == ["idle"] * len(NODES)

    def run(
        self, *command: str, host: Host | None = None, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Execute a command of Slurm on ``north`` or another host."""
        env = self.env | options.pop("env", {})
        return (host or self._hosts.north).run(command, env=env, **options)

    def start(self, *command: str, host: Host | None = None, **popen: Any) -> subprocess.Popen[str]:
        """Start a command of Slurm on ``north`` or another host."""
        env = self.env | popen.pop("env", {})
        return (host or self._hosts.north).start(command, env=env, **popen)
