"""Mark the bounds of a step: in reinforcement learning, one iteration has many forwards and updates.

    python examples/own_steps.py

A policy guesses digits, receives only right or wrong as the reward, and learns from its guesses four times (as PPO
does). Without a mark, torchotel would record an evaluation and four steps in each iteration. `torchotel.step()` makes
each iteration one step. In Jaeger (http://localhost:16686) each iteration is a trace with four forwards, backwards and
optimizer steps; the guesses are part of the first forward. The reward is the attribute `torch.log.reward` and the gauge
`torch_log{torch_log_name="reward"}` at http://localhost:9464/metrics.
"""

import sys

import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import torchotel

try:
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f"{error}; this example needs: pip install scikit-learn")

ITERATIONS = 60
UPDATES = 4
GUESSES = 256
CLIP = 0.2


def iterate(policy: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> Tensor:
    """Guess, compare with the labels, learn from the rewards, and return the mean reward."""
    with torch.no_grad():
        guesses = Categorical(logits=policy(images))
        actions = guesses.sample()
        before = guesses.log_prob(actions)
    rewards: Tensor = (actions == labels).float()
    advantages = rewards - rewards.mean()
    for _ in range(UPDATES):
        ratio = (Categorical(logits=policy(images)).log_prob(actions) - before).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
        optimizer.zero_grad()
        (-gain).backward()
        optimizer.step()
    return rewards.mean()


def main() -> None:
    """Train with one step for each iteration."""
    torch.manual_seed(0)
    handle = torchotel.instrument()
    digits = load_digits()
    pixels, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    policy = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)
    rewards = []
    for iteration in range(ITERATIONS):
        chosen = torch.randint(len(pixels), (GUESSES,))
        with torchotel.step(iteration=iteration, samples=GUESSES):
            reward = iterate(policy, optimizer, pixels[chosen], labels[chosen])
            torchotel.log(reward=reward)
        rewards.append(reward)
    handle.shutdown()  # exports the remaining spans, so that the numbers below are final
    print(f"{ITERATIONS} iterations, {handle.stats()['steps']} steps, {handle.stats()['evaluations']} evaluations")
    print(f"right guesses: {rewards[0]:.0%} at first, {rewards[-1]:.0%} at last")


if __name__ == "__main__":
    main()
