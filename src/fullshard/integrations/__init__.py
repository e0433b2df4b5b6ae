"""Other libraries' training loops on our engine."""
