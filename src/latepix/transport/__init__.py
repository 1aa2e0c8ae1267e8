"""Between processes: batches go to the trainer, weights go to the server. Written aside, then renamed; versioned."""
