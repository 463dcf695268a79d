"""The training loop of Accelerate's documentation."""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from support.framework_loops.model_and_data import BATCHES, EPOCHS, RATE, VALIDATION_BATCHES, Net, Setting, loader


def forget() -> None:
    """Reset Accelerate's state, so that the next accelerator can have other settings."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(setting: Setting) -> list[float]:
    """Train and return the loss of each batch; step numbers start at 100."""
    forget()
    precision = "bf16" if setting.bf16 else "no"
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=setting.accumulate, mixed_precision=precision)
    bare = Net()
    net, optimizer, training, validation = accelerator.prepare(
        bare, torch.optim.SGD(bare.parameters(), lr=RATE), loader(BATCHES), loader(VALIDATION_BATCHES)
    )
    losses: list[float] = []
    for epoch in range(EPOCHS):
        for batch in training:
            with accelerator.accumulate(net):
                loss = net(**batch)["loss"]
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), setting.clip)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.log({"loss": loss.detach(), "epoch": epoch}, step=100 + len(losses))
            losses.append(loss.item())
        for batch in validation:
            with torch.no_grad():
                net(**batch)
    return losses
