"""OTLP over HTTP and gRPC without the SDK: an encoder of the stable wire format and a sender thread."""
