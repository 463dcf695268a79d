"""The minimal use: three additional lines in an ordinary training loop.

With an OTLP endpoint at http://localhost:4318, such as Jaeger, every step is a trace.
"""

import torch
from torch import nn

import torchotel  # 1

handle = torchotel.instrument()  # 2

model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(20):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 16)).square().mean()
    loss.backward()
    optimizer.step()

handle.shutdown()  # 3: exports the remaining spans; the end of the program also does this
print(f"{handle.stats()['steps']} steps, {handle.stats()['spans_recorded']} spans")
