"""The worker thread: takes records from the training threads, builds spans and exports them."""
