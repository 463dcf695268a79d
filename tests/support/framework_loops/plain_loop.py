"""The plain loop that the frameworks' loops are compared with."""

import torch
from torch import nn

from support.framework_loops.model_and_data import BATCHES, EPOCHS, RATE, VALIDATION_BATCHES, Net, Setting, loader


def train(setting: Setting) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        for number, batch in enumerate(loader(BATCHES), 1):
            with torch.autocast("cpu", torch.bfloat16, enabled=setting.bf16):
                loss = net(**batch)["loss"]
            (loss / setting.accumulate).backward()
            if number % setting.accumulate == 0:
                nn.utils.clip_grad_norm_(net.parameters(), setting.clip)
                optimizer.step()
                optimizer.zero_grad()
        for batch in loader(VALIDATION_BATCHES):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=setting.bf16):
                net(**batch)
