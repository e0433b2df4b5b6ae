"""Train a model on text; without a configuration file, the main job.

The main job trains a small Llama on the text of Python's language reference, on two local
ranks, in two or three minutes. --NAME VALUE is training.NAME=VALUE; torchrun's flags may stand
after `--`: fullshard train CONFIG -- --nproc-per-node 4.
"""

EXAMPLE = "model=FOLDER data=texts/ max_steps=100"
