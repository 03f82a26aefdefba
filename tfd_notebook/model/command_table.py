"""The table of all commands: of the magics, of ``tfd``, of the control socket and of front ends.

It is the source of command lines, their help and their completion, and of the checks of requests.
The form that starts a cluster and the reference page are made from it, too. A handler is imported
when its command is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

from tfd_notebook.model.command import REQUIRED, Argument, Command

#: The surfaces that have subcommands, and their summaries.
PROGRAMS = {
    "%tfd_cluster": "Start, inspect and stop clusters.",
    "%tfd_stream": "Iterate datasets in the background.",
    "%tfd_spark": "Run TensorFlow clusters on Spark executors.",
    "tfd": "Start, watch and control TensorFlow clusters. The commands also apply to the clusters "
    "of running notebooks, even while a cell runs.",
}
#: The module and class of the handlers of each surface, and of commands with other handlers.
HANDLERS = {
    "%tfd_cluster": "ui.magics.cluster:ClusterMagic",
    "%tfd_stream": "ui.magics.stream:StreamMagic",
    "%tfd_explain": "ui.magics.stream:ExplainMagic",
    "%tfd_schedule": "ui.magics.schedule:ScheduleMagic",
    "%tfd_run": "ui.magics.run:RunMagic",
    "%tfd_spark": "ui.magics.spark:SparkMagic",
    "%tfd_kernel": "ui.magics.remote_kernel:KernelMagic",
    "%tfd_resolve": "ui.magics.resolve:ResolveMagic",
    "tfd": "ui.cli.commands:Tfd",
    "request": "cluster.commands:Requests",
    "request doctor": "diagnosis.commands:Requests",
    "request support": "diagnosis.commands:Requests",
    "panel": "ui.magics.resolve:Requests",
    "panel launchers": "ui.magics.start_form:Requests",
    "panel start": "ui.magics.start_form:Requests",
    **dict.fromkeys(
        ("%tfd_pause", "%tfd_resume", "%tfd_step", "%tfd_join", "%tfd_cancel", "%tfd_values"),
        "ui.magics.stepper:StepperMagic",
    ),
}

ALL = "%tfd_cluster tfd request"

# Arguments

NAME = Argument("[name]", "name of the cluster, if several run", "images", source="clusters")
PID = Argument(
    "--pid N", "process or agent of the cluster, if several have the same name", on="tfd"
)
DETACHED = replace(NAME, help="name of the cluster, if several are detached")
CLUSTER = Argument("--cluster C", "name of the cluster, if several run", source="clusters")
OUTPUT = Argument(
    "-o --output VAR",
    "variable for the cluster; never overwrites anything else",
    default="cluster",
    label="variable",
)
JSON = Argument("--json", "print JSON", on="tfd")
HOURS = Argument("--hours H", "how long to keep it", "12", 8.0)
LIVE = Argument("--live", "show a widget that updates itself", "yes", group="view")
FRAME = Argument("--frame", "return the tasks as a DataFrame", on="magic", group="view")
LINES = Argument("-n --lines N", "lines per task", "50", 100, minimum=1, maximum=100_000)
DATASET = Argument(
    "dataset",
    "variable that holds the dataset, or an expression in the notebook's namespace (in quotation "
    "marks if it contains spaces)",
    "batches",
    source="datasets",
)
STREAM = Argument("[name]", "name of the stream, if several run", "train", source="streams")
TIMES = Argument("--times N", "schedule it N times, and return a list", "10", minimum=1)
PLAIN = Argument("--plain", "show text and images only, no HTML and no JavaScript")
LABEL = Argument("--name NAME", "name of the stream (default: the variable's name)")
EVERY = Argument("--all", "stop every cluster of this kernel", on="magic")
CODE = Argument("code", "code such as TFD811, or name of an error", "TFD811")
FILE = Argument("[file]", "path of the archive (default: tfd-support-<time>.tar.gz)", on="tfd")
DRY_RUN = Argument("--dry-run", "list them, but end nothing", "yes")
SOURCE = Argument("source", default="a terminal", on="request")
FAILURE = Argument("failure", kind=bool, default=REQUIRED)
HOLD = (
    Argument("worker N", default=REQUIRED, minimum=0, maximum=100_000),
    Argument("held", kind=bool, default=REQUIRED),
)
VARIABLE = Argument("variable", default="cluster")
ROWS = Argument("rows", "variable that holds an RDD or DataFrame", "rows", source="rows")
SPARK_NAME = Argument("[name]", "name of the cluster, if several run", source="spark")
SPARK_CLUSTER = Argument("--cluster C", "name of the cluster, if several run", source="spark")
EPOCHS = Argument("--epochs N", "passes over the rows", "3", 1)
SCHEMA = Argument(
    "--schema 'NAME TYPE, ...'", "columns of the result DataFrame (default: an RDD)", "'guess long'"
)
FEED = (
    Argument("--feed-timeout S", "seconds without progress until it fails", default=600.0),
    SPARK_CLUSTER,
)
NODE = Argument("[node]", "such as worker:0 (default: all)", "worker:1")
NODES = replace(FRAME, help="return the nodes as a DataFrame")
NODE_LINES = replace(LINES, help="lines per node", example="")
SESSION = Argument("--spark SESSION", "variable of the SparkSession (default: the active session)")
BACKGROUND = Argument("--background", "do not wait; return a future")
KERNEL = (
    Argument("kernel", "variable that holds a tfd.RemoteKernel, or an expression", "kernel"),
    Argument("--timeout S", "interrupt it after S seconds"),
)

#: The views of a cluster that a widget can show.
VIEWS = ("cluster", "throughput", "values", "timeline", "stepper")
VIEW = Argument(
    "--view VIEW",
    f"show one part of that widget: {', '.join(VIEWS)}",
    choices=VIEWS,
    group="view",
)
# The name of a cluster and a task. On a command line, they are words in any order.
TASK = (
    Argument("name", on="request"),
    Argument("task", default=REQUIRED, on="request"),
    Argument(
        "[words...] [NAME] TASK",
        "cluster and task, such as data_worker:0",
        "images data_worker:0",
        on="magic tfd",
        split="task",
        source="tasks",
    ),
)
LOG = (
    TASK[0],
    replace(TASK[1], default=None),
    replace(TASK[2], usage="[words...] [NAME] [TASK]", help="name and task (default: all tasks)"),
    PID,
    LINES,
    Argument("-f --follow", "show new lines until Ctrl-C", on="magic tfd"),
    Argument("offset N", minimum=0, maximum=2**62, on="request"),
)
STACKS = (*LOG[:4], JSON)
COUNT = (
    Argument("name", on="request"),
    Argument(
        "[words...] [N] [NAME]",
        "number of closures (default: 1); name of the cluster, if several run",
        "3 images",
        on="magic tfd",
        split="count",
        source="clusters",
    ),
    Argument("count N", default=1, minimum=1, maximum=2**31, on="request"),
    Argument("wait", kind=bool, default=True, on="request"),
    PID,
)
ID = Argument("id", default=REQUIRED, minimum=0, maximum=2**62, on="request")
CLOSURE = (
    Argument("id", "id of the closure from %tfd_values", "17", on="magic", source="closures"),
    replace(NAME, on="magic request"),
    Argument(
        "[words...] [NAME] ID",
        "name of the cluster; id of the closure from tfd watch",
        "images 17",
        on="tfd",
        split="id",
    ),
    PID,
    ID,
)
RESOLUTION = (
    Argument("resolver", default="auto", maximum=1000, on="request"),
    Argument("options", kind=dict, on="request"),
)
RESOLVE = (
    Argument(
        "[resolver]",
        "auto, tf_config, sagemaker, slurm, spark, tpu, kubernetes, gce, jupyter, file, local, or "
        "a .json or .toml file",
        "slurm",
        "auto",
        on="magic tfd",
        source="resolvers",
    ),
    Argument(
        "--set NAME=VALUE",
        'argument of the resolver, such as port=8470 or jobs={"worker":2}',
        "job=1234",
        (),
        on="magic tfd",
        repeat=True,
    ),
    Argument("--watch SECONDS", "show changes for SECONDS, or until Ctrl-C", "60", on="magic tfd"),
    replace(LIVE, help="show a widget with a choice of resolvers", example="", on="magic"),
    FRAME,
    JSON,
    *RESOLUTION,
    Argument("probe", default=False, kind=bool, on="request"),
)
START = (
    Argument("--data-workers N", "number of tf.data service workers", "2", 0, label="data workers"),
    Argument("--workers N", "number of training workers", default=0, label="workers"),
    Argument("--ps N", "number of parameter servers", default=0, label="parameter servers"),
    Argument("--evaluator", "start an evaluator, which is a separate server", label="evaluator"),
    Argument(
        "--gpus X",
        "GPUs of the workers: auto, 0 (none), indices such as 0,1, or a count for each, such as "
        "worker=1",
        default="auto",
        label="GPUs",
    ),
    Argument(
        "--launcher L",
        "launcher of the tasks; the command launchers lists the choices",
        default="local",
        source="launchers",
        label="launcher",
    ),
    Argument("--name NAME", "name of the cluster (default: cluster)", label="name"),
    Argument("--host HOST", "host name or address that the tasks advertise"),
    Argument(
        "--preload M", "load this module or op library first in each task", default=(), repeat=True
    ),
    Argument("--work-dir D", "directory of the dispatcher's journal"),
    Argument(
        "--worker-tags T", "tag of the data workers, such as COLOCATED", default=(), repeat=True
    ),
    Argument(
        "--cross-trainer-cache-size-bytes N",
        "bytes of the cross-trainer cache of each data worker",
    ),
    Argument("--snapshot-max-chunk-size-bytes N", "bytes of a chunk of a saved dataset"),
    Argument("--allow CIDR", "accept connections from this network, too", default=(), repeat=True),
    Argument("--time-limit S", "stop the cluster after S seconds", label="time limit"),
    Argument("--port N", "port of the dispatcher (default: free)", default=0, on="tfd"),
    Argument(
        "--foreground", "run it until Ctrl-C or SIGTERM (the default)", on="tfd", group="mode"
    ),
    Argument(
        "--detach [HOURS]",
        "keep it running after this process ends, for HOURS hours (default: 8)",
        const=8.0,
        group="mode",
        label="detach",
    ),
)
RUN = (
    Argument("function", "called as FUNCTION(args, ctx)", "main_fun", source="functions"),
    Argument("--args EXPR...", "first argument of FUNCTION (default: None)", "args"),
    Argument("--executors N", "number of nodes (default: all free slots)", "3"),
    Argument("--ps N", "use N of the nodes as parameter servers", "1", 0),
    Argument(
        "--input-mode MODE",
        "source of the data: spark feeds the rows (default); with tensorflow, FUNCTION reads its "
        "own data",
        default="spark",
        choices=("spark", "tensorflow"),
    ),
    Argument("--master-node NAME", "role of the first worker: chief or master"),
    Argument("--evaluator", "use one of the nodes as evaluator"),
    Argument("--driver-ps", "run parameter servers on the host of this kernel"),
    Argument("--tensorboard", "run TensorBoard next to the first worker"),
    Argument("--log-dir D", "directory that TensorBoard reads"),
    Argument("--timeout S", "seconds until all nodes must have registered", default=600.0),
    Argument("--name NAME", "name of the cluster (default: spark)"),
    SESSION,
    BACKGROUND,
    OUTPUT,
)
CHECK = (
    Argument("--executors N", "number of nodes to check (default: all free slots)", "3"),
    SESSION,
    BACKGROUND,
)
SHUTDOWN = (
    SPARK_NAME,
    Argument("--grace S", "seconds that the evaluator may run on after the workers", default=0.0),
    Argument(
        "--timeout S",
        "seconds until the nodes are stopped; -1: no limit (default: 3 days)",
        "60",
        259200.0,
    ),
    BACKGROUND,
)
RECOVER = (
    NAME,
    Argument(
        "--checkpoint PATH",
        "checkpoint, or a directory of which the latest checkpoint is used",
        "checkpoints",
    ),
    Argument(
        "--build FUNCTION",
        "function that builds the model again: takes the coordinator, returns its "
        "tf.train.Checkpoint",
        "build",
        source="functions",
    ),
)
EXPLAIN = (
    DATASET,
    Argument("--seconds S", "duration of the run", "5", 10.0),
    Argument("--step FUNCTION", "function that consumes an element, such as a training step"),
    Argument("--step-time S", "seconds that the consumer takes per element"),
)
SCHEDULE = (
    Argument(
        "function",
        "variable that holds the tf.function, or an expression",
        "step",
        source="functions",
    ),
    Argument("--args EXPR...", "expression for its arguments: a tuple, or one argument", "x"),
    TIMES,
    CLUSTER,
)
RUN_TIMEOUT = Argument("--timeout S", "end it on all workers after S seconds", "600")
RUN_FOLD = Argument("--fold", "show the output of each rank in a collapsible section")
RUN_FUNCTION = (
    Argument("function", "variable that holds the function, or an expression", "train"),
    Argument("--args EXPR...", "expression for its arguments: a tuple, or one argument", "x"),
    RUN_TIMEOUT,
    RUN_FOLD,
    CLUSTER,
)
VALUES = (
    NAME,
    Argument("--state STATE", "show only closures in this state", "failed", source="states"),
    Argument("--worker I", "show only closures of this worker"),
    Argument("--rows N", "show the latest N", default=20),
)
JOIN = (
    NAME,
    Argument("--timeout S", "maximum wait in seconds (default: no limit)", "60"),
    Argument("--background", "wait in a thread, and return a BackgroundJoin"),
)
SCALE = (
    NAME,
    Argument(
        "--data-workers N",
        "number of tf.data service workers (default: unchanged)",
        "4",
        minimum=0,
        maximum=100_000,
    ),
    Argument(
        "--workers N", "number of training workers (default: unchanged)", minimum=0, maximum=100_000
    ),
    # Without help: it is parsed so that the error can name the alternative.
    Argument("--ps N", on="magic"),
)
ADAPT = (
    NAME,
    PID,
    Argument("--minimum N", "least number of data workers", "1", minimum=1, maximum=100_000),
    Argument("--maximum N", "largest number of data workers", "8", minimum=1, maximum=100_000),
    Argument("--off", "keep the current number from now on", on="magic tfd"),
)
WHAT_IF = Argument(
    "--data-workers N...",
    "numbers of data workers to estimate for (default: 2 4 8)",
    "4 8",
    (2, 4, 8),
)
WATCH = (
    NAME,
    PID,
    JSON,
    Argument("--once", "show the current state and exit"),
    Argument("--interval S", "seconds between updates", "5", 1.0, minimum=0.1, maximum=3600),
)
SNAPSHOT = (
    NAME,
    Argument("width N", default=110, minimum=20, maximum=1000),
    # Seconds for which the client can resume a coordinator, so that `join` waits for it.
    Argument("hold N", default=0, minimum=0, maximum=3600),
)
#: Seconds since the Unix epoch. The last ten minutes are kept.
SINCE = Argument("since N", default=0, minimum=0, maximum=2**53)
LAB = (
    Argument(
        "[directory]",
        "directory for copies of the tutorials; existing notebooks are kept",
        "tutorials",
        "tfd-tutorials",
    ),
    Argument("--no-browser", "do not open a browser"),
    Argument("--port N", "port of the server (default: a free one)", minimum=1, maximum=65535),
)
TARGET = "name of a cluster, HOST:PORT, or a dataset or resolver of the notebook (default: all)"
HOST_TARGET = "name of a cluster, or HOST:PORT (default: this host)"
DOCTOR = (
    Argument("[target...]", TARGET, "images", on="magic", source="clusters"),
    Argument("[name] TARGET", HOST_TARGET, "images", on="tfd request", source="clusters"),
    PID,
    JSON,
)

COMMANDS = (
    # Clusters
    Command("demo", "train on a small cluster in this terminal", "tfd"),
    Command("lab", "open JupyterLab on the tutorial notebooks", "tfd", *LAB),
    Command("form", "show a form that starts a cluster", "%tfd_cluster", alias=""),
    Command("start", "start a cluster, or reuse the running one", "%tfd_cluster", *START, OUTPUT),
    Command("start", "start a cluster and run it until Ctrl-C", "tfd", *START),
    Command("list", "list your clusters: of all kernels, and detached", "%tfd_cluster tfd", JSON),
    Command("list", "return the clusters of this process", "request"),
    Command("status", "show tasks, streams and notices", "%tfd_cluster", NAME, LIVE, VIEW, FRAME),
    Command("snapshot", "return the state of a cluster, and a text of it", "request", *SNAPSHOT),
    Command("watch", "follow a cluster", "tfd", *WATCH),
    Command("scale", "change the number of tasks", "%tfd_cluster request", *SCALE),
    Command("adapt", "adapt the number of data workers to the demand", ALL, *ADAPT),
    Command("jobs", "show the data jobs of a cluster and their passes", "%tfd_cluster", NAME),
    Command("what-if", "estimate the rate with more data workers", "%tfd_cluster", NAME, WHAT_IF),
    Command("logs", "show the output of tasks", "%tfd_cluster tfd request", *LOG),
    Command("stacks", "show the Python stacks of tasks", ALL, *STACKS),
    Command("rates", "return rates of streams and tasks by second", "request", NAME, SINCE),
    Command("restart", "replace the process of a task", "%tfd_cluster request", *TASK),
    Command("kill", "kill a task, to simulate a crash", "%tfd_cluster request", *TASK),
    Command("interrupt", "cancel every read from a cluster", "%tfd_cluster request", NAME),
    Command(
        "recover", "restore training after losing a parameter server", "%tfd_cluster", *RECOVER
    ),
    Command("attach", "attach to a detached cluster", "%tfd_cluster", DETACHED, OUTPUT),
    Command("attach", "show a cluster, or use a detached one in IPython", "tfd", NAME, PID, JSON),
    Command("detach", "keep a cluster running after its process ends", ALL, NAME, PID, HOURS),
    Command("renew", "extend the time of a detached cluster", ALL, NAME, PID, HOURS),
    Command("stop", "stop a cluster and all its tasks", ALL, NAME, PID, EVERY),
    Command("launchers", "list the available launchers", "%tfd_cluster tfd", JSON, alias="kinds"),
    Command("launchers", "return the form that starts a cluster", "panel"),
    Command("start", "start the cluster of a form", "panel", Argument("options", kind=dict)),
    # Problems
    Command("doctor", "diagnose problems", ALL, *DOCTOR),
    Command("why", "explain a code", "tfd", CODE),
    Command("support", "collect diagnostics for a support ticket", "tfd request", FILE),
    Command("sweep", "end orphaned processes", "tfd", JSON, DRY_RUN),
    # Closures
    Command("pause", "hold queued closures back", "%tfd_pause tfd request", NAME, PID, SOURCE),
    Command("resume", "resume a paused coordinator", "%tfd_resume tfd request", NAME, PID),
    Command("step", "run the next closures while paused", "%tfd_step tfd request", *COUNT),
    Command("cancel", "cancel a queued or running closure", "%tfd_cancel tfd request", *CLOSURE),
    Command("join", "wait until all closures have ended", "%tfd_join", *JOIN),
    Command("values", "show the latest closures: worker, state, times", "%tfd_values", *VALUES),
    Command("value", "return the record of a closure", "request", NAME, ID),
    Command("break_on", "set the breakpoint on failures", "request", NAME, FAILURE),
    Command("hold", "stop or resume the closures of a worker", "request", NAME, *HOLD),
    Command(
        "schedule",
        "schedule a tf.function on the workers; %%tfd_schedule over a cell schedules the cell",
        "%tfd_schedule",
        *SCHEDULE,
    ),
    Command(
        "schedule",
        "schedule the cell on the workers. It becomes a tf.function that returns the value of its "
        "last line. Variables that it assigns are local; all others are those of the notebook",
        "%%tfd_schedule",
        TIMES,
        CLUSTER,
    ),
    Command(
        "run",
        "call a function in a new process next to each training worker, and return the results; "
        "%%tfd_run over a cell runs the cell",
        "%tfd_run",
        *RUN_FUNCTION,
    ),
    Command(
        "run",
        "run the cell in a new process next to each training worker, and return the values of its "
        "last line. Variables that it assigns are local; it gets copies of all others",
        "%%tfd_run",
        RUN_TIMEOUT,
        RUN_FOLD,
        CLUSTER,
    ),
    # Data
    Command("explain", "run a pipeline and report its bottleneck", "%tfd_explain", *EXPLAIN),
    Command("start", "iterate a dataset in the background", "%tfd_stream", DATASET, LABEL, CLUSTER),
    Command("pause", "pause a stream", "%tfd_stream", STREAM),
    Command("resume", "resume a stream", "%tfd_stream", STREAM),
    Command("stop", "stop a stream", "%tfd_stream", STREAM),
    Command("status", "show the streams and datasets of all clusters", "%tfd_stream"),
    # Other kernels and systems
    Command(
        "kernel",
        "show a remote kernel and its clusters; %%tfd_kernel runs a cell in the kernel",
        "%tfd_kernel",
        *KERNEL,
    ),
    Command(
        "kernel",
        "run the cell in a remote kernel. Its output is shown here. Variables that it assigns are "
        "in the remote kernel",
        "%%tfd_kernel",
        *KERNEL,
        PLAIN,
    ),
    Command(
        "resolve",
        "find a cluster and show its tasks. Without RESOLVER, rules check the environment, and the "
        "first match decides",
        "%tfd_resolve tfd panel",
        *RESOLVE,
    ),
    Command("resolvers", "return the choices of resolvers", "panel"),
    Command("attach", "attach to the cluster of a resolution", "panel", *RESOLUTION, VARIABLE),
    # Spark
    Command("run", "start a cluster that runs a function in each node", "%tfd_spark", *RUN),
    Command(
        "train",
        "feed the rows of an RDD or DataFrame",
        "%tfd_spark",
        ROWS,
        EPOCHS,
        *FEED,
        BACKGROUND,
    ),
    Command("inference", "compute a result for each row", "%tfd_spark", ROWS, SCHEMA, *FEED),
    Command("shutdown", "finish and shut down the cluster", "%tfd_spark", *SHUTDOWN),
    Command(
        "status", "show phase, nodes, feeding and errors", "%tfd_spark", SPARK_NAME, LIVE, NODES
    ),
    Command("logs", "show the output of the nodes", "%tfd_spark", NODE, SPARK_CLUSTER, NODE_LINES),
    Command("check", "check that this session can run a cluster", "%tfd_spark", *CHECK),
)


def commands(surface: str) -> dict[str, Command]:
    """Return the commands of a surface by name."""
    return {command.name: command for command in COMMANDS if surface in command.surfaces}


def handler(command: Command, surface: str, *context: Any) -> Callable[..., Any]:
    """Return the function that performs a command on a surface.

    It is the method with the command's name of the class in `HANDLERS`. Its instance is created
    with `context`.
    """
    path = HANDLERS.get(f"{surface} {command.name}") or HANDLERS[surface.replace("%%", "%")]
    module, _, name = path.partition(":")
    handlers = getattr(import_module(f"tfd_notebook.{module}"), name)(*context)
    method: Callable[..., Any] = getattr(handlers, command.name.replace("-", "_"))
    return method
