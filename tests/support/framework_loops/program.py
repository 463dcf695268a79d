"""A program that trains with frameworks and does not use torchotel."""

from support.framework_loops import lightning_loop, trainer_loop
from support.framework_loops.model_and_data import Setting

if __name__ == "__main__":
    trainer_loop.train(Setting())
    lightning_loop.train(Setting())
