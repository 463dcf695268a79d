"""Limits that users can notice: pages and messages name them, or they change what is exported."""

# Steps.

MAX_BETWEEN_NS = 60 * 10**9
"""Time between two steps that is part of the second one; a longer time is the gap before it."""
MAX_STEP_CALLS = 1 << 16
"""Module calls of a step segment; further ones are counted in `calls_dropped`."""
MAX_UNTRAINED_FORWARDS = 256
"""Outermost forwards in detail on a thread without backwards beside one with backwards, unless all steps are."""
MAX_STEP_TIMESTAMPS = 1 << 18
"""Times of autograd nodes of a step segment; further ones are counted in `stamps_dropped`."""
MAX_REGISTRATIONS = 128
"""Events `torch.module.registered` of a step."""
MAX_FOLLOWING_EVALUATIONS = 10
"""Evaluations under one span of the program; later ones are folded into one."""
MAX_NONFINITE_NAMES = 16
"""Values of `torch.nonfinite`."""
MAX_BUCKET_MODULES = 16
"""Values of `torch.collective.modules`."""

# Texts.

MAX_NAME = 1024
"""Characters of an exported name: of a module, a class, a service, a logged value."""
MAX_MESSAGE = 2000
"""Characters of an error message of the command line, which may quote a file."""
MAX_EXCEPTION_TEXT = 4096
"""Characters of an exception's exported text."""
MAX_LABEL = 256
"""Characters of a metric's label."""
MAX_LOG_TEXT = 256
"""Characters of a string that is logged."""

# Series.

MAX_LOG_NAMES = 64
"""Names of `log()` of the program, and as many of a framework; each is a series."""
MAX_WATCH_NAMES = 256
"""Names of `watch()`; each is a series."""
MAX_WATCHED = 1024
"""Gradients of watched tensors of a step segment."""
MAX_SHAPES = 64
"""Tensors of one container whose shapes are exported."""
MAX_METRIC_MODULES = 2048
"""Modules with metrics; each has a forward and a backward."""

# Queues and requests.

MAX_FAULTS = 10
"""Internal errors after which a part switches itself off."""
MAX_BUFFER_SPANS = 100_000
"""Spans of the records that wait for the worker; beyond them the oldest records are dropped."""
MIN_CHANNEL_BYTES, MAX_CHANNEL_BYTES = 64 * 1024, 1024 * 1024 * 1024
"""Shared memory for records that wait for the companion; 64 KiB hold a detailed step of some hundred calls."""
MAX_REQUEST_SPANS = 4000
MAX_REQUEST_BYTES = 2 * 1024 * 1024
"""Size before compression: half of what a gRPC receiver accepts by default, as a Collector may pass requests on."""
MAX_WAITING_REQUESTS = 64
MAX_WAITING_BYTES = 32 * 1024 * 1024
"""Size of the requests that wait for an endpoint; beyond it the oldest requests are dropped."""
MAX_RETRY_S = 64.0
"""Time for which a request is retried."""
MAX_RETRY_AFTER_S = 3600.0
"""Longest pause that an endpoint may ask for: a date by a wrong clock must not end the export."""
MAX_CONNECTIONS = 16
"""Connections to the scrape endpoint. One more closes the oldest connection without a whole request."""

# Run files.

MAX_RUN_FILE_BYTES = 256 * 1024 * 1024
"""Size of a run file; beyond it the oldest segment of traces is deleted."""
MAX_INFO_BYTES = 4 * 1024 * 1024
"""Size of a `run.json` that is read; torchotel writes some kilobytes."""
MAX_LINE_BYTES = 64 * 1024 * 1024
"""Size of a line that is read, some 100,000 spans; parsing a longer one would take gigabytes of memory."""
MAX_UPLOAD_TRACES = 50
"""Traces of one file for Jaeger's upload; Jaeger shows all of them at once."""
MAX_UPLOAD_BYTES = 20 * 1024 * 1024
"""Size of one file for Jaeger's upload, except for a file of one line."""
