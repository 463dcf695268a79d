"""Serve a model over HTTP, each request a span of your own: the model's layers appear below it.

    python examples/serve.py --port 8000
    curl --data '[0,0,5,13,9,1,0,0, ...]' http://127.0.0.1:8000/predict     # 64 pixels from 0 to 16

In Jaeger (http://localhost:16686) a request is one trace: `POST /predict`, below it `torch.evaluation`, below that
`forward Net` and its layers. A caller that sends a `traceparent` header finds all this in its own trace. Here torchotel
sets the TracerProvider, so that the spans of your own are exported too; where you have one, leave that argument out.
"""

import argparse
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from opentelemetry import trace
from opentelemetry.propagate import extract
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchotel

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f"{error}; this example needs: pip install 'torchotel[demo]'")

N_PIXELS = 64


class Net(nn.Module):
    """Name handwritten digits of 8x8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(N_PIXELS, 64)
        self.scores = nn.Linear(64, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        """Give ten scores for each image."""
        scores: Tensor = self.scores(torch.relu(self.hidden(pixels / 16)))
        return scores


def trained() -> Net:
    """Train for a second, so that the answers mean something."""
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        cross_entropy(net(pixels), labels).backward()
        optimizer.step()
    return net.eval()


class Predict(BaseHTTPRequestHandler):
    """Answer a JSON list of 64 pixels with the digit that the model sees."""

    net: Net
    tracer = trace.get_tracer("serve")

    def do_POST(self) -> None:  # the name that http.server calls
        """Answer in a span that continues the caller's trace, where there is one."""
        with self.tracer.start_as_current_span(
            f"POST {self.path}", context=extract(self.headers), kind=trace.SpanKind.SERVER
        ) as span:
            status, answer = self.predict(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            span.set_attribute("http.response.status_code", status)
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def predict(self, body: bytes) -> tuple[int, dict[str, object]]:
        """Give the status and the answer to a request."""
        try:
            pixels = torch.tensor(json.loads(body), dtype=torch.float32).reshape(1, N_PIXELS)
        except (ValueError, TypeError, RuntimeError):
            return 400, {"error": f"give a JSON list of {N_PIXELS} numbers"}
        with torch.no_grad():
            return 200, {"digit": int(self.net(pixels).argmax())}

    def log_message(self, *_: object) -> None:
        """Leave the log to telemetry."""


def main() -> None:
    """Serve until it is interrupted."""
    parser = argparse.ArgumentParser(description="Serve a model of handwritten digits.")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    port = parser.parse_args().port
    torch.manual_seed(0)
    Predict.net = trained()  # before instrument(), so that only what is served is seen
    with (
        torchotel.instrument(service_name="digits", set_global_provider=True),
        ThreadingHTTPServer(("127.0.0.1", port), Predict) as server,
    ):
        print(f"http://127.0.0.1:{server.server_port}/predict", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")


if __name__ == "__main__":
    main()
