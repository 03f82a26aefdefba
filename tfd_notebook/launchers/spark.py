"""``launcher="spark"``: tasks on the hosts of the executors of a Spark application."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tfd_notebook._compat import pyspark as private
from tfd_notebook.agent.bridges import spark_bootstrap, stdio
from tfd_notebook.errors import (
    AgentLost,
    LaunchError,
    NotEnoughSlots,
    StateError,
    Unsupported,
    UsageError,
)
from tfd_notebook.launchers import spark_slots
from tfd_notebook.launchers.client.handshake import read_handshake
from tfd_notebook.launchers.client.session import Channel
from tfd_notebook.launchers.remote import RemoteHost, RemoteLauncher
from tfd_notebook.model.spec import Endpoint
from tfd_notebook.net import reconnect, secure_channel, validation

_ANSWER_SECONDS = 30.0
_JOB_SECONDS = 45.0
_CONNECT_SECONDS = 10.0
_POLL_SECONDS = 0.5


class Spark(RemoteLauncher):
    """Executors of Spark: a short job starts an agent on each, which connects back to the driver.

    The agents take no Spark slot. An agent ends with its executor, with the cluster, or after the
    grace time without a connection to this process. Agents and this process communicate over an
    encrypted channel. Needs the extra ``spark``.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession or pyspark.SparkContext, optional
        Default: the active one of this process.
    executors : int, optional
        The number of executors to use, in the order of their hosts. Default: all.
    grace, place, secure, host, allow
        See `RemoteLauncher` and `Launcher`.
    """

    name: ClassVar[str] = "spark"
    summary: ClassVar[str] = "next to the executors of a Spark application (extra: spark)"

    def __init__(
        self,
        spark: Any = None,
        *,
        executors: int | None = None,
        grace: float = 600.0,
        place: Mapping[str, str | Sequence[str]] | None = None,
        secure: bool = False,
        host: str | Mapping[str, str] = "",
        allow: Iterable[str] = (),
    ) -> None:
        super().__init__(grace=grace, place=place, secure=secure, host=host, allow=allow)
        if executors is not None and (
            isinstance(executors, bool) or not isinstance(executors, int) or executors < 1
        ):
            raise UsageError(f"invalid executors {executors!r}: expected 1 or more")
        self._spark = spark
        self._executors = executors

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "executors": self._executors}

    def reconnect(self, cluster: str, agents: Sequence[str]) -> Any:
        raise Unsupported(
            f"cluster {cluster!r} ends with its Spark application and cannot be attached"
        )

    def hosts(self) -> list[RemoteHost]:
        context = self._context()
        settings = context.getConf()
        bound = settings.get("spark.driver.bindAddress") or settings.get("spark.driver.host")
        advertised = settings.get("spark.driver.host") or bound or "127.0.0.1"
        rendezvous = ExecutorRendezvous(bound or "127.0.0.1")
        try:
            arguments = {
                "address": str(Endpoint(advertised.strip("[]"), rendezvous.port)),
                "secret": rendezvous.secret.hex(),
                "grace": self._grace,
            }
            started = self._start(context, arguments)
            started.sort(key=lambda executor: (executor["host"], executor["executor"]))
            if self._executors is not None and len(started) < self._executors:
                raise LaunchError(
                    f"Spark has {len(started)} executors, but executors={self._executors}",
                    fix="start Spark with more executors; tfd.spark.check shows the settings",
                )
            return rendezvous.expect(started, self._executors)
        except BaseException:
            rendezvous.close()
            raise

    def _enough_executors(self, context: Any) -> Callable[[], bool]:
        most = self._executors
        if most is None:
            return spark_slots.AllExecutorsRegistered(context)
        return lambda: len(private.executors(context)) >= most

    def _context(self) -> Any:
        spark = self._spark if self._spark is not None else private.active_context()
        if spark is None:
            raise StateError(
                "no Spark application in this process", fix="tfd.spark.session(), or spark=session"
            )
        context = spark if hasattr(spark, "parallelize") else getattr(spark, "sparkContext", None)
        if context is None:
            raise UsageError(f"invalid spark {spark!r}: expected a SparkSession or a SparkContext")
        if private.is_stopped(context):
            raise StateError("the SparkContext was stopped", fix="start another one")
        return context

    def _start(self, context: Any, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        """Start a process next to each executor, and return the replies."""
        from pyspark import cloudpickle

        if holding := spark_slots.slots_held():
            raise NotEnoughSlots(
                "a task in each slot starts the agents, and "
                + spark_slots.report(private.slots(context), holding),
                fix="start this cluster before those that hold slots (their nodes can use it), or "
                "shut those down",
            )
        spark_slots.wait_for_executors(context, self._enough_executors(context))
        count = private.slots(context)
        if not count:
            raise LaunchError(
                "Spark has no executor, and none registered in time",
                fix="check that a Spark worker has room for one; tfd.spark.check shows details",
            )
        group = f"tfd-launch-{uuid.uuid4().hex[:8]}"
        result: concurrent.futures.Future[list[dict[str, Any]]] = concurrent.futures.Future()

        def run() -> None:
            try:
                context.setJobGroup(group, "agents of a cluster", interruptOnCancel=True)
                code = stdio.bootstrap("spark_executor")
                start = spark_bootstrap.starter(code, arguments, _ANSWER_SECONDS)
                tasks = context.parallelize(range(count), count).barrier()
                result.set_result(tasks.mapPartitions(start).collect())
            except BaseException as error:
                result.set_exception(error)

        # Pickle by value: an executor may not have this package, which the reply then reports.
        cloudpickle.register_pickle_by_value(spark_bootstrap)
        try:
            threading.Thread(target=run, name="tfd-spark-launch", daemon=True).start()
            return result.result(_JOB_SECONDS)
        except concurrent.futures.TimeoutError:
            context.cancelJobGroup(group)
            raise LaunchError(
                "Spark's executors cannot be reached or are busy: not all of them ran a "
                f"task within {_JOB_SECONDS:g} s",
                fix="check that no other job uses the slots, and that the hosts are up",
            ) from None
        except Exception as error:
            raise _launch_error(error) from error
        except BaseException:
            context.cancelJobGroup(group)
            raise
        finally:
            cloudpickle.unregister_pickle_by_value(spark_bootstrap)


def _launch_error(error: Exception) -> LaunchError:
    """Return an error with the essential line of Spark's error, whose text fills a page."""
    text = str(error).strip()
    if lost := re.search(r"ExecutorLostFailure \([^\n]*", text):
        return LaunchError(
            f"a Spark executor cannot be reached: {lost[0]}",
            fix="check that its host is up; Spark replaces an executor if it can",
        )
    lines = re.findall(r"^(?:\w+\.)*\w+(?:Error|Exception): [^\n]+", text, re.M)
    message = lines[-1] if lines else text.partition("\n")[0]
    return LaunchError(
        f"running a task on each Spark executor failed: {message}",
        fix="run tfd.spark.check(spark) for details",
    )


class ExecutorRendezvous:
    """Listener for the executors' processes, which assigns connections to hosts.

    Parameters
    ----------
    address : str
        Address to listen on.
    """

    def __init__(self, address: str) -> None:
        self.secret = secure_channel.Secret.new()
        self._changed = threading.Condition()
        self._hosts: dict[tuple[str, int], _SparkHost] | None = None
        self._open = 0
        self._server = secure_channel.serve(self.secret, self._accept, host=address.strip("[]"))
        self.port = int(self._server.address.rpartition(":")[2])

    def expect(self, executors: Sequence[dict[str, Any]], most: int | None) -> list[RemoteHost]:
        """Return the hosts of the started executors; connections of all others are ended."""
        hosts: dict[tuple[str, int], _SparkHost] = {}
        for number, executor in enumerate(executors):
            label = f"{executor['host']}/{executor['executor']}"
            handshake = read_handshake(label, iter([executor["line"].encode()]))
            if most is None or number < most:
                host = hosts[handshake.identity, executor["jvm"]] = _SparkHost(label, self)
                host.handshake = handshake
        with self._changed:
            self._hosts, self._open = hosts, len(hosts)
            self._changed.notify_all()
        return list(hosts.values())

    def release(self) -> None:
        """Release a host that needs no more connections; the last one closes the listener."""
        with self._changed:
            self._open -= 1
            last = self._open == 0
        if last:
            self.close()

    def close(self) -> None:
        """Close the listener; waiting connections end."""
        with self._changed:
            self._hosts = self._hosts or {}
            self._changed.notify_all()
        self._server.close()

    def _accept(self, channel: secure_channel.AuthenticatedChannel) -> None:
        header, _ = channel.receive(_CONNECT_SECONDS)
        with self._changed:
            # The connection may arrive before the job that started its process has ended.
            self._changed.wait_for(lambda: self._hosts is not None, _JOB_SECONDS)
            hosts = self._hosts or {}
        host = hosts.get((str(header.get("host")), header.get("executor", 0)))
        if host is None or not host.offer(channel):
            channel.send({"close": True})


class _SparkHost(RemoteHost):
    """An executor as a host."""

    can_detach: ClassVar[bool] = False

    def __init__(self, label: str, rendezvous: ExecutorRendezvous) -> None:
        super().__init__(label)
        self._rendezvous = rendezvous
        self._changed = threading.Condition()
        self._idle: secure_channel.AuthenticatedChannel | None = None
        self._loss_reason = ""
        self._closed = False

    def offer(self, channel: secure_channel.AuthenticatedChannel) -> bool:
        """Offer a connection to the next session, and return when that session has ended.

        Returns
        -------
        bool
            True if the executor's process must connect again.
        """
        with self._changed:
            if self._closed:
                return False
            if self._idle is not None:  # the executor's process gave this connection up
                self._idle.close()
            self._idle = channel
            self._changed.notify_all()
        next_heartbeat = time.monotonic() + reconnect.HEARTBEAT_SECONDS
        try:
            while not channel.closed:
                if time.monotonic() > next_heartbeat:
                    channel.send({})
                    next_heartbeat = time.monotonic() + reconnect.HEARTBEAT_SECONDS
                with self._changed:
                    if self._idle is channel:  # no session reads it
                        with contextlib.suppress(TimeoutError):
                            self._loss_reason = str(channel.receive(0.0)[0].get("ended", ""))
                    self._changed.wait(_POLL_SECONDS)
        except (OSError, EOFError):
            pass  # the connection broke
        finally:
            with self._changed:
                if self._idle is channel:
                    self._idle = None
        return not self._closed

    def connect(self, agent: str, start: bool) -> Channel:
        with self._changed:
            self._changed.wait_for(
                lambda: self._idle is not None or self._loss_reason or self._closed,
                _CONNECT_SECONDS,
            )
            if self._loss_reason:
                raise self._lost()
            channel, self._idle = self._idle, None
        if channel is None:
            raise OSError(f"its executor did not connect within {_CONNECT_SECONDS:g} s")
        try:
            channel.send({"agent": agent, "mode": "start" if start else "reconnect"})
            header, _ = channel.receive(_ANSWER_SECONDS if start else _CONNECT_SECONDS)
            if "ended" in header:
                self._loss_reason = str(header["ended"])
                raise self._lost()
            line = stdio.HANDSHAKE + json.dumps(header.get("handshake"))
            self.handshake = read_handshake(self.label, iter([line.encode()]), reconnect=not start)
        except EOFError as error:
            channel.close()
            raise OSError(str(error)) from None
        except BaseException:
            channel.close()
            raise
        return _LineChannel(channel)

    def _lost(self) -> AgentLost:
        return AgentLost(f"{self.label}: {self._loss_reason}", fix="start the cluster again")

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            channel, self._idle = self._idle, None
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.send({"close": True})
            channel.close()
        self._rendezvous.release()


class _LineChannel:
    """A channel of lines over an authenticated channel."""

    def __init__(self, channel: secure_channel.AuthenticatedChannel) -> None:
        self._channel = channel

    def send(self, data: bytes) -> None:
        self._channel.send({}, data)

    def lines(self) -> Iterator[bytes]:
        rest = b""
        while True:
            try:
                _, body = self._channel.receive(reconnect.SILENT_SECONDS)
            except (OSError, EOFError):
                return
            *lines, rest = (rest + bytes(body)).split(b"\n")
            validation.check_size(len(rest))
            for line in lines:
                yield line + b"\n"

    def close(self) -> None:
        self._channel.close()
