"""Serve a model with FastAPI: the evaluation and the layers of the model are below the span of each request.

    pip install fastapi uvicorn opentelemetry-instrumentation-fastapi
    python examples/serve.py --port 8000
    curl --json '[0,0,5,13,9,1,0,0, ...]' http://127.0.0.1:8000/predict     # 64 pixels from 0 to 16

In Jaeger (http://localhost:16686) a request is one trace: `POST /predict`, below it `torch.evaluation`, below that
`forward Net` and its layers. If a caller sends a `traceparent` header, these spans are part of the caller's trace.
torchotel sets the TracerProvider here, so that FastAPI's spans are exported too. If your program has a TracerProvider,
omit that argument.
"""

import argparse
import socket
import sys
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import torchotel

try:
    import uvicorn
    from fastapi import FastAPI
    from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
    from pydantic import Field
except ImportError as error:
    sys.exit(f"{error}; this example needs: pip install fastapi uvicorn opentelemetry-instrumentation-fastapi")
try:
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f"{error}; this example needs: pip install scikit-learn")

N_PIXELS = 64
Pixels = Annotated[list[float], Field(min_length=N_PIXELS, max_length=N_PIXELS)]


class Net(nn.Module):
    """Classifies handwritten digits of 8x8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(N_PIXELS, 64)
        self.scores = nn.Linear(64, 10)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return ten scores for each image."""
        scores: Tensor = self.scores(torch.relu(self.hidden(pixels / 16)))
        return scores


def trained() -> Net:
    """Train for a second, so that the predictions are useful."""
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32), torch.tensor(digits.target)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        cross_entropy(net(pixels), labels).backward()
        optimizer.step()
    return net.eval()


def make_app(net: nn.Module) -> FastAPI:
    """Return an app that answers a JSON list of 64 pixels with the predicted digit."""
    app = FastAPI()

    @app.post("/predict")
    def predict(pixels: Pixels) -> dict[str, int]:
        with torch.inference_mode():  # with gradients on, a forward might be the first of a training step
            return {"digit": int(net(torch.tensor([pixels])).argmax())}

    FastAPIInstrumentor.instrument_app(app, exclude_spans=["receive", "send"])
    return app


def main() -> None:
    """Serve until the program is interrupted."""
    parser = argparse.ArgumentParser(description="Serve a model of handwritten digits.")
    parser.add_argument("--port", type=int, default=8000, help="0: any free port")
    port = parser.parse_args().port
    torch.manual_seed(0)
    net = trained()  # before instrument(), so that the training is not recorded
    with (
        torchotel.instrument(service_name="digits", set_global_provider=True),
        socket.create_server(("127.0.0.1", port)) as listening,
    ):
        print(f"http://127.0.0.1:{listening.getsockname()[1]}/predict", flush=True)
        server = uvicorn.Server(uvicorn.Config(make_app(net), log_level="warning"))
        try:
            server.run([listening])
        except KeyboardInterrupt:
            print("stopped")


if __name__ == "__main__":
    main()
