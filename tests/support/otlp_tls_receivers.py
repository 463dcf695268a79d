"""Receivers with TLS, and an authority that vouches for them."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import grpc
import trustme

from support.otlp_grpc_receiver import grpc_receiver
from support.otlp_http_receiver import receiver
from torchotel.config.otlp_endpoint import OtlpProtocol


class Files(NamedTuple):
    """Certificates of one test, each a PEM file."""

    authority: str
    stranger: str
    """Another authority, which signed nothing here."""
    client: str
    client_key: str
    client_both: str
    """The client's certificate and key in one file."""


class Authority:
    """One that signed the server's certificate and the client's."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.server, self.client = self.ca.issue_cert("localhost", "127.0.0.1"), self.ca.issue_cert("client")
        self.files = Files(*(str(folder / name) for name in Files._fields))
        self.ca.cert_pem.write_to_path(self.files.authority)
        trustme.CA().cert_pem.write_to_path(self.files.stranger)
        self.client.cert_chain_pems[0].write_to_path(self.files.client)
        self.client.private_key_pem.write_to_path(self.files.client_key)
        self.client.private_key_and_cert_chain_pem.write_to_path(self.files.client_both)


@contextmanager
def served(authority: Authority, protocol: OtlpProtocol, *, mutual: bool) -> Iterator[str]:
    """Run a receiver with TLS, and give its endpoint."""
    if protocol == "grpc":
        key, chain = authority.server.private_key_pem.bytes(), authority.server.cert_chain_pems[0].bytes()
        trusted = authority.ca.cert_pem.bytes() if mutual else None
        credentials = grpc.ssl_server_credentials([(key, chain)], trusted, mutual)
        with grpc_receiver("localhost:0", credentials) as server:
            yield server.endpoint
        return
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.server.configure_cert(context)
    if mutual:
        authority.ca.configure_trust(context)
        context.verify_mode = ssl.CERT_REQUIRED
    with receiver() as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        yield server.url.replace("http://127.0.0.1", "https://localhost")
