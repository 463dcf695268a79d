"""OTLP without the SDK, over HTTP and gRPC: our own encoder of the stable wire format, and a thread that sends."""
