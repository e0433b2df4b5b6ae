"""Fine-tune a model on questions and answers or conversations.

Without a configuration file, the model in runs/train (which is trained first if it is missing)
learns from docstrings to answer what the functions of Python's library do.
"""

EXAMPLE = "model=FOLDER data=chats.jsonl max_steps=100"
