"""``%tfd_stream`` and ``%tfd_explain``: datasets in the background, and their bottleneck."""

from __future__ import annotations

import argparse
from typing import Any

from tfd_notebook import views
from tfd_notebook.cluster import registry
from tfd_notebook.data.explain.explain import explain
from tfd_notebook.model.limit import Limit
from tfd_notebook.ui.magics import lookup
from tfd_notebook.ui.magics.lookup import report


class ExplainMagic(lookup.ShellCommands):
    """``%tfd_explain`` in a shell."""

    def explain(self, options: argparse.Namespace) -> Limit:
        step = None if options.step is None else lookup.evaluate(self._shell, options.step)
        dataset = lookup.evaluate(self._shell, options.dataset)
        return explain(dataset, options.seconds, step=step, step_time=options.step_time)


class StreamMagic(lookup.ShellCommands):
    """Subcommands of ``%tfd_stream`` in a shell."""

    def start(self, options: argparse.Namespace) -> Any:
        cluster = lookup.pick_own(options.cluster)
        source = options.dataset
        dataset = lookup.evaluate(self._shell, source)
        name = options.name or (source if source.isidentifier() else None)
        previous = cluster.streams.get(name or "")
        replaces = previous is not None and previous.state in ("running", "paused")
        stream = cluster.stream(dataset, name).start()
        state = "is running; the previous one was stopped" if replaces else "is running"
        report(f"stream {stream.name!r} {state}. Stop it with %tfd_stream stop {stream.name}")
        return stream

    def pause(self, options: argparse.Namespace, method: str = "pause") -> None:
        stream = lookup.pick_stream(options.name)
        getattr(stream, method)()
        report(f"stream {stream.name!r} is {stream.state}")

    def resume(self, options: argparse.Namespace) -> None:
        self.pause(options, "resume")

    def stop(self, options: argparse.Namespace) -> None:
        self.pause(options, "stop")

    def status(self, options: argparse.Namespace) -> views.Table:
        clusters = registry.running_clusters().values()
        return views.streams_table([cluster.snapshot() for cluster in clusters])
