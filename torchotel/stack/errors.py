"""What the stack says when it can't go on."""


class StackError(Exception):
    """Something is missing, taken or broken; the message says what, and what to do."""
