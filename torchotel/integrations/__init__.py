"""Adapters to training frameworks, which publish epoch, step number, loss and logged values of a step."""
