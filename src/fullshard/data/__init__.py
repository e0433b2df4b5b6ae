"""From text or conversations to batches: files, tokens, sequences, and the order of samples."""
