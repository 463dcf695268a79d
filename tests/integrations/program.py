"""A program that trains with frameworks and knows nothing of torchotel."""

from integrations import lightning_loop, trainer_loop
from integrations.trained import Setting

if __name__ == "__main__":
    trainer_loop.train(Setting())
    lightning_loop.train(Setting())
