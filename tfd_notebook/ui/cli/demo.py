"""``tfd demo``: train on a small cluster in the terminal.

Data workers crop, augment and batch two photographs. A small network learns which photograph a
crop is from. A stream runs while workers are added and one is killed. The training then runs again
with the servers inside this process. The terminal shows live progress and the final tables.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

from tfd_notebook import views
from tfd_notebook.cluster.cluster import Cluster
from tfd_notebook.errors import TfdError, TimeLimit, Unsupported
from tfd_notebook.model.snapshot import Snapshot

CROP = 64
BATCH = 32
_BATCHES = 1_000_000

#: Seconds to wait until the killed worker is ready again.
_RESTART_SECONDS = 60
#: Seconds between two updates of the line in a terminal.
_PROGRESS_SECONDS = 0.5


def main(batches: int = 24) -> int:
    """Run the demonstration; return the exit status.

    Parameters
    ----------
    batches : int
        Number of batches of 32 crops that the network is trained on.

    Raises
    ------
    Unsupported
        scikit-learn, which contains the photographs, or Pillow, which reads them, is missing.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    began = time.monotonic()
    photographs = _photographs()
    _print_line("Starting a dispatcher and one data worker (child processes) ...")
    with Cluster(data_workers=1, name="demo") as cluster:
        _print_line(f"ready after {time.monotonic() - began:.1f} s\n")
        with _quiet_stderr():
            import keras  # noqa: F401 - imports TensorFlow, which prints to stderr
        _train(cluster, crops(photographs), batches)
        _stream(cluster, crops(photographs))
        _print_line(f"\n{views.text(cluster.snapshot())}")
    _print_line("\nThe same with the servers inside this process:")
    with Cluster(data_workers=2, name="demo-inprocess", launcher="inprocess") as cluster:
        _train(cluster, crops(photographs), batches)
        _print_line(f"\n{views.text(cluster.snapshot())}")
    _print_line(f"\nDone in {time.monotonic() - began:.0f} s. All servers have stopped.")
    return 0


def crops(photographs: tuple[str, ...]) -> Any:
    """Return an infinite dataset of random crops and the index of the photograph they come from.

    Parameters
    ----------
    photographs : tuple of str
        Paths of JPEG files.

    Returns
    -------
    tf.data.Dataset
        Pairs of float32 ``(32, 64, 64, 3)`` in 0 to 1 and int64 ``(32,)``.
    """
    import tensorflow as tf

    paths = tf.constant(photographs)

    def crop(number: Any) -> tuple[Any, Any]:
        label = number % len(photographs)
        image = tf.io.decode_jpeg(tf.io.read_file(paths[label]))
        image = tf.image.random_crop(image, (CROP, CROP, 3))
        image = tf.image.random_flip_left_right(tf.image.convert_image_dtype(image, tf.float32))
        image = tf.image.random_brightness(image, 0.2)
        return tf.clip_by_value(image, 0.0, 1.0), label

    # Numbers of batches: the data workers share them, whereas each would count from 0 itself.
    batches = tf.data.Dataset.range(_BATCHES)
    numbers = batches.flat_map(lambda i: tf.data.Dataset.range(i * BATCH, (i + 1) * BATCH))
    return numbers.map(crop, num_parallel_calls=2).batch(BATCH).repeat()


def _photographs() -> tuple[str, ...]:
    try:
        from sklearn.datasets import load_sample_images

        return tuple(load_sample_images().filenames)
    except ImportError:
        raise Unsupported(
            "tfd demo requires scikit-learn and Pillow for its photographs",
            fix='pip install "tfd-notebook[demo]"',
        ) from None


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Redirect stderr to a file, and copy it to the terminal after an error.

    TensorFlow prints lines on import that no setting hides.
    """
    with tempfile.TemporaryFile() as output:
        stderr = os.dup(2)
        os.dup2(output.fileno(), 2)
        try:
            yield
        except BaseException:
            output.seek(0)
            os.write(stderr, output.read())
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def _network() -> Any:
    import keras

    network = keras.Sequential(
        [
            keras.layers.Input((CROP, CROP, 3)),
            keras.layers.Conv2D(8, 5, strides=3, activation="relu"),
            keras.layers.Conv2D(16, 3, strides=2, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(2),
        ]
    )
    network.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return network


def _train(cluster: Cluster, dataset: Any, batches: int) -> None:
    epoch = dataset.apply(cluster.distribute(processing_mode="dynamic")).take(batches)
    with _progress(cluster, "train"):
        history = _network().fit(cluster.observe(epoch, name="train"), verbose=0, shuffle=False)
    accuracy = history.history["accuracy"][-1]
    _print_line(f"one epoch of model.fit: accuracy {accuracy:.2f}")


def _stream(cluster: Cluster, dataset: Any) -> None:
    # With mode "off" each worker produces its own infinite random crops.
    dataset = dataset.apply(cluster.distribute(processing_mode="off"))
    with cluster.stream(dataset, name="background").start() as stream:
        with _progress(cluster, "background"):
            stream.wait(elements=20, timeout=60)
        estimate = cluster.what_if(4).records()[-1]
        _print_line("scaling from 1 to 4 data workers ...")
        cluster.scale(data_workers=4)
        with _progress(cluster, "background"):
            stream.wait(elements=stream.elements + 60, timeout=60)
        _print_line(
            f"estimate from the cost of a batch: {estimate['low']:.0f} to {estimate['high']:.0f} "
            f"batches/s ({estimate['because']})"
        )
        victim = "data_worker:0"
        killed = cluster.kill(victim)
        _print_line(f"killing {victim} (pid {killed}) ...")
        with _progress(cluster, "background"):
            stream.wait(elements=stream.elements + 60, timeout=60)
            pid = _await_restart(cluster, stream, victim, killed)
    _print_line(f"{victim} is ready again (pid {pid}); the stream was not interrupted")


def _await_restart(cluster: Cluster, stream: Any, task: str, killed: int | None) -> int | None:
    """Read the stream until the killed `task` is ready again, and return its new pid."""
    deadline = time.monotonic() + _RESTART_SECONDS
    while time.monotonic() < deadline:
        row = cluster.snapshot().task(task)
        if row is not None and row.state == "ready" and row.pid != killed:
            return row.pid
        stream.wait(elements=stream.elements + 1, timeout=_RESTART_SECONDS)
    raise TimeLimit(
        f"not ready {_RESTART_SECONDS} s after it was killed",
        task=task,
        fix="see its log: tfd logs",
    )


@contextlib.contextmanager
def _progress(cluster: Cluster, consumer: str) -> Iterator[None]:
    """Show the progress of a consumer in one line, which a terminal updates."""

    def line(snapshot: Snapshot) -> str:
        row = next((row for row in snapshot.streams if row.name == consumer), None)
        if row is None:
            return ""
        waits = "" if row.wait_fraction is None else f", waits {row.wait_fraction:.0%} of the time"
        return f"  {row.name}: {row.elements} batches, {row.elements_per_s:.0f}/s{waits}"

    def show() -> None:
        while not finished.wait(_PROGRESS_SECONDS):
            sys.stdout.write(_line_start() + line(cluster.snapshot()))
            sys.stdout.flush()

    finished = threading.Event()
    thread = threading.Thread(target=show, name="tfd-demo-progress", daemon=True)
    if _line_start():
        thread.start()
    try:
        yield
    finally:
        finished.set()
        _print_line(line(cluster.snapshot()))


def _line_start() -> str:
    """Return the control sequence that clears a line, or an empty string without a terminal."""
    return "\r\x1b[K" if sys.stdout.isatty() else ""


def _print_line(text: str) -> None:
    print(_line_start() + text, flush=True)


__all__ = ["crops", "main"]

if __name__ == "__main__":
    try:
        sys.exit(main())
    except TfdError as error:
        sys.exit(f"tfd demo: {error}")
