"""The default methods of task hosts, for third-party launchers, and errors of options."""

import inspect

import pytest

from tfd_notebook import errors
from tfd_notebook.launchers import SSH
from tfd_notebook.launchers.base import TaskHost

OPTIONAL = {
    "restart": ("worker:0", {}),
    "kill": ("worker:0",),
    "serve_errors": (["worker:0"],),
    "install": (b"", [], []),
    "inspect": (),
    "stacks": (["worker:0"],),
    "gpus": (),
    "journal": ({},),
    "journal_size": (),
    "free_disk_space": (),
    "lease": (5.0,),
    "open_ranks": (["worker:0"],),
    "run_rank": ("worker:0", b"", {}),
    "rank_output": ("worker:0", 100, 0),
    "close_ranks": (["worker:0"],),
    "describe": ({},),
}


class Minimal(TaskHost):
    """A host that implements the abstract methods only."""

    host, label, directory = "10.0.0.5", "blue", ""

    def reserve_ports(self, tasks, *, timeout=30.0):
        return {}

    def start(self, tasks, *, timeout=30.0):
        pass

    def stop(self, tasks, *, timeout=30.0):
        pass

    def logs(self, task, size, offset=None, *, timeout=30.0):
        return "", 0

    def close(self, timeout=10.0):
        pass

    def detach(self):
        pass


@pytest.mark.parametrize("method", OPTIONAL)
def test_optional_method_raises_unsupported(method):
    with pytest.raises(errors.Unsupported, match=r"host blue does not support this: .*cannot"):
        getattr(Minimal(), method)(*OPTIONAL[method])


def test_all_methods_with_a_timeout_are_abstract_or_optional():
    with_timeout = {
        name
        for name, method in vars(TaskHost).items()
        if inspect.isfunction(method) and "timeout" in inspect.signature(method).parameters
    }
    assert with_timeout == (TaskHost.__abstractmethods__ - {"detach"}) | OPTIONAL.keys()


def test_duplicate_hosts_are_named():
    with pytest.raises(errors.UsageError, match=r"invalid hosts \['a', 'a'\]: duplicate entries"):
        SSH(["a", "a"])


@pytest.mark.parametrize("port", ["x", "0", "65536"])
def test_invalid_port_of_a_host_is_named(port):
    label = f"a@b:{port}"
    with pytest.raises(errors.UsageError, match=f"port '{port}' in host '{label}': expected 1 to"):
        SSH([label]).hosts()
