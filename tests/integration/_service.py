"""A bare tf.data service in separate processes, for tests that kill parts of it."""

import subprocess
import sys
import threading


def run_python(source, *arguments):
    """Run `source` in a separate Python, with pipes for standard input and output."""
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", source, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def read_line(process, seconds=60.0):
    """Return the next line of output of a process; kill the process at the timeout."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        return process.stdout.readline().strip()
    finally:
        timer.cancel()


def end(process):
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


class Service:
    """A dispatcher and its workers, started by `tasks`, as a context manager."""

    def __init__(self, tasks, workers=1):
        self._tasks = tasks
        self._dispatcher = tasks.start("dispatcher")
        self.target = tasks.addresses[self._dispatcher]
        self._workers = []
        for _ in range(workers):
            self.add_worker()

    def add_worker(self):
        dispatcher = self.target.partition("://")[2]
        self._workers.append(self._tasks.start("worker", dispatcher=dispatcher))

    def kill_workers(self):
        while self._workers:
            self._tasks.end(self._workers.pop())

    def kill_dispatcher(self):
        self._tasks.end(self._dispatcher)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill_workers()
        self.kill_dispatcher()
