"""The worker thread: builds metrics and traces of the records of the training threads, and exports them."""
