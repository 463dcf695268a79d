"""OTLP over HTTP without the SDK: our own encoder of the stable wire format, and a thread that sends."""
