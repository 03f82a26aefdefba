"""``launcher="spark"``: tasks beside the executors of a Spark application."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import re
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from tfd_notebook._compat import pyspark as private
from tfd_notebook.agent.bridges import spark_bootstrap, stdio
from tfd_notebook.agent.bridges.spark_executor import PING_SECONDS, SILENT_SECONDS
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
from tfd_notebook.net import secure_channel, validation

_ANSWER_SECONDS = 30.0
_JOB_SECONDS = 45.0
_CONNECT_SECONDS = 10.0
_LOOK_SECONDS = 0.5


class Spark(RemoteLauncher):
    """Executors of Spark: a short job starts an agent beside each, which connects back to here.

    The agents take no slot of Spark. They end with their executor, with the cluster, or when this
    process has been away for the grace time. Agents and this process communicate over a channel
    that is authenticated, but not encrypted: ``env`` and Python functions can be read on the
    network, also with ``secure=True``. Needs the extra ``spark``.

    Parameters
    ----------
    spark : pyspark.sql.SparkSession or pyspark.SparkContext, optional
        Default: the one that lives in this process.
    executors : int, optional
        How many of its executors, in the order of their hosts. Default: all.
    grace, place, secure, host, allow
        See `RemoteLauncher` and `Launcher`.
    """

    name: ClassVar[str] = "spark"
    summary: ClassVar[str] = "beside the executors of a Spark application (extra: spark)"

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
            raise UsageError(f"executors={executors!r} must be 1 or more")
        self._spark = spark
        self._executors = executors

    @property
    def options(self) -> dict[str, Any]:
        return {**super().options, "executors": self._executors}

    def reconnect(self, cluster: str, agents: Sequence[str]) -> Any:
        raise Unsupported(
            f"cluster {cluster!r} ends with its Spark application, and nobody else can take it up"
        )

    def hosts(self) -> list[RemoteHost]:
        context = self._context()
        settings = context.getConf()
        bound = settings.get("spark.driver.bindAddress") or settings.get("spark.driver.host")
        advertised = settings.get("spark.driver.host") or bound or "127.0.0.1"
        meeting = ExecutorRendezvous(bound or "127.0.0.1")
        try:
            given = {
                "address": f"{_bracketed(advertised)}:{meeting.port}",
                "secret": meeting.secret.hex(),
                "grace": self._grace,
            }
            found = self._start(context, given)
            found.sort(key=lambda one: (one["host"], one["executor"]))
            if self._executors is not None and len(found) < self._executors:
                raise LaunchError(
                    f"Spark has {len(found)} executors, and {self._executors} are wanted",
                    fix="start it with more; tfd.spark.check says with which settings",
                )
            return meeting.expect(found, self._executors)
        except BaseException:
            meeting.close()
            raise

    def _enough(self, context: Any) -> Callable[[], bool]:
        most = self._executors
        if most is None:
            return spark_slots.AllExecutorsRegistered(context)
        return lambda: len(private.executors(context)) >= most

    def _context(self) -> Any:
        spark = self._spark if self._spark is not None else private.active_context()
        if spark is None:
            raise StateError(
                "no Spark lives in this process", fix="tfd.spark.session(), or spark=session"
            )
        context = spark if hasattr(spark, "parallelize") else getattr(spark, "sparkContext", None)
        if context is None:
            raise UsageError(f"spark={spark!r} is neither a SparkSession nor a SparkContext")
        if private.is_stopped(context):
            raise StateError("the SparkContext was stopped", fix="make another one")
        return context

    def _start(self, context: Any, given: dict[str, Any]) -> list[dict[str, Any]]:
        """Have a process started beside each executor, and return what each said."""
        from pyspark import cloudpickle

        if holding := spark_slots.slots_held():
            raise NotEnoughSlots(
                "an agent is started by a task that takes each slot for a moment, and "
                + spark_slots.report(private.slots(context), holding),
                fix="start this cluster before those that hold slots, whose nodes can use it; or "
                "shut them down",
            )
        spark_slots.wait_for_executors(context, self._enough(context))
        count = private.slots(context)
        if not count:
            raise LaunchError(
                "Spark has no executor, and none has come",
                fix="see that a worker of Spark has room for one; tfd.spark.check says more",
            )
        group = f"tfd-launch-{uuid.uuid4().hex[:8]}"
        done: concurrent.futures.Future[list[dict[str, Any]]] = concurrent.futures.Future()

        def run() -> None:
            try:
                context.setJobGroup(group, "agents of a cluster", interruptOnCancel=True)
                code = stdio.bootstrap("sparkend")
                start = spark_bootstrap.starter(code, given, _ANSWER_SECONDS)
                tasks = context.parallelize(range(count), count).barrier()
                done.set_result(tasks.mapPartitions(start).collect())
            except BaseException as error:
                done.set_exception(error)

        # By value: an executor may have none of this package, which is said then.
        cloudpickle.register_pickle_by_value(spark_bootstrap)
        try:
            threading.Thread(target=run, name="tfd-spark-launch", daemon=True).start()
            return done.result(_JOB_SECONDS)
        except concurrent.futures.TimeoutError:
            context.cancelJobGroup(group)
            raise LaunchError(
                "the executors of Spark cannot be reached, or are busy: not all of them ran a "
                f"task within {_JOB_SECONDS:g} s",
                fix="see that no other job keeps them busy, and that their hosts are up",
            ) from None
        except Exception as error:
            raise _failed(error) from error
        except BaseException:
            context.cancelJobGroup(group)
            raise
        finally:
            cloudpickle.unregister_pickle_by_value(spark_bootstrap)


def _failed(error: Exception) -> LaunchError:
    """Return what matters of an error of Spark, whose text is a page long."""
    text = str(error).strip()
    if lost := re.search(r"ExecutorLostFailure \([^\n]*", text):
        return LaunchError(
            f"an executor of Spark cannot be reached: {lost[0]}",
            fix="see that its host is up; Spark brings another one where it can",
        )
    lines = re.findall(r"^(?:\w+\.)*\w+(?:Error|Exception): [^\n]+", text, re.M)
    said = lines[-1] if lines else text.partition("\n")[0]
    return LaunchError(
        f"Spark could not run a task on each executor: {said}",
        fix="tfd.spark.check(spark) tells more",
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host.strip("[]") else host


class ExecutorRendezvous:
    """Where the executors' ends connect to, and are given to their hosts.

    Parameters
    ----------
    address : str
        To listen at.
    """

    def __init__(self, address: str) -> None:
        self.secret = secure_channel.Secret.new()
        self._changed = threading.Condition()
        self._hosts: dict[tuple[str, int], _SparkHost] | None = None
        self._open = 0
        self._server = secure_channel.serve(self.secret, self._met, host=address.strip("[]"))
        self.port = int(self._server.address.rpartition(":")[2])

    def expect(self, found: Sequence[dict[str, Any]], most: int | None) -> list[RemoteHost]:
        """Return the hosts of the executors that said something; ends of others are sent home."""
        made: dict[tuple[str, int], _SparkHost] = {}
        for number, one in enumerate(found):
            label = f"{one['host']}/{one['executor']}"
            greeting = read_handshake(label, iter([one["line"].encode()]))
            if most is None or number < most:
                host = made[greeting.identity, one["jvm"]] = _SparkHost(label, self)
                host.greeting = greeting
        with self._changed:
            self._hosts, self._open = made, len(made)
            self._changed.notify_all()
        return list(made.values())

    def let_go(self) -> None:
        """Count a host that needs no connection any more."""
        with self._changed:
            self._open -= 1
            last = self._open == 0
        if last:
            self.close()

    def close(self) -> None:
        """Listen no more; whoever is connected ends."""
        with self._changed:
            self._hosts = self._hosts or {}
            self._changed.notify_all()
        self._server.close()

    def _met(self, channel: secure_channel.AuthenticatedChannel) -> None:
        header, _ = channel.receive(_CONNECT_SECONDS)
        with self._changed:
            # It may be here before the job that started it has ended.
            self._changed.wait_for(lambda: self._hosts is not None, _JOB_SECONDS)
            hosts = self._hosts or {}
        host = hosts.get((str(header.get("host")), header.get("executor", 0)))
        if host is None or not host.offer(channel):
            channel.send({"end": True})


class _SparkHost(RemoteHost):
    """An executor."""

    lasts: ClassVar[bool] = False

    def __init__(self, label: str, meeting: ExecutorRendezvous) -> None:
        super().__init__(label)
        self._meeting = meeting
        self._changed = threading.Condition()
        self._idle: secure_channel.AuthenticatedChannel | None = None
        self._gone = ""
        self._closed = False

    def offer(self, channel: secure_channel.AuthenticatedChannel) -> bool:
        """Have a connection used for the next session; returns when it has ended.

        Returns
        -------
        bool
            Whether the other end shall connect again.
        """
        with self._changed:
            if self._idle is not None:  # it has been given up there
                self._idle.close()
            self._idle = channel
            self._changed.notify_all()
        since_ping = 0.0
        while True:
            with self._changed:
                self._changed.wait(_LOOK_SECONDS)
                if self._closed and self._idle is channel:
                    self._idle = None
                    return False
                if self._idle is not channel:
                    break
                try:
                    header, _ = channel.receive(0.0)
                    self._gone = str(header.get("gone", ""))
                except TimeoutError:
                    pass
                except (OSError, EOFError):
                    self._idle = None
                    return True
                if self._gone:
                    self._idle = None
                    return True
            since_ping += _LOOK_SECONDS
            if since_ping >= PING_SECONDS:
                since_ping = 0.0
                channel.send({"ping": True})
        while not channel.closed:  # the session has it
            threading.Event().wait(_LOOK_SECONDS)
        return True

    def connect(self, agent: str, start: bool) -> Channel:
        with self._changed:
            self._changed.wait_for(
                lambda: self._idle is not None or self._gone or self._closed, _CONNECT_SECONDS
            )
            if self._gone:
                raise self._lost()
            channel, self._idle = self._idle, None
        if channel is None:
            raise OSError(f"its executor did not connect within {_CONNECT_SECONDS:g} s")
        try:
            channel.send({"agent": agent, "how": "start" if start else "again"})
            header, _ = channel.receive(_ANSWER_SECONDS if start else _CONNECT_SECONDS)
            if "gone" in header:
                self._gone = str(header["gone"])
                raise self._lost()
            line = stdio.GREETING + json.dumps(header.get("said"))
            self.greeting = read_handshake(self.label, iter([line.encode()]), again=not start)
        except EOFError as error:
            channel.close()
            raise OSError(str(error)) from None
        except BaseException:
            channel.close()
            raise
        return _SealedChannel(channel)

    def _lost(self) -> AgentLost:
        return AgentLost(f"{self.label}: {self._gone}", fix="start the cluster again")

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            channel, self._idle = self._idle, None
        if channel is not None:
            with contextlib.suppress(OSError):
                channel.send({"end": True})
            channel.close()
        self._meeting.let_go()


class _SealedChannel:
    """Lines over a sealed channel."""

    def __init__(self, channel: secure_channel.AuthenticatedChannel) -> None:
        self._channel = channel

    def send(self, data: bytes) -> None:
        self._channel.send({}, data)

    def lines(self) -> Iterator[bytes]:
        rest = b""
        while True:
            try:
                _, body = self._channel.receive(SILENT_SECONDS)
            except (OSError, EOFError):
                return
            *whole, rest = (rest + bytes(body)).split(b"\n")
            validation.check_size(len(rest))
            for line in whole:
                yield line + b"\n"

    def close(self) -> None:
        self._channel.close()
