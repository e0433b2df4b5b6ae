"""Distill a teacher into a student.

Without a configuration file, a small mixture of experts is trained as the teacher if it is
missing, and a student with half of its layers and experts is cut out of it. With backend=jax a
smaller student learns from the model in runs/train.

`fullshard distill cache CONFIG` writes the teacher's logits to disk, for runs without it.
"""

EXAMPLE = "teacher=FOLDER student=FOLDER data=texts/"
