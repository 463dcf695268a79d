"""Say where a step begins and ends: reinforcement learning, where one iteration has many forwards and updates.

    python examples/own_steps.py

A policy guesses digits, is told only whether it was right, and learns from its guesses four times over (as PPO does).
By itself torchotel would see an evaluation and four steps in each iteration. `torchotel.step()` makes it one: in Jaeger
(http://localhost:16686) each iteration is a trace, in which forward, backward and optimizer step come four times, the
guessing in the first forward. `torch.log.reward` says how it went, at http://localhost:9464/metrics the gauge
`torch_log{torch_log_name="reward"}`.
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
    """Guess, see what was right, learn from it, and give the mean reward."""
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
    """Train, one step for each iteration."""
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
    handle.shutdown()  # what is left would be sent at the end of the program by itself; here for the numbers below
    print(f"{ITERATIONS} iterations, {handle.stats()['steps']} steps, {handle.stats()['evaluations']} evaluations")
    print(f"right guesses: {rewards[0]:.0%} at first, {rewards[-1]:.0%} at last")


if __name__ == "__main__":
    main()
