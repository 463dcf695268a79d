"""A training that has nearly all metrics, and the names that these go by."""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchotel

STEPS = 12
_MODULE = {"torch_model", "torch_module_path", "torch_module_type", "torch_direction"}
SEEN = {
    "torch_step_duration_seconds_bucket": {"le"},
    "torch_step_duration_seconds_sum": set(),
    "torch_step_duration_seconds_count": set(),
    "torch_phase_time_seconds_total": {"torch_phase"},
    "torch_module_time_seconds_total": _MODULE,
    "torch_module_calls_total": _MODULE,
    "torch_module_duration_seconds_bucket": {
        "torch_model",
        "torch_module_path",
        "torch_module_type",
        "torch_direction",
        "le",
    },
    "torch_module_duration_seconds_sum": _MODULE,
    "torch_module_duration_seconds_count": _MODULE,
    "torch_module_gradient_norm": {"torch_model", "torch_module_path", "torch_gradient_scope"},
    "torch_gradient_norm": {"torch_gradient_scope"},
    "torch_tensor_gradient_norm": {"torch_tensor_name"},
    "torch_step_nonfinite_total": {"torch_nonfinite_kind"},
    "torch_steps_total": set(),
    "torch_samples_total": set(),
    "torch_evaluations_total": set(),
    "torch_loss": set(),
    "torch_learning_rate": set(),
    "torch_step_last_end_time_seconds": set(),
    "torch_run_finished": set(),
    "torch_tokens_total": set(),
    "torch_log": {"torch_log_name"},
    "torch_evaluation_time_seconds_total": set(),
    "torchotel_spans_total": {"torchotel_outcome"},
    "torchotel_overhead_ratio": set(),
    "torchotel_detail_ratio": set(),
}
"""All rows of the conventions but those that need a GPU or a failing endpoint."""


class Watched(nn.Module):
    """A model whose hidden activations are watched."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.hidden(x)
        torchotel.watch(hidden, "hidden")
        out: torch.Tensor = self.out(hidden.relu())
        return out


def train(steps: int = STEPS) -> None:
    """Train, log, and evaluate two batches."""
    model = Watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    data = TensorDataset(torch.rand(4 * steps, 4))
    for (batch,) in DataLoader(data, batch_size=4):
        loss = model(batch).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torchotel.log(loss=loss, samples=len(batch), tokens=10, accuracy=0.75, broken=math.nan)
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            model(torch.rand(4, 4))
