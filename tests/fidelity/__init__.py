"""That torchotel changes nothing of what is computed, and that what it says is true: over many models."""
