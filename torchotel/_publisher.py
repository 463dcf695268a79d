"""Every way out of metrics that the configuration asks for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torchotel._utils.faults import Guard
from torchotel._utils.state_dir import stack_targets
from torchotel.config.config import Config
from torchotel.exporters.outlets import MetricsOutlet
from torchotel.exporters.stats import ExportStats
from torchotel.metrics.instruments import STEP_LAST_END_TIME
from torchotel.metrics.store import Metrics
from torchotel.tracing.span import Attributes

if TYPE_CHECKING:
    from torchotel.exporters.prometheus.endpoint import EndpointOutlet


class Publisher:
    """Bring metrics out by each of their ways; a fault of one is nobody else's.

    Args:
        config: Which ways are wanted.
        metrics: What is shown and sent.
        resource: Attributes of the resource.
        version: Of torchotel, for the scope.
        stats: Where failures to push are counted.
        environ: Where the stack's folder may be told.
        rest: Called between slices of an answer to a scrape, to let go of the GIL.
        wait: Open the port and push only when there is something to tell.

    Raises:
        ConfigError: The endpoint's address or the discovery folder can't be used.
    """

    def __init__(
        self,
        config: Config,
        metrics: Metrics,
        resource: Attributes,
        version: str,
        stats: ExportStats,
        environ: Mapping[str, str],
        rest: Callable[[], None],
        *,
        wait: bool,
    ) -> None:
        self.guard = Guard("the ways out of metrics", limit=1000)
        self._metrics = metrics
        self._endpoint: EndpointOutlet | None = None
        self._outlets: list[MetricsOutlet] = []
        if "prometheus" in config.metrics_exporter:
            self._serve(config, resource, environ, rest, wait=wait)
        if config.meter_provider is not None:
            from torchotel.exporters.sdk.meter_provider import ProviderOutlet  # noqa: PLC0415  # what is used is loaded

            made = self.guard.guarded(ProviderOutlet)(config.meter_provider, metrics, version)
            self._outlets += [] if made is None else [made]
        if "otlp" in config.metrics_exporter:
            from torchotel.exporters.otlp.metric_exporter import OtlpMetricsOutlet, Pushing  # noqa: PLC0415  # as above

            self._outlets.append(
                OtlpMetricsOutlet(
                    config.receiver("metrics"),
                    Pushing.of(config),
                    resource=resource,
                    metrics=metrics,
                    version=version,
                    stats=stats,
                    wait=wait,
                )
            )

    def _serve(
        self,
        config: Config,
        resource: Attributes,
        environ: Mapping[str, str],
        rest: Callable[[], None],
        *,
        wait: bool,
    ) -> None:
        if config.prometheus_registry is not None:
            from torchotel.exporters.prometheus.collector import RegistryOutlet  # noqa: PLC0415  # as above

            self._outlets.append(RegistryOutlet(config.prometheus_registry, self._metrics, resource, self.guard))
        elif config.prometheus_port is not None:
            from torchotel.exporters.prometheus.endpoint import EndpointOutlet  # noqa: PLC0415  # as above

            self._endpoint = EndpointOutlet(
                config.prometheus_host,
                config.prometheus_port,
                self._metrics,
                resource,
                config.discovery_dir or stack_targets(environ),
                self.guard,
                rest,
                wait=wait,
            )
            self._outlets.append(self._endpoint)

    @property
    def port(self) -> int | None:
        """The port of the scrape endpoint that is really bound, or None."""
        return None if self._endpoint is None else self._endpoint.port

    def prepare(self) -> None:
        """Load what is slow to load; called on the worker before there is anything to count."""
        for outlet in self._outlets:
            self.guard.guarded(outlet.prepare)()

    def begin(self) -> None:
        """Begin what had to wait until there is something to tell; called on the worker."""
        for outlet in self._outlets:
            self.guard.guarded(outlet.first_step)()

    def flush(self, deadline_s: float) -> bool:
        """Bring out the present state; False where it could not be by `deadline_s` of `time.monotonic()`."""
        done = [self.guard.guarded(outlet.flush)(deadline_s) for outlet in self._outlets]
        return all(done)

    def shutdown(self, deadline_s: float, *, finished: bool) -> None:
        """Bring out the last state, with what became of the run, and let go of threads, ports and files."""
        if finished:
            self._metrics.finish()
        elif self._endpoint is not None and self._metrics.points(STEP_LAST_END_TIME):
            self._endpoint.leave_target()
        for outlet in self._outlets:
            self.guard.guarded(outlet.shutdown)(deadline_s)

    def detach(self) -> None:
        """Be off in a forked child, and leave alone what is the parent's."""
        for outlet in self._outlets:
            with contextlib.suppress(Exception):  # the guard's lock may be held by a thread that is not here
                outlet.detach()
