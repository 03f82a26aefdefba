"""The settings that the servers of a cluster get."""

from __future__ import annotations

from typing import Any

import pytest
from tensorflow.data.experimental import service

import tfd_notebook as tfd
from tfd_notebook._compat.tf_data import servers
from tfd_notebook.agent import tf_servers
from tfd_notebook.cluster import server_config
from tfd_notebook.model.spec import ClusterConfig


def dispatcher_settings(**fields: Any) -> dict[str, Any]:
    config = service.DispatcherConfig(**fields) if fields else None
    cluster = ClusterConfig("c", service=tfd.Service(dispatcher_config=config))
    settings, _ = server_config.dispatcher_config(cluster, "/d", is_local=True, in_process=False)
    return tf_servers.dispatcher_settings(settings)


def test_dispatcher_discards_epochs_of_dynamic_sharding() -> None:
    settings = dispatcher_settings()
    assert settings["gc_dynamic_sharding_jobs"] is True
    assert settings["job_gc_timeout_ms"] == 30 * 60 * 1000
    assert settings["job_gc_check_interval_ms"] == 60 * 1000
    assert server_config.keep_seconds(tfd.Service()) == 30 * 60
    message = servers.config_message(service.DispatcherConfig, settings)
    assert message.gc_dynamic_sharding_jobs
    assert message.protocol == "grpc"


def test_worker_message_has_the_defaults_of_tensorflow() -> None:
    message = servers.config_message(service.WorkerConfig, {"dispatcher_address": "localhost:1"})
    assert message.worker_address == "localhost:%port%"
    assert message.dispatcher_address == "localhost:1"


@pytest.mark.parametrize(("timeout", "seconds"), [(500, 0.5), (-1, None)])
def test_user_chooses_how_long_an_epoch_is_kept(timeout: int, seconds: float | None) -> None:
    settings = dispatcher_settings(job_gc_timeout_ms=timeout)
    assert settings["job_gc_timeout_ms"] == timeout
    assert settings["job_gc_check_interval_ms"] == 60 * 1000
    config = service.DispatcherConfig(job_gc_timeout_ms=timeout)
    assert server_config.keep_seconds(tfd.Service(dispatcher_config=config)) == seconds
