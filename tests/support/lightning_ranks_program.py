"""Trains with Lightning on two ranks, of which Lightning starts the second: it runs this program again."""

import torchotel
from support.framework_loops import lightning_loop
from support.framework_loops.model_and_data import loader

if __name__ == "__main__":
    torchotel.instrument(record="run", prometheus_port=None)
    trainer = lightning_loop.make(devices=2, strategy="ddp")
    trainer.fit(lightning_loop.module(), loader(64), loader(4))  # validates before the first step
