"""``%tfd_cluster``: start, inspect and stop clusters."""

from __future__ import annotations

import argparse
import re
import time
from typing import Any

from tfd_notebook import views
from tfd_notebook.cluster import attach, data_service, registry
from tfd_notebook.cluster.commands import panel_requests
from tfd_notebook.diagnosis import doctor
from tfd_notebook.errors import UsageError
from tfd_notebook.launchers.client import detached
from tfd_notebook.model.spec import Role
from tfd_notebook.ui.argparsing import adaptation_range, launchers_table
from tfd_notebook.ui.magics import lookup, start_form
from tfd_notebook.ui.magics.lookup import report
from tfd_notebook.ui.widgets import Form, live

#: Matches host:port, grpc://host:port and [::1]:port.
_ADDRESS = re.compile(r"(?:grpc://)?(?:\[[^\]]+\]|[\w.-]+):\d+")


class ClusterMagic(lookup.ShellCommands):
    """Subcommands of ``%tfd_cluster`` in a shell."""

    def form(self, options: argparse.Namespace) -> Any:
        hint = "%tfd_cluster start --data-workers 2  starts a cluster, %tfd_cluster? shows the help"
        table = self.list(options)
        fallback = {
            "text/plain": f"{hint}\n{table.text()}",
            "text/html": f"<p><code>{hint}</code></p>{table.html()}",
        }
        return Form("start", panel_requests(self._shell), fallback)

    def start(self, options: argparse.Namespace) -> Any:
        started = start_form.start(self._shell, options)
        cluster = started.cluster
        report(started.message)
        if (
            Role.DISPATCHER in cluster.snapshot().observed
            and not data_service.of(cluster).data_workers()
        ):
            report("the cluster has no data worker yet: %tfd_cluster scale --data-workers 2")
        return cluster

    def list(self, options: argparse.Namespace) -> views.Table:
        return views.clusters_table(attach.all_clusters())

    def status(self, options: argparse.Namespace) -> Any:
        cluster = lookup.pick(options.name)
        if options.live or options.view:
            return live(cluster, options.view or "cluster")
        return cluster.to_frame() if options.frame else views.View(cluster.snapshot())

    def scale(self, options: argparse.Namespace) -> views.View:
        requested = {name: getattr(options, name) for name in ("data_workers", "workers", "ps")}
        counts = {name: count for name, count in requested.items() if count is not None}
        if not counts:
            raise UsageError("no number of tasks given", fix="add --data-workers N or --workers N")
        cluster = lookup.pick(options.name)
        cluster.scale(**counts)
        return views.View(cluster.snapshot())

    def adapt(self, options: argparse.Namespace) -> views.View:
        minimum, maximum = adaptation_range(options)
        cluster = lookup.pick(options.name)
        cluster.adapt(minimum, maximum)
        return views.View(cluster.snapshot())

    def jobs(self, options: argparse.Namespace) -> views.Table:
        return lookup.pick_own(options.name).jobs()

    def what_if(self, options: argparse.Namespace) -> views.Table:
        return lookup.pick_own(options.name).what_if(*options.data_workers)

    def logs(self, options: argparse.Namespace) -> None:
        cluster, task = lookup.pick_task(options, need_task=options.follow)
        if not options.follow:
            report(str(cluster.logs(task, options.lines)))
            return
        try:
            for line in lookup.pick_own(cluster.name).logs(task, options.lines, follow=True):
                report(line)
        except KeyboardInterrupt:
            report(f"(stopped following {task})")

    def stacks(self, options: argparse.Namespace) -> views.Table:
        cluster, task = lookup.pick_task(options, need_task=False)
        return cluster.stacks(task)

    def restart(self, options: argparse.Namespace) -> views.View:
        cluster, task = lookup.pick_task(options)
        cluster.restart(task)
        return views.View(cluster.snapshot())

    def kill(self, options: argparse.Namespace) -> None:
        cluster, task = lookup.pick_task(options)
        pid = cluster.kill(task)
        report(f"{task} had no process" if pid is None else f"{task} (process {pid}) was killed")

    def interrupt(self, options: argparse.Namespace) -> None:
        cluster = lookup.pick(options.name)
        cluster.interrupt()
        report(f"cancelled every read from cluster {cluster.name!r}")

    def recover(self, options: argparse.Namespace) -> Any:
        cluster = lookup.pick_own(options.name)
        build = options.build
        if build is not None:
            build = lookup.evaluate(self._shell, build, "a function that builds the model")
        coordinator = cluster.recover(options.checkpoint, build)
        report(f"cluster {cluster.name!r} has a new strategy and a new coordinator")
        if options.checkpoint is not None and coordinator.build is None:
            report(f"build the model again, then restore it from {options.checkpoint}")
        return coordinator

    def attach(self, options: argparse.Namespace) -> Any:
        variable = lookup.check_variable(options.output)
        cluster = attach.attach(options.name or _only_detached())
        bound = lookup.bind(self._shell.user_ns, variable, cluster)
        report(f"attached to cluster {cluster.name!r}; it is in the variable {bound!r}")
        return cluster

    def detach(self, options: argparse.Namespace, command: str = "detach") -> None:
        cluster = lookup.pick_own(options.name)
        until = time.ctime(getattr(cluster, command)(options.hours))
        report(
            f"cluster {cluster.name!r} is detached until {until}: it keeps running after this "
            "kernel ends"
        )

    def renew(self, options: argparse.Namespace) -> None:
        self.detach(options, "renew")

    def doctor(self, options: argparse.Namespace) -> Any:
        target = " ".join(options.target)
        if not target:
            return doctor()
        if target in registry.running_clusters() or _ADDRESS.fullmatch(target):
            return doctor(target)
        kind = "a dataset, a resolver or a cluster"
        return doctor(lookup.evaluate(self._shell, target, kind))

    def stop(self, options: argparse.Namespace) -> None:
        if options.all and options.name:
            raise UsageError("NAME and --all are mutually exclusive", fix="omit NAME or --all")
        running = registry.running_clusters().values()
        for cluster in tuple(running) if options.all else (lookup.pick(options.name),):
            cluster.stop()
            report(f"cluster {cluster.name!r} is {cluster.state}")

    def launchers(self, options: argparse.Namespace) -> views.Table:
        return launchers_table()


def _only_detached() -> str:
    records = {record.name: record for record in detached.detached()}
    fix = "%tfd_cluster list shows all clusters"
    return lookup.only(records, "clusters are detached", "no clusters are detached", fix).name
