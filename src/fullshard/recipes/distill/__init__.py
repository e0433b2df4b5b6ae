"""Distill a teacher into a student.

Without a configuration file, the built-in job distills a small mixture of experts into a student
with half of its layers and experts. The teacher is trained first if it does not exist. With
backend=jax a smaller student learns from the model in runs/train.

`fullshard distill cache CONFIG` writes the teacher's logits to disk, for runs without the teacher.
"""

EXAMPLE = "teacher=FOLDER student=FOLDER data=texts/"
