"""Training loops of frameworks, unmodified, beside a plain one."""
