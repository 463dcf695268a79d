"""How much of an exception's text leaves the program: never values of tensors or source lines by default."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import torchotel
from torchotel.testing import CapturedSpan, capture

VALUE = 42.4242


class Policy(nn.Module):
    """Raises as many policies do: the distribution quotes its parameter in further lines."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(x, torch.ones_like(x), validate_args=True).rsample()


def failed(text: str) -> CapturedSpan:
    with capture(exception_text=text) as captured:
        with pytest.raises(ValueError, match="invalid values"), torch.no_grad():
            Policy()(torch.tensor([VALUE, float("nan")]))
        (root,) = [root for root in captured.roots if root.error is not None]
    return root


@pytest.mark.parametrize(
    ("text", "starts", "has_value"),
    [("type", "", False), ("first_line", "Expected parameter loc", False), ("full", "Expected parameter loc", True)],
)
def test_the_setting_says_how_much_is_recorded(text: str, starts: str, *, has_value: bool) -> None:
    """On the root and on the module's span, in the status and in the event."""
    for span in failed(text).walk():
        assert span.error is not None
        assert span.error.type == "ValueError"
        assert span.error.message.startswith(starts)
        assert (str(VALUE) in span.error.message) == has_value
        (event,) = span.events
        assert event.attributes.get("exception.message", "") == span.error.message
        assert ("exception.message" in event.attributes) == (text != "type")


class Rows(Dataset[torch.Tensor]):
    def __getitem__(self, index: int) -> torch.Tensor:
        try:
            return torch.rand(0)[index]
        except IndexError as error:
            raise ValueError(f"bad row\nvalue {VALUE}") from error

    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("text", ["first_line", "full"])
def test_the_traceback_of_a_loader_s_worker_stays_here(text: str) -> None:
    """PyTorch puts it into the text of the exception, with paths and source lines of the worker."""
    batches = iter(DataLoader(Rows(), num_workers=1))
    with capture(exception_text=text) as captured:
        with pytest.raises(ValueError, match="Original Traceback"), torchotel.step():
            next(batches)
        (step,) = [root for root in captured.roots if root.name == "torch.step"]
    assert step.error is not None
    assert step.error.type == "ValueError"
    more = f"\nvalue {VALUE}" if text == "full" else ""
    assert step.error.message == f"Caught ValueError in DataLoader worker process 0. ValueError: bad row{more}"
    assert "Traceback" not in step.error.message
    assert __file__ not in step.error.message
