"""Training loops of frameworks, unmodified, and a plain loop to compare them with."""
