"""A bare tf.data service in child processes, for tests that kill parts of it."""

import subprocess
import sys
import threading

_SERVER = """
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = ""
import tensorflow as tf
service = tf.data.experimental.service
if sys.argv[1] == "dispatcher":
    server = service.DispatchServer(service.DispatcherConfig(job_gc_check_interval_ms=100))
    print(server.target, flush=True)
else:
    address = sys.argv[2].split("://")[1]
    server = service.WorkerServer(
        service.WorkerConfig(dispatcher_address=address, heartbeat_interval_ms=100)
    )
    print("worker", flush=True)
sys.stdin.read()
os._exit(0)
"""


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
    """A dispatcher and its workers, as a context manager."""

    def __init__(self, workers=1):
        self.dispatcher = run_python(_SERVER, "dispatcher")
        self.target = read_line(self.dispatcher)
        self.workers = []
        for _ in range(workers):
            self.add_worker()

    def add_worker(self):
        self.workers.append(run_python(_SERVER, "worker", self.target))
        assert read_line(self.workers[-1]) == "worker"

    def kill_workers(self):
        for worker in self.workers:
            end(worker)
        self.workers.clear()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill_workers()
        end(self.dispatcher)
