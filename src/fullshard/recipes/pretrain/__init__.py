"""Train a causal language model on text.

Without a configuration file, the built-in job trains a small Llama on the text of Python's language
reference, on two local ranks, in two or three minutes. --NAME VALUE means training.NAME=VALUE.
Flags of torchrun follow after `--`: fullshard train CONFIG -- --nproc-per-node 4.
"""

EXAMPLE = "model=FOLDER data=texts/ max_steps=100"
