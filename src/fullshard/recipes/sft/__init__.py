"""Fine-tune a model on questions and answers or on conversations.

Without a configuration file, the built-in job teaches the model in runs/train to say what the
functions of Python's library do, from their docstrings. That model is trained first if it does not
exist.
"""

EXAMPLE = "model=FOLDER data=chats.jsonl max_steps=100"
