"""Promises of docs/coordinator.md, in the cells of one notebook.

TensorFlow cannot undo a connection to a cluster, so a kernel is the coordinator.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests._waiting import until
from tests.integration._kernel import Kernel

pytestmark = pytest.mark.integration

SETUP = """
%load_ext tfd_notebook
import tensorflow as tf, tfd_notebook as tfd

tf.get_logger().setLevel("CRITICAL")
cluster = tfd.Cluster(workers=2, ps=1, name="contract")
coordinator = cluster.coordinator()
with coordinator.strategy.scope():
    total = tf.Variable(0.0)

@tf.function
def add():
    return total.assign_add(1.0)

def new_gate():
    with tf.device("/job:ps/task:0"):
        return tf.queue.FIFOQueue(10, tf.float32, shapes=())

def open_gate(gate):
    # More elements than closures, because that of a killed worker may still take one.
    gate.enqueue_many([[1.0] * 5])

@tf.function
def fail(number):
    tf.debugging.assert_less(number, 0.0, "wrong batch")

def last():
    return coordinator.values.to_frame().iloc[-1]

def error_of(wait):
    try:
        wait()
    except Exception as error:
        return "\\n".join((type(error).__name__, str(error), *getattr(error, "__notes__", ())))
"""


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    with Kernel(TF_CPP_MIN_LOG_LEVEL="3") as kernel:
        assert "Error" not in kernel.run(SETUP)
        yield kernel


@pytest.fixture
def kernel(notebook: Kernel) -> Iterator[Kernel]:
    """Return the kernel. A failed test leaves neither a pause nor a closure behind."""
    yield notebook
    notebook.run("coordinator.resume(); coordinator.resume_worker(1); coordinator.join(60)")


def await_that(kernel: Kernel, expression: str) -> None:
    """Wait until an expression is true in the kernel."""
    until(lambda: "holds True" in kernel.run(f"print('holds', bool({expression}))"), 90)


def test_scheduled_closures_run_and_return_their_results(kernel: Kernel) -> None:
    output = kernel.run("""
before = total.numpy()
values = [coordinator.schedule(add) for _ in range(20)]
coordinator.join(timeout=60)
print("results", max(coordinator.fetch(values)) - before, values[0].fetch() == values[0].get())
""")
    assert "results 20.0 tf.Tensor(True" in output


def test_frame_has_the_state_worker_and_times_of_each_closure(kernel: Kernel) -> None:
    output = kernel.run("""
coordinator.schedule(add).fetch()
row = last()
print("row", row.function, row.state, row.worker in (0, 1), row.attempts, row.run_ms > 0)
coordinator.pause()
cancelled = coordinator.schedule(add)
print("row", last().state, coordinator.cancel(cancelled), last().state)
""")
    assert "row add ready True 1 True" in output
    assert "row paused True cancelled" in output


def test_step_runs_exactly_n_closures_and_resume_the_rest(kernel: Kernel) -> None:
    output = kernel.run("""
coordinator.pause()
before = total.numpy()
values = [coordinator.schedule(add) for _ in range(6)]
for n in (2, 1):
    ran = coordinator.step(n)
    paused = coordinator.values.counts()["paused"]
    print("step", ran, total.numpy() - before, paused, coordinator.done())
coordinator.resume()
coordinator.join(timeout=60)
print("resumed", total.numpy() - before, coordinator.done())
""")
    assert "step 2 2.0 4 False\nstep 1 3.0 3 False\nresumed 6.0 True" in output


def test_wait_on_a_paused_coordinator_raises(kernel: Kernel) -> None:
    output = kernel.run("""
coordinator.pause()
value = coordinator.schedule(add)
print(error_of(coordinator.join))
print("fetch", error_of(value.fetch))
print("join", error_of(lambda: coordinator.join(timeout=0.1)))
""")
    assert output.startswith("PausedError")
    assert "1 closure" in output
    assert "coordinator.resume()" in output
    assert "fetch PausedError" in output
    assert "join TimeLimit" in output


def test_cancel_affects_one_closure_only(kernel: Kernel) -> None:
    output = kernel.run("""
coordinator.pause()
before = total.numpy()
kept, cancelled, later = [coordinator.schedule(add) for _ in range(3)]
print("cancelled", coordinator.cancel(cancelled))
coordinator.resume()
coordinator.join(timeout=60)
print("kept", kept.fetch() > before, later.fetch() > before, total.numpy() - before)
print("error", error_of(cancelled.fetch))
""")
    assert "cancelled True" in output
    assert "kept True True 2.0" in output
    assert "error CancelledError" in output


def test_join_has_a_timeout_and_responds_to_ctrl_c(kernel: Kernel) -> None:
    output = kernel.run("""
gate = new_gate()
running = coordinator.schedule(tf.function(gate.dequeue))
print(error_of(lambda: coordinator.join(timeout=0.1)))
try:
    coordinator.join(timeout=0.1)
except TimeoutError:
    print("is a TimeoutError")
""")
    assert "1 are running" in output
    assert "is a TimeoutError" in output
    cell = kernel.begin("print('joining', flush=True); coordinator.join()", until="joining")
    kernel.manager.interrupt_kernel()
    assert "KeyboardInterrupt" in kernel.finish(cell)
    output = kernel.run("print('cancelled', coordinator.cancel(running)); open_gate(gate)")
    assert "cancelled True" in output


def test_error_of_a_function_is_raised_with_function_and_worker(kernel: Kernel) -> None:
    output = kernel.run("""
coordinator.pause_worker(0)
value = coordinator.schedule(fail, args=(tf.constant(1.0),))
print(error_of(coordinator.join))
coordinator.resume_worker(0)
print("row", last().function, last().state, last().worker, "wrong batch" in last().error)
print("next", error_of(value.fetch).split()[0], coordinator.schedule(add).fetch() > 0)
""")
    assert "InvalidArgumentError" in output
    assert "wrong batch" in output
    assert "__inference_fail" in output
    assert "row fail failed 1 True" in output
    assert "next InvalidArgumentError True" in output


def test_break_on_failure_pauses_before_the_others_are_cancelled(kernel: Kernel) -> None:
    kernel.run("""
coordinator.break_on(failure=True)
coordinator.pause()
bad = coordinator.schedule(fail, args=(tf.constant(1.0),))
rest = coordinator.schedule(add)
coordinator.pause_worker(1)  # the other worker runs them one after the other
coordinator.resume()
""")
    await_that(kernel, "coordinator.paused")
    output = kernel.run("""
print("reason", coordinator.paused)
print("states", coordinator.values.to_frame().state[-2:].tolist())
print(error_of(coordinator.join))
print("paused", bool(coordinator.paused), last().state)
coordinator.break_on(failure=False)
""")
    assert "fail" in output.partition("reason")[2].partition("\n")[0]
    assert "states ['failed', 'paused']" in output
    assert "wrong batch" in output
    assert "paused False cancelled" in output


def test_closure_of_a_killed_worker_runs_on_another(kernel: Kernel) -> None:
    output = kernel.run("""
before = total.numpy()
gate = new_gate()
coordinator.pause_worker(1)
value = coordinator.schedule(tf.function(gate.dequeue))
pid = cluster.snapshot().task("worker:0").pid
print("pid", pid)
""")
    await_that(kernel, "last().state == 'running'")
    kernel.run("coordinator.resume_worker(1)")
    os.kill(int(output.split("pid ")[1]), signal.SIGKILL)
    await_that(kernel, "last().attempts == 2")
    output = kernel.run(
        "open_gate(gate); print('result', value.fetch(), last().worker, last().state)"
    )
    assert "result 1.0 1 ready" in output
    await_that(kernel, "cluster.snapshot().task('worker:0').pid not in (pid, None)")
    await_that(kernel, "cluster.snapshot().task('worker:0').state == 'ready'")
    output = kernel.run("""
coordinator.pause_worker(1)
coordinator.schedule(add).fetch()
print("restarted", total.numpy() - before, last().worker)
""")
    assert "restarted 1.0 0" in output


def test_killed_parameter_server_raises_one_error_and_is_recovered(
    kernel: Kernel, tmp_path: Path
) -> None:
    """This is the last test, because its variables belong to a new strategy."""
    output = kernel.run(f"""
total.assign(5.0)
path = tf.train.Checkpoint(total=total).save({str(tmp_path / "checkpoint")!r})
print("pid", cluster.snapshot().task("ps:0").pid)
""")
    os.kill(int(output.split("pid ")[1]), signal.SIGKILL)
    output = kernel.run("""
coordinator.schedule(add)
print(error_of(lambda: coordinator.join(timeout=90)))
""")
    assert "UnavailableError" in output or "AbortedError" in output
    assert "cluster.recover(checkpoint)" in output
    output = kernel.run("""
def build(coordinator):
    global total
    with coordinator.strategy.scope():
        total = tf.Variable(0.0)
    return tf.train.Checkpoint(total=total)

coordinator = cluster.recover(path, build)
add = tf.function(lambda: total.assign_add(1.0))
print("recovered", coordinator.schedule(add).fetch())
""")
    assert "recovered 6.0" in output
